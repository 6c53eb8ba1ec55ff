"""The forward half of the joint graph: captured calls lowered to operators with derivatives."""

from __future__ import annotations

from typing import Any

from stagewright.errors import ContractError, TraceError
from stagewright.graph import Origin, Part, Ref, Symbol, renumbered
from stagewright.tracing.arguments import draws, operator
from stagewright.tracing.capture import Captured, CapturedCall
from stagewright.tracing.draft import Draft
from stagewright.tracing.model_errors import first_line
from stagewright.tracing.private import is_mutable
from stagewright.tracing.recipes import Recipe, without_marks
from stagewright.tracing.rules import Call, Outcome, Rules

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
    """Adds the forward of `captured` to a draft.

    * `number`: the value of every captured number;
    * `calls`: of every forward node its call, for its backward.
    """

    def __init__(self, captured: Captured, draft: Draft, rules: Rules) -> None:
        self.captured = captured
        self.draft = draft
        self.rules = rules
        self.number: dict[int, int] = {}
        self.calls: dict[int, Call] = {}

    def run(self) -> None:
        """Raises `TraceError` and `ContractError` as `build_joint` does."""
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
                outputs = self._add_steps(captured, recipe, refs)
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

    def _add_steps(
        self, captured: CapturedCall, recipe: Recipe, refs: tuple[int, ...]
    ) -> tuple[int | None, ...]:
        local = dict(enumerate(refs))
        for step in recipe.steps:
            arguments = renumbered((step.args, step.kwargs), local.__getitem__)
            made = self._add_node(captured, step.op, *arguments)
            local.update(
                (number, value)
                for number, value in zip(step.outputs, made, strict=True)
                if number is not None and value is not None
            )
        return tuple(None if number is None else local[number] for number in recipe.results)

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

    def _add_node(
        self, captured: CapturedCall, op: str, args: _Args, kwargs: _Kwargs
    ) -> tuple[int | None, ...]:
        if is_mutable(operator(op)):
            raise ContractError(
                f"operator {op} of module '{captured.module}' at {captured.where} writes to its argument and could not "
                "be made functional: use the out-of-place form"
            )
        call, refs = self.draft.call(op, args, kwargs)
        detached = captured.no_grad or op == "aten.detach.default"
        needs = tuple(self.draft.values[ref].needs_grad and not detached for ref in refs)
        outcomes = self.rules.evaluate(call, needs)
        is_random = draws(operator(op), args, dict(kwargs))
        part, parameter = self._part(op, refs, outcomes, is_random)
        self.calls[len(self.draft.nodes)] = call
        outputs = self.draft.add(call, refs, outcomes, part, parameter, captured, is_random=is_random)
        if captured.region >= 0 and part is Part.FORWARD:
            self.draft.put_in_region(captured.region, is_kept=self._is_kept(captured, call))
        return outputs

    def _is_kept(self, captured: CapturedCall, call: Call) -> bool:
        """Whether selective checkpointing keeps what the call makes; every policy is asked, as some count."""
        if not captured.keeps:
            return False
        try:
            asked = self.rules.run(call)
            answers = [keeps(operator(call.op), *asked) for keeps in captured.keeps]
        except Exception as error:
            raise TraceError(
                f"the policy of selective checkpointing around operator {call.op} of module '{captured.module}' at "
                f"{captured.where} cannot be asked without a tensor's values: {first_line(error)}"
            ) from error
        return any(answers)

    def _part(
        self, op: str, refs: tuple[int, ...], outcomes: tuple[Outcome | None, ...], is_random: bool
    ) -> tuple[Part, int]:
        """When a node runs, and the one parameter that its outputs derive from, or -1."""
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
