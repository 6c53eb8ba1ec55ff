"""The plan: everything needed to reproduce a run, and its predictions; `plan.json` on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_serializer, model_validator

from stagewright.cluster import Cluster, given_cluster, load_cluster
from stagewright.cluster.catalog import is_catalog_name
from stagewright.cluster.schema import StrictModel, validated
from stagewright.documents import CHECKSUM, read_sealed_json, sealed
from stagewright.errors import InputError, ScheduleError
from stagewright.files import write_whole
from stagewright.frames import data_frame, html_table
from stagewright.graph import OperatorGraph
from stagewright.graph.expert_parallel import expert_parallel_fault
from stagewright.limits import MOST_ACTIONS, MOST_DEVICES, MOST_SAMPLES, MOST_STAGES, MOST_TOKENS
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.predictions import Bytes, LengthPrediction, Predictions, StepCosts
from stagewright.schedule.placement import Placement
from stagewright.schedule.program import check_name
from stagewright.tracing.cache import is_compared
from stagewright.tracing.dependencies import Dependencies, other_contents
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.tracing.models.source import factory_file, split_factory
from stagewright.units import format_seconds

if TYPE_CHECKING:
    from pandas import DataFrame

VERSION = 1
_REQUIRED_COSTS = frozenset(name for name, field in StepCosts.model_fields.items() if field.is_required())
REDUCE_TYPES = {"fp32": "float32", "bf16": "bfloat16"}


class ModelSection(StrictModel):
    """The model of a plan: the reference as the user wrote it, and the digest of its structure."""

    text: str
    overrides: dict[str, Any] = Field(default_factory=dict)
    digest: str
    name: str
    lora: Lora | None = None
    """Adapters that are trained in place of the model."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files that a factory's code imported and read when the plan was made: SHA-256 by path from the folder of its file."""

    @property
    def is_code(self) -> bool:
        """Whether the model is a factory, whose code runs when the model is built; other models are data."""
        return split_factory(self.text) is not None

    @classmethod
    def of(cls, reference: ModelReference, graph: OperatorGraph | None = None) -> ModelSection:
        """Return the section of the model of `reference`, traced to `graph`."""
        factory = None if graph is None else factory_file(reference.text)
        files = (
            {}
            if graph is None or factory is None
            else Dependencies.of_facts(graph.facts).contents_relative_to(factory)
        )
        return cls(
            files=files,
            text=reference.text,
            overrides=dict(reference.overrides),
            digest=reference.digest,
            name=reference.name,
            lora=reference.lora,
        )

    def found_from(self, folder: Path) -> ModelSection:
        """Return this section with the path of a factory's file, if it is relative to `folder`, made relative to the current
        folder: a plan is often used in another folder than it was made in."""
        name = split_factory(self.text)
        if name is None or not name.is_file or Path(name.module).expanduser().exists():
            return self
        nearby = folder / name.module
        return self.model_copy(update={"text": f"{nearby}:{name.function}"}) if nearby.is_file() else self

    def reference(self) -> ModelReference:
        """Return the model as it is now, which may have changed. Raises `InputError` if it no longer exists."""
        return resolve(self.text, self.overrides).adapted(self.lora)

    def change(self, reference: ModelReference) -> str:
        """Return a text about what has changed in the model of `reference` since the plan, empty if nothing has."""
        if reference.digest != self.digest:
            return f"its config or source, whose digest is {reference.digest[:12]} and was {self.digest[:12]}"
        factory = factory_file(reference.text)
        changed = "" if factory is None else other_contents(factory, self.files)
        return f"'{changed}', which it uses" if changed else ""

    def resolved(self) -> ModelReference:
        """Return the model of the plan.

        Raises:
            InputError: it no longer exists, or it has changed.
        """
        reference = self.reference()
        if change := self.change(reference):
            raise InputError(
                f"model '{self.text}' has changed since the plan was made ({change}): plan again"
            )
        return reference


