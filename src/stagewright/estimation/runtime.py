"""Runtimes: the training frameworks whose execution is predicted, as data and as a rewrite of the operator graph.

A runtime is a file: which operators are one kernel and what such a kernel keeps, the types of gradients and optimizer state,
what the host spends, which transfers keep a rank waiting. Time and memory come from the same estimate and replay for all.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stagewright.cluster.device import Seconds
from stagewright.cluster.dispatch import MULTIPROCESSORS
from stagewright.cluster.schema import SourcedModel, StrictModel, validated
from stagewright.documents import read_toml
from stagewright.errors import InputError, nearest
from stagewright.estimation.operators import COUNTED
from stagewright.estimation.overlap import OverlappedCollectives
from stagewright.estimation.precision import Precision
from stagewright.graph import OperatorGraph
from stagewright.graph.fusion import (
    INPUTS,
    JOINED,
    FusionRule,
    accumulating_in_matmuls,
    fuse,
    holding_logits,
    reducing_once,
)

STAGEWRIGHT = "stagewright"
"""The runtime that `stagewright run` is: graphs as they are traced."""

_AS_TRACED = {
    "attention": "traced", "experts": "traced", "embedding": "split", "head": "split", "column_inputs": "shared",
    "loss": "float32",
}  # fmt: skip
"""How a model is traced by default."""

_COMMUNICATION_SHARE = 0.15
"""Fraction of a GPU's multiprocessors. Source: 20 of 132 of an H800 serve communication (DeepSeek-V3, arXiv 2412.19437);
NCCL's own fraction differs with version and number of ranks."""

_Count = Annotated[float, Field(ge=0, le=1e6)]


class FusedKernel(SourcedModel):
    """A fused kernel, with the fields of `stagewright.graph.fusion.FusionRule`."""

    name: str = Field(pattern=r"^[a-z][a-z0-9 _-]*$")
    around: frozenset[str] = Field(min_length=1)
    absorbs: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset({INPUTS})
    within: Literal["module", "parent", "model", "loss"] = "module"
    kind: Literal["memory", "norm", "matmul"] = "memory"
    forward_bytes: _Count | None = None
    backward_bytes: _Count | None = None
    scratch_bytes: _Count = 0.0
    backward_scratch_bytes: _Count = 0.0

    @model_validator(mode="after")
    def _check_flop(self) -> FusedKernel:
        if self.kind == "matmul":
            others = self.around - set(JOINED)
            if others or self.absorbs:
                raise ValueError(
                    f"kernel '{self.name}' of kind 'matmul' joins {' and '.join(JOINED)} alone: leave out "
                    f"{', '.join(sorted(others) or ['absorbs'])}"
                )
        elif counted := sorted((self.around | self.absorbs) & COUNTED):
            raise ValueError(
                f"kernel '{self.name}' holds {', '.join(counted)}, whose FLOP a kernel of kind '{self.kind}' does not "
                'count: leave it out, or use kind = "matmul"'
            )
        return self

    @property
    def rule(self) -> FusionRule:
        """The same kernel as a rule of `fuse`."""
        return FusionRule(**self.model_dump(exclude={"sources"}))


class HostCosts(StrictModel):
    """Seconds of the host.

    * `kernel_s`: for a kernel, with the operators and autograd's work around it, views included; None: those of eager
      execution in the device's file.
    * `member_s`: for every further member of a collective, and for a message to another rank: all wait for the slowest.
    * `pass_s`: for a microbatch in one direction.
    * `step_s`: once per step: data, learning rate, losses, the optimizer's bookkeeping.
    * `waits_for_kernels`: whether the host issues nothing before the device is done (``CUDA_LAUNCH_BLOCKING=1``): times of
      both add up.
    """

    kernel_s: Seconds | None = None
    member_s: Seconds = 0.0
    pass_s: Seconds = 0.0
    step_s: Seconds = 0.0
    waits_for_kernels: bool = False


