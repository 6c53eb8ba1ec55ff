"""By which costs `schedule` simulates: uniform ones, a table's, or what the document of a program states."""

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
"""The costs of so many stages."""


class GivenCosts(NamedTuple):
    """What the command line says of costs; None: nothing."""

    table: Path | None
    passes: tuple[float, float, float] | None
    transfer: float | None


class ProgramCosts(NamedTuple):
    """What computations and transfers take, and in words where that is from."""

    costs_of: CostsOf
    transfers: Transfers
    overhead_s: float
    said: str


def costing_of(
    given: GivenCosts, promise: ProgramPrediction | None, name: str, rank_of_stage: Sequence[int] = ()
) -> ProgramCosts:
    """Return the costs that are given, and for the rest those that `promise` of the program `name`, placed so, states.
    Raises `InputError` where the table cannot be used, or has other layers than the promise is for."""
    if promise is None:
        return _unstated(given, name)
    transfers: Transfers = promise.transfers if given.transfer is None else given.transfer
    overhead = promise.costs.overhead_seconds
    if given.table is not None:
        costs, own = _of_table(given.table, promise, name, rank_of_stage)
        said = f"costs of {given.table} at the cuts, speeds and bandwidth of {name}"
        transfers = own if given.transfer is None else given.transfer
    elif given.passes is not None:
        from stagewright.simulation import StageCosts

        costs, overhead = StageCosts.uniform(len(promise.cuts) + 1, *given.passes), 0.0
        said = f"uniform costs in place of those that {name} states"
    else:
        costs, said = promise.stage_costs, f"costs as {name} states them"
    if given.transfer is not None:
        said += f", but {given.transfer:g} s for every transfer"

    def costs_of(num_stages: int) -> StageCosts:
        if num_stages != costs.num_stages:
            raise InputError(f"{name} states the costs of {costs.num_stages} stages, not of {num_stages}")
        return costs

    return ProgramCosts(costs_of, transfers, overhead, said)


def _unstated(given: GivenCosts, name: str) -> ProgramCosts:
    transfer = given.transfer or 0.0
    if given.table is not None:
        from stagewright.cli.cost_table import layer_table, read_cost_table

        layers = layer_table(read_cost_table(given.table))
        said = f"{name} states no cuts: the layers of {given.table} are split evenly by time"
        return ProgramCosts(lambda num_stages: _balanced(layers, num_stages), transfer, 0.0, said)
    from stagewright.simulation import StageCosts

    passes = given.passes or (1.0, 1.0, 1.0)
    said = f"{name} states no costs: uniform ones are assumed"
    return ProgramCosts(lambda num_stages: StageCosts.uniform(num_stages, *passes), transfer, 0.0, said)


def _balanced(layers: LayerTable, num_stages: int) -> StageCosts:
    """Costs of stages of consecutive layers, the slowest as fast as can be. Raises `InputError` where there are fewer layers
    than stages."""
    from stagewright.planning.joint.layout import stage_costs
    from stagewright.planning.joint.problem import Problem
    from stagewright.planning.joint.starts import balanced
    from stagewright.schedule.placement import linear

    if layers.num_layers < num_stages:
        raise InputError(
            f"{num_stages} stages need as many layers, but the cost table has {layers.num_layers}: use fewer stages"
        )
    problem = Problem.of(layers, num_stages, 1)
    layout = balanced(problem, linear(num_stages))
    assert layout is not None, "there are layers enough"
    return stage_costs(problem, layout)


def _of_table(
    table: Path, promise: ProgramPrediction, name: str, rank_of_stage: Sequence[int]
) -> tuple[StageCosts, Transfers]:
    """What the stages of the promise cost with the layers of a table, and what their transfers take."""
    from stagewright.cli.cost_table import layer_table, read_cost_table
    from stagewright.planning.joint.layout import Layout, stage_costs, transfer_times
    from stagewright.planning.joint.problem import Problem

    layers, assumed = layer_table(read_cost_table(table)), promise.assumptions
    if layers.num_layers != assumed.num_layers:
        raise InputError(
            f"{table} has {layers.num_layers} layers, and {name} is for {assumed.num_layers}: give the table it was planned "
            "for, or plan again"
        )
    problem = Problem.of(
        layers, len(assumed.speeds), 1, speed=assumed.speeds, latency_s=assumed.latency_seconds,
        bytes_per_s=float("inf") if assumed.bytes_per_second is None else assumed.bytes_per_second,
    )  # fmt: skip
    layout = Layout((*promise.cuts, layers.num_layers), tuple(rank_of_stage))
    return stage_costs(problem, layout), transfer_times(problem, layout)
