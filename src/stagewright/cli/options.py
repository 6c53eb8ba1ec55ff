"""Arguments and options that several verbs share, and functions that parse them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from stagewright.documents import parse_json_or_text
from stagewright.errors import InputError, nearest
from stagewright.text import say
from stagewright.units import parse_count

if TYPE_CHECKING:
    from stagewright.cluster import Cluster
    from stagewright.planning.job import Job
    from stagewright.tracing.models.reference import ModelReference

# fmt: off
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Model = Annotated[
    str, typer.Argument(metavar="MODEL",
        help="A bundled name (`stagewright models`), config.json, Hugging Face directory or id, or "
        "package.module:factory.")]
ComparedModel = Annotated[
    str | None, typer.Argument(metavar="MODEL",
        help="A bundled name (`stagewright models`), config.json, Hugging Face folder or id, package.module:factory; "
        "default: from --compare.")]
TokenizerPath = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="tokenizer.json or the folder of a Hugging Face tokenizer; default: bytes."),
]
TextField = Annotated[
    str | None, typer.Option(metavar="NAME", help="The field of each record that holds its text; default: inferred.")
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json that `stagewright plan` wrote.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE",
        help="Change a key of the model's configuration; repeatable.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write the result.")]
SequenceLength = Annotated[int, typer.Option("--sequence-length", min=1, help="Tokens per sample.")]
MicrobatchSize = Annotated[int, typer.Option("--microbatch", min=1, help="Samples per microbatch.")]
ClusterName = Annotated[
    str, typer.Option("--cluster", "-c", metavar="C", help="A catalog name such as 8x-h100, or a cluster.toml.")]
PlannedCluster = Annotated[
    str | None, typer.Option("--cluster", "-c", metavar="C", help="The cluster; default: the plan's.")]
JobFile = Annotated[Path | None, typer.Option("--job", metavar="FILE", help="A job.toml; options override it.")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", help="Samples per optimizer step.")]
JobSequenceLength = Annotated[int | None, typer.Option("--sequence-length", help="Tokens per sample.")]
JobSequenceLengths = Annotated[
    str | None, typer.Option("--sequence-lengths", metavar="N,N,...",
        help="Sequence lengths that steps take in turn, instead of --sequence-length; one plan for all.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="bf16, fp16, fp32, tf32, fp8, fp64 or autocast; default: bf16.")]
Compiled = Annotated[bool, typer.Option("--compiled", help="Predict compiled execution, with fused operators.")]
DocumentsApart = Annotated[
    bool, typer.Option("--documents-apart",
        help="Mask attention between the documents of a sample, and restart positions at each.")]
RuntimeName = Annotated[
    str | None, typer.Option("--runtime", metavar="NAME",
        help="The runtime to predict: stagewright (the default), megatron-core+te, megatron-core+te-bf16-gradients, "
        "megatron-lm, megatron-deepspeed, deepspeed, deepspeed-tf32, zero-bubble, torch-fsdp, torchtitan-pipeline, "
        "nanotron, or a runtime.toml.")]
Profile = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE",
        help="Operator times measured by `stagewright profile`, used where they match.")]
RecordFile = Annotated[
    Path | None, typer.Option("--record", metavar="FILE",
        help="The record.json of a run on this cluster, for the measured speed of each rank.")]
OptimizerName = Annotated[
    str | None, typer.Option("--optimizer", metavar="NAME",
        help="An optimizer of torch.optim in lower case, or package.module:factory; default: adamw.")]
OptimizerOptions = Annotated[
    list[str] | None, typer.Option("--optimizer-option", metavar="NAME=VALUE",
        help="A further argument of the optimizer, e.g. momentum=0.9; repeatable.")]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", metavar="SIZE", help="Memory a rank may use, e.g. 16GiB.")]
PipelineDegree = Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline parallelism: ranks per pipeline.")]
TensorDegree = Annotated[
    int | None, typer.Option("--tp", min=1, help="Tensor parallelism: ranks that each layer is split over.")]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel", help="Use sequence parallelism over the ranks of --tp.")]
ContextDegree = Annotated[
    int | None, typer.Option("--cp", min=1, help="Context parallelism: ranks that each sample's tokens are split over.")]
ExpertDegree = Annotated[
    int | None, typer.Option("--ep", min=1,
        help="Expert parallelism: ranks of a stage that each layer's experts are sharded over.")]
DataDegree = Annotated[int | None, typer.Option("--dp", min=1, help="Data parallelism: replicas.")]
Zero = Annotated[
    int | None, typer.Option(min=0, max=3, metavar="LEVEL",
        help="ZeRO level: shard over replicas 1 optimizer state, 2 also gradients, 3 also parameters; 0 nothing.")]
ReduceDtype = Annotated[
    str | None, typer.Option(metavar="TYPE", help="Type of gradient reductions, fp32 or bf16; default: the gradients'.")]
ShardSize = Annotated[
    int | None, typer.Option(min=1, metavar="N",
        help="Maximum replicas per shard group, e.g. those of a node; groups replicate each other.")]
ShardUnits = Annotated[
    str, typer.Option(metavar="N|auto",
        help="Pieces in which a stage is gathered and reduced, with --zero 2 and 3; auto: the fastest that fits.")]
LossPieces = Annotated[
    str, typer.Option("--loss-pieces", metavar="N|auto",
        help="Slices of a microbatch's tokens for which head and loss are computed one after the other; auto: several "
        "where logits are large or, with `plan`, where memory is short.")]
# fmt: on


def parse_settings(texts: list[str] | None, option: str = "--set") -> dict[str, Any]:
    """Return overrides from ``key=value``; a value is parsed as JSON if it is JSON, else taken as text.

    Raises:
        InputError: a text without an equals sign, or a value such as NaN.

    >>> parse_settings(["num_hidden_layers=2", "hidden_act=gelu", "tie_word_embeddings=true"])
    {'num_hidden_layers': 2, 'hidden_act': 'gelu', 'tie_word_embeddings': True}
    """
    overrides: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            example = "num_hidden_layers=4" if option == "--set" else "momentum=0.9"
            raise InputError(f"{option} {text}: write KEY=VALUE, e.g. {option} {example}")
        overrides[key.strip()] = parse_json_or_text(value, f"{option} {key.strip()}")
    return overrides


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def torch_dtype(text: str) -> str:
    """Return the name of a precision as the graph writes it.

    Raises:
        InputError: unknown precision; the message names the nearest.

    >>> torch_dtype("bf16"), torch_dtype("float32")
    ('bfloat16', 'float32')
    """
    name = _DTYPES.get(text.lower(), text.lower())
    if name not in _DTYPES.values():
        names = [*_DTYPES, *_DTYPES.values()]
        raise InputError(f"unknown precision '{text}'{nearest(text, names)}: one of {', '.join(_DTYPES)}")
    return name


def checked_shard_units(text: str) -> int | None:
    """Return the number of pieces, None for ``auto``. Raises `InputError` for anything else."""
    number = parse_count(text)
    if text != "auto" and not number:
        raise InputError(
            f"--shard-units {text}: give auto, or the number of pieces a stage is gathered in, e.g. 8"
        )
    return number


def parse_pieces(text: str) -> int | Literal["auto"]:
    """Return the number of loss pieces or ``auto``.

    >>> parse_pieces("4"), parse_pieces("auto")
    (4, 'auto')
    """
    if text == "auto":
        return "auto"
    if not (pieces := parse_count(text)):
        raise InputError(f"--loss-pieces {text}: give a number of slices, or auto")
    return pieces


def checked_reduce_dtype(text: str | None) -> Literal["fp32", "bf16"] | None:
    """Return `text`. Raises `InputError` for a data type in which gradients cannot be reduced."""
    from stagewright.planning.plan import REDUCE_TYPES

    if text is not None and text not in REDUCE_TYPES:
        raise InputError(f"--reduce-dtype {text}{nearest(text, REDUCE_TYPES)}: give fp32 or bf16")
    return cast('Literal["fp32", "bf16"] | None', text)


def parse_lengths(text: str | None) -> tuple[int, ...] | None:
    """Return sequence lengths.

    >>> parse_lengths("512,512,4096"), parse_lengths(None)
    ((512, 512, 4096), None)
    """
    return _counts(
        text, "--sequence-lengths", "numbers of tokens separated by commas, e.g. 512,1024,4096", least=1
    )


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Return numbers of layers.

    >>> parse_layers("3,4,4,3"), parse_layers(None)
    ((3, 4, 4, 3), None)
    """
    return _counts(text, "--layers-per-stage", "numbers of layers separated by commas, e.g. 3,4,4,3", least=0)


