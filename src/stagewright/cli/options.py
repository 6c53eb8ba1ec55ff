"""Arguments and options that several verbs share, and the inputs they are read into."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from stagewright.documents import parse_json_or_text, read_json
from stagewright.errors import InputError, nearest
from stagewright.text import say
from stagewright.units import parse_count

if TYPE_CHECKING:
    from stagewright.cluster import Cluster
    from stagewright.planning.job import Job
    from stagewright.planning.plan import Plan

# fmt: off
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Model = Annotated[
    str, typer.Argument(metavar="MODEL",
        help="A bundled name (`stagewright models`), config.json, Hugging Face directory or id, or "
        "package.module:factory.")]
ComparedModel = Annotated[
    str | None, typer.Argument(metavar="MODEL",
        help="A bundled name (`stagewright models`), config.json, Hugging Face folder or id, package.module:factory; "
        "default --compare's.")]
TokenizerPath = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="tokenizer.json or the folder of a Hugging Face tokenizer; default bytes."),
]
TextField = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which field of each record is its text; default what its keys say.")
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
    str | None, typer.Option("--cluster", "-c", metavar="C", help="The cluster; default the one the plan describes.")]
JobFile = Annotated[Path | None, typer.Option("--job", metavar="FILE", help="A job.toml; options override it.")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", help="Samples per optimizer step.")]
JobSequenceLength = Annotated[int | None, typer.Option("--sequence-length", help="Tokens per sample.")]
JobSequenceLengths = Annotated[
    str | None, typer.Option("--sequence-lengths", metavar="N,N,...",
        help="Tokens per sample of the steps, in turn, in place of --sequence-length: one plan for all.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="bf16, fp16, fp32, tf32, fp8, fp64 or autocast; default bf16.")]
Compiled = Annotated[bool, typer.Option("--compiled", help="Predict compiled execution: fused operators.")]
DocumentsApart = Annotated[
    bool, typer.Option("--documents-apart",
        help="Documents that share a sample do not see each other: positions begin anew, attention does not cross.")]
RuntimeName = Annotated[
    str | None, typer.Option("--runtime", metavar="NAME",
        help="Whose execution is predicted: stagewright (the default), megatron-core+te, megatron-lm, megatron-deepspeed, "
        "deepspeed, deepspeed-tf32, zero-bubble, torch-fsdp, or a runtime.toml.")]
Profile = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE",
        help="Measured seconds of operators that `stagewright profile` wrote; they are taken where they fit.")]
RecordFile = Annotated[
    Path | None, typer.Option("--record", metavar="FILE",
        help="The record.json of a run on this cluster: its ranks compute as fast as they did there.")]
OptimizerName = Annotated[
    str | None, typer.Option("--optimizer", metavar="NAME",
        help="One of torch.optim in small letters, or package.module:factory; default adamw.")]
OptimizerOptions = Annotated[
    list[str] | None, typer.Option("--optimizer-option", metavar="NAME=VALUE",
        help="A further argument of the optimizer, as momentum=0.9; repeatable.")]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", metavar="SIZE", help="Memory a rank may use, e.g. 16GiB.")]
PipelineWidth = Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline parallelism: ranks of a pipeline.")]
TensorWidth = Annotated[
    int | None, typer.Option("--tp", min=1, help="Tensor parallelism: ranks that every layer is split over.")]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel", help="Ranks of --tp also split the sequence between layers.")]
ContextWidth = Annotated[
    int | None, typer.Option("--cp", min=1, help="Context parallelism: ranks that divide every sample's tokens.")]
ExpertWidth = Annotated[
    int | None, typer.Option("--ep", min=1,
        help="Expert parallelism: ranks of a stage that every layer's experts are sharded over.")]
DataWidth = Annotated[int | None, typer.Option("--dp", min=1, help="Data parallelism: replicas.")]
Zero = Annotated[
    int | None, typer.Option(min=0, max=3, metavar="LEVEL",
        help="What is sharded over replicas: 1 optimizer state, 2 gradients too, 3 parameters too; 0 nothing.")]
ReduceDtype = Annotated[
    str | None, typer.Option(metavar="TYPE", help="Sum gradients over replicas in fp32 or bf16; default as they are.")]
ShardSize = Annotated[
    int | None, typer.Option(min=1, metavar="N",
        help="Replicas in a shard group at most, say those of a node; groups hold copies.")]
ShardUnits = Annotated[
    str, typer.Option(metavar="N|auto",
        help="Pieces in which replicas gather and reduce a stage, with --zero 2 and 3; auto: the fastest in memory.")]
LossPieces = Annotated[
    str, typer.Option("--loss-pieces", metavar="N|auto",
        help="Slices of a microbatch's tokens for which head and loss are evaluated one after the other; auto: several "
        "where logits are large, or with `plan` where memory is short.")]
# fmt: on


def parse_settings(texts: list[str] | None, option: str = "--set") -> dict[str, Any]:
    """Overrides from ``key=value``; a value is read as JSON where it is JSON, else as text.

    Raises:
        InputError: a text without an equals sign, or a value such as NaN.

    >>> parse_settings(["num_hidden_layers=2", "hidden_act=gelu", "tie_word_embeddings=true"])
    {'num_hidden_layers': 2, 'hidden_act': 'gelu', 'tie_word_embeddings': True}
    """
    found: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            example = "num_hidden_layers=4" if option == "--set" else "momentum=0.9"
            raise InputError(f"{option} {text}: write KEY=VALUE, e.g. {option} {example}")
        found[key.strip()] = parse_json_or_text(value, f"{option} {key.strip()}")
    return found


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def torch_dtype(text: str) -> str:
    """The name of a precision as the graph writes it.

    Raises:
        InputError: an unknown precision; names the nearest.

    >>> torch_dtype("bf16"), torch_dtype("float32")
    ('bfloat16', 'float32')
    """
    name = _DTYPES.get(text.lower(), text.lower())
    if name not in _DTYPES.values():
        known = [*_DTYPES, *_DTYPES.values()]
        raise InputError(f"unknown precision '{text}'{nearest(text, known)}: one of {', '.join(_DTYPES)}")
    return name


def checked_shard_units(text: str) -> int | None:
    """The number of pieces, None for ``auto``; raises `InputError` for what is neither."""
    number = parse_count(text)
    if text != "auto" and not number:
        raise InputError(f"--shard-units {text}: give auto, or how many pieces a stage is gathered in, as 8")
    return number


def parse_pieces(text: str) -> int | Literal["auto"]:
    """
    >>> parse_pieces("4"), parse_pieces("auto")
    (4, 'auto')
    """
    if text == "auto":
        return "auto"
    if not (pieces := parse_count(text)):
        raise InputError(f"--loss-pieces {text}: give a number of slices, or auto")
    return pieces


def checked_reduce_dtype(text: str | None) -> Literal["fp32", "bf16"] | None:
    """Raises `InputError` for a type in which no gradients are summed."""
    from stagewright.planning.plan import REDUCE_TYPES

    if text is not None and text not in REDUCE_TYPES:
        raise InputError(f"--reduce-dtype {text}{nearest(text, REDUCE_TYPES)}: give fp32 or bf16")
    return cast('Literal["fp32", "bf16"] | None', text)


def parse_lengths(text: str | None) -> tuple[int, ...] | None:
    """
    >>> parse_lengths("512,512,4096"), parse_lengths(None)
    ((512, 512, 4096), None)
    """
    return _counts(
        text, "--sequence-lengths", "numbers of tokens with commas between, as 512,1024,4096", least=1
    )


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """
    >>> parse_layers("3,4,4,3"), parse_layers(None)
    ((3, 4, 4, 3), None)
    """
    return _counts(text, "--layers-per-stage", "numbers of layers with commas between, as 3,4,4,3", least=0)


def parse_microbatches(text: str) -> tuple[int, ...]:
    """
    >>> parse_microbatches("1,2,2,4")
    (1, 2, 4)
    """
    sizes = _counts(text, "--microbatches", "numbers of samples with commas between, as 1,2,4", least=1)
    return tuple(dict.fromkeys(sizes or ()))


def _counts(text: str | None, option: str, what: str, least: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    counts = [parse_count(part) for part in text.split(",")]
    if any(count is None or count < least for count in counts):
        raise InputError(f"{option} {text}: give {what}")
    return tuple(count for count in counts if count is not None)


def read_job(path: Path | None, **options: Any) -> Job:
    """The job of a file with the given options in place; options that are None were not given. Raises `InputError` for a
    missing or wrong key, in the words of the command line where no file was given."""
    from stagewright.planning.job import load_job

    given = {key: value for key, value in options.items() if value is not None}
    if "sequence_lengths" in given:
        given.setdefault("sequence_length", max(given["sequence_lengths"]))
    elif "sequence_length" in given:
        given["sequence_lengths"] = ()  # in place of those of the file
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
    """Raises `InputError` for a job of several sequence lengths, which `what` would not look at."""
    if job.sequence_lengths:
        raise InputError(
            f"sequence_lengths {list(job.sequence_lengths)}: {what} knows one length only; give --sequence-length in their "
            "place"
        )


def cluster_of(plan: Plan, name: str | None) -> Cluster:
    """The cluster `name`, or the one the plan was made for. Raises `InputError` where there is no such cluster, or the
    plan describes none and that is not in the catalog."""
    from stagewright.cluster import load_cluster

    return plan.cluster.load() if name is None else load_cluster(name)


def as_measured(cluster: Cluster, profile: Path | None, record: Path | None) -> Cluster:
    """`cluster` with what a profile says of its operators and a record of the pace of its devices, where these are given.

    Raises:
        InputError: a file is not what it should be, or of another kind of device or another number of them.
    """
    from stagewright.cluster import load_profile, paced

    if profile is not None:
        cluster = cluster.with_profile(load_profile(profile))
    if record is None:
        return cluster
    from stagewright.execution.record import load_record

    ran = load_record(record)
    if not ran.paces:
        raise InputError(
            f"{record} says of no rank how fast it was: give the record of a run of 3 steps or more"
        )
    if max(ran.paces) >= cluster.num_devices:
        raise InputError(
            f"{record} is of a run on {max(ran.paces) + 1} devices or more, and cluster '{cluster.name}' has "
            f"{cluster.num_devices}: name the cluster that it ran on"
        )
    return paced(cluster, ran.paces)


def is_plan(text: str) -> bool:
    """Whether `text` names a file that holds a plan (and not, say, a model's configuration)."""
    path = Path(text)
    if path.suffix != ".json" or not os.path.isfile(path):
        return False
    try:
        document = read_json(path, "plan")
    except InputError:
        return False
    return isinstance(document, dict) and "predictions" in document


def warn(messages: Iterable[str]) -> None:
    """Says on stderr what the user should know about a result."""
    for message in messages:
        say(f"warning: {message}")
