"""`stagewright finetune`: trains adapters of a model on this machine, with one command made of the other verbs."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from stagewright.cli import finetune_options as options
from stagewright.cli.finetune_options import (
    DTYPES,
    QUANTISED,
    RANK,
    TARGETS,
    FinetuneDataOptions,
    FinetuneRequest,
    FinetuneResultOptions,
    MachineOptions,
    TrainingOptions,
    quantised_bases,
)
from stagewright.cli.finetune_plan import Preparation
from stagewright.cli.from_file import reported
from stagewright.cli.groups import explains, grouped
from stagewright.cli.model import ModelOptions
from stagewright.cli.output import print_document, show
from stagewright.cli.plan import ParallelismOptions, ScheduleOptions, space_of, tensor_degree
from stagewright.cli.progress import Progress
from stagewright.cli.refuse import given_words, is_given, refuse
from stagewright.errors import InputError, RunError, nearest
from stagewright.text import plural, say

if TYPE_CHECKING:
    from stagewright.execution.record import Record
    from stagewright.export.read_finetuning import FinetuneReading
    from stagewright.planning.plan import Plan

_BETWEEN_CHECKPOINTS_S = 600.0


@explains("from_file", "data", "cluster", "out", "merge", "dry_run")
@grouped
def finetune(
    model: options.FinetunedModel = None,
    from_file: options.FromProgram = None,
    *,
    data: FinetuneDataOptions,
    model_options: ModelOptions,
    training: TrainingOptions,
    machine: MachineOptions,
    degrees: ParallelismOptions,
    scheduling: ScheduleOptions,
    result: FinetuneResultOptions,
) -> None:
    """Fine-tune a model on this machine's cards.

    Measures the machine once, plans for its cards, trains adapters, evaluates them and writes them for peft. Started again,
    it goes on where it was.

    Example:
        stagewright finetune models/llama --data chat.jsonl
    """
    from stagewright.tracing.models.quantised import keeps_fp8

    if "RANK" in os.environ:
        raise InputError(
            "finetune starts its processes itself: for several machines give --cluster, and it shows the command for "
            "torchrun"
        )
    reading = None if from_file is None else _read(from_file)
    if reading is not None:
        data, training = _with_read(data, reading), _with_read(training, reading)
        model_options = _with_read(model_options, reading)
    if model_options.lora is None and model_options.lora_from is None:
        model_options = replace(model_options, lora=RANK)
    if reading is None and model_options.lora_targets is None and model_options.lora_from is None:
        model_options = replace(model_options, lora_targets=TARGETS)
    model = model or (None if reading is None else reading.model)
    if model is None:
        raise InputError("no model was given: name MODEL, the folder of a Hugging Face model")
    space = space_of(degrees, tensor_degree(degrees.tp or "auto"), scheduling)
    words = given_words({*vars(degrees), *vars(scheduling)})
    job = {} if reading is None else reading.job
    if (base := model_options.lora_base) is not None:
        if training.base not in ("auto", base):
            raise InputError(
                f"--lora-base {base} and --base {training.base} contradict each other: give one of them"
            )
        training = replace(training, base=base)
    plain = replace(model_options, lora_base=None).reference(model)
    # Programs whose files say bf16 compute in it and keep what is published in fp8.
    is_of_file = reading is not None and not is_given("base")
    if is_of_file and training.base == "bf16" and keeps_fp8(plain.config or {}):
        training = replace(training, base="auto")
    bases = quantised_bases(plain, training.base)
    models = {None: plain} | {base: replace(model_options, lora_base=base).reference(model) for base in bases}
    request = FinetuneRequest(models, data, training, machine, result, space, tuple(words), job)
    _check(request)
    work = FineTuning(request)
    work.continue_or_begin()
    work.tokenise()
    plan = work.plan()
    if not result.as_json:
        show(*work.plan_lines(plan))
    if result.dry_run or plan.cluster.load().num_nodes > 1:
        if result.as_json:
            print_document(work.document(plan))
        else:
            show("", *work.next_commands(plan))
        return
    record = work.train(plan)
    work.export()
    if result.as_json:
        print_document(work.document(plan, record))
    else:
        show(*work.result_lines(record))


Group = TypeVar("Group", FinetuneDataOptions, ModelOptions, TrainingOptions)


def _read(path: Path) -> FinetuneReading:
    """Return the fine-tuning in another program's file; print on stderr what of it is left out."""
    from stagewright.export.read_finetuning import read_finetuning

    return reported(path, read_finetuning(path), "note")


