"""The joint graph of a captured model: its forward, and the backward that autograd would run for it.

In the backward, forward operators come in reverse order, each contributing to the cotangents of its arguments; a cotangent
that has arrived before is the first addend. Because every backward operator is made for one forward operator, a cut between
any two forward operators also cuts the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stagewright.errors import ContractError, TraceError
from stagewright.graph import Node, OperatorGraph, Origin, Part, Ref, Symbol, TensorMeta, Value, renumbered
from stagewright.graph.dequantise import dequantised_again
from stagewright.graph.repeat import REPEATS
from stagewright.graph.simplify import compact
from stagewright.tracing.arguments import contents, draws, operator, references
from stagewright.tracing.autograd_functions import FunctionCall
from stagewright.tracing.capture import Captured, CapturedCall
from stagewright.tracing.draft import Draft
from stagewright.tracing.effects import TensorHook
from stagewright.tracing.model_errors import first_line
from stagewright.tracing.private import is_mutable
from stagewright.tracing.recipes import BackwardRecipe, FunctionRecipe, Recipe, RecipeStep, without_marks
from stagewright.tracing.rules import OperatorCall, OperatorRules, Outcome


def build_joint(name: str, captured: Captured, rules: OperatorRules, facts: dict[str, Any]) -> OperatorGraph:
    """Return the operator graph of a captured model.

    Raises:
        TraceError: an operator cannot be differentiated.
        ContractError: an operator writes to its arguments.
    """
    draft = Draft()
    forward = ForwardPass(captured, draft, rules)
    forward.run()
    number = forward.number
    hooks = {number[hooked]: hooks for hooked, hooks in captured.hooks.items()}
    backward = BackwardPass(draft, forward.calls, rules, forward.functions, hooks)
    backward.run(number[captured.loss])
    by_source = {(source.origin, source.name): number[source.number] for source in captured.sources}
    parameters = {
        alias: by_source[Origin.PARAMETER, first]
        for alias, first in captured.aliases.items()
        if (Origin.PARAMETER, first) in by_source
    }
    graph = OperatorGraph(
        name=name,
        values=tuple(
            Value(index, value.meta, value.storage, value.origin, value.name, value.node, value.needs_grad)
            for index, value in enumerate(draft.values)
        ),
        nodes=tuple(draft.nodes),
        parameters=parameters,
        buffers={name: value for (origin, name), value in by_source.items() if origin is Origin.BUFFER},
        inputs={name: value for (origin, name), value in by_source.items() if origin is Origin.INPUT},
        loss=number[captured.loss],
        seed=backward.seed,
        gradients=backward.gradients,
        contributions={
            gradient: tuple(sorted(parts, key=lambda item: -item[0]))
            for gradient, parts in backward.contributions.items()
        },
        mutations=tuple(
            (by_source[Origin.BUFFER, buffer], number[changed]) for buffer, changed in captured.mutations
        ),
        num_draws=draft.num_draws,
        constants={name: contents(tensor) for name, tensor in captured.constants.items()},
        facts=facts | ({REPEATS: captured.repeats} if captured.repeats else {}),
    )
    return dequantised_again(compact(graph))


_VIEW = "aten.view.default"
_CLONE = "aten.clone.default"
_CONTIGUOUS = (("memory_format", Symbol("memory_format", "contiguous_format")),)
_ELEMENTWISE_ON_PARAMETER = frozenset(
    {
        "aten._to_copy.default", "aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor",
        "aten.neg.default", "aten.exp.default", "aten.clone.default",
    }
)  # fmt: skip

_Args = tuple[Any, ...]
_Kwargs = tuple[tuple[str, Any], ...]


class ForwardPass:
    """The forward of `captured`, added to a draft.

    * `number`: the value of every captured number;
    * `calls`: the call of every forward node, for its backward; none for a node within a custom function;
    * `functions`: the call of a custom function, by the last node of its forward.
    """

    def __init__(self, captured: Captured, draft: Draft, rules: OperatorRules) -> None:
        self.captured = captured
        self.draft = draft
        self.rules = rules
        self.number: dict[int, int] = {}
        self.calls: dict[int, OperatorCall] = {}
        self.functions: dict[int, FunctionUse] = {}

    def run(self) -> None:
        """Add all nodes. Raises `TraceError` and `ContractError` as `build_joint` does."""
        changing = {name for name, _ in self.captured.mutations}
        for source in self.captured.sources:
            changes = source.origin is Origin.INPUT or (
                source.origin is Origin.BUFFER and source.name in changing
            )
            part = Part.PROLOGUE if changes else Part.STATIC
            self.number[source.number] = self.draft.add_value(
                source.meta, source.origin, source.name, source.needs_grad, part
            )
        for call in self.captured.calls:
            self._add_call(call)

    def _add_call(self, captured: CapturedCall) -> None:
        args, kwargs = renumbered((captured.args, captured.kwargs), self.number.__getitem__)
        if captured.function is not None:
            self._add_function(captured, captured.function, tuple(references(args)))
            return
        op = without_marks(captured.op)
        call, refs = self.draft.call(op, args, kwargs)
        needs = tuple(self.draft.values[ref].needs_grad and not captured.no_grad for ref in refs)
        try:
            recipe = self.rules.lower(call, needs)
            if recipe is None:
                if op == _VIEW and not self._can_view(call, needs):
                    (copied,) = self._add_node(captured, _CLONE, args[:1], _CONTIGUOUS)
                    args = (Ref(copied if copied is not None else refs[0]), *args[1:])
                outputs = self._add_node(captured, op, args, kwargs)
            else:
                outputs = self._add_steps(captured, recipe, dict(enumerate(refs)))
        except (TraceError, ContractError):
            raise
        except Exception as error:
            raise TraceError(
                f"operator {captured.op} of module '{captured.module}' at {captured.where} cannot be traced: "
                f"{first_line(error)}"
            ) from error
        self._name_outputs(captured, outputs)

    def _name_outputs(self, captured: CapturedCall, outputs: Sequence[int | None]) -> None:
        for number, value in zip(captured.outputs, outputs, strict=False):
            if number is not None and value is not None:
                is_hooked = number in self.captured.hooks
                self.number[number] = self._copied(captured, value) if is_hooked else value

    def _copied(self, captured: CapturedCall, value: int) -> int:
        """Return a value with a separate backward: a copy of one derived from a parameter, whose gradient would first be
        accumulated over microbatches."""
        if self.draft.values[value].part is not Part.DERIVED:
            return value
        call, refs = self.draft.call(_CLONE, (Ref(value),))
        is_inside = captured.function is not None
        outcomes = self.rules.evaluate(call, (self.draft.values[value].needs_grad and not is_inside,))
        if not is_inside:
            self.calls[len(self.draft.nodes)] = call
        (copy,) = self.draft.add(call, refs, outcomes, Part.FORWARD, -1, captured)
        assert copy is not None
        return copy

    def _add_function(self, captured: CapturedCall, function: FunctionCall, refs: tuple[int, ...]) -> None:
        """Add a call of a custom function: its forward operators, of which the last stands for its backward."""
        values = self.draft.values
        wanted = [index for index, ref in enumerate(refs) if values[ref].needs_grad and not captured.no_grad]
        weights = tuple(index for index in wanted if values[refs[index]].parameter >= 0)
        use = FunctionUse(captured, function, refs, tuple(i for i in wanted if i not in weights), weights)
        recipe = use.recipe(self.draft, self.rules)
        local = dict(enumerate(refs))
        first = len(self.draft.nodes)
        outputs = self._add_steps(captured, recipe.forward, local)
        outputs = tuple(
            self._copied(captured, value) if value is not None and index in recipe.passing else value
            for index, value in enumerate(outputs)
        )
        self._name_outputs(captured, outputs)
        if not recipe.passing:
            return
        added = self.draft.nodes[first:]
        last = next((node.id for node in reversed(added) if node.part is Part.FORWARD), None)
        if last is None:
            raise use.refusal("its results depend on no parameter, yet pass a gradient")
        self.functions[last] = replace(use, steps=recipe.forward.steps, values=local, outputs=outputs)
        for index in recipe.passing:
            values[outputs[index]].needs_grad = True  # type: ignore[index]

    def _add_steps(
        self, captured: CapturedCall, recipe: Recipe, local: dict[int, int]
    ) -> tuple[int | None, ...]:
        """Add the nodes of a recipe on values numbered as in `local`, which is extended by their results."""
        for step in recipe.steps:
            arguments = renumbered((step.args, step.kwargs), local.__getitem__)
            results = self._add_node(captured, step.op, *arguments)
            local.update(
                (number, value)
                for number, value in zip(step.outputs, results, strict=True)
                if number is not None and value is not None
            )
        return tuple(None if number is None else local[number] for number in recipe.results)

    def _can_view(self, call: OperatorCall, needs: tuple[bool, ...]) -> bool:
        """Return whether a view is possible with the layouts of this graph.

        An exported graph lacks the copies that were needless with the layouts during export. A kernel chosen because
        gradients are needed (attention with a trained bias) may produce another layout, and then eager execution copies.
        """
        try:
            self.rules.evaluate(call, needs)
        except (RuntimeError, ValueError):
            return False
        return True

    def _add_node(
        self, captured: CapturedCall, op: str, args: _Args, kwargs: _Kwargs
    ) -> tuple[int | None, ...]:
        if is_mutable(operator(op)):
            raise ContractError(
                f"operator {op} of module '{captured.module}' at {captured.where} writes to its argument and could not "
                "be made functional: use the out-of-place form"
            )
        call, refs = self.draft.call(op, args, kwargs)
        is_inside = captured.function is not None
        detached = captured.no_grad or is_inside or op == "aten.detach.default"
        needs = tuple(self.draft.values[ref].needs_grad and not detached for ref in refs)
        outcomes = self.rules.evaluate(call, needs)
        is_random = draws(operator(op), args, dict(kwargs))
        part, parameter = self._part(op, refs, outcomes, is_random)
        if not is_inside:
            self.calls[len(self.draft.nodes)] = call
        outputs = self.draft.add(call, refs, outcomes, part, parameter, captured, is_random=is_random)
        if captured.region >= 0 and part is Part.FORWARD:
            self.draft.put_in_region(captured.region, is_kept=self._is_kept(captured, call))
        return outputs

    def _is_kept(self, captured: CapturedCall, call: OperatorCall) -> bool:
        """Return whether selective checkpointing keeps the results of the call; every policy is called, as some count."""
        if not captured.keeps:
            return False
        try:
            arguments = self.rules.run(call)
            answers = [keeps(operator(call.op), *arguments) for keeps in captured.keeps]
        except Exception as error:
            raise TraceError(
                f"the policy of selective checkpointing around operator {call.op} of module '{captured.module}' at "
                f"{captured.where} cannot be evaluated without a tensor's values: {first_line(error)}"
            ) from error
        return any(answers)

    def _part(
        self, op: str, refs: tuple[int, ...], outcomes: tuple[Outcome | None, ...], is_random: bool
    ) -> tuple[Part, int]:
        """Return when a node runs, and the one parameter that its outputs derive from, or -1."""
        parts = {self.draft.values[ref].part for ref in refs}
        parameters = {self.draft.values[ref].parameter for ref in refs} - {-1}
        if Part.FORWARD in parts or is_random:
            return Part.FORWARD, -1
        if parameters:
            derived = len(refs) == 1 and Part.PROLOGUE not in parts
            if derived and all(
                outcome is None or outcome.alias == 0 or self._is_small_map(op, outcome, refs[0])
                for outcome in outcomes
            ):
                return Part.DERIVED, next(iter(parameters))
            return Part.FORWARD, -1
        return (Part.PROLOGUE if Part.PROLOGUE in parts else Part.STATIC), -1

    def _is_small_map(self, op: str, outcome: Outcome, ref: int) -> bool:
        return (
            op in _ELEMENTWISE_ON_PARAMETER
            and outcome.meta.num_elements == self.draft.values[ref].meta.num_elements
        )


@dataclass(frozen=True)
class FunctionUse:
    """A call of a custom function as part of a graph.

    Attributes:
        inputs: the values of its tensors; those numbered `activations` and `weights` get gradients.
        steps: the steps of its forward.
        values: its values by their numbers in its recipe.
        outputs: the values it returns.
    """

    captured: CapturedCall
    call: FunctionCall
    inputs: tuple[int, ...]
    activations: tuple[int, ...]
    weights: tuple[int, ...]
    steps: tuple[RecipeStep, ...] = ()
    values: Mapping[int, int] = field(default_factory=dict)
    outputs: tuple[int | None, ...] = ()

    def recipe(
        self, draft: Draft, rules: OperatorRules, cotangents: tuple[tuple[int, TensorMeta], ...] | None = None
    ) -> FunctionRecipe:
        """Return the recipe for `cotangents` of the outputs with these numbers, or of all that pass a gradient."""
        metas = tuple(draft.values[value].meta for value in self.inputs)
        try:
            recipe = rules.function(self.call, metas, self.activations, self.weights, cotangents)
        except Exception as error:
            raise self.refusal(first_line(error)) from error
        if self.steps and recipe.forward.steps != self.steps:
            raise self.refusal("it behaves differently when called again with equal arguments")
        return recipe

    def refusal(self, reason: str) -> TraceError:
        return TraceError(
            f"the autograd.Function '{self.call.name}' of module '{self.captured.module or '(model)'}' at "
            f"{self.captured.where} cannot be traced: {reason}"
        )


_ADD = "aten.add.Tensor"


class BackwardPass:
    """The backward of a draft's forward, whose nodes are those of `calls` and within `functions`.

    * `gradients`: values of the gradients of parameters and derived values;
    * `contributions`: contributions to each of them, as (forward node, value);
    * `seed`: the cotangent of the loss.
    """

    def __init__(
        self,
        draft: Draft,
        calls: Mapping[int, OperatorCall],
        rules: OperatorRules,
        functions: Mapping[int, FunctionUse],
        hooks: Mapping[int, tuple[TensorHook, ...]],
    ) -> None:
        self.draft = draft
        self.calls = calls
        self.rules = rules
        self.functions = functions
        self.hooks = dict(hooks)
        self.cotangent: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.contributions: dict[int, list[tuple[int, int]]] = {}
        self.seed = -1

    def run(self, loss: int) -> None:
        """Add the backward from the value `loss`. Raises `TraceError` as `build_joint` does."""
        value = self.draft.values[loss]
        if not value.needs_grad:
            raise TraceError(
                "the loss depends on no parameter that requires a gradient: there is nothing to train"
            )
        self.seed = self.cotangent[loss] = self.draft.add_value(value.meta, Origin.SEED, "seed")
        forward = tuple(self.draft.nodes)
        for part in (Part.FORWARD, Part.DERIVED):
            for node in reversed(forward):
                if node.part is part:
                    self._go_back(node)

    def _go_back(self, node: Node) -> None:
        """Add the contributions of `node` to the cotangents of its arguments."""
        for value in node.outputs:
            if value in self.hooks and value in self.cotangent and node.id in self.calls:
                self._call_hooks(node, value)
        if node.id in self.functions:
            self._go_back_through(node, self.functions[node.id])
        if node.id not in self.calls:
            return
        table = self.gradients if node.part is Part.DERIVED else self.cotangent
        seeds = {
            index: table[output]
            for index, output in enumerate(node.outputs)
            if output is not None and output in table
        }
        wanted = [index for index, ref in enumerate(node.inputs) if self._wants(node, ref)]
        if not seeds or not wanted:
            return
        weights = tuple(index for index in wanted if self.draft.values[node.inputs[index]].parameter >= 0)
        activations = tuple(index for index in wanted if index not in weights)
        recipe = self._recipe(node, activations, weights, seeds)
        given = (*node.inputs, *node.outputs, *seeds.values())
        local = {index: value for index, value in enumerate(given) if value is not None}
        self._add_backward(node, recipe, node.inputs, weights, local)

    def _go_back_through(self, node: Node, use: FunctionUse) -> None:
        """Add the contributions of a custom function, whose last forward is `node`, to the cotangents of its arguments."""
        for value in use.outputs:
            if value in self.hooks and value in self.cotangent:
                self._call_hooks(node, value)
        seeds = {
            index: self.cotangent[output]
            for index, output in enumerate(use.outputs)
            if output is not None and output in self.cotangent
        }
        if not seeds:
            return
        layouts = tuple((index, _own_storage(self.draft.values[seed].meta)) for index, seed in seeds.items())
        recipe = use.recipe(self.draft, self.rules, layouts)
        following = dict(enumerate(seeds.values(), start=recipe.num_values))
        self._add_backward(node, recipe.backward, use.inputs, use.weights, {**use.values, **following})

    def _call_hooks(self, node: Node, value: int) -> None:
        """Return the cotangent of `value`, a result of `node`, after its hooks."""
        for hook in self.hooks.pop(value):
            gradient = self.cotangent[value]
            layout = _own_storage(self.draft.values[gradient].meta)
            try:
                recipe = self.rules.hook(hook.function, layout)
            except Exception as error:
                raise TraceError(
                    f"the hook of a tensor of module '{node.module or '(model)'}', registered at {hook.where}, cannot be "
                    f"traced: {first_line(error)}"
                ) from error
            local = {0: gradient}
            for step in recipe.steps:
                self._add_step(node, step, Part.INPUT_GRAD, local)
            self.cotangent[value] = local[recipe.results[0]]  # type: ignore[index]

    def _add_backward(
        self,
        node: Node,
        recipe: BackwardRecipe,
        inputs: tuple[int, ...],
        weights: tuple[int, ...],
        local: dict[int, int],
    ) -> None:
        """Add the steps of a recipe for `node` on values numbered as in `local`, and their contributions to `inputs`."""
        for part, steps in ((Part.INPUT_GRAD, recipe.input_grad), (Part.WEIGHT_GRAD, recipe.weight_grad)):
            for step in steps:
                self._add_step(node, step, part, local)
        for index, gradient in enumerate(recipe.gradients):
            if gradient is None:
                continue
            ref, value = inputs[index], local[gradient]
            if index in weights:
                self._contribute(ref, node, value)
            else:
                self._accumulate(ref, node, value)

    def _wants(self, node: Node, ref: int) -> bool:
        return self.draft.values[ref].needs_grad and node.op != "aten.detach.default"

    def _recipe(
        self, node: Node, activations: tuple[int, ...], weights: tuple[int, ...], seeds: Mapping[int, int]
    ) -> BackwardRecipe:
        """Return the recipe for the cotangents `seeds` of the outputs with these numbers."""
        metas = tuple(_own_storage(self.draft.values[seed].meta) for seed in seeds.values())
        try:
            return self.rules.backward(self.calls[node.id], activations, weights, tuple(seeds), metas)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"operator {node.op} of module '{node.module}' at {node.where} cannot be differentiated: "
                f"{first_line(error)}"
            ) from error

    def _add_step(self, node: Node, step: RecipeStep, part: Part, local: dict[int, int]) -> None:
        arguments = renumbered((step.args, step.kwargs), local.__getitem__)
        call, refs = self.draft.call(step.op, *arguments)
        outcomes = self.rules.evaluate(call, (False,) * len(refs))
        parameters = {self.draft.values[ref].parameter for ref in refs}
        derived = len(refs) == 1 and -1 not in parameters and all(o is None or o.alias == 0 for o in outcomes)
        here, parameter = (Part.DERIVED, next(iter(parameters))) if derived else (part, -1)
        results = self.draft.add(call, refs, outcomes, here, parameter, node, None if derived else node.id)
        local.update(
            (number, value)
            for number, value in zip(step.outputs, results, strict=False)
            if number is not None and value is not None
        )

    def _accumulate(self, ref: int, node: Node, value: int) -> None:
        """Add `value` to the cotangent of `ref`."""
        earlier = self.cotangent.get(ref)
        if earlier is None:
            self.cotangent[ref] = value
            return
        call, refs = self.draft.call(_ADD, (Ref(earlier), Ref(value)))
        outcomes = self.rules.evaluate(call, (False, False))
        (total,) = self.draft.add(call, refs, outcomes, Part.INPUT_GRAD, -1, node, node.id)
        assert total is not None
        self.cotangent[ref] = total

    def _contribute(self, ref: int, node: Node, value: int) -> None:
        """Note that `value` is what `node` contributes to the gradient of `ref`."""
        gradient = self.gradients.get(ref)
        if gradient is None:
            meta = _own_storage(self.draft.values[value].meta)
            name = self.draft.values[ref].name
            gradient = self.gradients[ref] = self.draft.add_value(meta, Origin.GRADIENT, name)
        self.contributions.setdefault(gradient, []).append((node.id, value))


def _own_storage(meta: TensorMeta) -> TensorMeta:
    return TensorMeta(meta.shape, meta.stride, meta.dtype)
