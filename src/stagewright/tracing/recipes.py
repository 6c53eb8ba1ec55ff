"""Recipes: what torch dispatches for one operator, as steps that every call of it takes on its own values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from stagewright.errors import TraceError
from stagewright.graph import Ref, renumbered
from stagewright.tracing.arguments import encode, encode_keywords, references, the_element

_GETITEM = "<built-in function getitem>"

# Views that torch marks with a bit instead of a layout: another layout does not tell them apart, so they are copied.
_COPIES = {"aten._conj.default": "aten._conj_physical.default", "aten._neg_view.default": "aten.neg.default"}


def without_marks(op: str) -> str:
    """Return the operator to run for `op`: one whose result is described by layout and storage alone."""
    return _COPIES.get(op, op)


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """An operator of a recipe. Values are numbered: arguments first, then outputs in order of production."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    steps: tuple[RecipeStep, ...]
    results: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class BackwardRecipe:
    """Steps from (arguments, outputs, cotangents) to one gradient per argument (None: no gradient flows)."""

    input_grad: tuple[RecipeStep, ...]
    weight_grad: tuple[RecipeStep, ...]
    gradients: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class FunctionRecipe:
    """A custom function: the steps of its forward, and of its backward for some cotangents.

    Values are numbered: arguments first, then outputs of the forward in order of production, cotangents, and outputs of the
    backward.
    """

    forward: Recipe
    passing: tuple[int, ...]  # which results pass a gradient
    num_values: int  # arguments and outputs of the forward
    backward: BackwardRecipe


