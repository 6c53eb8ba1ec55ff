"""The process of one rank: joins the group that torchrun's environment describes, trains, reports.

Run by `stagewright.execution.launch` with one argument, the options as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.errors import StagewrightWarning
from stagewright.execution.member import end_process, exit_code, member, start_process
from stagewright.execution.watch import Limits
from stagewright.version import __version__

if TYPE_CHECKING:
    from stagewright.cluster import Device
    from stagewright.planning.plan import Plan


def main(options: str) -> int:
    """Run one rank; returns the exit code. `options` are those of `work`, as JSON."""
    return exit_code(lambda: work(**json.loads(options)))


def work(
    plan: str,
    out: str,
    data: dict[str, Any] | None = None,
    steps: int | None = None,
    device: str = "cpu",
    random_weights: bool = False,
    timeout: float = 1800.0,
    start_timeout: float = 300.0,
    devices: Sequence[int] | None = None,
    checkpoint: str | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
) -> None:
    """Train the plan on this rank; rank 0 writes the record.

    Raises:
        InputError: the record cannot be written.
        RunError: the run failed; names the rank, the action and what it waited for.
    """
    from stagewright.planning.plan import load_plan

    warnings.simplefilter("always", StagewrightWarning)  # the command line hides those of libraries
    loaded = load_plan(plan)
    if devices is not None:
        loaded = loaded.model_copy(update={"devices": tuple(devices)})
    launched = int(os.environ["RANK"])
    with member(device, Limits(timeout, start_timeout), loaded.rank_on(launched)) as (watch, target):
        import torch

        from stagewright.execution.checkpoint import restore, save
        from stagewright.execution.clock import clock_offset
        from stagewright.execution.collectives import exchange
        from stagewright.execution.data.prepared import PreparedData
        from stagewright.execution.metering import metered_steps
        from stagewright.execution.pace import PaceWatch
        from stagewright.execution.record import Record, StepLog, finite
        from stagewright.execution.reference import SpeedWatch
        from stagewright.execution.session import Session

        if (threads := num_threads(loaded, launched)) is not None:
            torch.set_num_threads(threads)
        session = Session(
            loaded, target, None if data is None else PreparedData(**data), random_weights, watch.at, watch.at,
            lambda: watch.stop_asked is not None,
        )  # fmt: skip
        results = []
        num_steps = steps or loaded.job.num_steps
        first = restore(session, Path(checkpoint)) if checkpoint is not None and resume else 0
        metered = metered_steps(loaded.job, num_steps, first)
        log = StepLog(Path(out), first, num_steps) if launched == 0 else None
        watch.num_steps = first
        speed = SpeedWatch(target, _probed_reference(loaded, launched, target.type))
        paces = PaceWatch()
        for step in range(first, num_steps):
            result = session.train_step(step, metered=step in metered)
            results.append(result)
            watch.num_steps = step + 1
            speed.after(step - first, result.seconds)
            if log is not None:
                log(step, result)
                for message in paces.after(step, result.paces):
                    warnings.warn(message, StagewrightWarning, stacklevel=1)
            is_last = result.is_last_asked or step + 1 == num_steps
            is_due = is_last or (checkpoint_every is not None and (step + 1) % checkpoint_every == 0)
            if checkpoint is not None and is_due:
                save(session, Path(checkpoint), step + 1)
            if result.is_last_asked:
                break
        watch.at("comparing clocks")
        offset = clock_offset(watch.rank, watch.num_ranks, timeout)
        own = session.rank_record(offset).model_copy(
            update={
                "slowdowns": tuple(speed.slowdowns),
                "device": launched,
                "pace": _pace(loaded, launched, [result.paces[watch.rank] for result in results[1:]]),
            }
        )
        ranks = exchange(own.model_dump(mode="json"))
        if launched == 0:
            watch.at("writing the record")
            stopped = watch.stopped_by() if first + len(results) < num_steps else None
            steps_run = range(first, first + len(results))
            lengths = tuple(map(loaded.job.length_of, steps_run)) if loaded.job.sequence_lengths else ()
            timed = loaded.at_length(max(lengths)) if lengths else loaded
            record = Record(
                stagewright=__version__,
                model=loaded.model.name,
                first_step=first,
                device=str(target),
                versions={"torch": torch.__version__, "python": sys.version.split()[0]},
                losses=tuple(finite(result.loss) for result in results),
                gradient_norms=tuple(finite(result.gradient_norm) for result in results),
                step_seconds=tuple(result.seconds for result in results),
                sequence_lengths=lengths,
                stopped_by=stopped,
                metered_steps=tuple(sorted({0, *(step - first for step in metered if step in steps_run)})),
                predicted_step_seconds=timed.predictions.step_seconds,
                ranks=tuple(ranks),
            )
            record.save(Path(out) / "record.json")


def num_threads(plan: Plan, device: int) -> int | None:
    """Threads that the process of a device of the plan's cluster computes with; None where nothing says so."""
    described = _described(plan, device)
    return None if described is None else described.num_threads


def _described(plan: Plan, device: int) -> Device | None:
    """A device of the plan's cluster; None where the plan does not describe it."""
    cluster = plan.cluster.description
    return cluster.device_of(device) if cluster is not None and device < cluster.num_devices else None


def _pace(plan: Plan, device: int, beside_plan: list[float]) -> float | None:
    """`Device.pace` as some steps showed it, of computations that took so many times as long as planned, in the middle; None
    where none was looked at."""
    seen = [pace for pace in beside_plan if pace]
    described = _described(plan, device)
    planned = (described and described.pace) or 1.0
    return planned * statistics.median(seen) if seen else None


def _probed_reference(plan: Plan, device: int, kind: str) -> float | None:
    """What the reference took when the device was probed; None where that is not known, or was another `kind` of device."""
    described = _described(plan, device)
    return described.reference_s if described is not None and described.kind == kind else None


if __name__ == "__main__":
    start_process()
    end_process(main(sys.argv[1]))
