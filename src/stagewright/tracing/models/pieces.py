"""Loss in pieces over tokens: everything after a model's base (head, soft-capping, scaling), slice by slice.

A transformers model with a head calls its base model once and then treats every token independently. So the model is called
once per slice: the first call runs the base, and every call gets one slice of its result. The model's own code processes the
logits, and only those of one slice are needed at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stagewright.errors import InputError
from stagewright.tracing.models.losses import IGNORED, CrossEntropy, LanguageModel

LATE = "pieces"
"""Path of the module whose operators are the first of the loss."""


def evaluate_in_pieces(model: nn.Module, num_pieces: int, num_tokens: int) -> None:
    """Change `model`, a loss around ``net``, so that it evaluates its loss in `num_pieces` slices of its tokens.

    Raises:
        InputError: the loss of such a model has no slices, or there are fewer than `num_pieces` tokens.
    """
    if not isinstance(model, LanguageModel):
        raise InputError(
            f"loss_pieces = {num_pieces}: only the loss of a language model of transformers is known to be a mean over "
            f"tokens, and this is a {_kind(model)}: use --loss-pieces 1"
        )
    if num_pieces > num_tokens:
        raise InputError(
            f"loss_pieces = {num_pieces} is more than the {num_tokens} tokens of a microbatch: use fewer"
        )
    if _base_of(model.net) is model.net:
        raise InputError(
            f"loss_pieces = {num_pieces}: {type(model.net).__name__} has no base model separate from its head, so its loss "
            "cannot be evaluated in pieces: use --loss-pieces 1"
        )
    model.pieces = Slices(num_pieces)
    model.loss_of = model.pieces.loss_of


class Slices(nn.Module):
    """Hidden states (batch, sequence, features) as slices (1, tokens, features), as nearly equal as whole tokens can be."""

    def __init__(self, num_pieces: int) -> None:
        super().__init__()
        self.num_pieces = num_pieces

    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [part.unsqueeze(0) for part in self._split(hidden.flatten(0, 1))]

    def _split(self, tokens: Tensor) -> tuple[Tensor, ...]:
        count = tokens.shape[0]
        ends = [count * (index + 1) // self.num_pieces for index in range(self.num_pieces)]
        return tokens.split([end - start for start, end in itertools.pairwise([0, *ends])])

    def loss_of(
        self, net: nn.Module, call: Callable[[], Any], labels: Tensor, cross_entropy: CrossEntropy
    ) -> tuple[Tensor, Any]:
        """Return the mean loss, the sum over slices divided by the number of labels that count, and the first result.

        Ignores: that a model's code after its base could look at more than one token.
        """
        base = _base_of(net)
        count = (labels != IGNORED).sum()
        returned: list[Any] = []
        given: list[Tensor] = []
        total, first = None, None
        for index, wanted in enumerate(self._split(labels.flatten())):
            with self._in_place_of(base, returned, given, index):
                output = call()
            if not given or output.logits.shape[:2] != given[index].shape[:2]:
                raise InputError(
                    f"the logits of {type(net).__name__} are not made of what its {type(base).__name__} returns, token by "
                    "token, so its loss cannot be evaluated in pieces: use --loss-pieces 1"
                )
            loss = cross_entropy(output.logits, wanted, reduction="sum")
            total, first = (loss, output) if total is None else (total + loss, first)
        assert total is not None, "a microbatch has tokens"
        return total / count, first

    @contextmanager
    def _in_place_of(
        self, base: nn.Module, returned: list[Any], given: list[Tensor], index: int
    ) -> Iterator[None]:
        """Make `base` return slice `index` inside; its first run keeps its result in `returned`, the slices in `given`."""
        had, run = base.__dict__.get("forward"), base.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not given:
                returned.append(run(*args, **kwargs))
                given.extend(self(returned[0][0]))
            return _with_first(returned[0], given[index])

        base.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            if had is None:
                del base.__dict__["forward"]
            else:
                base.forward = had


def _base_of(net: nn.Module) -> nn.Module:
    """Return the base of a transformers model, before its head; the model itself if it has no separate one."""
    base = getattr(net, "base_model", net)
    return base if isinstance(base, nn.Module) else net


def _with_first(output: Any, hidden: Tensor) -> Any:
    """Return the output of a base model with other hidden states."""
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    return type(output)(**{**output, next(iter(output)): hidden})


def _kind(model: nn.Module) -> str:
    if type(model).__name__ == "FactoryModel":
        return "model of a factory with its own loss"
    return type(getattr(model, "net", model)).__name__
