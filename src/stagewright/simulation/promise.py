"""What a program was planned by and for: costs, cuts and what follows from them, in one document with it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from stagewright.cluster.strict import StrictModel, validated
from stagewright.errors import InputError
from stagewright.limits import MOST_PREDICTED, MOST_ROWS
from stagewright.schedule.program import Program
from stagewright.simulation.costs import StageCosts
from stagewright.simulation.simulate import simulate
from stagewright.simulation.timeline import Timeline

Seconds = Annotated[float, Field(ge=0, le=MOST_PREDICTED)]
Bytes = Annotated[float, Field(ge=0, le=MOST_PREDICTED)]
Positive = Annotated[float, Field(gt=0, le=MOST_PREDICTED)]


class ProgramCosts(StrictModel):
    """Of every stage, seconds and bytes of one microbatch on the rank that has it."""

    forward_seconds: tuple[Seconds, ...]
    input_grad_seconds: tuple[Seconds, ...]
    weight_grad_seconds: tuple[Seconds, ...]
    saved_bytes: tuple[Bytes, ...]
    """By a forward; the input gradient frees all but `held_bytes`, which the weight gradient frees."""
    held_bytes: tuple[Bytes, ...]
    base_bytes: tuple[Bytes, ...]
    """Always there: weights, gradients, optimizer."""
    transfer_seconds: tuple[Seconds, ...]
    """From each stage but the last to the next, if that is on another rank; its gradient takes as long."""
    transfer_bytes: tuple[Bytes, ...]
    overhead_seconds: Seconds = 0.0
    """Of every computation, besides."""


class Assumptions(StrictModel):
    """What the costs of the stages were worked out from, beside those of the layers."""

    num_layers: int = Field(ge=1, le=MOST_ROWS)
    bytes_per_second: Positive | None
    """Between ranks; None: transfers take no time."""
    bandwidth: Literal["given", "assumed", "none"]
    """Where that is from: with none, the layers do not say what leaves them."""
    latency_seconds: Seconds = 0.0
    speeds: tuple[Positive, ...]
    """Of every rank; 1 is that of the costs per layer."""
    memory_limits: tuple[Positive, ...] | None
    """Bytes of every rank; None: whatever a plan takes."""
    activations: Literal["until weight gradient"] = "until weight gradient"
    """How long a forward's saved values are counted, all of them."""


class Promise(StrictModel):
    """What a program promises, and what that follows from."""

    cuts: tuple[Annotated[int, Field(ge=1, le=MOST_ROWS)], ...]
    """Layers in front of stages 1, 2, ..."""
    makespan_seconds: Seconds
    lower_bound_seconds: Seconds
    peak_bytes: tuple[Bytes, ...]
    """Of every rank."""
    costs: ProgramCosts
    assumptions: Assumptions

    @classmethod
    def of_document(cls, document: Mapping[str, Any], program: Program, origin: str) -> Promise | None:
        """What the document of `program` promises; None where it states no costs.

        Raises:
            InputError: a key that is wrong, or as many entries as there are no stages or ranks; names it.
        """
        if "costs" not in document:
            return None
        found = validated(cls, {key: document[key] for key in cls.model_fields if key in document}, origin)
        found._check_sizes(program, origin)
        return found

    def timeline(self, program: Program) -> Timeline:
        """When every action of `program` runs, and what every rank holds, at the stated costs."""
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
        wanted = {f"costs.{name}": stages for name, column in self.costs if isinstance(column, tuple)}
        wanted |= {"costs.transfer_seconds": stages - 1, "costs.transfer_bytes": stages - 1}
        sizes = {f"costs.{name}": len(column) for name, column in self.costs if isinstance(column, tuple)}
        for name, size, right in (
            *((name, sizes[name], right) for name, right in wanted.items()),
            ("cuts", len(self.cuts), stages - 1),
            ("peak_bytes", len(self.peak_bytes), ranks),
            ("assumptions.speeds", len(self.assumptions.speeds), ranks),
            ("assumptions.memory_limits", ranks if limits is None else len(limits), ranks),
        ):
            if size != right:
                raise InputError(f"{origin}: {name} has {size} entries where {right} belong: plan again")
        ends = (0, *self.cuts, self.assumptions.num_layers)
        if any(one >= other for one, other in pairwise(ends)):
            raise InputError(
                f"{origin}: cuts {list(self.cuts)} are not in order within {self.assumptions.num_layers} layers: plan again"
            )
