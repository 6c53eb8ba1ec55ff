"""Plans of the joint search: layouts with a program, evaluated by the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagewright.arrays import Floats
from stagewright.planning.joint.layout import Layout, stage_costs, stages_of, transfer_times
from stagewright.planning.joint.problem import JointProblem
from stagewright.schedule.action import Action
from stagewright.schedule.list_scheduler.kernels import list_schedule
from stagewright.schedule.list_scheduler.priorities import deadlines_of, window_of
from stagewright.schedule.list_scheduler.stage_times import KINDS
from stagewright.schedule.list_scheduler.terms import Order, Rule, Stages
from stagewright.schedule.program import Program
from stagewright.simulation import EncodedProgram, Timeline, encode, simulate


@dataclass(frozen=True, eq=False)
class DeadlinePolicy:
    """A rule and shifts of deadlines: seconds by which those of each layer's forwards (row 0) and input gradients (row 1)
    are shifted, and fractions of a cycle by which those of consecutive microbatches are further apart (rows 2 and 3)."""

    rule: Rule
    shifts: Floats

    @classmethod
    def of(cls, rule: Rule, num_layers: int) -> DeadlinePolicy:
        """Return the policy of a rule with no deadline shifted."""
        return cls(rule, np.zeros((4, num_layers)))


@dataclass(frozen=True, eq=False)
class JointPlan:
    """A layout, the program of its ranks, and their timeline from the simulator."""

    name: str
    problem: JointProblem
    layout: Layout
    encoded: EncodedProgram
    timeline: Timeline
    policy: DeadlinePolicy | None = None

    @property
    def makespan_s(self) -> float:
        return self.timeline.makespan_s

    @property
    def peak_bytes(self) -> float:
        """Bytes of the rank with the highest peak."""
        return float(self.timeline.peak_bytes.max())

    @cached_property
    def fits(self) -> bool:
        """Whether every rank stays within its memory."""
        return bool((self.timeline.peak_bytes <= self.problem.memory_bytes * (1 + 1e-9)).all())

    @cached_property
    def program(self) -> Program:
        """The decoded program; takes a microsecond per action."""
        encoded = self.encoded
        actions = [encoded.action(index) for index in range(encoded.num_actions)]
        slices = (encoded.rank_slice(rank) for rank in range(encoded.num_ranks))
        ranks = tuple(tuple(actions[part]) for part in slices)
        return Program(encoded.name, encoded.placement, encoded.num_microbatches, ranks)


def judged(
    name: str,
    problem: JointProblem,
    layout: Layout,
    program: Program | EncodedProgram,
    policy: DeadlinePolicy | None = None,
) -> JointPlan:
    """Return the plan of `program`, simulated with the costs of `layout`."""
    encoded = program if isinstance(program, EncodedProgram) else encode(program)
    timeline = simulate(
        encoded,
        stage_costs(problem, layout),
        transfer_times(problem, layout),
        action_overhead_s=problem.overhead_s,
    )
    return JointPlan(name, problem, layout, encoded, timeline, policy)


def scheduled(name: str, problem: JointProblem, layout: Layout, policy: DeadlinePolicy) -> JointPlan | None:
    """Return the list schedule of `layout` by `policy`, or None where a rank cannot hold one microbatch."""
    stages = stages_of(problem, layout)
    window = window_of(stages, policy.rule.depth)
    deadlines = deadlines_of(stages, policy.rule, policy.shifts)
    makespan, order = list_schedule(stages, problem.num_microbatches, policy.rule, window, deadlines, np.inf)
    if not np.isfinite(makespan):
        return None
    return judged(name, problem, layout, encode_order(name, layout, stages, order), policy)


def encode_order(name: str, layout: Layout, stages: Stages, order: Order) -> EncodedProgram:
    """Return the program that runs `order`; the k-th occurrence of an action is for microbatch k."""
    num_microbatches = len(order.kinds) // (3 * layout.num_stages)
    pattern = order.stages.astype(np.int64) * 3 + order.kinds
    microbatch = np.empty(len(pattern), np.int32)
    microbatch[np.argsort(pattern, kind="stable")] = np.tile(
        np.arange(num_microbatches, dtype=np.int32), 3 * layout.num_stages
    )
    patterns = tuple(Action(kind, stage, 0) for stage in range(layout.num_stages) for kind in KINDS)
    offsets = 3 * num_microbatches * stages.offsets
    return EncodedProgram(
        name, layout.placement, num_microbatches, patterns, pattern.astype(np.int32), microbatch, offsets
    )
