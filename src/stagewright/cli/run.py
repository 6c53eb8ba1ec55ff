"""`stagewright run`: trains a plan on this machine, or as one rank under a launcher."""

from __future__ import annotations

import os
import shlex
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
    from stagewright.planning.plan import Plan


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
        list[str] | None, typer.Option(metavar="PATH", help="Data to evaluate at the start and at the end.")] = None
    evaluate_every: Annotated[int | None, typer.Option(min=1, metavar="N", help="Also evaluate it every N steps.")] = None

    def requests(self) -> dict[str, DataRequest | None]:
        """Return the data to train on and to evaluate, tokenised in the same way."""
        from stagewright.execution.data.request import DataRequest

        data = DataRequest.of(self.data, self.tokenizer, self.text_field)
        held_out = DataRequest.of(self.held_out, self.tokenizer, self.text_field) if self.held_out else None
        return {"data": data, "held_out": held_out}


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints."""

    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a checkpoint to it after the last step.")] = None
    checkpoint_every: Annotated[int | None, typer.Option(min=1, metavar="N", help="Also write one every N steps.")] = None
    keep_last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep only the newest N; default: all.")] = None
    keep_every: Annotated[int | None, typer.Option(min=1, metavar="N", help="Also keep every N-th step's.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in that folder.")] = False
    other_data: Annotated[bool, typer.Option("--other-data", help="Resume even if the data changed.")] = False
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Start from random weights even if there are trained ones.")] = False


@dataclass(frozen=True)
class RateOptions:
    """Learning rate: by default as in the plan's job."""

    learning_rate: Annotated[float | None, typer.Option(metavar="RATE", help="Peak learning rate.")] = None
    lr_schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Decay: constant, linear, cosine, or wsd (only at the end).")
    ] = None
    warmup_steps: Annotated[int | None, typer.Option(min=0, metavar="N", help="Number of warmup steps.")] = None
    decay_steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Final steps in which wsd decays; default: a tenth.")] = None
    final_fraction: Annotated[
        float | None, typer.Option(min=0, max=1, metavar="PART", help="Fraction of the peak at the end; default: 0.")
    ] = None


@dataclass(frozen=True)
class ProcessOptions:
    """Processes."""

    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto"
    ranks: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Node and device of every rank (CSV); default: the plan's.")] = None
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds a rank may spend on one action.")] = 1800.0
    start_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds within which every rank must join.")] = 300.0


@dataclass(frozen=True)
class TroubleOptions:
    """When something goes wrong."""

    on_nan: Annotated[
        str, typer.Option(metavar="WHAT", help="When loss or gradients are NaN or Inf: warn, skip, stop, or rollback.")
    ] = "warn"
    adapt: Annotated[bool, typer.Option("--adapt", help="Switch to another plan if ranks or links stay slow.")] = False
    replan: Annotated[
        bool, typer.Option("--replan", help="With fewer processes or devices than ranks, plan again and continue.")] = False
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Whether to compare the model with its traced graph before the "
            "first run; otherwise tracing errors go unnoticed.")] = True


