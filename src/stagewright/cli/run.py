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
from typing import TYPE_CHECKING, Annotated, cast

import typer

from stagewright.cli.consent import say_what_runs
from stagewright.cli.groups import explains, grouped
from stagewright.cli.options import Json, PlanFile, TextField, TokenizerPath
from stagewright.cli.output import check_writable, print_document, show
from stagewright.files import write_whole
from stagewright.text import say

if TYPE_CHECKING:
    from stagewright.execution.no_number import OnNan
    from stagewright.execution.record import Record


# fmt: off
@dataclass(frozen=True)
class RateOptions:
    """Learning rate: what is not given is as the plan's job says."""

    learning_rate: Annotated[float | None, typer.Option("--learning-rate", metavar="RATE", help="The highest.")] = None
    lr_schedule: Annotated[
        str | None, typer.Option("--lr-schedule", metavar="NAME",
            help="How it falls: constant, linear, cosine, or wsd (only in the last steps).")] = None
    warmup_steps: Annotated[
        int | None, typer.Option("--warmup-steps", min=0, metavar="N", help="Steps in which it rises.")] = None
    decay_steps: Annotated[
        int | None, typer.Option("--decay-steps", min=1, metavar="N",
            help="The last steps, in which wsd falls; default a tenth of all.")] = None
    final_fraction: Annotated[
        float | None, typer.Option("--final-fraction", min=0, max=1, metavar="PART",
            help="What is left of it behind the last step; default 0.")] = None
# fmt: on


@explains(
    "data", "tokenizer", "steps", "out", "device", "checkpoint", "checkpoint_every", "resume", "held_out"
)
@grouped
def run(
    plan: PlanFile,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH[=WEIGHT]", help="Text, .jsonl, .parquet, a datasets folder, token ids (.npy, stagewright "
                     "tokenize), package.module:factory or moby-dick, a text that comes along; several are mixed by "
                     "weight. Default: random samples."),
    ] = None,
    tokenizer: TokenizerPath = None,
    text_field: TextField = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default the job's.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where record.json goes; default runs/MODEL-TIME.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Start from the seed even where weights are at hand.")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds a rank may stay at one action.")] = 1800.0,
    start_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds until every rank must have joined the others.")] = 300.0,
    ranks: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Node and device of every rank (CSV); default the plan's.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a checkpoint there after the last step.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=1, metavar="N", help="And one every N steps.")] = None,
    keep_last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the newest N of them only; default all.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="And those after every N-th step.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in that folder.")] = False,
    other_data: Annotated[
        bool, typer.Option("--other-data", help="With --resume: go on though the data is other than before.")] = False,
    held_out: Annotated[
        list[str] | None, typer.Option("--held-out", metavar="PATH", help="Data to evaluate at the end, each sample once.")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option("--evaluate-every", min=1, metavar="N", help="And after every N steps.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Figures of every step for TensorBoard.")] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="And for Weights & Biases.")] = None,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Go on under another plan where ranks or links stay slow.")] = False,
    replan: Annotated[
        bool, typer.Option("--replan", help="With fewer processes or devices than ranks, plan again and go on.")] = False,
    on_nan: Annotated[
        str, typer.Option("--on-nan", metavar="WHAT",
            help="A step whose loss or gradients are no finite numbers: warn, skip, stop, or rollback.")] = "warn",
    no_compare: Annotated[
        bool, typer.Option("--no-compare", help="Do not compare the model with its traced graph before the first run: what "
                           "tracing got wrong is then trained.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Afterwards, predicted and measured as one page.")] = None,
    as_json: Json = False,
    *,
    rates: RateOptions,
) -> None:  # fmt: skip
    """Train a plan, one process per rank.

    Starts the processes itself, or joins a launcher such as torchrun that has set RANK and WORLD_SIZE. Ctrl-C stops it
    behind the present step, with a checkpoint if --checkpoint was given; a second one ends it at once.

    Example:
        stagewright run plan.json --data texts.jsonl --tokenizer tokenizer.json \\
            --steps 1000 --checkpoint checkpoints
    """
    from stagewright.cluster.cluster import measured_beside
    from stagewright.execution import launch
    from stagewright.execution.data.request import DataRequest
    from stagewright.execution.machine_use import watch_others
    from stagewright.planning.plan import load_plan

    with _said_when_ended():
        check_writable(html)
        loaded = load_plan(plan)
        request = DataRequest.of(data, tokenizer, text_field)
        if os.environ.get("RANK", "0") == "0":
            say_what_runs(loaded.model.text)
            say_what_runs(loaded.job.optimizer)
            for source in request.sources if request is not None else ():
                say_what_runs(source.path)
        folder = out or launch.default_folder(loaded)
        others = watch_others()
        with _last_checkpoint_told(checkpoint):
            record = launch.run(
                plan, request, steps, folder, device=device, random_weights=random_weights, timeout=timeout,
                start_timeout=start_timeout, ranks=ranks, checkpoint=checkpoint, checkpoint_every=checkpoint_every,
                resume=resume, other_data=other_data, keep_last=keep_last, keep_every=keep_every,
                held_out=DataRequest.of(held_out, *_as_trained(held_out, tokenizer, text_field)),
                evaluate_every=evaluate_every, tensorboard=tensorboard, wandb=wandb,
                adapt=adapt, replan=replan, rates=vars(rates), on_nan=cast("OnNan", on_nan),
                compare=not no_compare,
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
        warn(measured_beside(others()))
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
        print(_stopped(record, steps or loaded.job.num_steps, checkpoint), file=sys.stderr)
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


def _as_trained(
    held_out: list[str] | None, tokenizer: Path | None, field: str | None
) -> tuple[Path | None, str | None]:
    """How held-out text becomes tokens: as what is trained on."""
    return (tokenizer, field) if held_out else (None, None)


def _stopped(record: Record, num_steps: int, checkpoint: Path | None) -> str:
    """Where a run ended that somebody stopped, and how it goes on."""
    done = record.first_step + len(record.losses)
    where = f"stopped by {record.stopped_by} after step {done} of {num_steps}"
    if checkpoint is None:
        return f"{where}; no checkpoint was asked for (--checkpoint), so nothing is kept to go on from"
    return f"{where}; its checkpoint is in {checkpoint}: the same command with --resume goes on from there"
