"""Sharded data parallelism in a plan: which actions a program needs for the levels of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.graph.flat import GRADIENTS, PARAMETERS
from stagewright.graph.stage import Stage
from stagewright.schedule import Kind, Program, insert_gathers, insert_reductions

NUM_BUFFERS = 2
"""Stages of which a rank holds gathered parameters, or whole gradients to add to, at once: one in use, one on its way."""

SHARDING_KINDS = frozenset({Kind.GATHER, Kind.RELEASE, Kind.REDUCE})


def sharded_program(program: Program, stages: Sequence[Stage], levels: Sequence[int]) -> Program:
    """`program` with the actions that replicas need when `stages` are sharded as `levels` say.

    Parameters of level 3 are gathered before use and released after; where gradients are sharded, those of two stages at
    most are whole at a time; other gradients are summed once, under the backwards that are left.
    """
    everything = range(len(stages))
    gathered = [stage for stage in everything if levels[stage] >= PARAMETERS]
    scattered = [stage for stage in everything if levels[stage] >= GRADIENTS]
    if gathered:
        reading = [stage for stage in gathered if reads_weights(stages[stage])]
        program = insert_gathers(program, NUM_BUFFERS, gathered, reading)
    if scattered:
        program = insert_reductions(program, NUM_BUFFERS, scattered)
    rest = sorted(set(everything) - set(scattered))
    return insert_reductions(program, None, rest) if rest else program


def without_sharding(program: Program) -> Program:
    """`program` for a single replica."""
    return program.with_ranks(
        (action for action in actions if action.kind not in SHARDING_KINDS) for actions in program.ranks
    )


def reads_weights(stage: Stage) -> bool:
    """Whether the weight gradient of a stage uses parameters, or what is derived from them.

    That of a normalisation does; that of a matrix product needs its input and cotangent alone.
    """
    derived = {value for node in stage.derived for value in node.outputs if value is not None}
    weights = derived.union(stage.parameters)
    return any(value in weights for node in stage.weight_grad.nodes for value in node.inputs)
