"""What single operators do, learnt from torch itself on fake tensors and remembered by signature.

Three questions are asked of an operator with given layouts of its arguments, and each is answered once:

* `lower`: which operators with a derivative of their own does a composite operator (linear, attention) become?
* `evaluate`: what layouts do its outputs have, which of them share storage with an argument, which need a gradient?
* `backward`: which operators compute its input gradients (I) and which its weight gradients (W)?

Because layers repeat, a model of hundreds of layers asks these questions a few dozen times. The answers come from
torch's own dispatcher and autograd formulas, so that running them equals eager execution to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from stagewright.errors import TraceError
from stagewright.graph import Ref, TensorMeta, renumbered
from stagewright.graph.tensor_parallel import ENTER
from stagewright.tracing.arguments import DTYPES, decode, encode, meta_of, operator, references
from stagewright.tracing.private import (
    FakeTensorMode,
    argument_place,
    is_composite,
    is_mutable,
    make_fx,
    storage_key,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One tensor output: its layout, the argument whose storage it shares (-1: its own), whether it needs a gradient."""

    meta: TensorMeta
    alias: int
    needs_grad: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a recipe. Values are numbered: arguments first, then outputs in order of production."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    steps: tuple[Step, ...]
    results: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class BackwardRecipe:
    """Steps from (arguments, outputs, cotangents) to one gradient per argument (None: no gradient flows)."""

    input_grad: tuple[Step, ...]
    weight_grad: tuple[Step, ...]
    gradients: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """An operator call with layouts in place of tensors: arguments hold ``Ref(i)`` to `metas[i]`."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    metas: tuple[TensorMeta, ...]


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """What a slice assignment writes: `source` in the shape and type of `target`."""
    return source.to(target.dtype).expand(target.shape)


# Operators that functionalisation makes and autograd has no derivative for.
_LOWERINGS: dict[str, Callable[..., torch.Tensor]] = {"aten.copy.default": _copy}


# Outputs that are float64 where the first argument is; the shape function of torch 2.11 says float32.
_AS_WIDE_AS_INPUT = {("aten._scaled_dot_product_flash_attention_for_cpu.default", 1)}


# Operators that return their argument, though their schema must not say so while a model is exported.
_IDENTITIES = {ENTER}


# Views that torch marks with a bit instead of a layout: another layout does not tell them apart, so they are copied.
_COPIES = {"aten._conj.default": "aten._conj_physical.default", "aten._neg_view.default": "aten.neg.default"}


def without_marks(op: str) -> str:
    """The operator to run for `op`: one whose result is described by layout and storage alone."""
    return _COPIES.get(op, op)


class Rules:
    """Answers about operators, remembered by signature. `mode` is the fake tensor mode they are asked under."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode = mode
        self.device = device
        self._lowered: dict[Any, Recipe | None] = {}
        self._outcomes: dict[Any, tuple[Outcome | None, ...]] = {}
        self._backwards: dict[Any, BackwardRecipe] = {}
        self._composite: dict[str, bool] = {}

    def lower(self, call: Call, needs_grad: tuple[bool, ...]) -> Recipe | None:
        """The recipe of a composite operator, or None for one that has its own derivative."""
        if call.op not in self._composite:
            self._composite[call.op] = call.op in _LOWERINGS or is_composite(operator(call.op))
        if not self._composite[call.op]:
            return None
        key = (call, needs_grad)
        if key not in self._lowered:
            self._lowered[key] = self._trace_lowering(call, needs_grad)
        return self._lowered[key]

    def evaluate(self, call: Call, needs_grad: tuple[bool, ...]) -> tuple[Outcome | None, ...]:
        key = (call, needs_grad)
        if key not in self._outcomes:
            self._outcomes[key] = self._run_fake(call, needs_grad)
        return self._outcomes[key]

    def backward(
        self,
        call: Call,
        activations: tuple[int, ...],
        weights: tuple[int, ...],
        cotangents: tuple[int, ...],
        layouts: tuple[TensorMeta, ...],
    ) -> BackwardRecipe:
        """Gradients with respect to the arguments numbered `activations` and `weights`, given cotangents of these
        `layouts` of the outputs numbered `cotangents`."""
        key = (call, activations, weights, cotangents, layouts)
        if key not in self._backwards:
            self._backwards[key] = self._trace_backward(*key)
        return self._backwards[key]

    # -- asking torch ---------------------------------------------------------------------------------------------

    def fake(self, meta: TensorMeta, needs_grad: bool = False) -> torch.Tensor:
        """A fake tensor of a layout, in a storage of its own."""
        dtype = DTYPES[meta.dtype]
        if meta.offset:
            storage = torch.empty(meta.offset + meta.extent, dtype=dtype, device=self.device)
            tensor = storage.as_strided(meta.shape, meta.stride, meta.offset)
        else:
            tensor = torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device=self.device)
        return tensor.requires_grad_(needs_grad)

    def _fakes(self, call: Call, needs_grad: tuple[bool, ...]) -> list[torch.Tensor]:
        with self.mode:
            return [self.fake(meta, needs) for meta, needs in zip(call.metas, needs_grad, strict=True)]

    def _apply(self, call: Call, tensors: list[torch.Tensor]) -> Any:
        args = decode(call.args, tensors.__getitem__, self.device)
        kwargs = {name: decode(value, tensors.__getitem__, self.device) for name, value in call.kwargs}
        return operator(call.op)(*args, **kwargs)

    def _run_fake(self, call: Call, needs_grad: tuple[bool, ...]) -> tuple[Outcome | None, ...]:
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
            Outcome(_as_run(call, index, meta_of(item)), keys.get(storage_key(item), -1), item.requires_grad)
            if isinstance(item, torch.Tensor) and is_wanted
            else None
            for index, (item, is_wanted) in enumerate(zip(items, wanted, strict=True))
        )

    def _graph(self, function: Callable[..., Any], tensors: list[torch.Tensor]) -> torch.fx.Graph:
        """Operators that `function` dispatches below autograd, without mutations."""
        with self.mode, torch.enable_grad():
            module = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*tensors)
        if any(node.op == "call_function" and is_mutable(node.target) for node in module.graph.nodes):
            functional = torch.func.functionalize(module, remove="mutations")
            with self.mode, torch.no_grad():
                detached = [tensor.detach() for tensor in tensors]
                module = make_fx(functional, tracing_mode="real", _allow_non_fake_inputs=True)(*detached)
        module.graph.eliminate_dead_code()
        return module.graph

    def _trace_lowering(self, call: Call, needs_grad: tuple[bool, ...]) -> Recipe:
        tensors = self._fakes(call, needs_grad)

        def forward(*inputs: torch.Tensor) -> list[Any]:
            by_hand = _LOWERINGS.get(call.op)
            result = by_hand(*inputs) if by_hand else self._apply(call, list(inputs))
            return list(result) if isinstance(result, list | tuple) else [result]

        graph = self._graph(forward, tensors)
        steps, numbers, results = _steps(graph, len(tensors), self.device)
        return Recipe(steps, tuple(numbers.get(item) if item is not None else None for item in results))

    def _trace_backward(
        self,
        call: Call,
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
            found: list[Any] = []
            for group in (activations, weights):
                if group:
                    with_respect_to = [arguments[index] for index in group]
                    found += torch.autograd.grad(
                        selected, with_respect_to, seeds, retain_graph=True, allow_unused=True
                    )
            return outputs + found

        graph = self._graph(joint, tensors + tangents)
        return _split_backward(
            graph, call, len(tensors), len(outcomes), cotangents, activations, weights, self.device
        )


def _as_run(call: Call, index: int, meta: TensorMeta) -> TensorMeta:
    """The layout of an output as its kernel makes it, where the shape function errs."""
    if (call.op, index) in _AS_WIDE_AS_INPUT and call.metas[0].dtype == "float64":
        return replace(meta, dtype="float64")
    return meta


def _op_name(node: torch.fx.Node) -> str:
    return str(node.target)


def _steps(
    graph: torch.fx.Graph, num_inputs: int, device: torch.device
) -> tuple[tuple[Step, ...], dict[torch.fx.Node, int], list[torch.fx.Node | None]]:
    """Steps of an fx graph whose placeholders are numbered first; getitem nodes become outputs of their producer."""
    numbers: dict[torch.fx.Node, int] = {}
    steps: list[Step] = []
    results: list[torch.fx.Node | None] = []
    following = num_inputs
    placeholders = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            numbers[node] = placeholders
            placeholders += 1
        elif node.op == "output":
            results = list(node.args[0])
        elif node.op == "get_attr":
            raise TraceError(
                f"an operator creates the tensor constant {node.target}: pass it to the model as a buffer"
            )
        elif _op_name(node) == "<built-in function getitem>":
            continue
        else:
            items = [user for user in node.users if _op_name(user) == "<built-in function getitem>"]
            if items:
                count = len(node.meta["val"])
                outputs: list[int | None] = [None] * count
                for item in items:
                    index = item.args[1]
                    if outputs[index] is None:
                        outputs[index] = following
                        following += 1
                    numbers[item] = outputs[index]  # type: ignore[assignment]
            else:
                outputs = [following]
                numbers[node] = following
                following += 1
            args = encode(node.args, lambda ref: Ref(numbers[ref]))
            kwargs = tuple(
                (name, encode(value, lambda ref: Ref(numbers[ref]))) for name, value in node.kwargs.items()
            )
            steps.append(Step(without_marks(_op_name(node)), args, _without_pin(kwargs), tuple(outputs)))
    return tuple(steps), numbers, results


def _without_pin(kwargs: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in kwargs if name != "pin_memory" and value is not None)


def _split_backward(
    graph: torch.fx.Graph,
    call: Call,
    num_arguments: int,
    num_outputs: int,
    cotangents: tuple[int, ...],
    activations: tuple[int, ...],
    weights: tuple[int, ...],
    device: torch.device,
) -> BackwardRecipe:
    """Renumber a joint trace of one operator so that (arguments, outputs, cotangents) come first, drop the forward and
    split the rest: what the activation gradients need is I, everything else is W."""
    num_placeholders = num_arguments + len(cotangents)
    steps, numbers, results = _steps(graph, num_placeholders, device)
    steps, replaced = _merge_equal(steps)

    def final(node: torch.fx.Node | None) -> int | None:
        if node is None:
            return None
        number = numbers[node]
        while number in replaced:
            number = replaced[number]
        return number

    ids = [final(node) if isinstance(node, torch.fx.Node) else None for node in results]
    outputs, gradients = ids[:num_outputs], ids[num_outputs:]

    # The forward is whatever the outputs depend on and no cotangent reaches.
    producers = {number: step for step in steps for number in step.outputs if number is not None}
    forward_steps = [step for step in steps if step.op == call.op and set(step.outputs) & set(outputs)]
    if len(forward_steps) > 1:
        raise TraceError(
            f"{call.op} has no single derivative: it dispatches to {[step.op for step in steps]}"
        )
    rename: dict[int, int] = {index: index for index in range(num_arguments)}
    for index in range(len(cotangents)):
        rename[num_arguments + index] = num_arguments + num_outputs + index
    if forward_steps:
        for index, number in enumerate(forward_steps[0].outputs):
            if number is not None:
                rename.setdefault(number, num_arguments + index)
    for index, number in enumerate(outputs):
        if number is not None:
            rename.setdefault(number, num_arguments + index)

    def ancestors(targets: list[int | None]) -> set[int]:
        found: set[int] = set()
        stack = [number for number in targets if number is not None]
        while stack:
            number = stack.pop()
            step = producers.get(number)
            if number in rename or step is None or id(step) in found:
                continue
            found.add(id(step))
            stack.extend(references(step.args))
            stack.extend(references(tuple(value for _, value in step.kwargs)))
        return found

    for_inputs = ancestors(gradients[: len(activations)])
    for_weights = ancestors(gradients[len(activations) :]) - for_inputs
    following = num_arguments + num_outputs + len(cotangents)
    parts: dict[bool, list[Step]] = {True: [], False: []}
    for step in steps:
        if id(step) not in for_inputs and id(step) not in for_weights:
            continue
        fresh: list[int | None] = []
        for number in step.outputs:
            if number is None:
                fresh.append(None)
                continue
            rename[number] = following
            fresh.append(following)
            following += 1
        args = _renumber(step.args, rename, replaced)
        kwargs = tuple((name, _renumber(value, rename, replaced)) for name, value in step.kwargs)
        parts[id(step) in for_inputs].append(Step(step.op, args, kwargs, tuple(fresh)))
    by_argument: list[int | None] = [None] * num_arguments
    for index, number in zip(activations + weights, gradients, strict=True):
        by_argument[index] = None if number is None else rename[number]
    return BackwardRecipe(tuple(parts[True]), tuple(parts[False]), tuple(by_argument))


def _merge_equal(steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], dict[int, int]]:
    """Drop steps that repeat an earlier one; the second map sends their outputs to the earlier outputs."""
    seen: dict[Any, Step] = {}
    replaced: dict[int, int] = {}
    kept: list[Step] = []
    for step in steps:
        args = _renumber(step.args, {}, replaced)
        kwargs = tuple((name, _renumber(value, {}, replaced)) for name, value in step.kwargs)
        key = (step.op, args, kwargs)
        twin = seen.get(key)
        if twin is None:
            merged = Step(step.op, args, kwargs, step.outputs)
            seen[key] = merged
            kept.append(merged)
            continue
        outputs = list(twin.outputs)
        for index, (number, earlier) in enumerate(zip(step.outputs, twin.outputs, strict=True)):
            if number is None:
                continue
            if earlier is None:
                outputs[index] = number
            else:
                replaced[number] = earlier
        if tuple(outputs) != twin.outputs:
            position = kept.index(twin)
            kept[position] = seen[key] = Step(twin.op, twin.args, twin.kwargs, tuple(outputs))
    return tuple(kept), replaced


def _renumber(argument: Any, rename: dict[int, int], replaced: dict[int, int]) -> Any:
    def number(value: int) -> int:
        value = replaced.get(value, value)
        return rename.get(value, value)

    return renumbered(argument, number)