@dataclass(frozen=True)
class ResultOptions:
    """Results."""

    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where record.json goes; default: runs/MODEL-TIME.")] = None
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page that compares predictions and measurements.")] = None
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Log every step to this folder for TensorBoard.")] = None
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Log every step to this project of Weights & Biases.")] = None
    as_json: Json = False
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
    results: ResultOptions,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default: the job's.")] = None,
) -> None:
    """Train a plan, one process per rank.

    Starts the processes itself, or joins a launcher such as torchrun that has set RANK and WORLD_SIZE. Ctrl-C stops it
    after the current step, with a checkpoint if --checkpoint was given; a second Ctrl-C stops it at once.

    Example:
        stagewright run plan.json --data texts.jsonl --tokenizer tokenizer.json \\
            --steps 1000 --checkpoint checkpoints
    """
    from stagewright.cluster.cluster import measurement_cautions
    from stagewright.execution import launch
    from stagewright.execution.machine_use import watch_others
    from stagewright.execution.preflight import default_folder
    from stagewright.planning.plan import load_plan

    with _message_on_sigterm():
        check_writable(results.html)
        loaded = load_plan(plan)
        requests = data.requests()
        request = requests["data"]
        if os.environ.get("RANK", "0") == "0":
            say_what_runs(loaded.model.text)
            say_what_runs(loaded.job.optimizer)
            for source in request.sources if request is not None else ():
                say_what_runs(source.path)
        folder = results.out or default_folder(loaded)
        measure_others = watch_others()
        with _newest_checkpoint_on_exit(checkpoints.checkpoint):
            record = launch.run(
                plan, steps=steps, out=folder, rates=vars(rates), evaluate_every=data.evaluate_every, **requests,
                **vars(checkpoints), **vars(processes), **vars(trouble), tensorboard=results.tensorboard,
                wandb=results.wandb,
            )  # fmt: skip
    if record is None or os.environ.get("RANK", "0") != "0":
        return
    from stagewright.cli.options import warn
    from stagewright.report import runs as report

    if record.plan is not None:  # not the given plan after replanning or adapting
        loaded = load_plan(record.plan)
    path = folder / "record.json"
    document = report.run_document(loaded, record, str(path))
    warn(report.on_other_devices(record, loaded.cluster.kind, loaded.cluster.name))
    if record.device == "cpu" and "RANK" not in os.environ:  # all ranks are children of this process
        warn(measurement_cautions(measure_others()))
    warn(report.longest_not_run(loaded, record))
    warn([*report.too_few_steps(len(record.losses)), *report.diverged(record.losses)])
    warn(report.left_out(record, loaded.job.dtype == "fp16"))
    if results.html is not None:
        from stagewright.api import compare

        write_whole(results.html, compare(loaded, record).page())
    if results.as_json:
        print_document(document)
    else:
        show(
            report.run_summary(document),
            *_written(loaded, plan, path, results.html, checkpoints.checkpoint, data),
        )
    if record.stopped_by is not None:
        print(_stopped(record, steps or loaded.job.num_steps, checkpoints.checkpoint), file=sys.stderr)
        raise typer.Exit(128 + signal.Signals[record.stopped_by])


def _written(
    loaded: Plan, plan: Path, record: Path, html: Path | None, checkpoints: Path | None, data: DataOptions
) -> Iterator[str]:
    """Yield what a run has written, and what to do with it."""
    from stagewright.execution.checkpoint_folder import steps_of

    yield f"Wrote {record}. Compare: `stagewright compare {plan} {record}`."
    if html is not None:
        yield f"Wrote {html}."
    if checkpoints is not None and (steps := steps_of(checkpoints)):
        given = {"--data": (data.held_out or data.data or ["DATA"])[0], "--tokenizer": data.tokenizer}
        given["--text-field"] = data.text_field
        words = (
            f"{option} {shlex.quote(str(value))}" for option, value in given.items() if value is not None
        )
        adapters = " --adapter" if loaded.model.lora is not None else ""
        yield (
            f"Wrote {steps[0]}. Evaluate: `stagewright evaluate {plan} {' '.join(words)} --checkpoint {checkpoints}`; "
            f"export: `stagewright checkpoint export {steps[0]} FOLDER{adapters}`."
        )


@contextmanager
def _message_on_sigterm() -> Iterator[None]:
    """Print a message on SIGTERM before ranks are started, which then handle it. While an error ends the block, SIGTERM is
    ignored, as it has nothing to add."""

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
        if signal.getsignal(signal.SIGTERM) is leave:  # not the handler of a rank
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)


@contextmanager
def _newest_checkpoint_on_exit(folder: Path | None) -> Iterator[None]:
    """Print the checkpoint from which a run interrupted inside can continue."""
    from stagewright.execution.checkpoint_folder import steps_of

    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if folder is not None and (steps := steps_of(folder)):
            say(f"the newest checkpoint is '{steps[0]}': the same command with --resume continues from there")
        raise


def _stopped(record: Record, num_steps: int, checkpoint: Path | None) -> str:
    """Return where a run was stopped and how to continue it."""
    done = record.first_step + len(record.losses)
    where = f"stopped by {record.stopped_by} after step {done} of {num_steps}"
    if checkpoint is None:
        return f"{where}; without --checkpoint nothing was saved to continue from"
    return f"{where}; its checkpoint is in {checkpoint}: the same command with --resume continues from there"
