"""The plan: everything needed to reproduce a run, with what was predicted for it; `plan.json` on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_serializer, model_validator

from stagewright.cluster import Cluster, load_cluster
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
    """Which model: the reference as the user wrote it, and the digest of the structure it led to."""

    text: str
    overrides: dict[str, Any] = Field(default_factory=dict)
    digest: str
    name: str
    lora: Lora | None = None
    """Adapters that are trained in place of the model."""
    files: dict[str, str] = Field(default_factory=dict)
    """Of a factory, what its code imported and read when the plan was made: SHA-256 by path from the folder of its file."""

    @property
    def is_code(self) -> bool:
        """Whether it is a factory, which building the model runs; the others are data."""
        return split_factory(self.text) is not None

    @classmethod
    def of(cls, reference: ModelReference, graph: OperatorGraph | None = None) -> ModelSection:
        """The section of the model that `reference` leads to, traced to `graph`."""
        factory = None if graph is None else factory_file(reference.text)
        files = {} if graph is None or factory is None else Dependencies.of_facts(graph.facts).beside(factory)
        return cls(
            files=files,
            text=reference.text,
            overrides=dict(reference.overrides),
            digest=reference.digest,
            name=reference.name,
            lora=reference.lora,
        )

    def found_from(self, folder: Path) -> ModelSection:
        """This section, its text the path from here where that of a factory's file begins at `folder` in place of here: a
        plan is often used from another folder than it was made in."""
        name = split_factory(self.text)
        if name is None or not name.is_file or Path(name.module).expanduser().exists():
            return self
        beside = folder / name.module
        return self.model_copy(update={"text": f"{beside}:{name.function}"}) if beside.is_file() else self

    def reference(self) -> ModelReference:
        """The model as it is now, which may have changed. Raises `InputError` where there is none any more."""
        return resolve(self.text, self.overrides).adapted(self.lora)

    def change(self, reference: ModelReference) -> str:
        """What of the model that `reference` leads to is no longer as planned, in words; empty where all is."""
        if reference.digest != self.digest:
            return f"its config or source, whose digest is {reference.digest[:12]} and was {self.digest[:12]}"
        factory = factory_file(reference.text)
        changed = "" if factory is None else other_contents(factory, self.files)
        return f"'{changed}', which it uses" if changed else ""

    def resolved(self) -> ModelReference:
        """The model itself.

        Raises:
            InputError: there is none any more, or it has changed.
        """
        reference = self.reference()
        if change := self.change(reference):
            raise InputError(
                f"model '{self.text}' has changed since the plan was made ({change}): plan again"
            )
        return reference


class ClusterSection(StrictModel):
    """Which cluster the predictions are for.

    The description is kept, of catalog clusters too: a probed cluster is known by no name, and a catalog that
    has changed must not change what an old plan means. Plans of other programs may leave it out.
    """

    name: str
    num_devices: int = Field(ge=1, le=MOST_DEVICES)
    device: str
    description: Cluster | None = None

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterSection:
        """The section that describes `cluster`; devices of several kinds are named one after the other."""
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
        """``cuda`` or ``cpu``, whose kernels the model is traced with; a GPU's where the section does not say."""
        known = self.description is not None or is_catalog_name(self.name)
        return self.load().kind if known else "cuda"

    def load(self) -> Cluster:
        """The cluster as described; without a description the one of that name in the catalog.

        Raises:
            InputError: there is no description, and the catalog does not know the name.
        """
        if self.description is not None:
            return self.description
        if not is_catalog_name(self.name):
            raise InputError(
                f"the plan was made for cluster '{self.name}', which it does not describe and which is no "
                "catalog name: give its file with --cluster"
            )
        return load_cluster(self.name)


def _compact(cluster: Cluster) -> dict[str, Any]:
    """The document of `cluster` without absent figures, and without where the others come from."""
    return _without_sources(cluster.model_dump(exclude_none=True, include=set(Cluster.model_fields)))


def _without_sources(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_sources(item) for key, item in value.items() if key != "sources"}
    if isinstance(value, list | tuple):
        return [_without_sources(item) for item in value]
    return value


class GraphSection(StrictModel):
    """Which graph the plan was made of, so that a run sees where its own is another."""

    digest: str
    """Of the names and operators of the forward, as `stagewright.graph.document.graph_digest` says."""
    operators: dict[str, str] = Field(default_factory=dict)
    """Of every operator that cuts and memory policies name, which it is."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Versions of what traced it: torch, and transformers."""


