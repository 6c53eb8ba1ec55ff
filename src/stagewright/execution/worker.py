"""The process of one rank: joins the group that torchrun's environment describes, trains, reports.

Run by `stagewright.execution.launch`, or under any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.errors import RunError, StagewrightError, StagewrightWarning
from stagewright.execution.member import end_process, gather, member, report_failure, start_process
from stagewright.execution.watch import Limits

if TYPE_CHECKING:
    from stagewright.planning.job import Job
    from stagewright.planning.plan import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    options = parsed(arguments)
    try:
        work(**options)
    except StagewrightError as error:
        report_failure(error)
        return 1 if isinstance(error, RunError) else 2
    return 0


def work(
    plan: str,
    out: str,
    data: str | None,
    steps: int | None,
    device: str,
    random_weights: bool,
    timeout: float,
    start_timeout: float = 300.0,
    devices: str | None = None,
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
        loaded = loaded.model_copy(update={"devices": tuple(map(int, devices.split(",")))})
    launched = int(os.environ["RANK"])
    with member(device, Limits(timeout, start_timeout), loaded.rank_on(launched)) as (watch, target):
        import torch

        from stagewright.execution.checkpoint import is_due, restore, save
        from stagewright.execution.clock import clock_offset
        from stagewright.execution.metering import metered_steps
        from stagewright.execution.record import StepLog
        from stagewright.execution.session import Session

        if (threads := num_threads(loaded, launched)) is not None:
            torch.set_num_threads(threads)
        session = Session(
            loaded, target, data, random_weights, watch.at, watch.at, lambda: watch.stop_asked is not None
        )
        results = []
        num_steps = steps or loaded.job.num_steps
        first = restore(session, Path(checkpoint)) if checkpoint is not None and resume else 0
        metered = metered_steps(loaded.job, num_steps, first)
        log = StepLog(Path(out), first, num_steps) if launched == 0 else None
        watch.num_steps = first
        for step in range(first, num_steps):
            result = session.train_step(step, metered=step in metered)
            results.append(result)
            watch.num_steps = step + 1
            if log is not None:
                log(step, result)
            if checkpoint is not None and (
                is_due(step + 1, num_steps, checkpoint_every) or result.is_last_asked
            ):
                save(session, Path(checkpoint), step + 1)
            if result.is_last_asked:
                break
        watch.at("comparing clocks")
        offset = clock_offset(watch.rank, watch.num_ranks, timeout)
        ranks = gather(session.rank_record(offset).model_dump_json())
        if launched == 0:
            watch.at("writing the record")
            stopped = watch.stopped_by() if first + len(results) < num_steps else None
            record = _record(loaded, torch, target, results, first, metered, ranks, stopped)
            record.save(Path(out) / "record.json")


def lengths_of(job: Job, steps: range) -> tuple[int, ...]:
    """Tokens per sample of each of `steps`; nothing where all are alike."""
    return tuple(map(job.length_of, steps)) if job.sequence_lengths else ()


def num_threads(plan: Plan, device: int) -> int | None:
    """Threads that the process of a device of the plan's cluster computes with; None where nothing says so."""
    described = plan.cluster.description
    known = described is not None and device < described.num_devices
    return described.device_of(device).num_threads if described is not None and known else None


def _record(
    loaded: Any, torch: Any, target: Any, results: list[Any], first: int, metered: set[int], ranks: list[Any],
    stopped: str | None,
) -> Any:  # fmt: skip
    from stagewright.execution.record import Record, finite
    from stagewright.version import __version__

    lengths = lengths_of(loaded.job, range(first, first + len(results)))
    timed = loaded.at_length(max(lengths)) if lengths else loaded
    return Record(
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
        metered_steps=tuple(sorted({0, *(step - first for step in metered if step - first < len(results))})),
        predicted_step_seconds=timed.predictions.step_seconds,
        ranks=tuple(ranks),
    )


def parsed(arguments: Sequence[str] | None) -> dict[str, Any]:
    """Arguments of this process as those of `work`."""
    parser = argparse.ArgumentParser(prog="python -m stagewright.execution.worker", description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--out", required=True)
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--devices", help="device of every rank, instead of the plan's")
    parser.add_argument("--checkpoint")
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--resume", action="store_true")
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    start_process()
    end_process(main())