class ClusterSection(StrictModel):
    """The cluster that the predictions are for.

    The description is kept for catalog clusters too: a probed cluster has no name there, and a changed catalog must not
    change the meaning of an old plan. Plans of other programs may leave it out.
    """

    name: str
    num_devices: int = Field(ge=1, le=MOST_DEVICES)
    device: str
    description: Cluster | None = None

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterSection:
        """Return the section that describes `cluster`; devices of several kinds are named one after the other."""
        return cls(
            name=cluster.name,
            num_devices=cluster.num_devices,
            device=" + ".join(dict.fromkeys(group.device.name for group in cluster.nodes)),
            description=Cluster.model_validate(_compact(cluster)),
        )

    @field_serializer("description")
    def _described(self, description: Cluster | None) -> dict[str, Any] | None:
        return None if description is None else _compact(description)

    @property
    def kind(self) -> str:
        """``cuda`` or ``cpu``, whose kernels the model is traced with; ``cuda`` if the section does not say."""
        is_described = self.description is not None or is_catalog_name(self.name)
        return self.load().kind if is_described else "cuda"

    def load(self) -> Cluster:
        """Return the cluster as described, or without a description the one of that name in the catalog.

        Raises:
            InputError: there is no description, and the name is not in the catalog.
        """
        if self.description is not None:
            return self.description
        if not is_catalog_name(self.name):
            raise InputError(
                f"the plan was made for cluster '{self.name}', which it does not describe and which is not in the "
                "catalog: give its file with --cluster"
            )
        return load_cluster(self.name)


def _compact(cluster: Cluster) -> dict[str, Any]:
    """Return the document of `cluster` without absent figures and without sources."""
    return _without_sources(cluster.model_dump(exclude_none=True, include=set(Cluster.model_fields)))


def _without_sources(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_sources(item) for key, item in value.items() if key != "sources"}
    if isinstance(value, list | tuple):
        return [_without_sources(item) for item in value]
    return value


class GraphSection(StrictModel):
    """The graph of a plan, so that a run notices if its own is different."""

    digest: str
    """Digest of the names and operators of the forward, from `stagewright.graph.document.graph_digest`."""
    operators: dict[str, str] = Field(default_factory=dict)
    """Kinds of the operators that cuts and memory policies name, by their names."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Versions of the packages that traced it: torch and transformers."""


