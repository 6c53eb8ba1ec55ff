"""`stagewright run`: trains a plan on this machine, or as one rank of a launcher that is already running."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.consent import say_what_runs
from stagewright.cli.groups import explains, grouped
from stagewright.cli.options import Json, PlanFile, TextField, TokenizerPath
from stagewright.cli.output import check_writable, print_document, show
from stagewright.files import write_whole
from stagewright.text import say

if TYPE_CHECKING:
    from stagewright.execution.data.request import DataRequest
    from stagewright.execution.record import Record


# fmt: off
@dataclass(frozen=True)
class DataOptions:
    """Data."""

    data: Annotated[
        list[str] | None, typer.Option(metavar="PATH[=WEIGHT]",
            help="Text, .jsonl, .parquet, a datasets folder, token ids (.npy, stagewright tokenize), package.module:factory "
            "or moby-dick, a bundled text; several are mixed by weight. Default: random samples.")] = None
    tokenizer: TokenizerPath = None
    text_field: TextField = None
    held_out: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="Data to evaluate at the end, each sample once.")] = None
    evaluate_every: Annotated[int | None, typer.Option(min=1, metavar="N", help="And after every N steps.")] = None

    def requests(self) -> dict[str, DataRequest | None]:
        """What to train on and what to evaluate, whose text is tokenised in the same way."""
        from stagewright.execution.data.request import DataRequest

        data = DataRequest.of(self.data, self.tokenizer, self.text_field)
        held_out = DataRequest.of(self.held_out, self.tokenizer, self.text_field) if self.held_out else None
        return {"data": data, "held_out": held_out}


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints."""

    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a checkpoint there after the last step.")] = None
    checkpoint_every: Annotated[int | None, typer.Option(min=1, metavar="N", help="And one every N steps.")] = None
    keep_last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep only the newest N; default all.")] = None
    keep_every: Annotated[int | None, typer.Option(min=1, metavar="N", help="And those after every N-th step.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in that folder.")] = False
    other_data: Annotated[bool, typer.Option("--other-data", help="Resume even if the data changed.")] = False


@dataclass(frozen=True)
class RateOptions:
    """Learning rate: default as the plan's job says."""

    learning_rate: Annotated[float | None, typer.Option(metavar="RATE", help="The highest.")] = None
    lr_schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="How it falls: constant, linear, cosine, or wsd (only at the end).")
    ] = None
    warmup_steps: Annotated[int | None, typer.Option(min=0, metavar="N", help="Steps in which it rises.")] = None
    decay_steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Last steps, in which wsd falls; default a tenth of all.")] = None
    final_fraction: Annotated[
        float | None, typer.Option(min=0, max=1, metavar="PART", help="Fraction of it after the last step; default 0.")
    ] = None


@dataclass(frozen=True)
class ProcessOptions:
    """Processes."""

    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto"
    ranks: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Node and device of every rank (CSV); default the plan's.")] = None
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds a rank may stay at one action.")] = 1800.0
    start_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds until every rank must have joined the others.")] = 300.0


@dataclass(frozen=True)
class TroubleOptions:
    """When something goes wrong."""

    on_nan: Annotated[
        str, typer.Option(metavar="WHAT", help="When loss or gradients are NaN or Inf: warn, skip, stop, or rollback.")
    ] = "warn"
    adapt: Annotated[bool, typer.Option("--adapt", help="Change to another plan if ranks or links stay slow.")] = False
    replan: Annotated[
        bool, typer.Option("--replan", help="With fewer processes or devices than ranks, plan again and go on.")] = False
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Whether to compare the model with its traced graph before the "
            "first run; without, errors of the trace are trained.")] = True


@dataclass(frozen=True)
class LogOptions:
    """Logs of every step."""

    tensorboard: Annotated[Path | None, typer.Option(metavar="FOLDER", help="For TensorBoard.")] = None
    wandb: Annotated[str | None, typer.Option(metavar="PROJECT", help="For Weights & Biases.")] = None
# fmt: on


