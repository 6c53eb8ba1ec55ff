"""Options of `stagewright finetune`, and the request that they make with a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli import options

if TYPE_CHECKING:
    from stagewright.planning.space import Space
    from stagewright.tracing.models.reference import ModelReference

RANK, TARGETS = 16, "all-linear"
DTYPES = ("bf16", "fp16", "fp32")
"""Types that the frozen model may be held in as it is computed in."""
QUANTISED = ("fp8", "int8", "nf4")
"""Smaller numbers that its linear layers may be stored in."""


# fmt: off
FinetunedModel = Annotated[
    str | None, typer.Argument(metavar="MODEL",
        help="Folder or id of a Hugging Face model; default: from --from.")]
FromProgram = Annotated[
    Path | None, typer.Option("--from", metavar="FILE",
        help="Read model, data, adapters and training from YAML of axolotl, LLaMA-Factory or TRL, or a script of TRL or "
        "unsloth; options override it.")]


@dataclass(frozen=True)
class FinetuneDataOptions:
    """Data."""

    data: Annotated[
        str | None, typer.Option("--data", metavar="PATH",
            help="Chats, prompts with completions, instructions or texts: .jsonl, .parquet, a datasets folder.")] = None
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="tokenizer.json or a folder; default: the model's.")] = None
    text_field: options.TextField = None
    held_out: Annotated[
        float, typer.Option("--held-out", metavar="SHARE", min=0, max=0.5,
            help="Share of the documents to evaluate on, before and after training, instead of training on it.")] = 0.05
    epochs: Annotated[float, typer.Option(metavar="N", help="Number of times to train on every sample.")] = 1.0
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Optimizer steps, instead of --epochs.")] = None
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", min=1, metavar="TOKENS",
            help="Tokens per sample; default: the longest document's, at most 2048.")] = None
    documents_apart: Annotated[
        bool, typer.Option("--documents-apart/--documents-together",
            help="Whether documents packed into a sample are hidden from each other.")] = True


@dataclass(frozen=True)
class TrainingOptions:
    """Training."""

    global_batch: Annotated[
        int | None, typer.Option("--global-batch", metavar="N", min=1, help="Samples per step; default: 16.")] = None
    learning_rate: Annotated[float, typer.Option(metavar="RATE", help="Peak learning rate.")] = 2e-4
    lr_schedule: Annotated[str, typer.Option(metavar="NAME", help="Decay: constant, linear, cosine or wsd.")] = "cosine"
    warmup_steps: Annotated[int | None, typer.Option(min=0, metavar="N", help="Number of warmup steps.")] = None
    warmup_ratio: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=1, help="Share of the steps that warm up, if not --warmup-steps.")
    ] = 0.03
    weight_decay: Annotated[float, typer.Option(metavar="W", help="Weight decay of the adapters.")] = 0.0
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the adapters and of the order of samples.")] = 0
    base: Annotated[
        str, typer.Option("--base", metavar="PRECISION",
            help="Hold the frozen model in bf16, fp16, fp32, fp8, int8, nf4, or auto, the most exact that fits.")] = "auto"


@dataclass(frozen=True)
class MachineOptions:
    """Machine."""

    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", metavar="C",
            help="Plan for a catalog name or cluster.toml; default: this machine, which is measured once.")] = None
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto"
    processes: Annotated[
        int | None, typer.Option("--processes", "-n", min=1, metavar="N",
            help="Number of GPUs, or of processes on the CPU; default: all GPUs, or one process.")] = None
    memory_limit: options.MemoryLimit = None
    memory_to_spare: Annotated[
        float, typer.Option("--memory-to-spare", metavar="SHARE", min=0, max=0.9,
            help="Share of every card's memory to leave free.")] = 0.1
    within: Annotated[
        float, typer.Option("--within", metavar="SECONDS", min=0,
            help="End the search for a plan then with the best so far, or as soon as it has one.")] = 120.0


@dataclass(frozen=True)
class FinetuneResultOptions:
    """Results."""

    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of all files; default: runs/finetune-MODEL-DATA.")] = None
    merge: Annotated[bool, typer.Option("--merge", help="Also write the model with the adapters merged.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after the plan.")] = False
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Start from random weights, to try out a model without any.")] = False
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, metavar="N",
            help="Steps between checkpoints; default: those of ten minutes.")] = None
    as_json: options.Json = False
# fmt: on


def quantised_bases(model: ModelReference, base: str) -> tuple[str, ...]:
    """Return the quantised bases to plan with where the frozen `model` is to be held in `base`, from the most exact to the
    smallest. Of weights that are published in fp8 that is the most exact in 8 bits, of all others int8."""
    from stagewright.tracing.models.quantised import keeps_fp8

    if base == "auto":
        return ("fp8" if keeps_fp8(model.config or {}) else "int8", "nf4")
    return (base,) if base in QUANTISED else ()


@dataclass(frozen=True)
class FinetuneRequest:
    """All that a fine-tuning is asked to do."""

    models: Mapping[str | None, ModelReference]
    """The model with adapters, by what its linear layers are stored in; None: the type that it is computed in."""
    data: FinetuneDataOptions
    training: TrainingOptions
    machine: MachineOptions
    result: FinetuneResultOptions
    space: Space
    space_words: tuple[str, ...]
    """The options of the space, as words of a command."""
    job: Mapping[str, Any]
    """Fields of the job that have no option here, as a file of another program says them."""

    @property
    def model(self) -> ModelReference:
        """The model with adapters, not quantised."""
        return self.models[None]

    @property
    def quantised(self) -> tuple[str, ...]:
        """The quantised bases to plan with, from the most exact to the smallest."""
        return tuple(base for base in self.models if base is not None)

    @property
    def folder(self) -> Path:
        """The folder of all its files."""
        if self.result.out is not None:
            return self.result.out
        data = "" if self.data.data is None else f"-{Path(self.data.data).name.partition('.')[0]}"
        return Path("runs") / f"finetune-{Path(self.model.name).name}{data}"

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer given, or the folder of the model if it has one."""
        from stagewright.execution.data.tokenizers import TOKENIZER_FILES

        folder = self.model.weights or Path(self.model.text)
        if self.data.tokenizer is not None or not any((folder / name).is_file() for name in TOKENIZER_FILES):
            return self.data.tokenizer
        return folder

    def identity(self, data_digest: str) -> dict[str, Any]:
        """Return what is trained, which a fine-tuning must have in common with one that it continues."""
        return {
            "model": self.model.digest,
            "lora": None if self.model.lora is None else self.model.lora.structure,
            **vars(self.data),
            "data": data_digest,
            "tokenizer": str(self.tokenizer),
            **vars(self.training),
            "job": self.job,
            "random_weights": self.result.random_weights,
        }

    @property
    def way(self) -> dict[str, Any]:
        """How it is trained, which may change from start to start."""
        return {**vars(self.machine), "within": None, "space": self.space_words}
