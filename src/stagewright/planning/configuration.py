"""Configurations: parallel degrees, schedule, sharding, recomputation and loss pieces, as one value."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, get_args

from stagewright.arrays import Floats
from stagewright.cluster import Cluster
from stagewright.errors import InputError, check_names
from stagewright.estimation.precision import Precision
from stagewright.graph.flat_buffers import PARAMETERS
from stagewright.planning.job import Job
from stagewright.schedule import Program
from stagewright.schedule.sharding import NUM_BUFFERS

if TYPE_CHECKING:
    from stagewright.estimation.stages import RangeCosts
    from stagewright.planning.bounds.layer_costs import LayerCosts

Recompute = Literal["auto", "model", "none", "selective", "full"]
"""What stages recompute: as much as memory asks for, what the model's own code checkpoints, nothing, the part of every
layer that `stagewright.planning.prediction.regions.selective_policy` says, or all but what enters each layer."""
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

_DERIVED = ("num_microbatches", "offload", "host_optimizer", "headroom")
"""Fields that a request does not set."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "recompute": ("none", "full", "selective", "model"),
    "reduce_dtype": ("fp32", "bf16"),
    "zero": (0, 1, 2, 3),
}


@dataclass(frozen=True)
class Configuration:
    """Everything that is decided about a training step before the model is partitioned.

    A request may leave `dp`, `pp`, `num_microbatches`, `recompute` and `loss_pieces` to follow from the cluster, the job
    and the model; see `completed`.
    """

    dp: int = 0
    """Replicas; 0: as many as the devices make."""
    pp: int = 0
    """Ranks of a pipeline; 0: as many as the devices make."""
    microbatch: int = 1
    """Samples of a microbatch."""
    num_microbatches: int = 0
    """Of one replica in a step; 0: as the batch has."""
    schedule: str = "1f1b"
    recompute: Recompute | None = None
    """None: what the model's own code checkpoints."""
    zero: int | None = None
    """ZeRO stage, 0 to 3; None sums gradients at the end of the batch."""
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    """Type in which gradients are summed over replicas; None: the one they are accumulated in."""
    tp: int = 1
    """Tensor parallel ranks."""
    sequence_parallel: bool = False
    cp: int = 1
    """Context parallel ranks."""
    ep: int = 1
    """Expert parallel ranks."""
    shard_size: int | None = None
    """Largest shard group; groups are replicas of each other (hybrid sharding). None: all replicas."""
    shard_units: int | None = None
    """Sharding units per stage, with ZeRO 2 and 3; None: the fastest number."""
    chunks: int | None = None
    """Stages per rank, of schedules that place several; None: the schedule's own number."""
    layers_per_stage: tuple[int, ...] | None = None
    """Numbered layers of every stage; None: a partition is searched."""
    offload: bool = False
    """Whether stages that recompute as memory asks for may offload as well."""
    host_optimizer: bool = False
    """Whether the optimizer runs on the host, for every rank that lacks memory for its state."""
    streamed: bool = False
    """Whether the weights of stages are in host memory, from where each stage is copied to its device before use."""
    loss_pieces: int = 1
    """Slices of tokens for which head and loss are evaluated one after the other; 0: several where logits are large."""
    headroom: int = 0
    """Bytes left free on every device, for fragmentation."""
    program: Program | None = None
    """Order of forwards and backwards in place of the schedule's, for stages of `layers_per_stage`."""

    @classmethod
    def of(cls, base: Configuration | None = None, **values: Any) -> Configuration:
        """Return `base` with `values` by name; None leaves a field as it is.

        Raises:
            InputError: no such field, or a value that it cannot have.

        >>> Configuration.of(pp=4, chunks=None, loss_pieces="auto").loss_pieces
        0
        """
        check_names(values, requested_fields(), "a configuration")
        given = {name: _checked(name, value) for name, value in values.items() if value is not None}
        return replace(base or cls(), **given)

    def completed(self, cluster: Cluster, job: Job) -> Configuration:
        """Return the configuration with `dp`, `pp` and `num_microbatches` for this cluster and job.

        Raises:
            InputError: the degrees do not fit the cluster, or do not divide the batch.
        """
        count = cluster.num_devices // max(self.tp, 1) // max(self.cp, 1)
        dp = self.dp or (max(count // self.pp, 1) if self.pp > 0 else 1)
        pp = self.pp or max(count // max(dp, 1), 1)
        if self.tp < 1 or self.cp < 1 or dp < 1 or pp < 1 or dp * pp > count:
            shared = (f" x tp {self.tp}" if self.tp != 1 else "") + (
                f" x cp {self.cp}" if self.cp != 1 else ""
            )
            raise InputError(
                f"dp {dp}{shared} x pp {pp} does not fit the {cluster.num_devices} devices of cluster '{cluster.name}': "
                "choose parallel degrees whose product is at most that"
            )
        if self.microbatch < 1 or job.global_batch % (dp * self.microbatch):
            raise InputError(
                f"dp {dp} replicas with microbatches of {self.microbatch} do not divide the global batch of "
                f"{job.global_batch}: change one of the three"
            )
        count = job.global_batch // dp // self.microbatch
        splits_sequence = self.sequence_parallel and self.tp > 1
        return replace(self, dp=dp, pp=pp, num_microbatches=count, sequence_parallel=splits_sequence)

    # -- the graph of one rank -------------------------------------------------------------------------------------

    @cached_property
    def traced(self) -> Configuration:
        """The fields that the graph of one rank depends on, the others at their defaults: a key of graphs."""
        return Configuration(
            tp=self.tp, cp=self.cp, ep=self.ep, microbatch=self.microbatch, sequence_parallel=self.sequence_parallel,
            loss_pieces=self.loss_pieces,
        )  # fmt: skip

    @property
    def trace_arguments(self) -> dict[str, Any]:
        """Arguments of `stagewright.tracing.cache.trace` that say how ranks share a model and how the loss is evaluated.

        >>> Configuration(tp=2, sequence_parallel=True).trace_arguments, Configuration(loss_pieces=4).trace_arguments
        ({'tp': 2, 'splits_sequence': True}, {'loss_pieces': 4})
        """
        layers = {"tp": self.tp, "splits_sequence": self.sequence_parallel} if self.tp > 1 else {}
        degrees = {"cp": self.cp, "ep": self.ep, "loss_pieces": self.loss_pieces}
        return layers | {name: value for name, value in degrees.items() if value > 1}

    # -- what follows ------------------------------------------------------------------------------------------------

    @property
    def saves(self) -> bool:
        """Whether stages recompute and offload as memory asks for."""
        return self.recompute == "auto"

    @property
    def recomputed_alike(self) -> Recompute:
        """What every layer recomputes alike."""
        return self.recompute if self.recompute in ("selective", "full") else "none"

    @property
    def num_stages(self) -> int:
        """Stages of all ranks, unless the schedule itself places several on a rank."""
        return self.pp * (self.chunks or 1)

    @property
    def num_holders(self) -> int:
        """Ranks that hold the same parameters: replicas, and context parallel ranks."""
        return self.dp * self.cp

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold a stage."""
        return self.num_holders * self.tp

    @property
    def level(self) -> int:
        """ZeRO stage; 0 where no two ranks hold the same parameters."""
        return self.zero or 0 if self.num_holders > 1 else 0

    @property
    def shard_group(self) -> int | None:
        """Ranks of a shard group: the most up to `shard_size` that divide the holders; None if that is all of them.

        >>> [Configuration(8, 1, zero=3, shard_size=most).shard_group for most in (1, 3, 4, 8, None)]
        [1, 2, 4, None, None]
        """
        if not self.level or self.shard_size is None or self.shard_size >= self.num_holders:
            return None
        return max(size for size in range(1, self.shard_size + 1) if self.num_holders % size == 0)

    def kept_state(self, costs: RangeCosts | LayerCosts, precision: Precision) -> Floats:
        """Return how much of the `state_bytes` of `costs` a rank keeps on its device, in their form.

        Frozen parameters have neither gradients nor optimizer state, so that only sharding of parameters divides them.
        """
        shards = self.shard_group or self.num_holders
        kept = precision.kept_per_parameter(self.level, shards, self.host_optimizer)
        frozen = 1 / shards if self.level >= PARAMETERS else 1.0
        held = min(1.0, NUM_BUFFERS / (self.chunks or 1)) if self.streamed else 1.0
        trained = kept / precision.bytes_per_parameter
        return held * (trained * costs.trained_bytes + frozen * (costs.state_bytes - costs.trained_bytes))

    def __str__(self) -> str:
        """
        >>> str(Configuration(2, 4, 1, 8, zero=1, recompute="full"))
        'dp 2 x pp 4, microbatch 1, 1f1b, recomputed, zero 1'
        >>> str(Configuration(tp=2, microbatch=4))
        'tp 2, microbatch 4'
        """
        pieces = f", loss in {self.loss_pieces} pieces" if self.loss_pieces > 1 else ""
        if not self.pp:  # a key of graphs
            degrees = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "microbatch": self.microbatch}
            named = [f"{name} {size}" for name, size in degrees.items() if size > 1 or name == "microbatch"]
            return ", ".join(named) + pieces
        how = f"{self.schedule}, recomputed" if self.recompute == "full" else self.schedule
        how += ", recomputed as the model says" if self.recompute == "model" else ""
        how += f", zero {self.level}" if self.level else ""
        how += ", optimizer on the host" if self.host_optimizer else ""
        how += ", streamed weights" if self.streamed else ""
        how += f" within {self.shard_group}" if self.shard_group else ""
        how += f" in {self.shard_units} units a stage" if self.shard_units else ""
        shared = f" x tp {self.tp}" if self.tp > 1 else ""
        shared += f" x cp {self.cp}" if self.cp > 1 else ""
        shared += f" (ep {self.ep})" if self.ep > 1 else ""
        return f"dp {self.dp}{shared} x pp {self.pp}, microbatch {self.microbatch}, {how}{pieces}"


def requested_fields() -> list[str]:
    """Return the names of the fields that a request may set."""
    return [option.name for option in fields(Configuration) if option.name not in _DERIVED]


def _checked(name: str, value: Any) -> Any:
    """Return the value of a field as it is stored. Raises `InputError` for one that it cannot have."""
    if name in _CHOICES:
        choices = _CHOICES[name]
        is_right = type(value) is type(choices[0]) and value in choices
        what = f"one of {', '.join(map(str, choices))}"
    elif name in ("sequence_parallel", "streamed"):
        is_right, what = isinstance(value, bool), "true or false"
    elif name == "layers_per_stage":
        what = "a list of numbers of layers, as [3, 4, 4, 3]"
        is_right = isinstance(value, list | tuple) and all(_is_count(count, 0) for count in value)
        value = tuple(value) if is_right else value
    elif name == "schedule":
        is_right, what = isinstance(value, str), "the name of a schedule"
    elif name == "program":
        is_right, what = isinstance(value, Program), "a Program"
    elif name == "loss_pieces" and value == "auto":
        return 0
    else:
        is_right, what = _is_count(value, 1), "a whole number of at least 1"
    if not is_right:
        raise InputError(f"{name} = {value!r}: give {what}")
    return value


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