@explains(
    "data", "tokenizer", "steps", "out", "device", "checkpoint", "checkpoint_every", "resume", "held_out"
)
@grouped
def run(
    plan: PlanFile,
    data: DataOptions,
    checkpoints: CheckpointOptions,
    rates: RateOptions,
    processes: ProcessOptions,
    trouble: TroubleOptions,
    logs: LogOptions,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default the job's.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where record.json goes; default runs/MODEL-TIME.")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Start from the seed even if there are weights.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Afterwards, predicted and measured as one page.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train a plan, one process per rank.

    Starts the processes itself, or joins a launcher such as torchrun that has set RANK and WORLD_SIZE. Ctrl-C stops it
    after the present step, with a checkpoint if --checkpoint was given; a second one ends it at once.

    Example:
        stagewright run plan.json --data texts.jsonl --tokenizer tokenizer.json \\
            --steps 1000 --checkpoint checkpoints
    """
    from stagewright.cluster.cluster import measurement_cautions
    from stagewright.execution import launch
    from stagewright.execution.machine_use import watch_others
    from stagewright.execution.preflight import default_folder
    from stagewright.planning.plan import load_plan

    with _said_when_ended():
        check_writable(html)
        loaded = load_plan(plan)
        requests = data.requests()
        request = requests["data"]
        if os.environ.get("RANK", "0") == "0":
            say_what_runs(loaded.model.text)
            say_what_runs(loaded.job.optimizer)
            for source in request.sources if request is not None else ():
                say_what_runs(source.path)
        folder = out or default_folder(loaded)
        others = watch_others()
        with _last_checkpoint_told(checkpoints.checkpoint):
            record = launch.run(
                plan, steps=steps, out=folder, random_weights=random_weights, rates=vars(rates),
                evaluate_every=data.evaluate_every, **requests, **vars(checkpoints), **vars(processes), **vars(trouble),
                **vars(logs),
            )  # fmt: skip
    if record is None or os.environ.get("RANK", "0") != "0":
        return
    from stagewright.cli.options import warn
    from stagewright.report import runs as report

    if record.plan is not None:  # a run that replanned or adapted has another one than was given
        loaded = load_plan(record.plan)
    path = folder / "record.json"
    document = report.run_document(loaded, record, str(path))
    warn(report.on_other_devices(record, loaded.cluster.kind, loaded.cluster.name))
    if record.device == "cpu" and "RANK" not in os.environ:  # all ranks are children of this process
        warn(measurement_cautions(others()))
    warn(report.longest_not_run(loaded, record))
    warn([*report.too_few_steps(len(record.losses)), *report.diverged(record.losses)])
    warn(report.left_out(record, loaded.job.dtype == "fp16"))
    if html is not None:
        from stagewright.verbs.comparing import compare

        write_whole(html, compare(loaded, record).page())
    if as_json:
        print_document(document)
    else:
        show(report.run_summary(document), f"Wrote {path}.")
    if record.stopped_by is not None:
        print(_stopped(record, steps or loaded.job.num_steps, checkpoints.checkpoint), file=sys.stderr)
        raise typer.Exit(128 + signal.Signals[record.stopped_by])


@contextmanager
def _said_when_ended() -> Iterator[None]:
    """SIGTERM before ranks are started, which see to it then, does not end this without a word. One that comes when this
    ends with an error has nothing to add to that."""

    def leave(number: int, _: object) -> None:
        say(f"ended by {signal.Signals(number).name} before any rank was started: nothing was trained")
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except BaseException:
        if signal.getsignal(signal.SIGTERM) is leave:  # and not that of a rank
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)


@contextmanager
def _last_checkpoint_told(folder: Path | None) -> Iterator[None]:
    """Says from which checkpoint a run that is ended inside can go on."""
    from stagewright.execution.checkpoint_folder import steps_of

    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if folder is not None and (found := steps_of(folder)):
            say(f"the newest checkpoint is '{found[0]}': the same command with --resume goes on from there")
        raise


def _stopped(record: Record, num_steps: int, checkpoint: Path | None) -> str:
    """Where a run ended that somebody stopped, and how it goes on."""
    done = record.first_step + len(record.losses)
    where = f"stopped by {record.stopped_by} after step {done} of {num_steps}"
    if checkpoint is None:
        return f"{where}; no checkpoint was asked for (--checkpoint), so nothing is kept to go on from"
    return f"{where}; its checkpoint is in {checkpoint}: the same command with --resume goes on from there"