class Waits(StrictModel):
    """Seconds for which a device waits.

    * `product_s`: around a matmul, beyond its ramp-up.
    * `collective_s`: in a collective, for the slowest of its members, whatever its size.
    * `message_s`: on a boundary value or gradient that a rank waits to send or receive, in addition to the transfer: shapes
      that go ahead of it, and the host that reads them before it issues more.
    * `scattered_s`: to send parts, one per rank of a group, to another node, in addition to the transfer.
    * `routing_s`: in a layer of sharded experts, in either direction, for the host to read how many tokens go where.
    * `beside_share`: fraction of a GPU's multiprocessors that collectives of sharded parameters and gradients, hidden
      dispatches and transfers within a node take from the computations they overlap with.
    """

    product_s: Seconds = 0.0
    collective_s: Seconds = 0.0
    message_s: Seconds = 0.0
    scattered_s: Seconds = 0.0
    routing_s: Seconds = 0.0
    beside_share: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Selective(StrictModel):
    """Values that checkpointed layers keep under selective recomputation: the results of operators of the short names
    `keeps`; for those also in `every_second`, only the results of the first, the third, ... call in each layer."""

    keeps: tuple[str, ...] = Field(min_length=1)
    every_second: tuple[str, ...] = ()


class OptimizerStorage(StrictModel):
    """Data types of the training state, and the bytes that an optimizer step moves.

    * `gradients`: type in which gradients are accumulated: that of the ``parameter``; ``fp16``, which is that of the
      parameter where it is fp16 and else float32; or ``float32``. None: float32 for half precision, else as the parameter.
    * `state`: type of the moments and the master copy; None: as the gradients.
    * `keeps_gradients`: whether gradients as the backward computes them are kept in addition to those of another type into
      which they are accumulated.
    * `moves_parameters`: whether parameters, created one by one, move into the buffers that are sharded over replicas, with
      state per parameter; what they leave in the allocator's cache is reserved too.
    * `gathers_masters`: whether sharded parameters are cast and gathered from their master copies, so that no other copy of
      them is kept; state is then kept per parameter.
    * `keeps_shards`: whether replicas that shard state but not parameters keep their shard of the parameters in addition to
      the whole; where there are master copies, these are such shards.
    * `flattens_gradients`: whether gradients that replicas all hold are copied into one tensor to be summed, and back.
    * `step_bytes`: bytes moved per parameter in a step: unscaling, norm, update, new copy; None: those of fused AdamW.
    """

    gradients: Literal["parameter", "fp16", "float32"] | None = None
    state: Literal["float32"] | None = None
    keeps_gradients: bool = False
    moves_parameters: bool = False
    gathers_masters: bool = False
    keeps_shards: bool = False
    flattens_gradients: bool = False
    step_bytes: _Count | None = None


class Loop(StrictModel):
    """A plain training loop on one device: its memory is replayed call by call in autograd's order
    (`stagewright.estimation.eager_step`) instead of stage by stage.

    * `step_copies`: copies of all gradients that exist at the peak of the optimizer step, created one after the other and
      freed at its end; weight decay needs one more.
    * `step_passes`: number of times the optimizer step reads or writes as many elements as there are parameters; weight
      decay adds three.
    * `num_moments`: tensors of optimizer state per parameter, created in the first step.
    * `adds_in_place`: whether cotangents of a value with several uses are added into the first of them.
    """

    step_copies: Annotated[int, Field(ge=0, le=100)]
    step_passes: Annotated[int, Field(ge=0, le=1000)]
    num_moments: Annotated[int, Field(ge=0, le=100)]
    adds_in_place: bool


