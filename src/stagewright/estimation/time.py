"""Seconds of operators and functions on a device: a roofline with the device's few efficiency constants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.cluster import Cluster, Device, Host, all_reduce_seconds
from stagewright.cluster.device import precision_name
from stagewright.errors import InputError
from stagewright.estimation.collectives import collective_seconds, slowest_group
from stagewright.estimation.compiled import Fusion, fused
from stagewright.estimation.liveness import Lookup
from stagewright.estimation.operators import Kernel, Work, work
from stagewright.estimation.optimizer import ADAMW, OptimizerState
from stagewright.estimation.ring import ring_seconds
from stagewright.estimation.runtime import runtime_of
from stagewright.estimation.signatures import signature_of
from stagewright.graph import Node, OperatorGraph, Origin, Part, TensorMeta, Value
from stagewright.graph.expert_parallel import ALL_TO_ALL
from stagewright.graph.graph import short_name
from stagewright.graph.layers import layer_of
from stagewright.graph.tensor_parallel import (
    ALL_GATHER,
    COLLECTIVES,
    REDUCE_SCATTER,
    entry_of,
    group_of,
    neighbour_strides,
    parallelism,
)
from stagewright.graph.views import not_issued

Floats = NDArray[np.float64]

OVERLAP = 2.5
"""How well arithmetic hides memory traffic in one kernel: seconds are (a^p + m^p)^(1/p), between the sum of the two
(p = 1) and the larger (p infinite). Tiles of a product first load, then compute, then store; a device that runs few
waves of them overlaps little. Fitted on batched products of the operator times published with Mist (EuroSys'25)."""

ACCESS_S = 0.35e-6
"""Of one access to device memory that the next one waits for. Source: pointer chasing on NVIDIA data-center GPUs finds 450
to 800 cycles (Jia et al., arXiv 1804.06826; Luo et al., arXiv 2402.13499)."""

DEPTHWISE_EFFICIENCY = 0.15
"""Part of the float32 peak that a depthwise convolution attains: every multiply-add needs an element from the first-level
cache, which serves a quarter of the multiply-adds, and neighbouring filters share little. A guess within that limit."""

_CASTS = 2
"""Kernels that cast the operands of a product in fp8."""

_CAST_BYTES = 4
"""Half precision read, and a copy in eight bits written for each of the two products that take it."""

_NOT_RECOMPUTED = 4 / 5
"""Of the five products of fused attention's backward, one computes the scores again."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one operator: seconds the device is busy, seconds the host needs to issue it, FLOP."""

    device_s: float
    host_s: float
    flop: float
    """As `torch.utils.flop_counter` counts."""
    model_flop: float
    """Without what is computed a second time."""
    overlapped_s: float = 0.0
    """Of a collective that runs beside the products of its function, in place of `device_s`."""
    product_s: float = 0.0
    """What of `device_s` a product takes."""
    hidden_s: float = 0.0
    """Of a collective that runs beside another microbatch's computations, in place of `device_s`."""


_NOTHING = Cost(0.0, 0.0, 0.0, 0.0)
_NOT_ISSUED = -1_000_000
"""In the place of the signature of views that are not issued."""

_TILED_ATTENTION = ("bf16", "fp16")
"""Types that the kernels take which attention by shape is of: FlashAttention's and cuDNN's."""


def kernel_seconds(found: Work, device: Device) -> float:
    """Time of one kernel without its launch: arithmetic and memory traffic, which overlap in part.

    Source: the roofline model (Williams, Waterman and Patterson, CACM 52, 2009) with saturation of small
    products as in `Device.matmul_seconds`, and its corner rounded as in `OVERLAP`. Ignores: shapes beyond FLOP
    and bytes; caches; clocks under load.
    """
    if found.kernel is Kernel.NORM:
        return device.norm_seconds(found.bytes_moved)
    memory = device.memory_seconds(found.bytes_moved)
    if found.kernel is Kernel.DEPTHWISE and device.kind == "cuda":
        peak = device.peak_flops.get("float32") or 0.0
        return overlapped(found.arithmetic / (peak * DEPTHWISE_EFFICIENCY), memory)
    if found.kernel is Kernel.MATMUL and found.shapes and device.products is not None:
        precision = _precision(found, device)
        return device.product_seconds(found.shapes, precision, found.bytes_moved, grouped=found.grouped)
    if found.kernel in (Kernel.MATMUL, Kernel.DEPTHWISE):
        arithmetic = device.matmul_seconds(found.arithmetic, _precision(found, device))
        if device.packing_bandwidth:
            return arithmetic + found.bytes_moved / device.packing_bandwidth
        return overlapped(arithmetic, memory)
    if found.kernel in (Kernel.ATTENTION, Kernel.ATTENTION_BACKWARD):
        forward = found.kernel is Kernel.ATTENTION
        in_tiles = precision_name(found.dtype) in _TILED_ATTENTION
        if in_tiles and device.attention is not None and found.scores is not None:
            seconds = device.attention_seconds(found.scores, _precision(found, device), backward=not forward)
            return (device.attention_overhead_s or 0.0) + overlapped(seconds, memory)
        share = device.attention_efficiency if forward else device.attention_backward_efficiency
        peak = device.peak_flops.get(_precision(found, device)) or 0.0
        on_cpu = device.kind == "cpu" and found.in_blocks is not None
        arithmetic = found.in_blocks if on_cpu else found.arithmetic
        return (device.attention_overhead_s or 0.0) + overlapped((arithmetic or 0.0) / (peak * share), memory)
    evaluated = device.evaluation_seconds(found.num_functions, found.num_random)
    one_by_one = found.serial_accesses * ACCESS_S
    if device.kind == "cpu":
        one_by_one = found.num_scattered / device.scatter_rate if device.scatter_rate else 0.0
    return memory + evaluated + one_by_one


def overlapped(arithmetic: float, memory: float) -> float:
    """Seconds of a kernel whose arithmetic and whose traffic alone would take so long, as `OVERLAP` says."""
    return (arithmetic**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP)


def _precision(found: Work, device: Device) -> str:
    """The precision whose figures apply; a type the device has none for is computed in float32."""
    has = device.peak_flops.get(found.dtype) and device.matmul_efficiency.get(found.dtype)
    return found.dtype if has else "float32"


def cost(found: Work, device: Device) -> Cost:
    """What one operator takes in eager execution."""
    if found.kernel is Kernel.VIEW:
        busy, issue = 0.0, device.view_seconds
    else:
        busy, issue = kernel_seconds(found, device) + device.launch_overhead_s, device.host_overhead_s
    needed = found.flop * (_NOT_RECOMPUTED if found.kernel is Kernel.ATTENTION_BACKWARD else 1.0)
    return _issued(busy, issue, found.flop, needed, device)


def _issued(busy: float, issue: float, flop: float, model_flop: float, device: Device) -> Cost:
    """A CPU computes on the thread that issues the operators, so that both times add up there."""
    times = (busy + issue, 0.0) if device.kind == "cpu" else (busy, issue)
    return Cost(*times, flop, model_flop)


def _paced(plain: Cost, device: Device) -> Cost:
    """What an operator takes as a run showed, of which the device's figures say `plain`."""
    pace = device.pace
    if pace is None:
        return plain
    return replace(
        plain, device_s=pace * plain.device_s, host_s=pace * plain.host_s, product_s=pace * plain.product_s
    )


class _Sums(NamedTuple):
    """Of the operators of a function, as `together` takes them."""

    device_s: float
    host_s: float
    overlapped_s: float
    product_s: float
    hidden_s: float


class NodeCosts(NamedTuple):
    """The fields of `Cost`, each of all nodes of a graph."""

    device_s: Floats
    host_s: Floats
    flop: Floats
    model_flop: Floats
    overlapped_s: Floats
    product_s: Floats
    hidden_s: Floats

    @classmethod
    def of(cls, costs: Sequence[Cost]) -> NodeCosts:
        return cls(*(np.array([getattr(one, name) for one in costs], np.float64) for name in cls._fields))


_MOST_COPIES = 16
"""Products that take one tensor, at most."""

_GROWN = 256.0
"""Times as many samples: in a kernel of so many, what does not grow with them is next to nothing."""


class Costing:
    """Costs of the nodes of a graph on a device; equal nodes are looked at once."""

    def __init__(
        self,
        graph: OperatorGraph,
        device: Device,
        cluster: Cluster | None = None,
        products: str | None = None,
        compiled: bool = False,
    ) -> None:
        """`cluster` has the links of a graph whose layers several ranks share; `products` is the type in which products
        are computed where it is not that of their operands (``tf32``, ``fp8``); `compiled` as `estimation.compiled` says.
        """
        self.products = products
        self.fusions: dict[int, Fusion] = fused(graph) if compiled else {}
        self.runtime = runtime_of(graph)
        self.graph = graph
        self.device = device.with_attention(
            self.runtime.attention_rate, best=self.runtime.attention_kernels == "best"
        )
        if self.runtime.experts == "grouped":  # by kernels of its own
            self.device = self.device.with_grouped_share(1.0)
        found = parallelism(graph)
        self._strides = neighbour_strides(graph)
        if found is not None and cluster is None:
            raise InputError(
                f"model '{graph.name}' is split over {found.size} ranks: name the cluster whose links join them"
            )
        self.cluster = cluster
        self.without_rule: set[str] = set()
        self._by_signature: dict[int, Cost] = {}
        self._fused_costs: dict[int, Cost] = {}
        self._growing_by_kind: dict[tuple[int, Part], float] = {}
        self._products_of: dict[int, int] = {}
        self._of_graph = graph.values.__getitem__
        self._given = device, compiled  # as it was given, without the runtime's attention

    def on(self, device: Device) -> Costing:
        """The same nodes on another device."""
        costing = Costing(self.graph, device, self.cluster, self.products, self._given[1])
        costing._not_issued = self._not_issued
        return costing

    def of_graph(self, graph: OperatorGraph) -> Costing:
        """On the same device another graph, whose nodes cost as much where they have the same signature."""
        found = Costing(graph, self._given[0], self.cluster, self.products, self._given[1])
        found._by_signature, found.without_rule = self._by_signature, self.without_rule
        return found

    def of(self, node: Node, value: Lookup) -> Cost:
        """The cost of a node, of the graph or made by splitting."""
        if node.id in self._not_issued:
            return _NOTHING
        if node.id in self.fusions and self.graph.nodes[node.id] is node:
            return self._fused(node)
        kind = self._kind(node)
        known = self._by_signature.get(kind) if node.signature >= 0 else None
        if known is not None:
            return known
        found = work(node, value)
        if not found.has_rule:
            self.without_rule.add(short_name(node.op))
        if not found.is_aligned and self.runtime.unaligned_products == "other cores":
            found = replace(found, dtype="float32")
        made = self._in_products(found, node, value)
        measured_s = self.measured_seconds(node, value)
        if measured_s is not None:
            made = replace(made, device_s=measured_s)
        made = _paced(self._under_runtime(made, found), self.device)
        if self.runtime.context == "ring" and self.cluster is not None:
            ring_s = ring_seconds(node, value, self.cluster, self._strides, self.device)
            made = replace(made, device_s=made.device_s + ring_s)
        if node.op in COLLECTIVES:
            made = self._sent(node, value, made)
        made = self._in_turn(made)
        if node.signature >= 0:
            self._by_signature[kind] = made
        return made

    def _in_turn(self, plain: Cost) -> Cost:
        """What an operator takes where the runtime's host waits for every kernel; else as it is."""
        if not self.runtime.host.waits_for_kernels:
            return plain
        return replace(plain, device_s=plain.device_s + plain.host_s, host_s=0.0)

    def measured_seconds(self, node: Node, value: Lookup) -> float | None:
        """What the device's profile says of a node; None where it says nothing, or of another type of product."""
        profile = self.device.profile
        if profile is None or node.id in self.fusions or self.products is not None:
            return None
        signature = signature_of(node, value)
        return None if signature is None else profile.seconds.get(signature)

    @property
    def measured_share(self) -> float:
        """The part of the operators' time on the device that is measured and not worked out."""
        if self.device.profile is None:
            return 0.0
        seconds = self.arrays.device_s
        is_measured = [self.measured_seconds(node, self._of_graph) is not None for node in self.graph.nodes]
        return float(seconds[is_measured].sum() / seconds.sum())

    def _kind(self, node: Node) -> int:
        """A number that nodes of equal cost share: their signature, and in eight bits also what else decides."""
        if node.id in self._not_issued:
            return _NOT_ISSUED
        kind = node.signature * _MOST_COPIES + self._num_copies(node) - 1
        if self.products != "fp8":
            return kind
        return (kind * len(Part) + node.part) * 2 + self._takes_fp8(node)

    @cached_property
    def _not_issued(self) -> frozenset[int]:
        """Ids of the views that the runtime does not issue; of a compiled function none is told apart."""
        if not self.runtime.merges_views or self._given[1]:
            return frozenset()
        return not_issued(self.graph)

    def _num_copies(self, node: Node) -> int:
        """How many collectives a node stands for, of products that take the same tensor and share nothing.

        Source of what a compiler shares: torch/_functorch/compile_utils.py, `fx_graph_cse`.
        """
        if self.runtime.shares_gathers or (entry := entry_of(self.graph, node)) is None:
            return 1
        if node.part is Part.FORWARD and self._given[1]:
            return 1
        known = self._products_of.get(entry.id)
        if known is None:
            known = self._products_of[entry.id] = _num_products(self.graph, entry)
        return min(max(known, 1), _MOST_COPIES)

    def _under_runtime(self, plain: Cost, found: Work) -> Cost:
        """What the runtime's host spends in place of eager execution's, and how long the device waits."""
        kernel_s = self.runtime.host.kernel_s
        if kernel_s is not None:
            plain = replace(plain, host_s=0.0 if found.kernel is Kernel.VIEW else kernel_s)
        if found.kernel is Kernel.MATMUL:
            busy = plain.device_s + self.runtime.waits.product_s
            plain = replace(plain, device_s=busy, product_s=plain.device_s)
        return plain

    def _sent(self, node: Node, value: Lookup, plain: Cost) -> Cost:
        """A collective: `plain` is the copy that some runtimes make of its parts; others send in place."""
        assert self.cluster is not None
        runtime = self.runtime
        share = self._sent_share(node, value)
        copied_s = share * plain.device_s if runtime.copies_parts else 0.0
        once = runtime.dispatch == "once per node"
        copying = runtime.dispatch_multiprocessors if once else None
        sent_s = collective_seconds(node, value, self.cluster, self._strides, copying, share)
        sent_s += runtime.waits.collective_s
        beside, hidden = self._is_overlapped(node), node.op == ALL_TO_ALL and runtime.hides_dispatch
        if hidden:
            copied_s += runtime.waits.beside_share * sent_s
        if node.op == ALL_TO_ALL and _is_of_routing(value(node.inputs[0]).meta):
            copied_s += runtime.waits.routing_s
        num = self._num_copies(node)
        return replace(
            plain,
            device_s=num * (copied_s + (0.0 if beside or hidden else sent_s)),
            overlapped_s=num * sent_s if beside else 0.0,
            hidden_s=num * sent_s if hidden else 0.0,
            host_s=num * (plain.host_s + (group_of(node)[1] - 1) * runtime.host.member_s),
        )

    def _sent_share(self, node: Node, value: Lookup) -> float:
        """Of the bytes that a collective would send, those that it does where they are cast to eight bits before."""
        if not (self.runtime.casts_gathers and self.products == "fp8" and node.op == ALL_GATHER):
            return 1.0
        meta = value(node.inputs[0]).meta
        return (
            1 / meta.item_bytes
            if precision_name(meta.dtype) in ("bf16", "fp16") and self._takes_fp8(node)
            else 1.0
        )

    def _is_overlapped(self, node: Node) -> bool:
        """Whether a collective runs in parts beside products, as Transformer Engine's layers and asynchronous tensor
        parallelism have it."""
        which = self.runtime.overlapped_collectives
        if node.op not in (ALL_GATHER, REDUCE_SCATTER) or which == "none":
            return False
        return which == "all" or node.part > Part.FORWARD

    def _fused(self, node: Node) -> Cost:
        """The cost of a node that a compiler computes in the kernel of another one, or another one in its kernel."""
        known = self._fused_costs.get(node.id)
        if known is None:
            fusion = self.fusions[node.id]
            found = work(node, self._of_graph)
            busy = kernel_seconds(replace(found, bytes_moved=fusion.bytes_moved), self.device)
            if fusion.is_launched:
                busy += self.device.launch_overhead_s
            kernel_s = self.runtime.host.kernel_s
            issue_s = self.device.host_overhead_s if kernel_s is None else kernel_s
            host = issue_s if fusion.is_launched else 0.0
            plain = _paced(_issued(busy, host, found.flop, found.flop, self.device), self.device)
            known = self._in_turn(plain)
            self._fused_costs[node.id] = known
        return known

    def _in_products(self, found: Work, node: Node, value: Lookup) -> Cost:
        """The cost of an operator, with its product in the type that the job computes products in."""
        if self.products is None or found.kernel is not Kernel.MATMUL:
            return cost(found, self.device)
        if self.products == "tf32":
            return cost(replace(found, dtype="tf32") if found.dtype == "float32" else found, self.device)
        if precision_name(found.dtype) not in ("bf16", "fp16") or not self._takes_fp8(node):
            return cost(found, self.device)
        plain = cost(replace(found, dtype="fp8"), self.device)
        # Read in two bytes, written in one, which the product reads.
        num_bytes, num_casts = found.bytes_moved, _CASTS
        if self.runtime.casts == "once":
            operands = [value(number) for number in dict.fromkeys(node.inputs)]
            cast = [one for one in operands if one.meta.is_differentiable and not self._is_weight(one)]
            cast = cast if node.part < Part.WEIGHT_GRAD else []
            num_bytes, num_casts = sum(_CAST_BYTES * one.meta.num_elements for one in cast), len(cast)
        casts_s = self.device.memory_seconds(num_bytes) + num_casts * self.device.launch_overhead_s
        host_s = plain.host_s + num_casts * self.device.host_overhead_s
        return replace(plain, device_s=plain.device_s + casts_s, host_s=host_s)

    def _is_weight(self, value: Value) -> bool:
        root = value.storage
        return root < len(self.graph.values) and self.graph.values[root].origin is Origin.PARAMETER

    def _takes_fp8(self, node: Node) -> bool:
        """Whether a product is in eight bits: what surrounds numbered layers, the head above all, stays as it is."""
        if not (self.device.peak_flops.fp8 and self.device.matmul_efficiency.fp8):
            return False
        return bool(layer_of(node.module)) or not self._has_layers

    @cached_property
    def _has_layers(self) -> bool:
        return any(layer_of(node.module) for node in self.graph.nodes)

    def seconds(self, nodes: Iterable[Node], value: Lookup | None = None) -> float:
        """Time of a function: the device's work or the host's, whichever takes longer.

        Ignores: that a device waits where the host falls behind for a while only.
        """
        return float(together(*self._sums(nodes, value)))

    def behind_seconds(self, nodes: Iterable[Node], value: Lookup | None = None) -> float:
        """Of `seconds`, those in which the device waits for the host to issue what it does next; ignores the same."""
        sums = self._sums(nodes, value)
        return float(together(*sums) - together(*sums._replace(host_s=0.0)))

    def _sums(self, nodes: Iterable[Node], value: Lookup | None) -> _Sums:
        device_s = host_s = overlapped_s = product_s = hidden_s = 0.0
        for node in nodes:
            found = self.of(node, value or self._of_graph)
            device_s += found.device_s
            host_s += found.host_s
            overlapped_s += found.overlapped_s
            product_s += found.product_s
            hidden_s += found.hidden_s
        return _Sums(device_s, host_s, overlapped_s, product_s, hidden_s)

    def growing_seconds(self, nodes: Iterable[Node], value: Lookup) -> float:
        """Of the device's time of a function, what grows with the samples of a microbatch, at the least: no launches,
        no latency, not the traffic of weights and of their gradients. Where operators are measured, larger ones may be as
        fast as any, and nothing is known to grow."""
        return sum(self.growing(node, value) for node in nodes)

    def growing(self, node: Node, value: Lookup) -> float:
        """Of one node."""
        if self.device.profile is not None:
            return 0.0
        kind = self._kind(node), node.part
        if node.signature < 0 or kind not in self._growing_by_kind:
            self._growing_by_kind[kind] = self._growing(node, value)
        return self._growing_by_kind[kind]

    def _growing(self, node: Node, value: Lookup) -> float:
        if node.op in COLLECTIVES:
            assert self.cluster is not None
            sent = self.of(node, value)
            name, size = group_of(node)
            latency_s = all_reduce_seconds(
                self.cluster, 0, slowest_group(self.cluster, size, self._strides[name])
            )
            waits_s = self._num_copies(node) * (latency_s + self.runtime.waits.collective_s)
            return max(0.0, sent.device_s - waits_s)
        found = work(node, value)
        is_product = found.kernel is Kernel.MATMUL
        if found.kernel is Kernel.VIEW or (node.part >= Part.WEIGHT_GRAD and not is_product):
            return 0.0
        if node.id in self.fusions and not is_product:
            return max(0.0, self.of(node, value).device_s - self.device.launch_overhead_s)
        grown = replace(
            found, arithmetic=_GROWN * found.arithmetic, bytes_moved=0.0 if is_product else _GROWN * found.bytes_moved,
            shapes=(), in_blocks=None if found.in_blocks is None else _GROWN * found.in_blocks,
            scores=None if found.scores is None else found.scores._replace(batch=_GROWN * found.scores.batch),
        )  # fmt: skip
        seconds = _paced(self._in_products(grown, node, value), self.device).device_s / _GROWN
        if not is_product or self.device.products is None or found.grouped:
            return seconds
        of_weights = node.part >= Part.WEIGHT_GRAD
        least = self.device.products.least_kernel_factor
        return seconds * min((least(shape, of_weights=of_weights) for shape in found.shapes), default=1.0)

    @cached_property
    def arrays(self) -> NodeCosts:
        """What every node of the graph costs."""
        if self.fusions:
            return NodeCosts.of([self.of(node, self._of_graph) for node in self.graph.nodes])
        signatures = np.fromiter(map(self._kind, self.graph.nodes), np.int64)
        _, first, inverse = np.unique(signatures, return_index=True, return_inverse=True)
        found = NodeCosts.of([self.of(self.graph.nodes[index], self._of_graph) for index in first])
        return NodeCosts(*(column[inverse] for column in found))

    @property
    def flop(self) -> float:
        """FLOP of one microbatch, forward and backward, as `torch.utils.flop_counter` counts."""
        return float(self.arrays.flop.sum())

    @property
    def model_flop(self) -> float:
        """FLOP of one microbatch without what is computed a second time."""
        return float(self.arrays.model_flop.sum())


def together(
    device_s: Floats | float,
    host_s: Floats | float,
    overlapped_s: Floats | float,
    product_s: Floats | float,
    hidden_s: Floats | float,
) -> Floats:
    """Seconds of functions whose operators sum up to these: the device's work or the host's, whichever takes longer."""
    busy = device_s + np.maximum(0.0, np.subtract(overlapped_s, product_s))
    return np.maximum(busy, np.maximum(hidden_s, host_s))


def _num_products(graph: OperatorGraph, node: Node) -> int:
    """Products of the forward that take what a node makes, as it is or as views of it."""
    waiting, found, seen = [node], set[int](), set[int]()
    while waiting:
        for output in waiting.pop().outputs:
            for user in graph.consumers.get(output, ()) if output is not None else ():
                reader = graph.nodes[user]
                if reader.part is not Part.FORWARD or user in seen:
                    continue
                seen.add(user)
                kernel = work(reader, graph.values.__getitem__).kernel
                if kernel is Kernel.MATMUL:
                    found.add(user)
                elif kernel is Kernel.VIEW:
                    waiting.append(reader)
    return len(found)


def _is_of_routing(sent: TensorMeta) -> bool:
    """Whether an all-to-all sends the weights of routed tokens, or their gradients: once a layer in either direction."""
    return len(sent.shape) == 1 and sent.is_differentiable


def host_optimizer_seconds(
    num_parameters: float,
    device: Device,
    host: Host,
    gradient: int,
    parameter: int,
    clips: bool,
    kept: OptimizerState = ADAMW,
) -> float:
    """As `optimizer_seconds` for state on the host: gradients go there, the optimizer runs there, parameters come back, in
    elements of `gradient` and `parameter` bytes.

    One after the other, as the executor does it. Ignores: launches; that transfers take bandwidth of the host's memory.
    """
    moved = (gradient + parameter) / device.host_link_bandwidth if device.kind != "cpu" else 0.0
    on_host = host.memory_seconds(
        kept.passes * gradient + (gradient + parameter if parameter != gradient else 0.0)
    )
    clipping = (device.pace or 1.0) * device.memory_seconds(3.0 * gradient) if clips else 0.0
    return (moved + on_host + clipping) * num_parameters


def optimizer_seconds(
    num_parameters: float,
    device: Device,
    has_master: bool,
    clips: bool,
    num_tensors: int = 0,
    kept: OptimizerState = ADAMW,
) -> float:
    """Time of an optimizer over parameters of 4-byte state, with clipping and, if there are masters, rounding.

    Fused AdamW reads weight, gradient and two moments and writes all but the gradient, others as `kept` says; clipping reads
    each gradient, then reads and writes it; rounding reads a master and writes two bytes. A CPU does each of these tensor by
    tensor, where a GPU does them for all `num_tensors` in a few kernels. Ignores: those launches; fp64's double width;
    matrix products of an optimizer.
    """
    per_parameter = 4.0 * kept.passes + (12.0 if clips else 0.0) + (6.0 if has_master else 0.0)
    per_tensor = kept.calls + (2 if clips else 0) + (1 if has_master else 0) if device.kind == "cpu" else 0
    return (device.pace or 1.0) * (
        device.memory_seconds(per_parameter * num_parameters)
        + per_tensor * num_tensors * device.host_overhead_s
    )
