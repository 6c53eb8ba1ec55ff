"""Resident bytes of a rank, kept from step to step: parameters, gradients, optimizer state and constants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from stagewright.estimation.flat_operations import is_gathered
from stagewright.estimation.liveness import FunctionMemory
from stagewright.estimation.optimizer import OptimizerState, optimizer_of
from stagewright.estimation.precision import Precision
from stagewright.estimation.runtime import STAGEWRIGHT, Runtime, load_runtime, runtime_of
from stagewright.estimation.stage_memory import StageMemory
from stagewright.graph.flat_buffers import GRADIENTS, OPTIMIZER, PARAMETERS, FlatLayout, of_stages
from stagewright.graph.fusion import logits_of
from stagewright.graph.stage import Stage
from stagewright.graph.tensor import ITEM_BYTES


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes of a rank that are allocated during every action.

    `rederived`: additional bytes while the derived values of a step replace those of the last.
    `step_transient`: bytes that exist only during the optimizer step.
    `host_bytes`: optimizer state and streamed weights on the host, in no category.
    `flats`: flat buffers, some of which exist only during parts of a batch; `derived`: values that stages with gathered
    parameters derive from them each time; `reduce_dtype`: type in which gradients are reduced, if not their own.
    `has_slots`: whether transfers use permanent buffers, in no category.
    """

    categories: dict[str, int]
    host_bytes: int = 0
    rederived: int = 0
    step_transient: int = 0
    flats: tuple[FlatLayout, ...] = ()
    derived: Mapping[int, FunctionMemory] = field(default_factory=dict)
    reduce_dtype: str | None = None
    has_slots: bool = False
    runtime: Runtime = field(default_factory=lambda: load_runtime(STAGEWRIGHT))

    @cached_property
    def total(self) -> int:
        return sum(self.categories.values())

    def with_versions(self, count: int) -> ResidentBytes:
        """Return the bytes with `count` versions of the parameters, for programs that step before all backwards of a
        version."""
        if count <= 1:
            return self
        others = (count - 1) * self.categories.get("parameters", 0)
        return replace(self, categories=self.categories | {"weight versions": others})


def resident_bytes(
    memories: Sequence[StageMemory],
    flats: Sequence[FlatLayout] = (),
    reduce_dtype: str | None = None,
    *,
    host_optimizer: bool = False,
    thread_bytes: int = 0,
    kernel_bytes: int = 0,
) -> ResidentBytes:
    """Return the resident bytes of the rank with the stages of `memories`; a tensor that several stages use counts once.

    `flats` are the flat buffers, including those of other ranks, and `reduce_dtype` is the type (a torch name) in which
    gradients are reduced; None: their own. With `host_optimizer` the host holds the optimizer's state, a master copy of
    every parameter of any type, and a buffer for its gradient. `thread_bytes` are the matmul library's workspace of one
    thread; the device has that of the first; `kernel_bytes` are one workspace of the runtime's own kernels.

    Master weights and gradients follow from `Precision.of` each parameter's type; state and temporary memory of a step from
    `OptimizerState`. Source: PyTorch's fused AdamW, which needs no additional memory. Ignores: a few bytes
    each for the norms of the gradients and, where tokens are masked, the weights of microbatches.
    """
    stages = [memory.stage for memory in memories]
    runtime, optimizer = runtime_of(stages[0].graph), optimizer_of(stages[0].graph)
    flats = of_stages(flats, (stage.index for stage in stages))
    sizes: dict[str, dict[object, int]] = {
        name: {} for name in ("parameters", "gradients", "optimizer", "master", "host", "updated")
    }
    sharded = {value for flat in flats if flat.level >= OPTIMIZER for value in flat.values}
    in_flats = {value for flat in flats if flat.is_trained for value in flat.values}
    constants: dict[int, int] = {}
    for stage in stages:
        for value in set(stage.parameters) - sharded:
            sizes["parameters"][value] = stage.graph.storage_bytes[stage.value(value).storage]
        for value in (*stage.buffers, *stage.constants):
            constants[value] = stage.graph.storage_bytes[stage.value(value).storage]
        for value in {value for value, _ in stage.gradients} - sharded:
            meta, name = stage.value(value).meta, stage.value(value).name
            gradient = _add_optimizer(
                sizes, value, meta.shape, runtime.precision(meta.dtype), optimizer, name=name
            )
            if value not in in_flats:
                sizes["gradients"][value] = gradient
    for flat in flats:
        _add_flat(sizes, flat, runtime, optimizer)
    if runtime.optimizer.keeps_gradients:
        trained = {value: stage.value(value).meta for stage in stages for value, _ in stage.gradients}
        sizes["gradients"] |= {
            (value, "as made"): meta.payload_bytes
            for value, meta in trained.items()
            if runtime.precision(meta.dtype).gradient != meta.dtype
        }
    host_sizes, updated = sizes.pop("host"), sizes.pop("updated")
    host_bytes = sum(flat.num_elements * ITEM_BYTES[flat.dtype] for flat in flats if flat.is_streamed)
    if host_optimizer:
        host_bytes += sum(host_sizes.values())
        sizes |= {"optimizer": {}, "master": {}}
    static = [memory.static for memory in memories]
    derived = {memory.stage.index: memory.derived for memory in memories}
    gathered = {index: function for index, function in derived.items() if is_gathered(flats, index)}
    lasting = [function for index, function in derived.items() if index not in gathered]
    cotangents = sum(stage.value(stage.graph.loss).meta.storage_bytes for stage in stages)
    fixed = (
        runtime.workspaces * kernel_bytes
        + (thread_bytes if runtime.has_backward_thread else 0)
        + sum(constants.values())
        + cotangents
        + (sum(map(_logits_bytes, stages)) if runtime.keeps_logits else 0)
        + sum(sum(function.kept.values()) for function in (*static, *lasting))
    )
    categories = {name: sum(entries.values()) for name, entries in sizes.items()} | {"constants": fixed}
    rederived = _peak_in_turn(lasting)
    transient = 0 if host_optimizer else optimizer.transient_bytes(updated.values())
    return ResidentBytes(
        categories,
        host_bytes,
        rederived,
        transient,
        flats=flats,
        derived=gathered,
        reduce_dtype=reduce_dtype,
        runtime=runtime,
    )


