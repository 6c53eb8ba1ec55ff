"""Rules of single operators, derived from torch on fake tensors and cached by signature.

Three questions about an operator with given layouts of its arguments are each answered once:

* `lower`: which differentiable operators does a composite operator (linear, attention) become?
* `evaluate`: what layouts do its outputs have, which of them share storage with an argument, which need a gradient?
* `backward`: which operators compute its input gradients (I) and which its weight gradients (W)?

Because layers repeat, a model of hundreds of layers needs a few dozen answers. They come from
torch's own dispatcher and autograd formulas, so that running them equals eager execution to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stagewright.errors import TraceError
from stagewright.graph import TensorMeta
from stagewright.graph.tensor_parallel import ENTER
from stagewright.tracing.arguments import DTYPES, decode, draws, empty, meta_of, operator
from stagewright.tracing.autograd_functions import FunctionCall
from stagewright.tracing.private import (
    FakeTensorMode,
    argument_place,
    is_composite,
    is_mutable,
    storage_key,
)
from stagewright.tracing.recipes import (
    BackwardRecipe,
    FunctionRecipe,
    Recipe,
    backward_recipe,
    function_recipe,
    recipe,
    recorded,
)
from stagewright.tracing.regions import BEGIN


@dataclass(frozen=True, slots=True)
class Outcome:
    """A tensor output: its layout, the argument whose storage it shares (-1: none), and whether it needs a gradient."""

    meta: TensorMeta
    alias: int
    needs_grad: bool


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator call with layouts in place of tensors: arguments hold ``Ref(i)`` to `metas[i]`."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    metas: tuple[TensorMeta, ...]


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return the value that a slice assignment writes: `source` in the shape and type of `target`."""
    return source.to(target.dtype).expand(target.shape)


# Operators from functionalisation without a derivative in autograd.
_LOWERINGS: dict[str, Callable[..., torch.Tensor]] = {"aten.copy.default": _copy}


# Outputs that are float64 where the first argument is; the shape function of torch 2.11 says float32.
_AS_WIDE_AS_INPUT = {("aten._scaled_dot_product_flash_attention_for_cpu.default", 1)}


# Statistics that a CPU keeps in half precision, and a GPU in float32.
_STATISTICS = {("aten.native_layer_norm.default", 1), ("aten.native_layer_norm.default", 2)}
_HALF = ("bfloat16", "float16")


# Operators that return their argument, although their schema must not say so during export.
_IDENTITIES = {ENTER}