class Runtime(SourcedModel):
    """The description of a runtime: how a training framework executes a model.

    * `dtypes`: precisions of jobs that it trains.
    * `attention`: whether scores are computed and stored (``explicit``) or never (``fused``), or as on the device that
      traces (``traced``).
    * `context`: whether context-parallel ranks gather keys and values for one kernel (``gathered``), or use a ``ring``.
    * `experts`: as the model's own code computes them (``traced``), or ``grouped``, with weights between their matmuls, or
      grouped and ``split`` over tensor-parallel ranks, which gather their tokens for them under sequence parallelism.
    * `embedding`: whether tensor-parallel ranks each have some rows of the embedding (``split``) or all (``whole``).
    * `head`: whether they each compute the logits of some tokens, and the loss from these (``split``), get the logits of
      all tokens before the loss (``gathered``), or compute all of them (``whole``). A parameter that is both embedding and
      head is whole on all ranks if either is whole.
    * `column_inputs`: whether column-parallel matmuls save an input that is whole on every rank together (``shared``), or
      each a copy of it (``copied``).
    * `loss`: in ``float32``, or in the type of the logits (``as logits``).
    * `holds_logits`: whether the loop keeps logits in a variable while the loss is differentiated.
    * `keeps_logits`: whether the logits of a microbatch are kept until those of the next are computed.
    * `shares_gathers`: whether matmuls with the same input share its gathered copy, and their input gradients are reduced
      together; otherwise each gathers the input and reduces its own gradient. A compiler merges equal gathers. Ignores: the
      memory of further copies.
    * `casts_gathers`: whether with fp8 matmuls what tensor-parallel ranks gather inside layers is cast before; with `casts`
      ``once`` a matmul then transposes what was gathered.
    * `compiles`: whether the ``layers`` are compiled, or the ``model`` where replicas do not shard it piece by piece: its
      backward returns all gradients at its end, in addition to those of earlier microbatches that they are added to.
    * `attention_rate`: speed of its fused attention relative to the device's file, which describes FlashAttention-2 or its
      successor.
    * `attention_kernels`: whether its fused attention is as the device's file describes (``described``), or the ``best``
      available.
    * `casts`: with fp8 matmuls, whether operands are cast for ``every product``, or activations and gradients ``once`` for
      both matmuls that take them, and weights once per step.
    * `shard_units`: the units in which replicas gather and reduce a sharded stage: the ``fastest``, or each of its
      ``layers`` alone, and what comes before and after them.
    * `reduces`: whether replicas that shard gradients reduce them after ``every microbatch``, or after the ``last
      microbatch``, until when they are whole, in the type in which they are accumulated.
    * `keeps_root`: whether what surrounds the layers of a lone pipeline rank is gathered before a forward, and released and
      its gradients reduced after the backward.
    * `copies_parts`: whether collectives copy what they send or receive because its parts are not contiguous.
    * `merges_views`: whether a view of a view is issued as one, and none where its result is at hand.
    * `has_backward_thread`: whether backwards run in a thread of their own, as in autograd, for which the matrix library has
      a second workspace.
    * `workspaces`: workspaces that its own kernels hold for matmuls, in addition to the matrix library's, each as large as
      cuBLAS recommends for the device (`stagewright.cluster.Device.recommended_workspace_bytes`).
    * `expandable_segments`: whether PyTorch's allocator grows its segments on NVIDIA's GPUs, instead of reserving others.
    * `unaligned_products`: where batched matmuls run whose rows do not all begin at multiples of 16 bytes, above all those
      of heads of 108 or 150 elements: on ``tensor cores`` as others, or on a device's ``other cores`` at its rate in
      float32.
    * `overlaps_reduction`: whether gradients are reduced during the last backward, and parameters gathered during the first
      forward, layer by layer.
    * `overlapped_collectives`: which collectives of sequence parallelism overlap with the matmuls they belong to
      (`stagewright.estimation.overlap`): none; those of the ``backward`` with its other matmul, as a whole; in parts those
      that a compiler has ``fused`` with matmuls; or ``all``, in either way. Collectives without such a matmul in the same
      function are waited for.
    * `adds_in_products`: whether matmuls accumulate weight gradients instead of returning them.
    * `sums_once`: whether gradients of parameters that all tensor-parallel ranks hold are summed over them once per step.
    * `checks_after`: whether the optimizer checks all gradients after its step, so that with split backwards a rank
      continues with the next step while others finish theirs.
    * `recomputes`: short names of operators that are always recomputed in the backward.
    * `selective`: what is kept under selective recomputation; None: all but attention's scores.
    * `dispatch`: what is sent to experts on other ranks: a copy of a token for each of them, or one to each node that has
      any, which forwards it inside the node.
    * `dispatch_multiprocessors`: number of a device's multiprocessors that then copy tokens.
    * `hides_dispatch`: whether sending tokens overlaps with another microbatch. Ignores: that one more is alive then, and
      that there may be no other.
    * `partition`: stages with numbers of layers as even as possible (``layers``), or of operators (``balanced``).
    * `recomputes_ahead`: whether a rank recomputes while it waits for the gradient.
    * `recomputes_head`: whether what surrounds the layers is recomputed where they are.
    * `loop`: for a plain loop on one device: parameters of its memory.
    * `transfers`: whether a rank waits while it ``sends``, while it ``sends and receives``, or never (``overlapped``);
      ``overlapped if interleaved``: never with several stages per rank, otherwise while it sends.
    * `scatters_boundaries`: whether tensor-parallel ranks each send a part of a boundary value, which the receivers gather.
    """

    not_figures = frozenset({"name", "about", "dtypes", "kernels"})

    name: str
    about: str = ""
    dtypes: tuple[Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp64", "autocast"], ...] = ()
    attention: Literal["traced", "fused", "explicit"] = "fused"
    context: Literal["gathered", "ring"] = "gathered"
    experts: Literal["traced", "grouped", "split"] = "traced"
    dispatch: Literal["every copy", "once per node"] = "every copy"
    dispatch_multiprocessors: Annotated[int, Field(ge=2, le=1000)] = MULTIPROCESSORS
    hides_dispatch: bool = False
    partition: Literal["balanced", "layers"] = "balanced"
    recomputes_ahead: bool = True
    recomputes_head: bool = True
    transfers: Literal["overlapped", "overlapped if interleaved", "sends", "sends and receives"] = (
        "overlapped"
    )
    scatters_boundaries: bool = False
    embedding: Literal["split", "whole"] = "split"
    head: Literal["split", "gathered", "whole"] = "split"
    column_inputs: Literal["shared", "copied"] = "shared"
    loss: Literal["float32", "as logits"] = "float32"
    holds_logits: bool = False
    keeps_logits: bool = False
    shares_gathers: bool = True
    casts_gathers: bool = False
    compiles: Literal["layers", "model"] = "layers"
    reduces: Literal["every microbatch", "last microbatch"] = "every microbatch"
    attention_rate: Annotated[float, Field(gt=0, le=10)] = 1.0
    keeps_root: bool = False
    copies_parts: bool = False
    merges_views: bool = False
    attention_kernels: Literal["described", "best"] = "described"
    casts: Literal["every product", "once"] = "every product"
    shard_units: Literal["fastest", "layers"] = "fastest"
    has_backward_thread: bool = False
    workspaces: Annotated[int, Field(ge=0, le=100)] = 0
    expandable_segments: bool = False
    unaligned_products: Literal["tensor cores", "other cores"] = "tensor cores"
    overlaps_reduction: bool = False
    overlapped_collectives: OverlappedCollectives = "none"
    adds_in_products: bool = False
    sums_once: bool = False
    checks_after: bool = False
    recomputes: tuple[str, ...] = ()
    selective: Selective | None = None
    optimizer: OptimizerStorage = OptimizerStorage()
    host: HostCosts = HostCosts()
    waits: Waits = Waits()
    loop: Loop | None = None
    kernels: tuple[FusedKernel, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)

    @model_validator(mode="after")
    def _names_differ(self) -> Runtime:
        twice = [name for name, count in Counter(kernel.name for kernel in self.kernels).items() if count > 1]
        if twice:
            raise ValueError(f"two kernels are called '{twice[0]}': give each a name of its own")
        return self

    @property
    def traced(self) -> dict[str, str]:
        """Arguments of `stagewright.tracing.cache.trace` that differ from its defaults."""
        return {
            name: getattr(self, name)
            for name, default in _AS_TRACED.items()
            if getattr(self, name) != default
        }

    def precision(self, dtype: str) -> Precision:
        """Return the types of the training state of parameters of `dtype` (a torch name)."""
        default = Precision.of(dtype)
        gradients = self.optimizer.gradients
        as_parameter = gradients == "parameter" or (gradients == "fp16" and dtype == "float16")
        gradient = default.gradient if gradients is None else dtype if as_parameter else "float32"
        return Precision(
            dtype, gradient, self.optimizer.state or (default.gradient if gradients is None else gradient)
        )

    def check_dtype(self, dtype: str) -> None:
        """Raise `InputError` if this runtime does not train in the precision `dtype` of a job."""
        if self.dtypes and dtype not in self.dtypes:
            raise InputError(
                f"runtime '{self.name}' does not train in {dtype}: give --dtype {' or '.join(self.dtypes)}, or another "
                "--runtime"
            )

    def rewrite(self, graph: OperatorGraph) -> OperatorGraph:
        """Return `graph` as this runtime runs it, with fused kernels and with the runtime's name among the facts."""
        if self.name == STAGEWRIGHT:
            return graph
        fused = fuse(graph, [kernel.rule for kernel in self.kernels])
        if self.holds_logits:
            fused = holding_logits(fused)
        if self.sums_once:
            fused = reducing_once(fused)
        if self.adds_in_products:
            fused = accumulating_in_matmuls(fused)
        return replace(fused, facts=fused.facts | {"runtime": self.name})


def runtime_of(graph: OperatorGraph) -> Runtime:
    """Return the runtime that a graph was rewritten for."""
    return load_runtime(graph.facts.get("runtime", STAGEWRIGHT))


@cache
def runtime_names() -> tuple[str, ...]:
    """Return the names of the bundled runtimes, Stagewright's own first."""
    folder = resources.files("stagewright.estimation") / "runtimes"
    names = sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )
    return (STAGEWRIGHT, *names)


