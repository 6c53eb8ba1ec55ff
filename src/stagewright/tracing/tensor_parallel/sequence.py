"""Sequence parallelism: outside the split matmuls, each rank has a part of the sequence of every sample.

It begins with the first layer and ends with the last. A module whose parameters are all split, such as attention, gathers
the sequence on entry and reduce-scatters its output. Normalisations and the like work on parts, and the gradients of their
parameters are all-reduced. Gates also work on parts where experts are sharded, or gather their tokens themselves. Any other
module (experts with their router, attention that is not split) is an island: its input is gathered, every rank computes it
as without sequence parallelism, and its output is split again.

Source: "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from stagewright.errors import InputError
from stagewright.graph.tensor_parallel import GROUP
from stagewright.tracing.experts import are_sharded, around
from stagewright.tracing.models.adapter_names import BASE
from stagewright.tracing.tensor_parallel.layers import SEQUENCE, ColumnLinear, RowLinear
from stagewright.tracing.tensor_parallel.operators import all_gather, enter, shard


def split_sequence(net: nn.Module, plan: Mapping[str, str], size: int) -> None:
    """Change a model whose layers have been split so that what lies between them works on parts of the sequence.

    Raises:
        InputError: the plan does not name one list of layers.
    """
    lists = {path.partition(".*")[0] for path in plan if ".*" in path}
    if len(lists) != 1:
        raise InputError(
            f"sequence parallelism needs one list of layers, and the plan names {sorted(lists)}: leave it out"
        )
    layers = list(net.get_submodule(lists.pop()).children())
    for layer in layers:
        for child in layer.children():
            _visit(child, size)
        _enter_parameters(layer, size)
    for layer in {id(layer): layer for layer in (layers[0], layers[-1])}.values():
        _put_around(layer, _Ends, size)
        layer.opens, layer.closes = layer is layers[0], layer is layers[-1]  # type: ignore[assignment]


def _visit(module: nn.Module, size: int) -> None:
    """Convert a module inside a layer, whose input is a part of the sequence."""
    if next(module.parameters(), None) is None:
        return
    if isinstance(module, RowLinear):
        module.scatters = True
    elif isinstance(module, ColumnLinear):
        module.source = "sequence"
    elif _is_split(module):
        _open(module, size)
    elif any(_are_experts_of_parts(child) for child in module.children()):
        for child in module.children():
            if _has_columns(child):
                _visit(child, size)
            elif not _are_experts_of_parts(child):
                _enter_parameters(child, size)
        _enter_parameters(module, size)
    elif _works_on_tokens(module):
        _enter_parameters(module, size)
    elif any(isinstance(part, RowLinear) for part in module.children()) and not _has_columns(module):
        for child in module.children():  # bias, dropout, add and normalisation after a matmul, as in BERT
            _visit(child, size)
        _enter_parameters(module, size)
    elif any(_takes_parts(child) for child in module.children()) and not _has_columns(module):
        raise InputError(
            f"a {type(module).__name__} has an adapter of a layer after which the sequence is split: leave out "
            "--sequence-parallel, or give other --lora-targets"
        )
    elif all(_is_split(child) or _leaves_input(child) for child in module.children()):
        for child in module.children():
            _visit(child, size)
    else:
        _put_around(module, _Island, size)


def _are_experts_of_parts(module: nn.Module) -> bool:
    """Return whether a module has experts that take a part of the sequence: sharded ones, or such as gather the others."""
    return are_sharded(module) or getattr(module, "gathers_tokens", False)


def _has_columns(module: nn.Module) -> bool:
    return any(isinstance(part, ColumnLinear) for part in module.modules())


def _is_split(module: nn.Module) -> bool:
    """Return whether a module has split matmuls, and no parameters but theirs and those used between them."""
    owners = [part for part in module.modules() if any(True for _ in part.parameters(recurse=False))]
    return _has_columns(module) and all(
        isinstance(part, ColumnLinear | RowLinear)
        or (hasattr(part, "tp_size") and _works_on_tokens(part))
        or _is_beside_split(part)
        for part in owners
    )


def _leaves_input(module: nn.Module) -> bool:
    """Return whether a module takes the output of a split one: its matmuls scatter, its normalisations work on tokens."""
    return next(module.parameters(), None) is None or (
        not _has_columns(module)
        and all(
            isinstance(part, RowLinear) or _works_on_tokens(part)
            for part in module.modules()
            if any(True for _ in part.parameters(recurse=False))
        )
    )


def _works_on_tokens(module: nn.Module) -> bool:
    """Return whether a module treats every token independently."""
    return "Norm" in type(module).__name__ and next(module.children(), None) is None


def _open(module: nn.Module, size: int) -> None:
    """Gather the sequence where split work begins; its matmuls do not do so again."""
    for part in module.modules():
        if isinstance(part, ColumnLinear):
            part.source = "entered"
        elif isinstance(part, RowLinear):
            part.scatters = True
        elif _is_beside_split(part):
            _enter_parameters(part, size)
    _put_around(module, _Opened, size)


def _takes_parts(module: nn.Module) -> bool:
    """Return whether a module is an adapted layer that takes some of the features on each rank."""
    return isinstance(getattr(module, BASE, None), RowLinear)


def _is_beside_split(module: nn.Module) -> bool:
    """Return whether a module is the whole half of an adapter whose other half is split."""
    return getattr(module, "is_beside_split", False)


def _enter_parameters(module: nn.Module, size: int) -> None:
    """All-reduce the gradients of a module's own parameters, as each rank sees only a part of the sequence."""
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    if names:
        module.__class__ = entering(type(module), names)
        module.tp_size = size  # type: ignore[assignment]


def _put_around(module: nn.Module, outer: type, size: int) -> None:
    module.__class__ = around(outer, type(module))
    module.sequence_tp_size = size  # type: ignore[assignment]


# -- classes made of a model's own --------------------------------------------------------------------------------------


@functools.cache
def entering(base: type, names: tuple[str, ...]) -> type:
    """Return a subclass of `base` whose parameters are entered wherever they are read."""

    def read(name: str) -> property:
        return property(lambda module: _entered(module, name))

    return type(f"Entering{base.__name__}", (base,), {name: read(name) for name in names})


def _entered(module: Any, name: str) -> Tensor | None:
    parameter = module._parameters[name]
    return None if parameter is None else enter(parameter, GROUP, module.tp_size)


class _Around:
    sequence_tp_size: int

    def inner(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]

    def whole(self, part: Tensor, sums: bool) -> Tensor:
        return all_gather(part, SEQUENCE, GROUP, self.sequence_tp_size, sums)

    def part(self, result: Any) -> Any:
        """Return this rank's part of a module's result: a tensor, or a tuple that begins with one."""
        if isinstance(result, tuple):
            return (self.part(result[0]), *result[1:])
        return shard(result, SEQUENCE, GROUP, self.sequence_tp_size)


class _Opened(_Around):
    """Split work: the input is made whole, and its cotangents are summed."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(self.whole(hidden_states, sums=True), *args, **kwargs)


class _Island(_Around):
    """Work that every rank does on whole sequences, as without sequence parallelism."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.part(self.inner(self.whole(hidden_states, sums=False), *args, **kwargs))


class _Ends(_Around):
    """The first layer takes whole sequences, and the last returns them."""

    opens: bool
    closes: bool

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.opens:
            hidden_states = self.part(hidden_states)
        result = self.inner(hidden_states, *args, **kwargs)
        if not self.closes:
            return result
        if isinstance(result, tuple):
            return (self.whole(result[0], sums=False), *result[1:])
        return self.whole(result, sums=False)
