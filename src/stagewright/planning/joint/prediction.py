"""The prediction of a joint plan, as it is stored with its program."""

from __future__ import annotations

import numpy as np

from stagewright.planning.joint.layout import stage_costs, transfer_times
from stagewright.planning.joint.plan import JointPlan
from stagewright.simulation.prediction import Assumptions, ProgramCosts, ProgramPrediction, Provenance


def prediction_of(plan: JointPlan, lower_bound_s: float, bandwidth: Provenance) -> ProgramPrediction:
    """Return the prediction of `plan` with its costs; `bandwidth` is the provenance of the bandwidth."""
    problem, layout = plan.problem, plan.layout
    costs = stage_costs(problem, layout)
    cuts = list(layout.cuts)
    limits = problem.memory_bytes.tolist()
    return ProgramPrediction(
        cuts=layout.cuts,
        makespan_seconds=plan.makespan_s,
        lower_bound_seconds=lower_bound_s,
        peak_bytes=tuple(plan.timeline.peak_bytes.tolist()),
        costs=ProgramCosts(
            forward_seconds=tuple(costs.forward_s.tolist()),
            input_grad_seconds=tuple(costs.input_grad_s.tolist()),
            weight_grad_seconds=tuple(costs.weight_grad_s.tolist()),
            saved_bytes=tuple(costs.saved_bytes.tolist()),
            held_bytes=tuple(costs.held_bytes.tolist()),
            base_bytes=tuple(costs.base_bytes.tolist()),
            transfer_seconds=tuple(transfer_times(problem, layout).values()),
            transfer_bytes=tuple(problem.layers.boundary_bytes[np.array(cuts, int) - 1].tolist()),
            overhead_seconds=problem.overhead_s,
        ),
        assumptions=Assumptions(
            num_layers=layout.num_layers,
            bytes_per_second=None if np.isinf(problem.bytes_per_s) else problem.bytes_per_s,
            bandwidth=bandwidth,
            latency_seconds=problem.latency_s,
            speeds=tuple(problem.speed.tolist()),
            memory_limits=None if np.isinf(limits).all() else tuple(limits),
        ),
    )