def _with_read(group: Group, reading: FinetuneReading) -> Group:
    """Return options with the values of a file for those that are not on the command line."""
    names = {field.name for field in fields(group)}
    return replace(
        group,
        **{name: value for name, value in reading.options.items() if name in names and not is_given(name)},
    )


def _check(request: FinetuneRequest) -> None:
    """Raise `InputError` for options that contradict each other or the model."""
    training, data, result = request.training, request.data, request.result
    if request.model.kind == "factory":
        raise InputError(
            f"'{request.model.text}' is a factory, which says itself what is trained: use `stagewright plan` and `run`"
        )
    bases = ("auto", *DTYPES, *QUANTISED)
    if training.base not in bases:
        raise InputError(
            f"--base {training.base}{nearest(training.base, bases)}: give one of {', '.join(bases)}"
        )
    if data.epochs <= 0:
        raise InputError(f"--epochs {data.epochs:g}: give a positive number")
    if data.steps is not None:
        refuse(["epochs"], "--steps says how long to train", "leave out --steps")
    if data.data is None and not result.dry_run:
        raise InputError("there is nothing to train on: give --data PATH, or --dry-run to see the plan alone")
    if request.machine.cluster is not None:
        refuse(["processes"], "--cluster says how many devices there are", "leave out --cluster")
    if request.model.weights is None and not result.random_weights and not result.dry_run:
        raise InputError(
            f"'{request.model.text}' has no weights here: download them (`hf download OWNER/NAME --local-dir FOLDER`) and "
            "name the folder, give --dry-run to see the plan alone, or --random-weights to try it out"
        )


