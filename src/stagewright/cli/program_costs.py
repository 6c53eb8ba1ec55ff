"""Costs for `schedule` to simulate: uniform ones, a table's, or those stated in a program's document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stagewright.errors import InputError

if TYPE_CHECKING:
    from stagewright.planning.joint.problem import LayerTable
    from stagewright.simulation import StageCosts
    from stagewright.simulation.costs import Transfers
    from stagewright.simulation.prediction import ProgramPrediction

CostsOf = Callable[[int], "StageCosts"]
"""Costs by number of stages."""


class GivenCosts(NamedTuple):
    """Costs given on the command line; None where not given."""

    table: Path | None
    action_seconds: tuple[float, float, float] | None
    """Seconds of every forward, input gradient and weight gradient."""
    transfer: float | None


class SourcedCosts(NamedTuple):
    """Costs of computations and transfers, and a sentence on their origin."""

    costs_of: CostsOf
    transfers: Transfers
    overhead_s: float
    origin: str


def costing_of(
    given: GivenCosts, prediction: ProgramPrediction | None, name: str, rank_of_stage: Sequence[int] = ()
) -> SourcedCosts:
    """Return the given costs, and otherwise those of the `prediction` for the program `name` with this placement.

    Raises:
        InputError: the table cannot be used, or has other layers than the prediction.
    """
    if prediction is None:
        return _unstated(given, name)
    transfers: Transfers = prediction.transfers if given.transfer is None else given.transfer
    overhead = prediction.costs.overhead_seconds
    if given.table is not None:
        costs, table_transfers = _of_table(given.table, prediction, name, rank_of_stage)
        origin = f"costs of {given.table} at the cuts, speeds and bandwidth of {name}"
        transfers = table_transfers if given.transfer is None else given.transfer
    elif given.action_seconds is not None:
        from stagewright.simulation import StageCosts

        costs, overhead = StageCosts.uniform(len(prediction.cuts) + 1, *given.action_seconds), 0.0
        origin = f"uniform costs instead of those that {name} states"
    else:
        costs, origin = prediction.stage_costs, f"costs as {name} states them"
    if given.transfer is not None:
        origin += f", but {given.transfer:g} s for every transfer"

    def costs_of(num_stages: int) -> StageCosts:
        if num_stages != costs.num_stages:
            raise InputError(f"{name} states the costs of {costs.num_stages} stages, not {num_stages}")
        return costs

    return SourcedCosts(costs_of, transfers, overhead, origin)


def _unstated(given: GivenCosts, name: str) -> SourcedCosts:
    transfer = given.transfer or 0.0
    if given.table is not None:
        from stagewright.cli.cost_table import layer_table, read_cost_table

        layers = layer_table(read_cost_table(given.table))
        origin = f"{name} states no cuts: the layers of {given.table} are split evenly by time"
        return SourcedCosts(lambda num_stages: _balanced(layers, num_stages), transfer, 0.0, origin)
    from stagewright.simulation import StageCosts

    seconds = given.action_seconds or (1.0, 1.0, 1.0)
    origin = f"{name} states no costs: uniform ones are assumed"
    return SourcedCosts(lambda num_stages: StageCosts.uniform(num_stages, *seconds), transfer, 0.0, origin)


def _balanced(layers: LayerTable, num_stages: int) -> StageCosts:
    """Return the costs of stages of consecutive layers, partitioned to minimise the slowest. Raises `InputError` if there
    are fewer layers than stages."""
    from stagewright.planning.joint.layout import stage_costs
    from stagewright.planning.joint.problem import JointProblem
    from stagewright.planning.joint.starts import balanced
    from stagewright.schedule.placement import linear

    if layers.num_layers < num_stages:
        raise InputError(
            f"{num_stages} stages need at least as many layers, but the cost table has {layers.num_layers}: use fewer stages"
        )
    problem = JointProblem.of(layers, num_stages, 1)
    layout = balanced(problem, linear(num_stages))
    assert layout is not None, "there are enough layers"
    return stage_costs(problem, layout)


def _of_table(
    table: Path, prediction: ProgramPrediction, name: str, rank_of_stage: Sequence[int]
) -> tuple[StageCosts, Transfers]:
    """Return the costs of the prediction's stages with the layers of a table, and the times of their transfers."""
    from stagewright.cli.cost_table import layer_table, read_cost_table
    from stagewright.planning.joint.layout import Layout, stage_costs, transfer_times
    from stagewright.planning.joint.problem import JointProblem

    layers, assumed = layer_table(read_cost_table(table)), prediction.assumptions
    if layers.num_layers != assumed.num_layers:
        raise InputError(
            f"{table} has {layers.num_layers} layers, but {name} is for {assumed.num_layers}: give the table it was planned "
            "for, or plan again"
        )
    problem = JointProblem.of(
        layers, len(assumed.speeds), 1, speed=assumed.speeds, latency_s=assumed.latency_seconds,
        bytes_per_s=float("inf") if assumed.bytes_per_second is None else assumed.bytes_per_second,
    )  # fmt: skip
    layout = Layout((*prediction.cuts, layers.num_layers), tuple(rank_of_stage))
    return stage_costs(problem, layout), transfer_times(problem, layout)
