"""The joint graph while it is made: values and nodes in the order in which they are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stagewright.graph import Node, Origin, Part, TensorMeta, renumbered
from stagewright.tracing.capture import CapturedCall
from stagewright.tracing.rules import OperatorCall, Outcome


@dataclass(slots=True)
class DraftValue:
    meta: TensorMeta
    storage: int
    origin: Origin
    name: str = ""
    node: int = -1
    needs_grad: bool = False
    part: Part = Part.STATIC  # when it becomes available
    parameter: int = -1  # the one parameter it derives from, for parameters and derived values


class Draft:
    def __init__(self) -> None:
        self.values: list[DraftValue] = []
        self.nodes: list[Node] = []
        self.num_draws = 0
        self._signatures: dict[OperatorCall, int] = {}
        self._ordinals: dict[str, int] = {}

    def call(
        self, op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...] = ()
    ) -> tuple[OperatorCall, tuple[int, ...]]:
        """Return the call with its tensors numbered by appearance, and the values of these numbers."""
        values: list[int] = []

        def place(value: int) -> int:
            values.append(value)
            return len(values) - 1

        placed, placed_kwargs = renumbered((args, kwargs), place)
        metas = tuple(self.values[value].meta for value in values)
        return OperatorCall(op, placed, placed_kwargs, metas), tuple(values)

    def add_value(
        self,
        meta: TensorMeta,
        origin: Origin,
        name: str = "",
        needs_grad: bool = False,
        part: Part = Part.STATIC,
    ) -> int:
        """Add a value that no node produces, in a new storage."""
        number = len(self.values)
        parameter = number if origin is Origin.PARAMETER else -1
        self.values.append(
            DraftValue(meta, number, origin, name, needs_grad=needs_grad, part=part, parameter=parameter)
        )
        return number

    def add(
        self,
        call: OperatorCall,
        inputs: tuple[int, ...],
        outcomes: Sequence[Outcome | None],
        part: Part,
        parameter: int,
        place: CapturedCall | Node,
        forward: int | None = None,
        is_random: bool = False,
    ) -> tuple[int | None, ...]:
        """Add a node and its outputs.

        Args:
            parameter: that the outputs derive from; -1: from none alone.
            place: what the node is made for, whose module and line of source it has.
            forward: the forward node that it belongs to; None: to itself.
        """
        node = len(self.nodes)
        outputs = tuple(
            None if outcome is None else self._add_output(outcome, inputs, node, part, parameter)
            for outcome in outcomes
        )
        args, kwargs = renumbered((call.args, call.kwargs), inputs.__getitem__)
        draw = ordinal = -1
        if is_random:
            draw, self.num_draws = self.num_draws, self.num_draws + 1
        if forward is None:
            ordinal = self._ordinals.get(place.module, 0)
            self._ordinals[place.module] = ordinal + 1
        signature = self._signatures.setdefault(call, len(self._signatures))
        new = Node(
            node, call.op, args, kwargs, inputs, outputs, part, node if forward is None else forward, place.module,
            ordinal, signature, draw, place.where,
        )  # fmt: skip
        self.nodes.append(new)
        return outputs

    def put_in_region(self, region: int, *, is_kept: bool) -> None:
        """Put the latest node into a region of `torch.utils.checkpoint`, which keeps its results if `is_kept`."""
        self.nodes[-1] = replace(self.nodes[-1], region=region, is_kept=is_kept)

    def _add_output(
        self, outcome: Outcome, inputs: tuple[int, ...], node: int, part: Part, parameter: int
    ) -> int:
        number = len(self.values)
        storage = number if outcome.alias < 0 else self.values[inputs[outcome.alias]].storage
        self.values.append(
            DraftValue(outcome.meta, storage, Origin.NODE, "", node, outcome.needs_grad, part, parameter)
        )
        return number
