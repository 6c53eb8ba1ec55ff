"""The joint graph: captured calls lowered to operators with derivatives, then differentiated operator by operator.

The backward is built the way autograd would run it: forward operators in reverse order, each contributing to the
cotangents of its arguments; a cotangent that has arrived before is the first addend. Because every backward operator is
made for one forward operator, a cut between any two forward operators also cuts the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stagewright.errors import ContractError, TraceError
from stagewright.graph import Node, OperatorGraph, Origin, Part, Ref, Symbol, TensorMeta, Value, renumbered
from stagewright.graph.simplify import compact
from stagewright.tracing.arguments import contents, draws, operator, references
from stagewright.tracing.capture import Captured, CapturedCall
from stagewright.tracing.model_errors import first_line
from stagewright.tracing.private import is_mutable
from stagewright.tracing.recipes import BackwardRecipe, Step, without_marks
from stagewright.tracing.rules import Call, Outcome, Rules

_ADD = "aten.add.Tensor"
_VIEW = "aten.view.default"
_CLONE = "aten.clone.default"
_CONTIGUOUS = (("memory_format", Symbol("memory_format", "contiguous_format")),)
_ELEMENTWISE_ON_PARAMETER = frozenset(
    {
        "aten._to_copy.default", "aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor",
        "aten.neg.default", "aten.exp.default", "aten.clone.default",
    }
)  # fmt: skip


@dataclass(slots=True)
class _Value:
    meta: TensorMeta
    storage: int
    origin: Origin
    name: str = ""
    node: int = -1
    needs_grad: bool = False
    part: Part = Part.STATIC  # when it becomes available
    parameter: int = -1  # the one parameter it derives from, for parameters and derived values


def build_joint(name: str, captured: Captured, rules: Rules, facts: dict[str, Any]) -> OperatorGraph:
    """The operator graph of a captured model.

    Raises:
        TraceError: an operator cannot be differentiated.
        ContractError: an operator writes to its arguments.
    """
    builder = _Builder(captured, rules)
    builder.forward()
    builder.backward()
    return builder.finish(name, facts)


class _Builder:
    def __init__(self, captured: Captured, rules: Rules) -> None:
        self.captured = captured
        self.rules = rules
        self.values: list[_Value] = []
        self.nodes: list[Node] = []
        self.signatures: dict[Any, int] = {}
        self.ordinals: dict[str, int] = {}
        self.number: dict[int, int] = {}  # captured number -> value
        self.num_draws = 0
        self.calls: dict[int, Call] = {}  # forward node -> its call, for its backward
        self.cotangent: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.contributions: dict[int, list[tuple[int, int]]] = {}
        self.seed = -1

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        changing = {name for name, _ in self.captured.mutations}
        for source in self.captured.sources:
            changes = source.origin is Origin.INPUT or (
                source.origin is Origin.BUFFER and source.name in changing
            )
            value = _Value(
                source.meta,
                len(self.values),
                source.origin,
                source.name,
                needs_grad=source.needs_grad,
                part=Part.PROLOGUE if changes else Part.STATIC,
                parameter=len(self.values) if source.origin is Origin.PARAMETER else -1,
            )
            self.number[source.number] = len(self.values)
            self.values.append(value)
        for call in self.captured.calls:
            self._forward_call(call)

    def _forward_call(self, captured: CapturedCall) -> None:
        args, kwargs = renumbered((captured.args, captured.kwargs), self.number.__getitem__)
        refs = list(references((args, kwargs)))
        needs = tuple(self.values[ref].needs_grad and not captured.no_grad for ref in refs)
        op = without_marks(captured.op)
        call = self._call(op, args, kwargs)
        try:
            recipe = self.rules.lower(call, needs)
            if recipe is None:
                if op == _VIEW and not self._can_view(call, needs):
                    (copied,) = self._forward_node(captured, _CLONE, args[:1], _CONTIGUOUS)
                    args = (Ref(copied if copied is not None else refs[0]), *args[1:])
                outputs = self._forward_node(captured, op, args, kwargs)
            else:
                local = dict(enumerate(refs))
                for step in recipe.steps:
                    arguments = renumbered((step.args, step.kwargs), local.__getitem__)
                    made = self._forward_node(captured, step.op, *arguments)
                    local.update(
                        (number, value)
                        for number, value in zip(step.outputs, made, strict=True)
                        if number is not None and value is not None
                    )
                outputs = tuple(None if number is None else local[number] for number in recipe.results)
        except (TraceError, ContractError):
            raise
        except Exception as error:
            raise TraceError(
                f"operator {captured.op} of module '{captured.module}' at {captured.where} cannot be traced: "
                f"{first_line(error)}"
            ) from error
        for number, value in zip(captured.outputs, outputs, strict=False):
            if number is not None and value is not None:
                self.number[number] = value

    def _can_view(self, call: Call, needs: tuple[bool, ...]) -> bool:
        """Whether a view is possible on the layouts of this graph.

        An exported graph lacks the copies that the layouts seen during its export made needless. A kernel chosen because
        gradients are needed (attention with a trained bias) may lay its output out otherwise, and then eager execution
        makes the copy.
        """
        try:
            self.rules.evaluate(call, needs)
        except (RuntimeError, ValueError):
            return False
        return True

    def _call(self, op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Call:
        """The call with its tensors numbered by appearance."""
        metas: list[TensorMeta] = []

        def place(value: int) -> int:
            metas.append(self.values[value].meta)
            return len(metas) - 1

        placed, placed_kwargs = renumbered((args, kwargs), place)
        return Call(op, placed, placed_kwargs, tuple(metas))

    def _forward_node(
        self,
        captured: CapturedCall,
        op: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
    ) -> tuple[int | None, ...]:
        if is_mutable(operator(op)):
            raise ContractError(
                f"operator {op} of module '{captured.module}' at {captured.where} writes to its argument and could not "
                "be made functional: use the out-of-place form"
            )
        call = self._call(op, args, kwargs)
        refs = tuple(references((args, kwargs)))
        detached = captured.no_grad or op == "aten.detach.default"
        needs = tuple(self.values[ref].needs_grad and not detached for ref in refs)
        outcomes = self.rules.evaluate(call, needs)
        random = draws(operator(op), args, dict(kwargs))
        part, parameter = self._part(op, refs, outcomes, random)
        node = len(self.nodes)
        draw = -1
        if random:
            draw, self.num_draws = self.num_draws, self.num_draws + 1
        outputs = [
            None if outcome is None else self._add_value(outcome, refs, node, part, parameter)
            for outcome in outcomes
        ]
        self._add_node(
            op, args, kwargs, refs, tuple(outputs), part, node, captured.module, captured.where, draw
        )
        self.calls[node] = call
        return tuple(outputs)

    def _part(
        self, op: str, refs: tuple[int, ...], outcomes: tuple[Outcome | None, ...], random: bool
    ) -> tuple[Part, int]:
        parts = {self.values[ref].part for ref in refs}
        parameters = {self.values[ref].parameter for ref in refs} - {-1}
        if Part.FORWARD in parts or random:
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
            and outcome.meta.num_elements == self.values[ref].meta.num_elements
        )

    def _add_value(
        self, outcome: Outcome, refs: tuple[int, ...], node: int, part: Part, parameter: int
    ) -> int:
        value = len(self.values)
        storage = value if outcome.alias < 0 else self.values[refs[outcome.alias]].storage
        self.values.append(
            _Value(
                outcome.meta,
                storage,
                Origin.NODE,
                node=node,
                needs_grad=outcome.needs_grad,
                part=part,
                parameter=parameter,
            )
        )
        return value

    def _add_node(
        self,
        op: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        refs: tuple[int, ...],
        outputs: tuple[int | None, ...],
        part: Part,
        forward: int,
        module: str,
        where: str,
        draw: int = -1,
    ) -> None:
        ordinal = -1
        if forward == len(self.nodes):
            ordinal = self.ordinals.get(module, 0)
            self.ordinals[module] = ordinal + 1
        call = self._call(op, args, kwargs)
        signature = self.signatures.setdefault(call, len(self.signatures))
        self.nodes.append(
            Node(
                len(self.nodes),
                op,
                args,
                kwargs,
                refs,
                outputs,
                part,
                forward,
                module,
                ordinal,
                signature,
                draw,
                where,
            )
        )

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        loss = self.number[self.captured.loss]
        if not self.values[loss].needs_grad:
            raise TraceError(
                "the loss depends on no parameter that requires a gradient: there is nothing to train"
            )
        self.seed = len(self.values)
        meta = self.values[loss].meta
        self.values.append(_Value(meta, self.seed, Origin.SEED, "seed"))
        self.cotangent[loss] = self.seed
        num_forward = len(self.nodes)
        order = [node for node in range(num_forward) if self.nodes[node].part is Part.FORWARD]
        derived = [node for node in range(num_forward) if self.nodes[node].part is Part.DERIVED]
        for node in reversed(order):
            self._backward_node(self.nodes[node])
        for node in reversed(derived):
            self._backward_node(self.nodes[node])

    def _backward_node(self, node: Node) -> None:
        table = self.gradients if node.part is Part.DERIVED else self.cotangent
        reached = tuple(
            index for index, output in enumerate(node.outputs) if output is not None and output in table
        )
        if not reached:
            return
        wanted = [index for index, ref in enumerate(node.inputs) if self._wants(node, ref)]
        if not wanted:
            return
        weights = tuple(index for index in wanted if self.values[node.inputs[index]].parameter >= 0)
        activations = tuple(index for index in wanted if index not in weights)
        seeds = [table[node.outputs[index]] for index in reached]  # type: ignore[index]
        recipe = self._backward_recipe(node, activations, weights, reached, seeds)
        local = dict(enumerate(node.inputs))
        count = len(node.inputs)
        local.update(
            (count + index, output) for index, output in enumerate(node.outputs) if output is not None
        )
        local.update((count + len(node.outputs) + index, seed) for index, seed in enumerate(seeds))
        for part, steps in ((Part.INPUT_GRAD, recipe.input_grad), (Part.WEIGHT_GRAD, recipe.weight_grad)):
            for step in steps:
                self._backward_step(node, step, part, local)
        for index in wanted:
            gradient = recipe.gradients[index]
            if gradient is None:
                continue
            ref, value = node.inputs[index], local[gradient]
            if index in weights:
                self._contribute(ref, node, value)
            else:
                self._accumulate(ref, node, value)

    def _wants(self, node: Node, ref: int) -> bool:
        return self.values[ref].needs_grad and node.op != "aten.detach.default"

    def _backward_recipe(
        self,
        node: Node,
        activations: tuple[int, ...],
        weights: tuple[int, ...],
        reached: tuple[int, ...],
        seeds: list[int],
    ) -> BackwardRecipe:
        metas = tuple(_own_storage(self.values[seed].meta) for seed in seeds)
        try:
            return self.rules.backward(self.calls[node.id], activations, weights, reached, metas)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"operator {node.op} of module '{node.module}' at {node.where} cannot be differentiated: "
                f"{first_line(error)}"
            ) from error

    def _backward_step(self, node: Node, step: Step, part: Part, local: dict[int, int]) -> None:
        args, kwargs = renumbered((step.args, step.kwargs), local.__getitem__)
        refs = tuple(references((args, kwargs)))
        call = self._call(step.op, args, kwargs)
        outcomes = self.rules.evaluate(call, (False,) * len(refs))
        parameters = {self.values[ref].parameter for ref in refs}
        derived = len(refs) == 1 and -1 not in parameters and all(o is None or o.alias == 0 for o in outcomes)
        here = Part.DERIVED if derived else part
        made: list[int | None] = []
        for index, outcome in enumerate(outcomes):
            number = step.outputs[index] if index < len(step.outputs) else None
            if outcome is None:
                made.append(None)
                continue
            parameter = next(iter(parameters)) if derived else -1
            value = self._add_value(outcome, refs, len(self.nodes), here, parameter)
            made.append(value)
            if number is not None:
                local[number] = value
        forward = len(self.nodes) if derived else node.id
        self._add_node(step.op, args, kwargs, refs, tuple(made), here, forward, node.module, node.where)

    def _accumulate(self, ref: int, node: Node, value: int) -> None:
        earlier = self.cotangent.get(ref)
        if earlier is None:
            self.cotangent[ref] = value
            return
        args = (Ref(earlier), Ref(value))
        call = self._call(_ADD, args, ())
        outcome = self.rules.evaluate(call, (False, False))[0]
        assert outcome is not None
        total = self._add_value(outcome, (earlier, value), len(self.nodes), Part.INPUT_GRAD, -1)
        self._add_node(
            _ADD, args, (), (earlier, value), (total,), Part.INPUT_GRAD, node.id, node.module, node.where
        )
        self.cotangent[ref] = total

    def _contribute(self, ref: int, node: Node, value: int) -> None:
        gradient = self.gradients.get(ref)
        if gradient is None:
            gradient = self.gradients[ref] = len(self.values)
            meta = self.values[value].meta
            self.values.append(_Value(_own_storage(meta), gradient, Origin.GRADIENT, self.values[ref].name))
        self.contributions.setdefault(gradient, []).append((node.id, value))

    # -- result -----------------------------------------------------------------------------------------------------

    def finish(self, name: str, facts: dict[str, Any]) -> OperatorGraph:
        by_source = {
            (source.origin, source.name): self.number[source.number] for source in self.captured.sources
        }
        parameters = {
            alias: by_source[Origin.PARAMETER, first]
            for alias, first in self.captured.aliases.items()
            if (Origin.PARAMETER, first) in by_source
        }
        contributions = {
            gradient: tuple(sorted(found, key=lambda item: -item[0]))
            for gradient, found in self.contributions.items()
        }
        graph = OperatorGraph(
            name=name,
            values=tuple(
                Value(
                    index, value.meta, value.storage, value.origin, value.name, value.node, value.needs_grad
                )
                for index, value in enumerate(self.values)
            ),
            nodes=tuple(self.nodes),
            parameters=parameters,
            buffers={n: v for (origin, n), v in by_source.items() if origin is Origin.BUFFER},
            inputs={n: v for (origin, n), v in by_source.items() if origin is Origin.INPUT},
            loss=self.number[self.captured.loss],
            seed=self.seed,
            gradients=dict(self.gradients),
            contributions=contributions,
            mutations=tuple(
                (by_source[Origin.BUFFER, buffer], self.number[number])
                for buffer, number in self.captured.mutations
            ),
            num_draws=self.num_draws,
            constants={name: contents(tensor) for name, tensor in self.captured.constants.items()},
            facts=facts,
        )
        return compact(graph)


def _own_storage(meta: TensorMeta) -> TensorMeta:
    return TensorMeta(meta.shape, meta.stride, meta.dtype)