class StagePolicy(StrictModel):
    """What one stage does with values it would save, by the names ``module:ordinal`` of the operators that make them."""

    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    """Kept to recompute from, though the backward itself may not need them."""
    fetch_ahead: Bytes = 0
    """The most bytes that are back from the host before their first use, and that are on their way there."""
    reruns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Where recomputing once does not do: pairs of an operator and those that run again in its backward, each as often as
    it is named. `recompute` names the same operators, and `checkpoints` none."""

    @property
    def names(self) -> Iterator[str]:
        """Of all operators that it says something of."""
        yield from (*self.recompute, *self.offload, *self.checkpoints)
        for target, again in self.reruns:
            yield from (target, *again)

    @model_validator(mode="after")
    def _reruns_agree(self) -> StagePolicy:
        differ = {name for _, names in self.reruns for name in names} ^ {*self.recompute}
        if self.reruns and differ:
            raise ValueError(
                f"recompute and reruns must name the same operators, and '{min(differ)}' is in one only"
            )
        if self.reruns and self.checkpoints:
            raise ValueError(
                "with reruns, what is used before it is made again is kept: leave out checkpoints"
            )
        return self


class Plan(StrictModel):
    """A complete plan. Tensor rank `t` of pipeline rank `p` of replica `d` is global rank ``(p * dp + d) * tp + t``;
    ranks that divide a sequence are numbered as replicas are, neighbours first."""

    def __repr__(self) -> str:
        """Short: a plan's document is long."""
        more = {"tp": self.tp, "cp": self.cp, "ep": self.ep}
        widths = "".join(f" x {name} {size}" for name, size in more.items() if size > 1)
        return (
            f"<Plan of {self.model.name} on {self.cluster.name}: pp {self.pp} x dp {self.dp}{widths}, {self.schedule}, "
            f"{self.num_microbatches} microbatches of {self.microbatch_size}, "
            f"{format_seconds(self.predictions.step_seconds)} a step>"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """In a notebook: the stages below what the plan is."""
        return html_table(repr(self).strip("<>"), *self._stage_rows())

    def to_dataframe(self) -> DataFrame:
        """A row per stage: rank, cut, seconds and bytes of one microbatch. Raises `InputError` without pandas."""
        return data_frame(*self._stage_rows())

    def _stage_rows(self) -> tuple[list[str], list[list[Any]]]:
        """Names of columns, and the stages."""
        stages = [one.model_dump() for one in self.predictions.stages]
        placed = zip(self.placement, ("(start)", *self.cuts), self.sharding, strict=True)
        names = ["stage", "rank", "starts_at", "zero", *(stages[0] if stages else ())]
        figures = [list(one.values()) for one in stages] or [[] for _ in self.placement]
        return names, [
            [number, *own, *figure] for number, (own, figure) in enumerate(zip(placed, figures, strict=True))
        ]

    version: Literal[1] = VERSION
    stagewright: str
    """Version of the program that made the plan."""
    model: ModelSection
    job: Job
    cluster: ClusterSection
    dp: int = Field(ge=1, le=MOST_DEVICES)
    tp: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Ranks that share every layer of a stage."""
    cp: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Ranks among which the tokens of every sample are divided; predicted, not run."""
    ep: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Ranks of one stage among which the experts of every layer are shared out; predicted, not run."""
    sequence_parallel: bool = False
    """Whether they split the sequence between the layers' products."""
    loss_pieces: int = Field(default=1, ge=1, le=MOST_TOKENS)
    """Slices of the tokens of a microbatch for which head and loss are evaluated one after the other, with the backward; 1:
    at once, with the forward."""
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
    """Device of every rank, in the numbering of the cluster: node after node. None given: rank r has device r."""
    schedule: str
    program: tuple[tuple[str, ...], ...]
    """Texts of the actions of every pipeline rank, in order, without transfers between ranks: computations, and where
    replicas share stages out GATHER, RELEASE and REDUCE."""
    memory_policy: tuple[Literal["keep", "layers", "recompute", "selective"] | StagePolicy, ...]
    """Per stage: keep saved values, keep what enters each layer and recompute the rest, recompute all from what enters the
    stage, recompute a part that the runtime chooses, or treat some values so."""
    sharding: tuple[Literal[0, 1, 2, 3], ...] = ()
    """Per stage, what its replicas share out: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
    None given: 0 for all."""
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    """Type in which gradients are summed over replicas; by default the type they are added up in."""
    shard_size: int | None = Field(default=None, ge=1, le=MOST_DEVICES)
    """Replicas, neighbours in number, that share out among each other; the others hold copies. None: all of them."""
    graph: GraphSection | None = None
    """Plans of earlier versions, and of other programs, do not say."""
    host_optimizer: tuple[int, ...] = ()
    """Pipeline ranks whose optimizer state, and the step on it, are on the host's processors."""
    predictions: Predictions
    """With several lengths, of a step of the longest."""
    shorter_lengths: tuple[LengthPrediction, ...] = ()
    """With several lengths, of a step of each of the others, shortest first."""

    @model_validator(mode="before")
    @classmethod
    def _without_sharding(cls, document: Any) -> Any:
        """Plans that do not speak of sharding keep every stage whole."""
        if isinstance(document, dict) and not document.get("sharding"):
            return {**document, "sharding": (0,) * len(document.get("placement", ()))}
        return document

    @model_validator(mode="after")
    def _sizes_agree(self) -> Plan:
        for name, found, wanted in (
            ("cuts", len(self.cuts), self.num_stages - 1),
            ("placement", len(self.placement), self.num_stages),
            ("program", len(self.program), self.pp),
            ("memory_policy", len(self.memory_policy), self.num_stages),
            ("sharding", len(self.sharding), self.num_stages),
        ):
            if found != wanted:
                raise ValueError(f"{name} has {found} entries where {wanted} belong")
        try:
            check_name(self.schedule)
        except ScheduleError as error:
            raise ValueError(f"schedule: {error}") from None
        for one in self.by_length.values():
            self._check_costs(one.costs)
            # Plans of other programs may predict nothing of their ranks.
            if len(one.ranks) not in (0, self.pp):
                raise ValueError(
                    f"predictions.ranks has {len(one.ranks)} entries where {self.pp} belong, or none"
                )
            if [rank.rank for rank in one.ranks] not in ([], list(range(self.pp))):
                raise ValueError(f"predictions.ranks must be those of ranks 0 to {self.pp - 1} in order")
        if self.num_ranks > MOST_DEVICES:
            raise ValueError(f"pp x dp x tp are {self.num_ranks:,} ranks, more than {MOST_DEVICES:,}")
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
        if self.num_holders % (self.shard_size or 1):
            raise ValueError(
                f"shard_size {self.shard_size} does not divide the {self.num_holders} replicas of dp"
            )
        if fault := expert_parallel_fault(self.ep, self.num_holders, self.tp, self.sequence_parallel):
            raise ValueError(fault)
        shorter = [one.sequence_length for one in self.shorter_lengths]
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
        """One entry per stage, or per pipeline rank, and transfers from stages to later ones."""
        if costs is None:
            return
        of_ranks = ("sum_seconds", "optimizer_seconds")
        for name, column in costs:
            if isinstance(column, tuple) and name != "transfers":
                wanted = self.pp if name in of_ranks else self.num_stages
                if len(column) != wanted and (column or name in _REQUIRED_COSTS):
                    raise ValueError(
                        f"predictions.costs.{name} has {len(column)} entries where {wanted} belong"
                    )
        if bool(costs.sum_seconds) != bool(costs.optimizer_seconds):
            raise ValueError(
                "predictions.costs has one of sum_seconds and optimizer_seconds: give both or none"
            )
        found = [(one.source, one.target) for one in costs.transfers]
        if len(set(found)) < len(found) or not all(a < c < self.num_stages for a, c in found):
            raise ValueError(
                "predictions.costs.transfers go from a stage to a later one, once each, not "
                + ", ".join(f"{a} -> {c}" for a, c in found)
            )

    @property
    def code(self) -> tuple[str, ...]:
        """The factories whose code runs where the plan is predicted anew: of its model, and of an optimizer of which the
        plan does not say what it keeps."""
        model = (self.model.text,) if self.model.is_code else ()
        asks = self.job.has_factory and self.job.optimizer_state is None
        return (*model, self.job.optimizer) if asks else model

    @property
    def by_length(self) -> dict[int, Predictions]:
        """Of a step of each length, shortest first."""
        shorter = {one.sequence_length: one.predictions for one in self.shorter_lengths}
        return shorter | {self.job.sequence_length: self.predictions}

    @property
    def mean_step_seconds(self) -> float:
        """Of one step; with several lengths, the mean over the steps that go through them."""
        if not self.shorter_lengths:
            return self.predictions.step_seconds
        shares = self.job.shares
        return sum(shares[length] * one.step_seconds for length, one in self.by_length.items())

    def mean_rate(self, rate: Callable[[Predictions], float]) -> float:
        """Of something per second, or of a part of the time; with several lengths, over the steps that go through them."""
        if not self.shorter_lengths:
            return rate(self.predictions)
        shares, steps = self.job.shares, self.by_length.items()
        return sum(shares[n] * one.step_seconds * rate(one) for n, one in steps) / self.mean_step_seconds

    def at_length(self, length: int) -> Plan:
        """This plan for batches of one length alone; with the longest's predictions where it has none for `length`."""
        predictions = self.by_length.get(length, self.predictions)
        return self.model_copy(
            update={"job": self.job.at_length(length), "predictions": predictions, "shorter_lengths": ()}
        )

    @property
    def host_bound(self) -> float:
        """Part of the step in which the devices of a pipeline rank wait for the host to issue operators, of the rank that
        waits longest."""
        behind = [0.0] * self.pp
        for rank, stage in zip(self.placement, self.predictions.stages, strict=True):
            behind[rank] += stage.behind_seconds * self.num_microbatches
        return max(behind) / self.predictions.step_seconds

    @property
    def reduce_torch_name(self) -> str | None:
        """`reduce_dtype` as torch names it."""
        return None if self.reduce_dtype is None else REDUCE_TYPES[self.reduce_dtype]

    @property
    def num_ranks(self) -> int:
        """Processes, each with a device."""
        return self.pp * self.num_holders * self.tp

    @property
    def num_holders(self) -> int:
        """Ranks that hold the same parameters: replicas, and those that divide a sequence."""
        return self.dp * self.cp

    def rank_on(self, device: int) -> int:
        """The rank that has a device, which a launcher counts node after node."""
        return self.devices.index(device) if self.devices else device

    def global_rank(self, pipeline_rank: int, replica: int, tensor_rank: int = 0) -> int:
        """The rank in the whole job: those that share layers are neighbours, and then replicas of one stage."""
        return (pipeline_rank * self.dp + replica) * self.tp + tensor_rank

    def traced(self) -> dict[str, Any]:
        """How `stagewright.tracing.cache.trace` is asked for the graph of one rank's share of this plan's model."""
        degrees = Configuration(
            tp=self.tp, sequence_parallel=self.sequence_parallel, cp=self.cp, ep=self.ep, loss_pieces=self.loss_pieces
        )  # fmt: skip
        return self.job.traced(self.cluster.kind) | degrees.trace_arguments

    def traced_whole(self) -> dict[str, Any]:
        """How it is asked for the graph that is compared with the model: of all its layers, as the model computes them."""
        plain = {"microbatch_size": self.microbatch_size, "autocast": None}
        return self.job.traced(self.cluster.kind) | plain

    @property
    def is_compared(self) -> bool:
        """Whether the graph of this plan's model was compared with the model, as its first run does; False where there is no
        such model any more."""
        try:
            return is_compared(self.model.resolved(), self.traced_whole())
        except InputError:
            return False

    def save(self, path: str | Path) -> None:
        """Write the plan to `path`; readers see the old file or the whole new one. Raises `InputError` if that fails."""
        write_whole(path, sealed(self.model_dump_json(indent=1)) + "\n")

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of `plan.json`."""
        schema = cls.model_json_schema()
        schema["properties"][CHECKSUM] = {
            "type": "string",
            "description": "Digest of all other keys with their values, by which a changed file is noticed; not needed.",
        }
        return schema


def load_plan(path: str | Path) -> Plan:
    """The plan in a file.

    Raises:
        InputError: no such file, not JSON, another version, or a key that is wrong; names it.
    """
    document = read_sealed_json(path, "plan", "give a file that `stagewright plan` wrote")
    if isinstance(document, Mapping) and document.keys() >= {"ranks", "rank_of_stage"}:
        raise InputError(
            f"{path} is a program, without a model: `stagewright schedule {path}` draws it, and `stagewright check {path}` "
            "checks it"
        )
    if not isinstance(document, Mapping) or "version" not in document:
        raise InputError(
            f"{path} has no 'version', so it is no plan: give a file that `stagewright plan` wrote"
        )
    if document["version"] != VERSION:
        raise InputError(
            f"{path} is a plan of version {document['version']!r}; this program reads version {VERSION}: "
            "plan again"
        )
    plan = validated(Plan, document, str(path))
    return plan.model_copy(update={"model": plan.model.found_from(Path(path).parent)})