class _GraphRecorder(TorchDispatchMode):
    """A mode that records operators in a graph, as torch's `make_fx` does, which takes several times as long."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        # By a tensor's identity, which holds while it lives.
        self._nodes: dict[int, tuple[torch.fx.Node, torch.Tensor]] = {}
        for index, tensor in enumerate(inputs):
            self._nodes[id(tensor)] = self.graph.placeholder(f"input_{index}"), tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node = self.graph.call_function(func, *tree_map_only(torch.Tensor, self.node, (args, kwargs)))
        result = node.meta["val"] = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._nodes[id(result)] = node, result
        elif isinstance(result, list | tuple):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    self._nodes[id(item)] = self.graph.call_function(getitem, (node, index)), item
        return result

    def node(self, tensor: torch.Tensor) -> torch.fx.Node:
        """Return the node that produced a tensor, or a constant for it."""
        if id(tensor) not in self._nodes:
            self._nodes[id(tensor)] = self._constant(tensor), tensor
        return self._nodes[id(tensor)][0]

    def _constant(self, tensor: torch.Tensor) -> torch.fx.Node:
        """Return the node of a tensor from the code: an operator that creates it if all elements are equal."""
        element = the_element(tensor)
        if element is None:
            return self.graph.get_attr("_tensor_constant0")
        args = (torch.ops.aten.full.default, (list(tensor.shape), element))
        node = self.graph.call_function(*args, {"dtype": tensor.dtype, "device": tensor.device})
        node.meta["val"] = tensor
        return node


def recorded(function: Callable[..., list[Any]], inputs: Sequence[torch.Tensor]) -> torch.fx.Graph:
    """Return the operators that `function` dispatches below autograd, from `inputs` to what it returns."""
    with _GraphRecorder(inputs) as recorder:
        results = function(*inputs)
    recorder.graph.output(tree_map_only(torch.Tensor, recorder.node, results))
    return recorder.graph


def recipe(graph: torch.fx.Graph, num_arguments: int) -> Recipe:
    """Return the steps of a traced operator, and which values are its outputs.

    Raises:
        TraceError: the operator makes a tensor constant.
    """
    return Recipe(*_steps(graph, num_arguments))


def backward_recipe(
    graph: torch.fx.Graph,
    op: str,
    counts: tuple[int, int, int],
    activations: tuple[int, ...],
    weights: tuple[int, ...],
) -> BackwardRecipe:
    """Return the backward in a joint trace of operator `op`: the steps for the gradients of the arguments numbered
    `activations` are I, all further steps for those of `weights` are W.

    Args:
        graph: from arguments and cotangents to outputs and these gradients.
        counts: of arguments, outputs and cotangents, which come first among the values of the recipe, in this order.

    Raises:
        TraceError: the operator has no single derivative, or makes a tensor constant.
    """
    num_arguments, num_outputs, num_cotangents = counts
    traced, results = _steps(graph, num_arguments + num_cotangents)
    steps, replaced = _merge_equal(traced)
    results = tuple(None if number is None else replaced.get(number, number) for number in results)
    outputs, gradients = results[:num_outputs], results[num_outputs:]
    places = _places(steps, op, outputs, counts)
    for_inputs = _needed(steps, gradients[: len(activations)], places)
    for_weights = _needed(steps, gradients[len(activations) :], places) - for_inputs
    following = itertools.count(sum(counts))
    parts: dict[bool, list[RecipeStep]] = {True: [], False: []}
    for index in sorted(for_inputs | for_weights):
        step = steps[index]
        args, kwargs = renumbered((step.args, step.kwargs), places.__getitem__)
        places.update((number, next(following)) for number in step.outputs if number is not None)
        placed_outputs = tuple(None if number is None else places[number] for number in step.outputs)
        parts[index in for_inputs].append(RecipeStep(step.op, args, kwargs, placed_outputs))
    by_argument: list[int | None] = [None] * num_arguments
    for index, number in zip(activations + weights, gradients, strict=True):
        by_argument[index] = None if number is None else places[number]
    return BackwardRecipe(tuple(parts[True]), tuple(parts[False]), tuple(by_argument))


def function_recipe(
    graph: torch.fx.Graph,
    mark: str,
    counts: tuple[int, int, int],
    passing: tuple[int, ...],
    activations: tuple[int, ...],
    weights: tuple[int, ...],
) -> FunctionRecipe:
    """Return the recipe of a custom function; its backward is split like that of an operator (see `backward_recipe`).

    Args:
        graph: as there; no result of its forward is left out, and an operator `mark` separates forward and backward.
        passing: which outputs pass a gradient.
    """
    num_arguments, num_outputs, num_cotangents = counts
    steps, results = _steps(graph, num_arguments + num_cotangents)
    middle = next(place for place, step in enumerate(steps) if step.op == mark)
    (end,) = steps[middle].outputs
    assert end is not None

    def place(number: int) -> int:
        if number < num_arguments or number >= end:
            return number
        is_cotangent = number < num_arguments + num_cotangents
        return number + (end - num_arguments - num_cotangents if is_cotangent else -num_cotangents)

    def placed(step: RecipeStep) -> RecipeStep:
        args, kwargs = renumbered((step.args, step.kwargs), place)
        return RecipeStep(step.op, args, kwargs, _placed(step.outputs))

    def _placed(numbers: Sequence[int | None]) -> tuple[int | None, ...]:
        return tuple(None if number is None else place(number) for number in numbers)

    numbers = _placed(results)
    outputs, gradients = numbers[:num_outputs], numbers[num_outputs:]
    forward, backward = tuple(map(placed, steps[:middle])), tuple(map(placed, steps[middle + 1 :]))
    for_inputs = _needed(backward, gradients[: len(activations)], ())
    for_weights = _needed(backward, gradients[len(activations) :], ()) - for_inputs
    by_argument: list[int | None] = [None] * num_arguments
    for index, number in zip(activations + weights, gradients, strict=True):
        by_argument[index] = number
    return FunctionRecipe(
        Recipe(forward, outputs),
        passing,
        end - num_cotangents,
        BackwardRecipe(
            tuple(step for index, step in enumerate(backward) if index in for_inputs),
            tuple(step for index, step in enumerate(backward) if index in for_weights),
            tuple(by_argument),
        ),
    )


def _steps(graph: torch.fx.Graph, num_inputs: int) -> tuple[tuple[RecipeStep, ...], tuple[int | None, ...]]:
    """Return the steps of an fx graph whose placeholders are numbered first, and the numbers of its results; getitem nodes
    become outputs of their producer."""
    numbers: dict[torch.fx.Node, int] = {}
    steps: list[RecipeStep] = []
    results: tuple[int | None, ...] = ()
    placeholders, following = itertools.count(), itertools.count(num_inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            numbers[node] = next(placeholders)
        elif node.op == "output":
            results = tuple(
                numbers[item] if isinstance(item, torch.fx.Node) else None for item in node.args[0]
            )
        elif node.op == "get_attr":
            raise TraceError(
                f"an operator creates the tensor constant {node.target}: pass it to the model as a buffer"
            )
        elif str(node.target) != _GETITEM:
            args = encode(node.args, lambda ref: Ref(numbers[ref]))
            kwargs = encode_keywords(node.kwargs, lambda ref: Ref(numbers[ref]))
            outputs = _number_outputs(node, numbers, following)
            steps.append(RecipeStep(without_marks(str(node.target)), args, kwargs, outputs))
    return tuple(steps), results


def _number_outputs(
    node: torch.fx.Node, numbers: dict[torch.fx.Node, int], following: Iterator[int]
) -> tuple[int | None, ...]:
    """Return the numbers of the results of `node`, None for unused ones; they are added to `numbers`."""
    items = [user for user in node.users if str(user.target) == _GETITEM]
    if not items and not isinstance(node.meta.get("val"), list | tuple):
        numbers[node] = next(following)
        return (numbers[node],)
    outputs: list[int | None] = [None] * len(node.meta["val"])
    for item in items:
        index = cast(int, item.args[1])
        number = outputs[index]
        numbers[item] = outputs[index] = next(following) if number is None else number
    return tuple(outputs)


def _places(
    steps: Sequence[RecipeStep], op: str, outputs: Sequence[int | None], counts: tuple[int, int, int]
) -> dict[int, int]:
    """Return the numbers in a backward recipe of existing values: arguments, cotangents, and results of the forward, that is
    the results of `op` that the outputs depend on."""
    num_arguments, num_outputs, num_cotangents = counts
    forward = [step for step in steps if step.op == op and set(step.outputs) & set(outputs)]
    if len(forward) > 1:
        raise TraceError(f"{op} has no single derivative: it dispatches to {[step.op for step in steps]}")
    places = {index: index for index in range(num_arguments)}
    for index in range(num_cotangents):
        places[num_arguments + index] = num_arguments + num_outputs + index
    for numbers in (*(step.outputs for step in forward), outputs):
        for index, number in enumerate(numbers):
            if number is not None:
                places.setdefault(number, num_arguments + index)
    return places


def _needed(steps: Sequence[RecipeStep], targets: Iterable[int | None], given: Container[int]) -> set[int]:
    """Return the indices of the steps that compute `targets`, directly or indirectly, from `given`."""
    producers = {number: place for place, step in enumerate(steps) for number in step.outputs}
    needed: set[int] = set()
    stack = [number for number in targets if number is not None]
    while stack:
        number = stack.pop()
        place = producers.get(number)
        if number in given or place is None or place in needed:
            continue
        needed.add(place)
        stack.extend(references((steps[place].args, steps[place].kwargs)))
    return needed


def _merge_equal(steps: tuple[RecipeStep, ...]) -> tuple[tuple[RecipeStep, ...], dict[int, int]]:
    """Drop steps that repeat an earlier one; the second map sends their outputs to the earlier outputs."""
    seen: dict[Any, int] = {}
    replaced: dict[int, int] = {}
    kept: list[RecipeStep] = []
    for step in steps:
        args, kwargs = renumbered((step.args, step.kwargs), lambda number: replaced.get(number, number))
        place = seen.setdefault((step.op, args, kwargs), len(kept))
        if place == len(kept):
            kept.append(RecipeStep(step.op, args, kwargs, step.outputs))
            continue
        outputs = list(kept[place].outputs)
        for index, (number, earlier) in enumerate(zip(step.outputs, outputs, strict=True)):
            if number is not None and earlier is not None:
                replaced[number] = earlier
            elif number is not None:
                outputs[index] = number
        kept[place] = replace(kept[place], outputs=tuple(outputs))
    return tuple(kept), replaced