class StagePolicy(StrictModel):
    """The memory policy of one stage: values to recompute, offload or keep, by the names ``module:ordinal`` of their
    operators."""

    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    """Values kept to recompute from, which the backward itself may not need."""
    fetch_ahead: Bytes = 0
    """Maximum bytes fetched from the host before their first use, and maximum bytes on their way to it."""
    reruns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Where recomputing once is not enough: pairs of an operator and those recomputed in its backward, each as often as it
    is named. `recompute` then names the same operators, and `checkpoints` none."""

    @property
    def names(self) -> Iterator[str]:
        """Names of all operators in the policy."""
        yield from (*self.recompute, *self.offload, *self.checkpoints)
        for target, again in self.reruns:
            yield from (target, *again)

    @model_validator(mode="after")
    def _reruns_agree(self) -> StagePolicy:
        differ = {name for _, names in self.reruns for name in names} ^ {*self.recompute}
        if self.reruns and differ:
            raise ValueError(
                f"recompute and reruns must name the same operators, but '{min(differ)}' is in only one of them"
            )
        if self.reruns and self.checkpoints:
            raise ValueError(
                "with reruns, values that are used before they are recomputed are kept anyway: leave out checkpoints"
            )
        return self


class Plan(StrictModel):
    """A complete plan. Tensor parallel rank `t` of pipeline rank `p` of replica `d` is global rank
    ``(p * dp + d) * tp + t``; context parallel ranks are numbered like replicas, neighbours first."""

    def __repr__(self) -> str:
        """Return the main facts; a plan's document is long."""
        microbatches = "microbatch" if self.num_microbatches == 1 else "microbatches"
        return (
            f"<Plan of {self.model.name} on {self.cluster.name}: {self.degrees}, {self.schedule}, "
            f"{self.num_microbatches} {microbatches} of size {self.microbatch_size}, "
            f"{format_seconds(self.predictions.step_seconds)} a step>"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the main facts and a table of stages, for a notebook."""
        return html_table(repr(self).strip("<>"), *self._stage_rows())

    def to_dataframe(self) -> DataFrame:
        """Return one row per stage: rank, cut, seconds and bytes of one microbatch. Raises `InputError` without pandas."""
        return data_frame(*self._stage_rows())

    def _stage_rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return the names of the columns and one row per stage."""
        stages = [stage.model_dump() for stage in self.predictions.stages]
        placed = zip(self.placement, ("(start)", *self.cuts), self.sharding, strict=True)
        names = ["stage", "rank", "starts_at", "zero", *(stages[0] if stages else ())]
        figures = [list(stage.values()) for stage in stages] or [[] for _ in self.placement]
        return names, [
            [number, *place, *figure]
            for number, (place, figure) in enumerate(zip(placed, figures, strict=True))
        ]

    version: Literal[1] = VERSION
    stagewright: str
    """Version of the program that made the plan."""
    model: ModelSection
    job: Job
    cluster: ClusterSection
    dp: int = Field(ge=1, le=MOST_DEVICES)
    tp: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Tensor parallel degree."""
    cp: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Context parallel degree: ranks among which the tokens of every sample are divided; predicted, not run."""
    ep: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Expert parallel degree: ranks of one stage among which the experts of every layer are divided; predicted, not run."""
    sequence_parallel: bool = False
    """Whether the tensor parallel ranks use sequence parallelism."""
    loss_pieces: int = Field(default=1, ge=1, le=MOST_TOKENS)
    """Number of slices of a microbatch's tokens for which head and loss are evaluated one after the other, with the
    backward; 1: at once, with the forward."""
    pp: int = Field(ge=1, le=MOST_DEVICES)
    num_stages: int = Field(ge=1, le=MOST_STAGES)
    microbatch_size: int = Field(ge=1, le=MOST_SAMPLES)
    num_microbatches: int = Field(ge=1, le=MOST_SAMPLES)
    """Per replica."""
    cuts: tuple[str, ...]
    """Names ``module:ordinal`` of the first operator of stages 1, 2, ..."""
    placement: tuple[int, ...]
    """Pipeline rank of every stage."""
    devices: tuple[int, ...] = ()
    """Device of every rank, as the cluster numbers them: node after node. Empty: rank r has device r."""
    schedule: str
    program: tuple[tuple[str, ...], ...]
    """Texts of the actions of every pipeline rank, in order, without transfers between ranks: computations and, for sharded
    stages, GATHER, RELEASE and REDUCE."""
    memory_policy: tuple[Literal["keep", "layers", "recompute", "selective"] | StagePolicy, ...]
    """Per stage: keep saved values; keep the inputs of layers and recompute the others; recompute everything from the
    stage's inputs; recompute what the runtime selects; or a policy for individual values."""
    sharding: tuple[Literal[0, 1, 2, 3], ...] = ()
    """ZeRO stage of every stage: replicas shard 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. Empty: 0
    for all."""
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    """Type in which gradients are reduced over replicas; by default the type they are accumulated in."""
    shard_size: int | None = Field(default=None, ge=1, le=MOST_DEVICES)
    """Shard group size, of consecutive replicas; groups are replicas of each other (hybrid sharding). None: all replicas."""
    graph: GraphSection | None = None
    """The graph of the plan; plans of earlier versions, and of other programs, do not have it."""
    host_optimizer: tuple[int, ...] = ()
    """Pipeline ranks whose optimizer state and step are on the host's processors."""
    streamed: bool = False
    """Whether the weights of stages are in host memory, from where each stage is copied to its device before use. Trained
    parameters are streamed on the ranks of `host_optimizer`."""
    predictions: Predictions
    """Predictions for a step, with several sequence lengths for the longest."""
    shorter_lengths: tuple[LengthPrediction, ...] = ()
    """Predictions for a step with each of the other sequence lengths, shortest first."""

    @model_validator(mode="before")
    @classmethod
    def _without_sharding(cls, document: Any) -> Any:
        """Fill in level 0 for all stages where a plan has no sharding."""
        if isinstance(document, dict) and not document.get("sharding"):
            return {**document, "sharding": (0,) * len(document.get("placement", ()))}
        return document

    @model_validator(mode="after")
    def _sizes_agree(self) -> Plan:
        for name, count, expected in (
            ("cuts", len(self.cuts), self.num_stages - 1),
            ("placement", len(self.placement), self.num_stages),
            ("program", len(self.program), self.pp),
            ("memory_policy", len(self.memory_policy), self.num_stages),
            ("sharding", len(self.sharding), self.num_stages),
        ):
            if count != expected:
                raise ValueError(f"{name} has {count} entries where {expected} belong")
        try:
            check_name(self.schedule)
        except ScheduleError as error:
            raise ValueError(f"schedule: {error}") from None
        for predictions in self.by_length.values():
            self._check_costs(predictions.costs)
            # Plans of other programs may predict nothing of their ranks.
            if len(predictions.ranks) not in (0, self.pp):
                raise ValueError(
                    f"predictions.ranks has {len(predictions.ranks)} entries where {self.pp} belong, or none"
                )
            if [rank.rank for rank in predictions.ranks] not in ([], list(range(self.pp))):
                raise ValueError(f"predictions.ranks must be ranks 0 to {self.pp - 1} in order")
        if self.num_ranks > MOST_DEVICES:
            raise ValueError(
                f"pp x dp x tp x cp = {self.num_ranks:,} ranks, more than the limit of {MOST_DEVICES:,}"
            )
        if 2 * self.num_stages * self.num_microbatches > MOST_ACTIONS:
            raise ValueError(
                f"{self.num_stages:,} stages of {self.num_microbatches:,} microbatches have more than {MOST_ACTIONS:,} "
                "forwards and backwards"
            )
        if self.devices and sorted(self.devices) != list(range(self.num_ranks)):
            raise ValueError(f"devices must name each of 0 to {self.num_ranks - 1} once: one device per rank")
        if not set(self.host_optimizer) <= set(range(self.pp)):
            raise ValueError(
                f"host_optimizer {list(self.host_optimizer)} must name pipeline ranks, 0 to {self.pp - 1}"
            )
        if self.streamed and self.num_holders > 1:
            raise ValueError(
                f"streamed weights are for one replica, not for the {self.num_holders} ranks of dp x cp"
            )
        if self.num_holders % (self.shard_size or 1):
            raise ValueError(
                f"shard_size {self.shard_size} does not divide the {self.num_holders} ranks of dp x cp"
            )
        if fault := expert_parallel_fault(
            self.ep, self.num_holders, self.tp, self.job.divides_tokens(self.sequence_parallel)
        ):
            raise ValueError(fault)
        shorter = [length.sequence_length for length in self.shorter_lengths]
        if shorter and shorter != list(self.job.shares)[:-1]:
            raise ValueError(
                f"shorter_lengths are {shorter}, not those of the job's sequence_lengths below the longest, "
                f"{list(self.job.shares)[:-1]}"
            )
        samples = self.microbatch_size * self.num_microbatches * self.dp
        if samples != self.job.global_batch:
            raise ValueError(
                f"microbatch_size x num_microbatches x dp = {samples} is not the job's global_batch "
                f"of {self.job.global_batch}"
            )
        return self

    def _check_costs(self, costs: StepCosts | None) -> None:
        """Raise `ValueError` unless columns have one entry per stage or pipeline rank, and transfers go to later stages."""
        if costs is None:
            return
        of_ranks = ("sum_seconds", "optimizer_seconds")
        for name, column in costs:
            if isinstance(column, tuple) and name != "transfers":
                expected = self.pp if name in of_ranks else self.num_stages
                if len(column) != expected and (column or name in _REQUIRED_COSTS):
                    raise ValueError(
                        f"predictions.costs.{name} has {len(column)} entries where {expected} belong"
                    )
        if bool(costs.sum_seconds) != bool(costs.optimizer_seconds):
            raise ValueError(
                "predictions.costs has only one of sum_seconds and optimizer_seconds: give both or neither"
            )
        pairs = [(transfer.source, transfer.target) for transfer in costs.transfers]
        if len(set(pairs)) < len(pairs) or not all(a < c < self.num_stages for a, c in pairs):
            raise ValueError(
                "predictions.costs.transfers must go from a stage to a later one, each pair once, not "
                + ", ".join(f"{a} -> {c}" for a, c in pairs)
            )

    @property
    def code(self) -> tuple[str, ...]:
        """The factories whose code runs when the plan is predicted again: that of its model, and that of an optimizer whose
        state is not in the plan."""
        model = (self.model.text,) if self.model.is_code else ()
        asks = self.job.has_factory and self.job.optimizer_state is None
        return (*model, self.job.optimizer) if asks else model

    @property
    def by_length(self) -> dict[int, Predictions]:
        """Predictions for a step by sequence length, shortest first."""
        shorter = {length.sequence_length: length.predictions for length in self.shorter_lengths}
        return shorter | {self.job.sequence_length: self.predictions}

    @property
    def mean_step_seconds(self) -> float:
        """Seconds of one step; with several sequence lengths, the mean over the steps."""
        if not self.shorter_lengths:
            return self.predictions.step_seconds
        shares = self.job.shares
        return sum(
            shares[length] * predictions.step_seconds for length, predictions in self.by_length.items()
        )

    def mean_rate(self, rate: Callable[[Predictions], float]) -> float:
        """Return a rate or a fraction of time; with several sequence lengths, its mean over the time of the steps."""
        if not self.shorter_lengths:
            return rate(self.predictions)
        shares, steps = self.job.shares, self.by_length.items()
        return (
            sum(shares[n] * predictions.step_seconds * rate(predictions) for n, predictions in steps)
            / self.mean_step_seconds
        )

    def at_length(self, length: int) -> Plan:
        """Return this plan for batches of one sequence length, with the predictions of the longest if `length` has none."""
        predictions = self.by_length.get(length, self.predictions)
        return self.model_copy(
            update={"job": self.job.at_length(length), "predictions": predictions, "shorter_lengths": ()}
        )

    @property
    def host_bound(self) -> float:
        """Fraction of the step in which devices wait for the host, on the pipeline rank that waits longest: for operators to
        be issued, and for what the runtime's host spends on every microbatch and message."""
        waiting_s, runtime = [0.0] * self.pp, self.job.profile
        num_stages = len(self.predictions.stages)
        ways = 2 if runtime.transfers == "sends and receives" else 1
        for index, (rank, stage) in enumerate(zip(self.placement, self.predictions.stages, strict=True)):
            num_messages = ways * ((index > 0) + (index < num_stages - 1))
            host_s = 2 * runtime.host.pass_s + num_messages * runtime.waits.message_s
            waiting_s[rank] += (stage.behind_seconds + host_s) * self.num_microbatches
        return max(waiting_s) / self.predictions.step_seconds

    @property
    def reduce_torch_name(self) -> str | None:
        """`reduce_dtype` as torch names it."""
        return None if self.reduce_dtype is None else REDUCE_TYPES[self.reduce_dtype]

    @property
    def num_ranks(self) -> int:
        """Number of ranks, each a process with one device."""
        return self.pp * self.num_holders * self.tp

    @property
    def num_holders(self) -> int:
        """Number of ranks that hold the same parameters: replicas times context parallel ranks."""
        return self.dp * self.cp

    @property
    def updated_on_host(self) -> frozenset[int]:
        """Stages whose optimizer is on the host."""
        return Placement(self.placement).stages_on(self.host_optimizer)

    @property
    def degrees(self) -> str:
        """The parallel degrees as text: those of pipeline and data parallelism, and others above 1."""
        degrees = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp}
        named = (f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name in ("pp", "dp"))
        return " x ".join(named) + (f", ep {self.ep}" if self.ep > 1 else "")

    @property
    def batch_text(self) -> str:
        """The division of the global batch."""
        return (
            f"{self.dp} x {self.num_microbatches} microbatches of {self.microbatch_size} are the global batch "
            f"of {self.job.global_batch}"
        )

    def usable_bytes(self, cluster: Cluster) -> list[int]:
        """Return the bytes that the allocator of every pipeline rank may reserve; the minimum over replicas on several kinds
        of devices."""
        width = self.num_holders * self.tp
        numbers = self.devices or range(self.num_ranks)
        communicators = {rank.rank: rank.communicator_bytes for rank in self.predictions.ranks}
        return [
            min(
                self.job.usable_bytes(device, cluster, communicators.get(rank, 0))
                for device in {cluster.device_of(n) for n in numbers[rank * width : (rank + 1) * width]}
            )
            for rank in range(self.pp)
        ]

    def host_bytes(self, cluster: Cluster) -> int:
        """Return the bytes of optimizer state, streamed weights and offloaded values on the host that has most."""
        width = self.num_holders * self.tp
        numbers = self.devices or range(self.num_ranks)
        on_node: Counter[int] = Counter()
        for rank in self.predictions.ranks:
            for device in numbers[rank.rank * width : (rank.rank + 1) * width]:
                on_node[cluster.node_of(device)] += rank.host_bytes + rank.offloaded_bytes
        return max(on_node.values(), default=0)

    def rank_on(self, device: int) -> int:
        """Return the rank on a device; launchers count devices node after node."""
        return self.devices.index(device) if self.devices else device

    def global_rank(self, pipeline_rank: int, replica: int, tensor_rank: int = 0) -> int:
        """Return the global rank: tensor parallel ranks are neighbours, then replicas of one stage."""
        return (pipeline_rank * self.dp + replica) * self.tp + tensor_rank

    def device_of(self, rank: int) -> int:
        """Return the device of a global rank, as the cluster numbers them."""
        return self.devices[rank] if self.devices else rank

    def described_rank(self, rank: int) -> str:
        """Return the name of a global rank with its device, for messages."""
        device = self.device_of(rank)
        try:
            name = self.cluster.load().device_of(device).name
        except InputError:  # a plan of another program, which does not describe its devices
            return f"rank {rank}"
        return f"rank {rank} (device {device}, {name})"

    @property
    def graph_key(self) -> Configuration:
        """The fields that the graph of one rank depends on, as `Configuration.traced`."""
        return Configuration(
            tp=self.tp, cp=self.cp, ep=self.ep, microbatch=self.microbatch_size,
            sequence_parallel=self.sequence_parallel, loss_pieces=self.loss_pieces,
        )  # fmt: skip

    def traced(self) -> dict[str, Any]:
        """Return the arguments of `stagewright.tracing.cache.trace` for the graph of one rank's share of the model."""
        return self.job.traced(self.cluster.kind) | self.graph_key.trace_arguments

    def traced_whole(self) -> dict[str, Any]:
        """Return its arguments for the graph that is compared with the model: of all layers, as the model computes them."""
        plain = {"microbatch_size": self.microbatch_size, "autocast": None}
        return self.job.traced(self.cluster.kind) | plain

    @property
    def is_compared(self) -> bool:
        """Whether the graph of this plan's model has been compared with the model, as its first run does; False if the model
        no longer exists."""
        try:
            return is_compared(self.model.resolved(), self.traced_whole())
        except InputError:
            return False

    def save(self, path: str | Path) -> None:
        """Write the plan to `path` atomically: readers see the old file or the new one. Raises `InputError` on failure."""
        write_whole(path, sealed(self.model_dump_json(indent=1)) + "\n")

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema of `plan.json`."""
        schema = cls.model_json_schema()
        schema["properties"][CHECKSUM] = {
            "type": "string",
            "description": "Digest of all other keys and values, to detect a changed file; optional.",
        }
        return schema


def load_plan(path: str | Path) -> Plan:
    """Return the plan in a file.

    Raises:
        InputError: no such file, not JSON, another version, or a wrong key, which the message names.
    """
    document = read_sealed_json(path, "plan", "give a file that `stagewright plan` wrote")
    if isinstance(document, Mapping) and document.keys() >= {"ranks", "rank_of_stage"}:
        raise InputError(
            f"{path} is a program, without a model: `stagewright schedule {path}` draws it, and "
            f"`stagewright check {path}` checks it"
        )
    if isinstance(document, Mapping) and document.keys() >= {"losses", "step_seconds"}:
        raise InputError(f"{path} is the record of a run, not a plan: give the plan.json that was run")
    if not isinstance(document, Mapping) or "version" not in document:
        raise InputError(
            f"{path} is not a plan: it has no 'version' key; give a file that `stagewright plan` wrote"
        )
    if document["version"] != VERSION:
        raise InputError(
            f"{path} is a plan of version {document['version']!r}; this program reads version {VERSION}: "
            "plan again"
        )
    plan = validated(Plan, document, str(path))
    return plan.model_copy(update={"model": plan.model.found_from(Path(path).parent)})


def given_plan(plan: Plan | str | Path) -> Plan:
    """Return the plan, loaded if it is a file.

    Raises:
        InputError: the file is not a plan.
        TypeError: it is neither.
    """
    if isinstance(plan, str | Path):
        return load_plan(plan)
    if not isinstance(plan, Plan):
        hint = ": its plans are in .plans, best first" if hasattr(plan, "plans") else ""
        raise TypeError(
            f"plan is of type {type(plan).__name__}{hint}; pass a plan, or the path of one that was saved as plan.json"
        )
    return plan


def cluster_of(plan: Plan, cluster: Cluster | str | Path | None) -> Cluster:
    """Return the cluster, loaded if it is a name or file; by default the one that the plan was made for.

    Raises:
        InputError: there is no such cluster, or the plan describes none and its name is not in the catalog.
    """
    return plan.cluster.load() if cluster is None else given_cluster(cluster)