class FineTuning(Preparation):
    """A fine-tuning: the preparation, the training and what comes of it."""

    def _run_words(self, plan: Plan) -> list[object]:
        """Return the words of the command that trains."""
        data, held_out = self.data_folders
        words: list[object] = ["run", self.folder / "plan.json", "--data", data]
        words += ["--held-out", held_out] if held_out is not None else []
        words += ["--out", self.folder / "run", "--checkpoint", self.checkpoints]
        words += ["--checkpoint-every", self._checkpoint_every(plan), "--keep-last", 2]
        return words + (["--random-weights"] if self.request.result.random_weights else [])

    def _checkpoint_every(self, plan: Plan) -> int:
        seconds = max(plan.predictions.step_seconds, 1e-9)
        return self.request.result.checkpoint_every or max(1, int(_BETWEEN_CHECKPOINTS_S / seconds))

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def _done(self) -> int:
        """Number of steps in the newest checkpoint."""
        from stagewright.execution.checkpoint_folder import newest

        checkpoint = newest(self.checkpoints) if self.checkpoints.is_dir() else None
        return 0 if checkpoint is None else checkpoint.manifest.step

    def train(self, plan: Plan) -> Record:
        """Train from the newest checkpoint on, or from the beginning; return the record of the run.

        Raises:
            typer.Exit: a signal stopped it.
        """
        from stagewright.execution import launch
        from stagewright.execution.data.request import DataRequest
        from stagewright.execution.record import load_record

        done, request = self._done, self.request
        out = self.folder / "run"
        if done >= plan.job.num_steps:
            say(f"all {plural(plan.job.num_steps, 'step')} are done")
            return load_record(out / "record.json")
        self.ran(*self._run_words(plan), "--resume" if done else None)
        if done:
            say(f"   from step {done} of {plan.job.num_steps}")
        data, held_out = self.data_folders
        with self._said_on_failure():
            record = launch.run(
                self.folder / "plan.json", data=DataRequest.of(data),
                held_out=None if held_out is None else DataRequest.of(held_out), out=out, device=request.machine.device,
                checkpoint=self.checkpoints, checkpoint_every=self._checkpoint_every(plan), keep_last=2, resume=done > 0,
                random_weights=request.result.random_weights,
            )  # fmt: skip
        assert record is not None, "no launcher started this process"
        if record.stopped_by is not None:
            count = record.first_step + len(record.losses)
            say(
                f"stopped by {record.stopped_by} after step {count} of {plan.job.num_steps}; the same command continues"
            )
            raise typer.Exit(128 + signal.Signals[record.stopped_by])
        return record

    @contextmanager
    def _said_on_failure(self) -> Iterator[None]:
        """Say, when a run fails, that nothing is lost, and how to go on."""
        try:
            yield
        except RunError:
            say(
                f"{plural(self._done, 'step')} are kept: the same command continues there; with another --memory-limit, "
                "--microbatch or other options of machine and parallelism it plans again first"
            )
            raise

    def export(self) -> None:
        """Write the adapters, and the merged model if it was asked for."""
        from stagewright.execution.model_export import export

        names = {"adapter": "--adapter", **({"merged": "--merge"} if self.request.result.merge else {})}
        for name, option in names.items():
            if (self.folder / name).exists():
                continue
            self.ran("checkpoint", "export", self.checkpoints, self.folder / name, option)
            with Progress(f"writing {name}") as progress:
                export(
                    self.checkpoints, self.folder / name, merges=name == "merged", adapter_only=name == "adapter",
                    report=progress,
                )  # fmt: skip

    # -- results ------------------------------------------------------------------------------------------------------

    def held_out_losses(self) -> tuple[float | None, float | None, int]:
        """Return the losses on held-out data before training and after the last step, None where there is none, and the
        number of tokens."""
        from stagewright.execution.logs import STEPS

        path, before, after, num_tokens = self.folder / "run" / STEPS, None, None, 0
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            with suppress(ValueError):  # cut off when the disk was full
                entry = json.loads(line)
                if "held_out_loss" in entry:
                    loss, num_tokens = entry["held_out_loss"], entry["held_out_tokens"]
                    before, after = (before, loss) if entry["step"] else (loss, None)
        return before, after, num_tokens

    def next_commands(self, plan: Plan) -> Iterator[str]:
        """Yield what to do after a dry run."""
        cluster = plan.cluster.load()
        if self.request.data.data is None or self.request.machine.cluster is not None:
            yield f"Wrote {self.folder / 'plan.json'}. With its data, on that machine, the same command trains."
        else:
            yield f"Wrote {self.folder / 'plan.json'}. The same command without --dry-run trains."
        if cluster.num_nodes > 1:
            run = " ".join(shlex.quote(str(word)) for word in self._run_words(plan))
            yield (
                f"On each of the {cluster.num_nodes} machines, with this folder on all of them: `torchrun --nnodes "
                f"{cluster.num_nodes} --nproc-per-node {cluster.nodes[0].devices_per_node} --rdzv-backend c10d "
                f"--rdzv-endpoint HOST:29500 -m stagewright.cli {run}`, then `stagewright checkpoint export "
                f"{self.checkpoints} {self.folder / 'adapter'} --adapter`."
            )

    def result_lines(self, record: Record) -> Iterator[str]:
        """Yield what came of it."""
        from stagewright.execution.logs import perplexity

        first, last = (loss for loss in (record.losses[0], record.losses[-1]))
        lost = [loss for loss in (first, last) if loss is None]
        yield "" if lost else f"Loss {first:.4f} at step {record.first_step + 1}, {last:.4f} at the last."
        before, after, num_tokens = self.held_out_losses()
        losses = [
            f"{loss:.4f} {when} (perplexity {perplexity(loss):,.4g})"
            for loss, when in ((before, "before training"), (after, "after training"))
            if loss is not None
        ]
        if losses:
            yield f"Held-out loss over {plural(num_tokens, 'token')}: {', '.join(losses)}."
        yield f"Adapters for peft: {self.folder / 'adapter'}."
        if (self.folder / "merged").exists():
            yield f"Merged model: {self.folder / 'merged'}."

    def document(self, plan: Plan, record: Record | None = None) -> dict[str, Any]:
        """Return the document of `--json`."""
        from stagewright.report.finetuning import held_in
        from stagewright.report.plans import estimate_document

        before, after, _ = self.held_out_losses()
        names = ("adapter", "merged")
        return {
            "folder": str(self.folder),
            "commands": self.verbs,
            "base": held_in(plan),
            "num_steps": plan.job.num_steps,
            "data": None if self.summary is None else vars(self.summary),
            "plan": estimate_document(plan),
            "losses": None if record is None else list(record.losses),
            "held_out_loss_before": before,
            "held_out_loss": after,
            **{name: str(self.folder / name) if (self.folder / name).exists() else None for name in names},
        }