@cache
def load_runtime(name: str) -> Runtime:
    """Return the bundled runtime `name`, or that of a TOML file.

    Raises:
        InputError: there is no such runtime (the message names the nearest), or its file is not valid.

    >>> load_runtime("stagewright").kernels
    ()
    """
    if name == STAGEWRIGHT:
        waits = Waits(beside_share=_COMMUNICATION_SHARE)
        return Runtime(
            name=STAGEWRIGHT,
            attention="traced",
            copies_parts=True,
            merges_views=True,
            waits=waits,
            expandable_segments=True,
        )
    if name.endswith(".toml"):
        path = Path(name).resolve()
        if path in _BEING_READ:
            raise InputError(f"runtime file '{name}' is based on itself: name another one in based_on")
        _BEING_READ.append(path)
        try:
            return _build(name, read_toml(Path(name), "runtime file"), name)
        finally:
            _BEING_READ.pop()
    if name not in runtime_names():
        raise InputError(
            f"no runtime '{name}'{nearest(name, runtime_names())}: use one of {', '.join(runtime_names())}, or the path of "
            "a file that ends in .toml"
        )
    text = (resources.files("stagewright.estimation") / "runtimes" / f"{name}.toml").read_text(
        encoding="utf-8"
    )
    return _build(name, tomllib.loads(text), f"runtime '{name}'")


