"""Modules that end in a scalar loss: one per kind of transformers model, and one around a factory's module.

The wrapped model is always the attribute `net`, so that parameter names are `net.` and the model's own names.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.errors import InputError

CrossEntropy = Callable[..., Tensor]
LossOf = Callable[[nn.Module, Callable[[], Any], Tensor, CrossEntropy], tuple[Tensor, Any]]
"""A function of a model, a call of it, its labels and the cross entropy; returns the mean loss and the model's output."""

IGNORED = -100
"""Label of a position that takes no part in the loss."""


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross entropy of `labels` (...) under `logits` (..., classes), in at least float32."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return cross_entropy_as_logits(logits, labels, reduction)


def cross_entropy_as_logits(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Return `cross_entropy` in the type of the logits."""
    return functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def loss_at_once(
    net: nn.Module, call: Callable[[], Any], labels: Tensor, cross_entropy: CrossEntropy
) -> tuple[Tensor, Any]:
    """Return the mean loss of all tokens, and what the model returned."""
    output = call()
    return cross_entropy(output.logits, labels), output


class LanguageModel(nn.Module):
    """A transformers model whose loss is a mean over tokens.

    `cross_entropy` and `loss_of` may be replaced: by one over logits split by classes, by one in pieces over tokens.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.cross_entropy: CrossEntropy = cross_entropy
        self.loss_of: LossOf = loss_at_once

    def loss(self, labels: Tensor, **inputs: Any) -> Tensor:
        """Return the mean loss of the model for `inputs`, with the loss that balances its experts."""

        def call() -> Any:
            with as_run(packed="position_ids" in inputs):
                return self.net(**inputs)

        return _with_auxiliary_loss(*self.loss_of(self.net, call, labels, self.cross_entropy), self.net)


class CausalLanguageModel(LanguageModel):
    """A model that predicts each next token of `input_ids` (batch, sequence), or of `labels`: the same tokens, with -100 for
    those without a loss. Where `position_ids` restart, another document begins, which does not see those before."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        # Shifting labels instead of logits spares a copy of the largest tensor of the model.
        labels = functional.pad((input_ids if labels is None else labels)[:, 1:], (0, 1), value=IGNORED)
        further = {} if position_ids is None else {"position_ids": position_ids}
        return self.loss(labels, input_ids=input_ids, use_cache=False, **further)


class MaskedLanguageModel(LanguageModel):
    """A model that predicts `labels` (batch, sequence) from `input_ids`; -100 marks positions without a loss."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(labels, input_ids=input_ids)


class SequenceToSequence(LanguageModel):
    """Encodes `input_ids` (batch, source) and predicts `labels` (batch, target) from those before each."""

    def __init__(self, net: nn.Module, start_token: int) -> None:
        super().__init__(net)
        self.start_token = start_token

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        decoder_input_ids = functional.pad(labels[:, :-1], (1, 0), value=self.start_token)
        return self.loss(labels, input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False)


class Classifier(nn.Module):
    """A model that predicts the class `labels` (batch) of its other inputs, such as `pixel_values` or `input_ids`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        with as_run():
            output = self.net(**inputs)
        return cross_entropy(output.logits, labels)


class FactoryModel(nn.Module):
    """A user's module with its loss: `loss_fn(net(**taken), *rest)`, or the module's own scalar without one.

    `taken` are the inputs that the module's `forward` names, `rest` the others, such as targets.
    """

    def __init__(
        self, net: nn.Module, taken: tuple[str, ...], loss_fn: Callable[..., Any] | None, name: str
    ) -> None:
        super().__init__()
        self.net = net
        self.taken = taken
        self.loss_fn = loss_fn
        self.name = name

    def forward(self, **inputs: Tensor) -> Tensor:
        targets = [value for key, value in inputs.items() if key not in self.taken]
        with as_run(packed="position_ids" in inputs):
            loss = self.net(**{key: inputs[key] for key in self.taken})
            if self.loss_fn is not None:
                loss = self.loss_fn(loss, *targets)
        if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point():
            return loss
        maker = "its loss_fn" if self.loss_fn is not None else "its module"
        raise InputError(
            f"factory '{self.name}': {maker} returned {_describe(loss)}, not a scalar floating-point loss: "
            "return (module, inputs, loss_fn) where loss_fn(output, *targets) gives one, e.g. ends in .mean()"
        )


def as_run(packed: bool = False) -> contextlib.AbstractContextManager[None]:
    """Return `trace_as_run` if transformers is in use; a factory may do without its long import."""
    if "transformers" not in sys.modules:
        return contextlib.nullcontext()
    from stagewright.tracing.models.transformers_patches import trace_as_run

    return trace_as_run(packed)


def _with_auxiliary_loss(loss: Tensor, output: Any, net: nn.Module) -> Tensor:
    """Return `loss` plus the router's balancing loss, if the config requests it with `output_router_logits`."""
    auxiliary = getattr(output, "aux_loss", None)
    if auxiliary is None:
        return loss
    return loss + getattr(net, "router_aux_loss_coef", 1.0) * auxiliary


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