class OperatorRules:
    """Answers about operators, cached by signature. `mode` is the fake tensor mode they are derived under, on tensors of a
    `device`; layouts are those on devices of type `target`."""

    def __init__(self, mode: FakeTensorMode, device: torch.device, target: str) -> None:
        self.mode = mode
        self.device = device
        self.target = target
        self._lowered: dict[Any, Recipe | None] = {}
        self._outcomes: dict[Any, tuple[Outcome | None, ...]] = {}
        self._backwards: dict[Any, BackwardRecipe] = {}
        self._functions: dict[Any, FunctionRecipe] = {}
        self._hooks: dict[Any, Recipe] = {}
        self._composite: dict[str, bool] = {}

    def lower(self, call: OperatorCall, needs_grad: tuple[bool, ...]) -> Recipe | None:
        """Return the recipe of a composite operator, or None for one that has its own derivative."""
        if call.op not in self._composite:
            self._composite[call.op] = call.op in _LOWERINGS or is_composite(operator(call.op))
        if not self._composite[call.op]:
            return None
        key = (call, needs_grad)
        if key not in self._lowered:
            self._lowered[key] = self._trace_lowering(call, needs_grad)
        return self._lowered[key]

    def evaluate(self, call: OperatorCall, needs_grad: tuple[bool, ...]) -> tuple[Outcome | None, ...]:
        key = (call, needs_grad)
        if key not in self._outcomes:
            self._outcomes[key] = self._run_fake(call, needs_grad)
        return self._outcomes[key]

    def backward(
        self,
        call: OperatorCall,
        activations: tuple[int, ...],
        weights: tuple[int, ...],
        cotangents: tuple[int, ...],
        layouts: tuple[TensorMeta, ...],
    ) -> BackwardRecipe:
        """Return the gradients of the arguments numbered `activations` and `weights`, given cotangents with these `layouts`
        of the outputs numbered `cotangents`."""
        key = (call, activations, weights, cotangents, layouts)
        if key not in self._backwards:
            self._backwards[key] = self._trace_backward(*key)
        return self._backwards[key]

    def function(
        self,
        call: FunctionCall,
        metas: tuple[TensorMeta, ...],
        activations: tuple[int, ...],
        weights: tuple[int, ...],
        cotangents: tuple[tuple[int, TensorMeta], ...] | None = None,
    ) -> FunctionRecipe:
        """Return the operators of a custom function given arguments of the layouts `metas`, and the gradients of those
        numbered `activations` and `weights`, given `cotangents` of some outputs (None: of all that have any).

        Raises:
            TraceError: its backward cannot be one of fixed operators; says why.
        """
        key = (call, metas, activations, weights, cotangents)
        if key not in self._functions:
            self._functions[key] = self._trace_function(*key)
        return self._functions[key]

    def hook(self, function: Callable[[torch.Tensor], Any], layout: TensorMeta) -> Recipe:
        """Return the operators of a tensor's hook, from a gradient of this `layout` to the one it returns.

        Raises:
            TraceError: it does something else; says what.
        """
        key = (function, layout)
        if key not in self._hooks:
            with self.mode:
                gradient = self.fake(layout)

            def called(tensor: torch.Tensor) -> list[Any]:
                torch.ops.stagewright.begin_region(-1)
                with torch.no_grad():
                    changed = function(tensor)
                if not isinstance(changed, torch.Tensor):
                    raise TraceError("it returns no gradient, and what it does besides would be lost")
                return [changed]

            graph = self._graph(called, [gradient])
            _check_function(graph)
            steps, results = recipe(graph, 1).steps, recipe(graph, 1).results
            self._hooks[key] = Recipe(tuple(step for step in steps if step.op != BEGIN), results)
        return self._hooks[key]

    def run(self, call: OperatorCall) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return arguments, keyword arguments and the result of a call, with fake tensors."""
        tensors = self._fakes(call, (False,) * len(call.metas))
        args, kwargs = self._arguments(call, tensors)
        with self.mode, torch.no_grad():
            return args, kwargs, operator(call.op)(*args, **kwargs)

    # -- asking torch ---------------------------------------------------------------------------------------------

    def fake(self, meta: TensorMeta, needs_grad: bool = False) -> torch.Tensor:
        """Return a fake tensor with a layout, in a new storage."""
        if not meta.offset:
            return empty(meta, self.device).requires_grad_(needs_grad)
        storage = torch.empty(meta.offset + meta.extent, dtype=DTYPES[meta.dtype], device=self.device)
        return storage.as_strided(meta.shape, meta.stride, meta.offset).requires_grad_(needs_grad)

    def _fakes(self, call: OperatorCall, needs_grad: tuple[bool, ...]) -> list[torch.Tensor]:
        with self.mode:
            return [self.fake(meta, needs) for meta, needs in zip(call.metas, needs_grad, strict=True)]

    def _arguments(
        self, call: OperatorCall, tensors: list[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = decode(call.args, tensors.__getitem__, self.device)
        kwargs = {name: decode(value, tensors.__getitem__, self.device) for name, value in call.kwargs}
        return tuple(args), kwargs

    def _apply(self, call: OperatorCall, tensors: list[torch.Tensor]) -> Any:
        args, kwargs = self._arguments(call, tensors)
        return operator(call.op)(*args, **kwargs)

    def _run_fake(self, call: OperatorCall, needs_grad: tuple[bool, ...]) -> tuple[Outcome | None, ...]:
        tensors = self._fakes(call, needs_grad)
        with self.mode, torch.enable_grad():
            result = self._apply(call, tensors)
        keys = {storage_key(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
        items = result if isinstance(result, list | tuple) else (result,)
        if call.op in _IDENTITIES:
            return (Outcome(call.metas[0], 0, items[0].requires_grad),)
        place = argument_place(operator(call.op), "output_mask")
        wanted = [True] * len(items) if place is None else call.args[place]
        return tuple(
            Outcome(
                self._as_run(call, index, meta_of(item)), keys.get(storage_key(item), -1), item.requires_grad
            )
            if isinstance(item, torch.Tensor) and is_wanted
            else None
            for index, (item, is_wanted) in enumerate(zip(items, wanted, strict=True))
        )

    def _as_run(self, call: OperatorCall, index: int, meta: TensorMeta) -> TensorMeta:
        """Return the layout of an output from its kernel, where the shape function is wrong or for another device."""
        if (call.op, index) in _AS_WIDE_AS_INPUT and call.metas[0].dtype == "float64":
            return replace(meta, dtype="float64")
        if (call.op, index) in _STATISTICS and self.target != "cpu" and meta.dtype in _HALF:
            return replace(meta, dtype="float32")
        return meta

    def _graph(
        self, function: Callable[..., Any], tensors: list[torch.Tensor], keeps_all: bool = False
    ) -> torch.fx.Graph:
        """Return the operators that `function` dispatches below autograd, without mutations; `keeps_all` includes unused."""
        with self.mode, torch.enable_grad():
            graph = recorded(function, tensors)
        if any(node.op == "get_attr" for node in graph.nodes):
            raise TraceError(
                "it reads a tensor that is not among its arguments: pass it tensors and parameters, and make constants of "
                "the code by torch.full or as buffers"
            )
        if any(node.op == "call_function" and is_mutable(node.target) for node in graph.nodes):
            functional = torch.func.functionalize(
                torch.fx.GraphModule(torch.nn.Module(), graph), remove="mutations"
            )
            with self.mode, torch.no_grad():
                graph = recorded(functional, [tensor.detach() for tensor in tensors])
        if not keeps_all:
            graph.eliminate_dead_code()
        for node in reversed(graph.nodes):
            if isinstance(node.meta.get("val"), torch.device):  # functionalisation gets it of every tensor
                graph.erase_node(node)
        return graph

    def _trace_lowering(self, call: OperatorCall, needs_grad: tuple[bool, ...]) -> Recipe:
        tensors = self._fakes(call, needs_grad)

        def forward(*inputs: torch.Tensor) -> list[Any]:
            by_hand = _LOWERINGS.get(call.op)
            result = by_hand(*inputs) if by_hand else self._apply(call, list(inputs))
            return list(result) if isinstance(result, list | tuple) else [result]

        return recipe(self._graph(forward, tensors), len(tensors))

    def _trace_backward(
        self,
        call: OperatorCall,
        activations: tuple[int, ...],
        weights: tuple[int, ...],
        cotangents: tuple[int, ...],
        layouts: tuple[TensorMeta, ...],
    ) -> BackwardRecipe:
        wanted = activations + weights
        needs_grad = tuple(index in wanted for index in range(len(call.metas)))
        tensors = self._fakes(call, needs_grad)
        outcomes = self.evaluate(call, needs_grad)
        with self.mode:
            tangents = [self.fake(layout) for layout in layouts]

        def joint(*inputs: torch.Tensor) -> list[Any]:
            arguments, seeds = list(inputs[: len(tensors)]), list(inputs[len(tensors) :])
            result = self._apply(call, arguments)
            outputs = list(result) if isinstance(result, list | tuple) else [result]
            selected = [outputs[index] for index in cotangents]
            gradients: list[Any] = []
            for group in (activations, weights):
                if group:
                    with_respect_to = [arguments[index] for index in group]
                    gradients += torch.autograd.grad(
                        selected, with_respect_to, seeds, retain_graph=True, allow_unused=True
                    )
            return outputs + gradients

        graph = self._graph(joint, tensors + tangents)
        counts = len(tensors), len(outcomes), len(cotangents)
        return backward_recipe(graph, call.op, counts, activations, weights)

    def _trace_function(
        self,
        call: FunctionCall,
        metas: tuple[TensorMeta, ...],
        activations: tuple[int, ...],
        weights: tuple[int, ...],
        cotangents: tuple[tuple[int, TensorMeta], ...] | None,
    ) -> FunctionRecipe:
        wanted = activations + weights
        with self.mode:
            tensors = [self.fake(meta, index in wanted) for index, meta in enumerate(metas)]
            outputs = _outputs_of(call, tensors)
            passing = tuple(index for index, output in enumerate(outputs) if output.requires_grad and wanted)
            if cotangents is None:
                cotangents = tuple((index, replace(meta_of(outputs[index]), offset=0)) for index in passing)
            tangents = [self.fake(layout) for _, layout in cotangents]

        def joint(*inputs: torch.Tensor) -> list[Any]:
            arguments, seeds = list(inputs[: len(tensors)]), list(inputs[len(tensors) :])
            outputs = _outputs_of(call, arguments)
            torch.ops.stagewright.begin_region(-1)
            gradients: Sequence[Any] = ()
            if seeds:
                selected = [outputs[index] for index, _ in cotangents]
                with_respect_to = [arguments[index] for index in wanted]
                gradients = torch.autograd.grad(selected, with_respect_to, seeds, allow_unused=True)
            return [*outputs, *gradients, *([None] * (len(wanted) - len(gradients)))]

        graph = self._graph(joint, tensors + tangents, keeps_all=True)
        _check_function(graph)
        counts = len(tensors), len(outputs), len(tangents)
        return function_recipe(graph, BEGIN, counts, passing, activations, weights)


def _outputs_of(call: FunctionCall, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.enable_grad():
        result = call(tensors)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _check_function(graph: torch.fx.Graph) -> None:
    """Refuse operators of a custom function that cannot be part of a graph.

    Raises:
        TraceError: says which, and what to do instead.
    """
    is_backward = False
    for node in graph.nodes:
        is_backward |= str(node.target) == BEGIN
        if node.op != "call_function":
            continue
        if is_mutable(node.target):
            raise TraceError(f"{node.target} writes to a tensor that is given to it: clone it first")
        if is_backward and draws(node.target, node.args, node.kwargs):
            raise TraceError(
                f"its backward draws random numbers by {node.target}: draw them in forward and save them"
            )