def parse_microbatches(text: str) -> tuple[int, ...]:
    """Return microbatch sizes without duplicates.

    >>> parse_microbatches("1,2,2,4")
    (1, 2, 4)
    """
    sizes = _counts(text, "--microbatches", "numbers of samples separated by commas, e.g. 1,2,4", least=1)
    return tuple(dict.fromkeys(sizes or ()))


def _counts(text: str | None, option: str, what: str, least: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    counts = [parse_count(part) for part in text.split(",")]
    if any(count is None or count < least for count in counts):
        raise InputError(f"{option} {text}: give {what}")
    return tuple(count for count in counts if count is not None)


def read_job(path: Path | None, model: ModelReference, **options: Any) -> Job:
    """Return the job of a file, overridden by `options`; options that are None were not given. Where samples of `model` are
    not sequences, their length need not be given.

    Raises:
        InputError: a key is missing or wrong; the message names options where no file was given.
    """
    from stagewright.planning.job import load_job

    given = {key: value for key, value in options.items() if value is not None}
    if "sequence_lengths" in given:
        given.setdefault("sequence_length", max(given["sequence_lengths"]))
    elif "sequence_length" in given:
        given["sequence_lengths"] = ()  # overrides those of the file
    elif path is None and not model.has_sequence:
        given["sequence_length"] = 1
    missing = [key for key in ("global_batch", "sequence_length") if key not in given]
    if path is None and missing:
        names = " and ".join(f"--{key.replace('_', '-')}" for key in missing)
        raise InputError(f"the job is incomplete: give {names}, or a job file with --job")
    job = load_job(path, given)
    if job.has_factory:
        from stagewright.cli.consent import say_what_runs

        say_what_runs(job.optimizer)
    return job


def check_one_length(job: Job, what: str) -> None:
    """Raise `InputError` for a job of several sequence lengths, which `what` does not support."""
    if job.sequence_lengths:
        raise InputError(
            f"sequence_lengths {list(job.sequence_lengths)}: {what} supports one length only; give --sequence-length "
            "instead"
        )


def as_measured(cluster: Cluster, profile: Path | None, record: Path | None) -> Cluster:
    """Return `cluster` with measured operator times from a profile and device speeds from a record, where given.

    Raises:
        InputError: a file is invalid, or of another kind or number of devices.
    """
    from stagewright.cluster import load_profile, with_slower_devices

    if profile is not None:
        cluster = cluster.with_profile(load_profile(profile))
    if record is None:
        return cluster
    from stagewright.execution.record import load_record

    run = load_record(record)
    if not run.device_slowdowns:
        raise InputError(f"{record} has no speed of any rank: give the record of a run of 3 steps or more")
    if max(run.device_slowdowns) >= cluster.num_devices:
        raise InputError(
            f"{record} is of a run on {max(run.device_slowdowns) + 1} devices or more, but cluster '{cluster.name}' has "
            f"{cluster.num_devices}: name the cluster of the run"
        )
    return with_slower_devices(cluster, run.device_slowdowns)


def warn(messages: Iterable[str]) -> None:
    """Print warnings about a result on stderr."""
    for message in messages:
        say(f"warning: {message}")