def _logits_bytes(stage: Stage) -> int:
    """Return the bytes of the logits of one microbatch, if `stage` makes them."""
    graph, logits = stage.graph, logits_of(stage.graph) if stage.computes_loss else None
    return 0 if logits is None else graph.storage_bytes[graph.values[logits].storage]


def kept_parameters(flat: FlatLayout, runtime: Runtime) -> int:
    """Return the bytes of a sharded buffer's parameters that one replica keeps on its device from step to step, in their
    own type."""
    if flat.is_streamed:
        return 0
    has_master = flat.is_trained and runtime.precision(flat.dtype).has_master
    if flat.level < PARAMETERS:
        has_shards = runtime.optimizer.keeps_shards and flat.level >= OPTIMIZER and not has_master
        kept = flat.num_elements + (flat.shard_elements if has_shards else 0)
        return kept * ITEM_BYTES[flat.dtype]
    from_master = runtime.optimizer.gathers_masters and has_master
    return 0 if from_master else flat.shard_elements * ITEM_BYTES[flat.dtype]


def _add_flat(
    sizes: dict[str, dict[object, int]], flat: FlatLayout, runtime: Runtime, optimizer: OptimizerState
) -> None:
    """Add the part of a flat buffer that one replica keeps; sharded gradients are temporary."""
    precision = runtime.precision(flat.dtype)
    gradient = ITEM_BYTES[precision.gradient]
    if flat.level >= OPTIMIZER:
        sizes["parameters"][flat] = kept_parameters(flat, runtime)
    if flat.is_trained and flat.level < GRADIENTS:
        sizes["gradients"][flat] = gradient * flat.num_elements
    if flat.is_trained and flat.level >= OPTIMIZER:
        _add_optimizer(sizes, flat, (flat.shard_elements,), precision, optimizer, len(flat.groups))


def _add_optimizer(
    sizes: dict[str, dict[object, int]],
    key: object,
    shape: Sequence[int],
    precision: Precision,
    optimizer: OptimizerState,
    num_spans: int = 1,
    name: str = "",
) -> int:
    """Add the optimizer's state of a tensor, and its size on the host; return the bytes of its gradient."""
    num_elements = math.prod(shape)
    state = num_elements * ITEM_BYTES[precision.state]
    sizes["optimizer"][key] = sum(optimizer.storages(shape, ITEM_BYTES[precision.state], num_spans, name))
    sizes["host"][key] = sizes["optimizer"][key] + 2 * state
    sizes["updated"][key] = state
    if precision.has_master:
        sizes["master"][key] = state
    return num_elements * ITEM_BYTES[precision.gradient]


def _peak_in_turn(functions: Iterable[FunctionMemory]) -> int:
    """Return the peak of computing derived values again, stage by stage, while the old ones exist."""
    return max((function.peak(()).above_entry for function in functions), default=0)
