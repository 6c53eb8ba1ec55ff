"""Predictions in the document of a program: the costs and cuts it was planned with, makespan and memory."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from stagewright.cluster.schema import StrictModel, validated
from stagewright.errors import InputError
from stagewright.limits import MOST_PREDICTED, MOST_ROWS
from stagewright.schedule.program import Program
from stagewright.simulation.costs import StageCosts
from stagewright.simulation.simulate import simulate
from stagewright.simulation.timeline import Timeline

Seconds = Annotated[float, Field(ge=0, le=MOST_PREDICTED)]
Bytes = Annotated[float, Field(ge=0, le=MOST_PREDICTED)]
Positive = Annotated[float, Field(gt=0, le=MOST_PREDICTED)]
Provenance = Literal["given", "assumed", "none"]
"""Origin of a bandwidth; "none": the layers do not say what they send."""


class ProgramCosts(StrictModel):
    """Seconds and bytes of one microbatch for every stage, on its rank."""

    forward_seconds: tuple[Seconds, ...]
    input_grad_seconds: tuple[Seconds, ...]
    weight_grad_seconds: tuple[Seconds, ...]
    saved_bytes: tuple[Bytes, ...]
    """Saved by a forward; the input gradient frees all but `held_bytes`, which the weight gradient frees."""
    held_bytes: tuple[Bytes, ...]
    base_bytes: tuple[Bytes, ...]
    """Always allocated: weights, gradients, optimizer."""
    transfer_seconds: tuple[Seconds, ...]
    """Seconds from each stage to the next, if that is on another rank; the gradient takes as long."""
    transfer_bytes: tuple[Bytes, ...]
    overhead_seconds: Seconds = 0.0
    """Additional seconds of every computation."""


class Assumptions(StrictModel):
    """Assumptions behind the costs of the stages, besides the costs of the layers."""

    num_layers: int = Field(ge=1, le=MOST_ROWS)
    bytes_per_second: Positive | None
    """Bandwidth between ranks; None: transfers take no time."""
    bandwidth: Provenance
    latency_seconds: Seconds = 0.0
    speeds: tuple[Positive, ...]
    """Relative speed of every rank; 1 is that of the costs per layer."""
    memory_limits: tuple[Positive, ...] | None
    """Bytes of every rank; None: unlimited."""
    activations: Literal["until weight gradient"] = "until weight gradient"
    """How long all saved values of a forward are counted."""


class ProgramPrediction(StrictModel):
    """The predicted makespan and memory of a program, with the costs and assumptions that they follow from."""

    cuts: tuple[Annotated[int, Field(ge=1, le=MOST_ROWS)], ...]
    """Number of layers before stages 1, 2, ..."""
    makespan_seconds: Seconds
    lower_bound_seconds: Seconds
    peak_bytes: tuple[Bytes, ...]
    """Predicted peak of every rank."""
    costs: ProgramCosts
    assumptions: Assumptions

    @classmethod
    def of_document(
        cls, document: Mapping[str, Any], program: Program, origin: str
    ) -> ProgramPrediction | None:
        """Read the prediction in the document of `program`; None if it has no costs.

        Raises:
            InputError: a key is wrong, or has another number of entries than there are stages or ranks; names it.
        """
        if "costs" not in document:
            return None
        prediction = validated(
            cls, {key: document[key] for key in cls.model_fields if key in document}, origin
        )
        prediction._check_sizes(program, origin)
        return prediction

    def timeline(self, program: Program) -> Timeline:
        """Simulate `program` with the stated costs."""
        return simulate(
            program, self.stage_costs, self.transfers, action_overhead_s=self.costs.overhead_seconds
        )

    @property
    def stage_costs(self) -> StageCosts:
        costs = self.costs
        return StageCosts.of(
            costs.forward_seconds,
            costs.input_grad_seconds,
            costs.weight_grad_seconds,
            saved_bytes=costs.saved_bytes,
            held_bytes=costs.held_bytes,
            base_bytes=costs.base_bytes,
        )

    @property
    def transfers(self) -> dict[tuple[int, int], float]:
        """Seconds by (stage, next stage)."""
        return {(stage, stage + 1): seconds for stage, seconds in enumerate(self.costs.transfer_seconds)}

    def _check_sizes(self, program: Program, origin: str) -> None:
        stages, ranks, limits = program.num_stages, program.num_ranks, self.assumptions.memory_limits
        expected = {f"costs.{name}": stages for name, column in self.costs if isinstance(column, tuple)}
        expected |= {"costs.transfer_seconds": stages - 1, "costs.transfer_bytes": stages - 1}
        sizes = {f"costs.{name}": len(column) for name, column in self.costs if isinstance(column, tuple)}
        for name, size, needed in (
            *((name, sizes[name], needed) for name, needed in expected.items()),
            ("cuts", len(self.cuts), stages - 1),
            ("peak_bytes", len(self.peak_bytes), ranks),
            ("assumptions.speeds", len(self.assumptions.speeds), ranks),
            ("assumptions.memory_limits", ranks if limits is None else len(limits), ranks),
        ):
            if size != needed:
                raise InputError(f"{origin}: {name} has {size} entries where {needed} belong: plan again")
        ends = (0, *self.cuts, self.assumptions.num_layers)
        if any(cut >= next_cut for cut, next_cut in pairwise(ends)):
            raise InputError(
                f"{origin}: cuts {list(self.cuts)} are not in order within {self.assumptions.num_layers} layers: plan again"
            )