_BEING_READ: list[Path] = []


def _build(name: str, document: dict[str, Any], origin: str) -> Runtime:
    """Return the runtime that a file describes; missing keys are those of the runtime that it is `based_on`."""
    if (based_on := document.pop("based_on", None)) is not None:
        base = _document_of(str(based_on), name, origin)
        changed = {key for key, value in document.items() if not isinstance(value, dict)}
        changed |= {
            f"{key}.{inner}" for key, table in document.items() if isinstance(table, dict) for inner in table
        }
        sources = base.get("sources", {})
        base["sources"] = {key: source for key, source in sources.items() if key not in changed}
        document = _merged(base, document)
    return validated(Runtime, {**document, "name": name}, origin)


def _document_of(name: str, child: str, origin: str) -> dict[str, Any]:
    """Return the document of the runtime `name`, which may be a file in the folder of `child`."""
    if name.endswith(".toml"):
        path = Path(child).resolve().parent / name
        if not path.is_file():
            raise InputError(
                f"{origin}: based_on = {name!r}, but there is no file '{path}': name one in the folder of this file"
            )
        return load_runtime(str(path.resolve())).model_dump(exclude_unset=True)
    if name not in runtime_names():
        raise InputError(
            f"{origin}: based_on = {name!r} is no bundled runtime{nearest(name, runtime_names())}: use one of "
            f"{', '.join(runtime_names())}, or a file next to this one that ends in .toml"
        )
    return load_runtime(name).model_dump(exclude_unset=True)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`: tables are merged key by key, kernels by name."""
    merged = dict(base)
    for key, value in changes.items():
        if key == "kernels" and isinstance(value, list):
            kernels = {kernel.get("name"): kernel for kernel in value if isinstance(kernel, dict)}
            kept = [kernel for kernel in base.get(key, ()) if kernel["name"] not in kernels]
            merged[key] = [*value, *kept]
        elif isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merged(base[key], value)
        else:
            merged[key] = value
    return merged
