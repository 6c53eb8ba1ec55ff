"""Ranks of the joint search that make some of what their layers save again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.errors import PlanError
from stagewright.planning.joint.bounds import memory_bound
from stagewright.planning.joint.layout import stage_costs, transfer_times
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.search import Effort, search
from stagewright.simulation import simulate

KEPT = LayerTable.of([2.0] * 8, [2.0] * 8, [2.0] * 8, saved_bytes=8.0)
LEAN = replace(
    KEPT,
    input_grad_s=KEPT.input_grad_s + 0.5,
    saved_bytes=KEPT.saved_bytes / 4,
    held_bytes=KEPT.held_bytes / 4,
)
LEANEST = replace(
    LEAN,
    input_grad_s=KEPT.input_grad_s + 1.5,
    saved_bytes=LEAN.saved_bytes / 2,
    held_bytes=LEAN.held_bytes / 2,
)


def problem(memory: float, recomputing: tuple[LayerTable, ...] = (LEAN, LEANEST)) -> JointProblem:
    return JointProblem.of(KEPT, 4, 8, memory_bytes=memory, recomputing=recomputing)


def test_ranks_make_values_again_where_memory_is_short_and_it_pays() -> None:
    effort = Effort(rounds=4)
    enough = search(problem(float("inf")), effort).best
    assert enough.layout.recompute == ()
    short = search(problem(34.0), effort).best
    assert any(short.layout.recompute) and short.fits and short.peak_bytes <= 34.0
    kept = search(problem(34.0, ()), effort).best
    assert enough.makespan_s < short.makespan_s < 0.92 * kept.makespan_s


def test_a_plan_is_found_where_keeping_everything_fits_nowhere() -> None:
    with pytest.raises(PlanError, match="no plan fits"):
        search(problem(14.0, ()), Effort(rounds=2))
    found = search(problem(14.0), Effort(rounds=2))
    assert found.best.fits and all(found.best.layout.recompute)
    assert found.bound.seconds <= found.best.makespan_s
    best = found.best
    costs, between = stage_costs(best.problem, best.layout), transfer_times(best.problem, best.layout)
    assert simulate(best.encoded, costs, between).makespan_s == best.makespan_s


def test_the_memory_bound_holds_for_the_thriftiest() -> None:
    assert memory_bound(problem(20.0)) == pytest.approx(memory_bound(problem(20.0, ())) / 8)


def test_the_memory_bound_counts_no_weight_gradient_that_a_thrifty_table_has_not() -> None:
    whole = replace(KEPT, input_grad_s=KEPT.backward_s, weight_grad_s=KEPT.weight_grad_s * 0)
    none_held = replace(KEPT, held_bytes=KEPT.held_bytes * 0)
    assert memory_bound(problem(20.0, (whole,))) == memory_bound(
        JointProblem.of(none_held, 4, 8, memory_bytes=20.0)
    )


def _shifted(column: str, by: float) -> LayerTable:
    """`LEAN` with more in the last layer and as much less in the first: no sum from the first layer on is larger."""
    values = getattr(LEAN, column).copy()
    values[-1] += by
    values[0] -= by
    return replace(LEAN, **{column: values})


@pytest.mark.parametrize(
    "table",
    [
        KEPT,
        _shifted("saved_bytes", 1.0),
        _shifted("held_bytes", 1.0),
        replace(LEAN, parameter_bytes=LEAN.parameter_bytes + 1.0),
        replace(LEAN, forward_s=LEAN.forward_s + 1.5, weight_grad_s=LEAN.weight_grad_s - 1.5),
    ],
    ids=["everything", "saved", "held", "parameters", "backward"],
)
def test_thrift_must_cost_time_and_save_bytes_on_every_layer(table: LayerTable) -> None:
    with pytest.raises(PlanError, match="recomputing"):
        JointProblem.of(LEAN, 2, 4, recomputing=(table,))
