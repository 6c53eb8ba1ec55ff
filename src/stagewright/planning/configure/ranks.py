"""From a configuration to the device of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stagewright.estimation.megatron import Shape
from stagewright.estimation.megatron.fusion import timed_stack
from stagewright.planning.configure.assignment import as_numbered
from stagewright.planning.configure.configuration import Configuration
from stagewright.planning.configure.fitting import Room, usable_of_ranks
from stagewright.planning.configure.iteration import Run
from stagewright.planning.configure.lineup import has_equal_nodes
from stagewright.planning.configure.placing import device_places, rearranged, weighed
from stagewright.planning.job import Job


def placed(shape: Shape, one: Configuration, job: Job, stack: str) -> Configuration:
    """The configuration with the devices that suit it best, timed there."""
    runtime, fusion = timed_stack(stack)
    run = Run(shape, one.layout, runtime, fusion, one.numbered)
    return on_best_devices(one, run, Room(shape, runtime), job)


def on_best_devices(
    one: Configuration, run: Run, room: Room, job: Job, num_steps: int | None = None
) -> Configuration:
    """A configuration whose `run` is in Megatron's order, with its ranks assigned to devices in `num_steps` moves.

    It stays where it is if its step is predicted to be no faster elsewhere, or a rank would lack memory there.
    """
    layout, numbered = one.layout, one.numbered
    found = weighed(run, job, () if has_equal_nodes(numbered) else room.peaks(layout), num_steps)
    if one.assignment is None:
        in_order = as_numbered(len(found.units) // layout.pp, layout.pp)
        one = replace(one, assignment=replace(found, units=in_order, seconds=found.seconds_by_default))
    cluster = rearranged(numbered, layout, found.units)
    if cluster == one.cluster:
        return replace(one, assignment=found)
    memory = one.memory
    if not has_equal_nodes(cluster):
        memory = room.of(layout, usable_of_ranks(job, cluster, layout.pp))
    step = replace(run, cluster=cluster, known={}).step()
    gain = one.step_s / step.seconds
    if gain <= 1 or not memory.fits:
        return one
    return replace(
        one, time=step, memory=memory, cluster=cluster, assignment=found,
        tokens_per_second=one.tokens_per_second * gain, mfu=one.mfu * gain,
    )  # fmt: skip


def rank_lines(one: Configuration) -> Sequence[str]:
    """One line per rank, in the order of ranks (stage, replica, shard): node and device in the node."""
    return [f"{rank},{node},{device}" for rank, (node, device) in enumerate(device_places(one.cluster))]
