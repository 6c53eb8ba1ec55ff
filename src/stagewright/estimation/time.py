"""Times of operators and functions on a device: a roofline model with the device's efficiency constants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Floats
from stagewright.cluster import Cluster, Device, Host, all_reduce_seconds
from stagewright.cluster.device import precision_name
from stagewright.errors import InputError
from stagewright.estimation.collectives import collective_seconds, ring_seconds, slowest_group
from stagewright.estimation.compiled import Fusion, fused
from stagewright.estimation.operators import Kernel, Work, work
from stagewright.estimation.optimizer import ADAMW, OptimizerState
from stagewright.estimation.overlap import COMPUTING, Overlaps, Pair, pairs_of, takers
from stagewright.estimation.runtime import runtime_of
from stagewright.estimation.signatures import signature_of
from stagewright.graph import Node, OperatorGraph, Origin, Part, TensorMeta, Value
from stagewright.graph.added_nodes import ACCUMULATE, HOST_COPIES
from stagewright.graph.expert_parallel import ALL_TO_ALL
from stagewright.graph.graph import UNPACKING, short_name
from stagewright.graph.layers import layer_of
from stagewright.graph.tensor_parallel import (
    ALL_GATHER,
    COLLECTIVES,
    entry_of,
    group_of,
    neighbour_strides,
    parallelism,
)
from stagewright.graph.views import Lookup, not_issued

OVERLAP = 2.5
"""Exponent p of the overlap of arithmetic and memory traffic in one kernel: seconds are (a^p + m^p)^(1/p), between the sum
(p = 1) and the maximum (p infinite). Tiles of a matmul first load, then compute, then store; a device that runs few waves of
them overlaps little. Fitted on batched matmuls of the operator times published with Mist (EuroSys'25)."""

ACCESS_S = 0.35e-6
"""Seconds of one access to device memory in a sequence of dependent ones. Source: pointer chasing on NVIDIA data-center GPUs
finds 450 to 800 cycles (Jia et al., arXiv 1804.06826; Luo et al., arXiv 2402.13499)."""

DEPTHWISE_EFFICIENCY = 0.15
"""Fraction of the float32 peak that a depthwise convolution attains: every multiply-add needs an element from the L1 cache,
which serves a quarter of the multiply-adds, and neighbouring filters share little. A guess within that limit."""

_CASTS = 2
"""Kernels that cast the operands of a matmul in fp8."""

_CAST_BYTES = 4
"""Bytes of a cast: half precision read, and a copy in eight bits written for each of two matmuls."""

_TRANSPOSE_BYTES = 2
"""Bytes of the second of these copies where the first was gathered: read and written in eight bits."""

_NOT_RECOMPUTED = 4 / 5
"""One of the five matmuls of fused attention's backward recomputes the scores."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one operator: busy seconds of the device, seconds of the host to issue it, FLOP."""

    device_s: float
    host_s: float
    flop: float
    """FLOP as counted by `torch.utils.flop_counter`."""
    model_flop: float
    """FLOP without recomputation."""
    overlapped_s: float = 0.0
    """Seconds of a collective that may overlap with matmuls, part of `device_s`."""
    kernel_s: float = 0.0
    """Seconds of a matmul or attention without waits, part of `device_s`."""
    hidden_s: float = 0.0
    """Seconds of a collective that overlaps with another microbatch's computations, instead of `device_s`."""


_NOTHING = Cost(0.0, 0.0, 0.0, 0.0)
_NOT_ISSUED = -1_000_000
"""Signature of views that are not issued."""

_TILED_ATTENTION = ("bf16", "fp16")
"""Types of the kernels that attention by shape models: FlashAttention's and cuDNN's."""


def kernel_seconds(operator: Work, device: Device) -> float:
    """Return the seconds of one kernel without its launch: arithmetic and memory traffic, which overlap in part.

    Source: the roofline model (Williams, Waterman and Patterson, CACM 52, 2009) with saturation of small matmuls as in
    `Device.matmul_seconds`, and its corner rounded as in `OVERLAP`. Ignores: shapes beyond FLOP and bytes; caches; clocks
    under load.
    """
    if operator.kernel is Kernel.NORM:
        return device.norm_seconds(operator.bytes_moved)
    memory = device.memory_seconds(operator.bytes_moved)
    if operator.kernel is Kernel.DEPTHWISE and device.kind == "cuda":
        peak = device.peak_flops.get("float32") or 0.0
        return overlapped(operator.arithmetic / (peak * DEPTHWISE_EFFICIENCY), memory)
    if operator.kernel is Kernel.MATMUL and operator.shapes and device.products is not None:
        precision = _precision(operator, device)
        return device.shaped_matmul_seconds(
            operator.shapes,
            precision,
            operator.bytes_moved,
            grouped=operator.grouped,
            aligned=operator.is_aligned,
        )
    if operator.kernel in (Kernel.MATMUL, Kernel.DEPTHWISE):
        arithmetic = device.matmul_seconds(operator.arithmetic, _precision(operator, device))
        if device.packing_bandwidth:
            return arithmetic + operator.bytes_moved / device.packing_bandwidth
        return overlapped(arithmetic, memory)
    if operator.kernel in (Kernel.ATTENTION, Kernel.ATTENTION_BACKWARD):
        forward = operator.kernel is Kernel.ATTENTION
        in_tiles = precision_name(operator.dtype) in _TILED_ATTENTION
        if in_tiles and device.attention is not None and operator.scores is not None:
            seconds = device.attention_seconds(
                operator.scores, _precision(operator, device), backward=not forward
            )
            return (device.attention_overhead_s or 0.0) + overlapped(seconds, memory)
        share = device.attention_efficiency if forward else device.attention_backward_efficiency
        peak = device.peak_flops.get(_precision(operator, device)) or 0.0
        on_cpu = device.kind == "cpu" and operator.in_blocks is not None
        arithmetic = operator.in_blocks if on_cpu else operator.arithmetic
        return (device.attention_overhead_s or 0.0) + overlapped((arithmetic or 0.0) / (peak * share), memory)
    evaluated = device.evaluation_seconds(operator.num_functions, operator.num_random)
    one_by_one = operator.serial_accesses * ACCESS_S
    if device.kind == "cpu":
        one_by_one = operator.num_scattered / device.scatter_rate if device.scatter_rate else 0.0
    return memory + evaluated + one_by_one


def overlapped(arithmetic: float, memory: float) -> float:
    """Return the seconds of a kernel from those of its arithmetic and its traffic alone; see `OVERLAP`."""
    return (arithmetic**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP)


def _precision(operator: Work, device: Device) -> str:
    """Return the precision whose figures apply; a type without figures is computed in float32."""
    has_figures = device.peak_flops.get(operator.dtype) and device.matmul_efficiency.get(operator.dtype)
    return operator.dtype if has_figures else "float32"


def cost(operator: Work, device: Device) -> Cost:
    """Return the cost of one operator in eager execution."""
    if operator.kernel is Kernel.VIEW:
        busy, issue = 0.0, device.view_seconds
    else:
        busy, issue = kernel_seconds(operator, device) + device.launch_overhead_s, device.host_overhead_s
    needed = operator.flop * (_NOT_RECOMPUTED if operator.kernel is Kernel.ATTENTION_BACKWARD else 1.0)
    return _issued(busy, issue, operator.flop, needed, device)


def _issued(busy: float, issue: float, flop: float, model_flop: float, device: Device) -> Cost:
    """Return a cost; on a CPU both times add up, because it computes on the thread that issues the operators."""
    times = (busy + issue, 0.0) if device.kind == "cpu" else (busy, issue)
    return Cost(*times, flop, model_flop)


def _slowed(plain: Cost, device: Device) -> Cost:
    """Return the cost `plain` scaled by the measured slowdown of the device."""
    slowdown = device.pace
    if slowdown is None:
        return plain
    return replace(
        plain,
        device_s=slowdown * plain.device_s,
        host_s=slowdown * plain.host_s,
        kernel_s=slowdown * plain.kernel_s,
    )


class Sums(NamedTuple):
    """Sums over the operators of a function, the arguments of `together`."""

    device_s: float
    host_s: float
    hidden_s: float

    @classmethod
    def of(cls, columns: Floats) -> Sums:
        """Return the sums of the `Costing.columns` of operators, added in their order."""
        return cls(*columns.cumsum(axis=1)[:, -1].tolist()) if columns.size else cls(0.0, 0.0, 0.0)

    @property
    def seconds(self) -> float:
        return float(together(*self))

    @property
    def behind_seconds(self) -> float:
        """The part of `seconds` in which the device waits for the host to issue operators."""
        return float(together(*self) - together(*self._replace(host_s=0.0)))


class NodeCosts(NamedTuple):
    """The fields of `Cost` as arrays over all nodes of a graph."""

    device_s: Floats
    host_s: Floats
    flop: Floats
    model_flop: Floats
    overlapped_s: Floats
    kernel_s: Floats
    hidden_s: Floats

    @classmethod
    def of(cls, costs: Sequence[Cost]) -> NodeCosts:
        return cls(*(np.array([getattr(cost, name) for cost in costs], np.float64) for name in cls._fields))


_MOST_COPIES = 16
"""Maximum number of matmuls that use one tensor."""

_GROWN = 256.0
"""Factor of the number of samples at which the constant part of a kernel is negligible."""


class Costing:
    """Costs of the nodes of a graph on a device; equal nodes are computed once."""

    def __init__(
        self,
        graph: OperatorGraph,
        device: Device,
        cluster: Cluster | None = None,
        matmul_precision: str | None = None,
        compiled: bool = False,
    ) -> None:
        """`cluster` has the links of a graph with tensor parallelism; `matmul_precision` is the type in which matmuls are
        computed if it is not that of their operands (``tf32``, ``fp8``); `compiled`: see `estimation.compiled`.
        """
        self.matmul_precision = matmul_precision
        self.fusions: dict[int, Fusion] = fused(graph) if compiled else {}
        self.runtime = runtime_of(graph)
        self.graph = graph
        self.device = device.with_attention(
            self.runtime.attention_rate, best=self.runtime.attention_kernels == "best"
        )
        if self.runtime.experts != "traced":  # by kernels of its own
            self.device = self.device.with_grouped_share(1.0)
        parallel = parallelism(graph)
        self._strides = neighbour_strides(graph)
        if parallel is not None and cluster is None:
            raise InputError(
                f"model '{graph.name}' is split over {parallel.size} ranks: name the cluster whose links join them"
            )
        self.cluster = cluster
        self.without_rule: set[str] = set()
        self._by_key: dict[object, Cost] = {}
        self._fused_costs: dict[int, Cost] = {}
        self._growing_by_kind: dict[tuple[int, Part | None], float] = {}
        self._num_matmuls_of: dict[int, int] = {}
        self._of_graph = graph.values.__getitem__
        self._is_compiled = compiled
        self._plain_device = device  # without the runtime's attention

    def on(self, device: Device) -> Costing:
        """Return the costs of the same nodes on another device."""
        costing = Costing(self.graph, device, self.cluster, self.matmul_precision, self._is_compiled)
        costing._not_issued, costing._pairs = self._not_issued, self._pairs
        return costing

    def of_graph(self, graph: OperatorGraph) -> Costing:
        """Return the costs of another graph on the same device; nodes of equal signature cost the same."""
        costing = Costing(graph, self._plain_device, self.cluster, self.matmul_precision, self._is_compiled)
        costing._by_key, costing.without_rule = self._by_key, self.without_rule
        return costing

    def of(self, node: Node, value: Lookup) -> Cost:
        """Return the cost of a node of the graph or of one added by splitting."""
        if node.id in self._not_issued:
            return _NOTHING
        if node.id in self.fusions and self.graph.nodes[node.id] is node:
            return self._fused(node)
        key = self._key(node, value)
        if key in self._by_key:
            return self._by_key[key]
        operator = work(node, value)
        if not operator.has_rule:
            self.without_rule.add(short_name(node.op))
        if not operator.is_aligned:
            operator = self._unaligned(operator)
        result = self._at_matmul_precision(operator, node, value)
        measured_s = self.measured_seconds(node, value)
        if measured_s is not None:
            result = replace(result, device_s=measured_s)
        result = _slowed(self._under_runtime(result, operator), self.device)
        if self.runtime.context == "ring" and self.cluster is not None:
            ring_s = ring_seconds(node, value, self.cluster, self._strides, self.device)
            result = replace(result, device_s=result.device_s + ring_s)
        if node.op in COLLECTIVES:
            result = self._sent(node, value, result)
        result = self._in_turn(result)
        if key is not None:
            self._by_key[key] = result
        return result

    def _unaligned(self, operator: Work) -> Work:
        """Return a matmul whose rows begin at no multiple of 16 bytes as it runs: compilers pad it, old libraries compute
        batches of such without tensor cores.

        Source for compilers: torch/_inductor/config.py, `shape_padding`.
        """
        if self._is_compiled:
            return replace(operator, is_aligned=True)
        is_batch = any(shape.batch > 1 for shape in operator.shapes)
        return (
            replace(operator, dtype="float32")
            if is_batch and self.runtime.unaligned_products == "other cores"
            else operator
        )

    def _in_turn(self, plain: Cost) -> Cost:
        """Add host time to device time if the runtime's host waits for every kernel."""
        if not self.runtime.host.waits_for_kernels:
            return plain
        return replace(plain, device_s=plain.device_s + plain.host_s, host_s=0.0)

    def measured_seconds(self, node: Node, value: Lookup) -> float | None:
        """Return the seconds of a node in the device's profile; None if it has none, or for another type of matmul."""
        profile = self.device.profile
        if profile is None or node.id in self.fusions or self.matmul_precision is not None:
            return None
        signature = signature_of(node, value)
        return None if signature is None else profile.seconds.get(signature)

    @property
    def measured_share(self) -> float:
        """Fraction of the operators' device time that was measured rather than modelled."""
        if self.device.profile is None:
            return 0.0
        seconds = self.arrays.device_s
        is_measured = [self.measured_seconds(node, self._of_graph) is not None for node in self.graph.nodes]
        return float(seconds[is_measured].sum() / seconds.sum())

    def _key(self, node: Node, value: Lookup) -> object:
        """Return a key that nodes of equal cost share; None for a node like no other."""
        if node.op == ACCUMULATE:  # which splitting adds for every trained parameter
            gradient = value(node.inputs[0])
            return gradient.meta, value(gradient.storage).meta.num_elements
        if node.op in HOST_COPIES:
            return node.op
        return self._kind(node) if node.signature >= 0 else None

    def _kind(self, node: Node) -> int:
        """Return a number that nodes of equal cost share: the signature, and with fp8 also other criteria."""
        if node.id in self._not_issued:
            return _NOT_ISSUED
        kind = node.signature * _MOST_COPIES + self._num_copies(node) - 1
        if self.matmul_precision != "fp8":
            return kind
        kind = (kind * len(Part) + node.part) * 2 + self._takes_fp8(node)
        return kind * (_CASTS + 1) + len(self._gathered_in_fp8(node))

    @cached_property
    def _not_issued(self) -> frozenset[int]:
        """Ids of the views that the runtime does not issue; empty for compiled functions."""
        if not self.runtime.merges_views or self._is_compiled:
            return frozenset()
        return not_issued(self.graph)

    def _num_copies(self, node: Node) -> int:
        """Return how many collectives a node stands for if matmuls that use the same tensor do not share its gather.

        Source for compilers: torch/_functorch/compile_utils.py, `fx_graph_cse`.
        """
        if self.runtime.shares_gathers or (entry := entry_of(self.graph, node)) is None:
            return 1
        if node.part is Part.FORWARD and self._is_compiled:
            return 1
        num_matmuls = self._num_matmuls_of.get(entry.id)
        if num_matmuls is None:
            num_matmuls = self._num_matmuls_of[entry.id] = len(takers(self.graph, entry))
        return min(max(num_matmuls, 1), _MOST_COPIES)

    def _under_runtime(self, plain: Cost, operator: Work) -> Cost:
        """Return the cost with the runtime's host time instead of eager execution's, and its waits."""
        kernel_s = self.runtime.host.kernel_s
        if kernel_s is not None:
            plain = replace(plain, host_s=0.0 if operator.kernel is Kernel.VIEW else kernel_s)
        if operator.kernel in COMPUTING:
            waits_s = self.runtime.waits.product_s if operator.kernel is Kernel.MATMUL else 0.0
            plain = replace(plain, device_s=plain.device_s + waits_s, kernel_s=plain.device_s)
        return plain

    def _sent(self, node: Node, value: Lookup, plain: Cost) -> Cost:
        """Return the cost of a collective; `plain` is the copy of its parts, which some runtimes avoid."""
        assert self.cluster is not None
        runtime = self.runtime
        share = self._sent_share(node, value)
        copied_s = share * plain.device_s if runtime.copies_parts else 0.0
        if share < 1.0:
            copied_s += self.device.memory_seconds(_CAST_BYTES * value(node.inputs[0]).meta.num_elements)
        once = runtime.dispatch == "once per node"
        copying = runtime.dispatch_multiprocessors if once else None
        sent_s = collective_seconds(node, value, self.cluster, self._strides, copying, share)
        sent_s += runtime.waits.collective_s
        hidden = node.op == ALL_TO_ALL and runtime.hides_dispatch
        if hidden:
            copied_s += runtime.waits.beside_share * sent_s
        if node.op == ALL_TO_ALL and _is_of_routing(value(node.inputs[0]).meta):
            copied_s += runtime.waits.routing_s
        num = self._num_copies(node)
        return replace(
            plain,
            device_s=num * (copied_s + (0.0 if hidden else sent_s)),
            overlapped_s=0.0 if hidden else num * sent_s,
            hidden_s=num * sent_s if hidden else 0.0,
            host_s=num * (plain.host_s + (group_of(node)[1] - 1) * runtime.host.member_s),
        )

    def _sent_share(self, node: Node, value: Lookup) -> float:
        """Return the fraction of a collective's bytes that is sent if they are cast to eight bits before."""
        if not (self.runtime.casts_gathers and self.matmul_precision == "fp8" and node.op == ALL_GATHER):
            return 1.0
        meta = value(node.inputs[0]).meta
        return (
            1 / meta.item_bytes
            if precision_name(meta.dtype) in ("bf16", "fp16") and self._takes_fp8(node)
            else 1.0
        )

    def _fused(self, node: Node) -> Cost:
        """Return the cost of a node that a compiler fuses with another one."""
        cached = self._fused_costs.get(node.id)
        if cached is None:
            fusion = self.fusions[node.id]
            operator = work(node, self._of_graph)
            busy = kernel_seconds(replace(operator, bytes_moved=fusion.bytes_moved), self.device)
            if fusion.is_launched:
                busy += self.device.launch_overhead_s
            kernel_s = self.runtime.host.kernel_s
            issue_s = self.device.host_overhead_s if kernel_s is None else kernel_s
            host = issue_s if fusion.is_launched else 0.0
            plain = _slowed(_issued(busy, host, operator.flop, operator.flop, self.device), self.device)
            cached = self._in_turn(plain)
            self._fused_costs[node.id] = cached
        return cached

    def _at_matmul_precision(self, operator: Work, node: Node, value: Lookup) -> Cost:
        """Return the cost of an operator; a matmul is computed in the job's type for matmuls, casts included."""
        if self.matmul_precision is None or operator.kernel is not Kernel.MATMUL:
            return cost(operator, self.device)
        if self.matmul_precision == "tf32":
            return cost(
                replace(operator, dtype="tf32") if operator.dtype == "float32" else operator, self.device
            )
        if precision_name(operator.dtype) not in ("bf16", "fp16") or not self._takes_fp8(node):
            return cost(operator, self.device)
        plain = cost(replace(operator, dtype="fp8"), self.device)
        # Operands are read in two bytes and written in one, which the matmul then reads.
        num_bytes, num_casts = operator.bytes_moved, _CASTS
        gathered = self._gathered_in_fp8(node)
        if self.runtime.casts == "once":
            operands = [value(number) for number in dict.fromkeys(node.inputs)]
            cast = [
                operand
                for operand in operands
                if operand.meta.is_differentiable and not self._is_weight(operand)
            ]
            cast = cast if node.part < Part.WEIGHT_GRAD else []
            num_casts = len(cast)
            num_bytes = sum(
                (_TRANSPOSE_BYTES if operand in gathered else _CAST_BYTES) * operand.meta.num_elements
                for operand in cast
            )
        else:
            num_bytes = max(0.0, num_bytes - sum(operand.meta.payload_bytes for operand in gathered))
            num_casts -= len(gathered)
        casts_s = self.device.memory_seconds(num_bytes) + num_casts * self.device.launch_overhead_s
        host_s = plain.host_s + num_casts * self.device.host_overhead_s
        return replace(plain, device_s=plain.device_s + casts_s, host_s=host_s)

    def _gathered_in_fp8(self, node: Node) -> list[Value]:
        """Return the operands of a matmul that were cast to eight bits before they were gathered."""
        if not self.runtime.casts_gathers or not self._takes_fp8(node):
            return []
        values, nodes = self.graph.values, self.graph.nodes
        operands = [values[number] for number in dict.fromkeys(node.inputs) if number < len(values)]
        makers = ((operand, values[operand.storage].node) for operand in operands)
        return [operand for operand, maker in makers if maker >= 0 and nodes[maker].op == ALL_GATHER]

    def _is_weight(self, value: Value) -> bool:
        root = value.storage
        return root < len(self.graph.values) and self.graph.values[root].origin is Origin.PARAMETER

    def _takes_fp8(self, node: Node) -> bool:
        """Whether a matmul is in eight bits: those outside of numbered layers, such as the head, are not."""
        if not (self.device.peak_flops.fp8 and self.device.matmul_efficiency.fp8):
            return False
        return bool(layer_of(node.module)) or not self._has_layers

    @cached_property
    def _has_layers(self) -> bool:
        return any(layer_of(node.module) for node in self.graph.nodes)

    def seconds(self, nodes: Iterable[Node], value: Lookup | None = None) -> float:
        """Return the seconds of a function: the device's work or the host's, whichever takes longer.

        Ignores: that a device may wait for the host in only a part of the function.
        """
        return self.sums(nodes, value).seconds

    def sums(self, nodes: Iterable[Node], value: Lookup | None = None) -> Sums:
        """Return the sums over the operators of a function, added in their order."""
        return Sums.of(self.columns(nodes, value))

    def columns(self, nodes: Iterable[Node], value: Lookup | None = None) -> Floats:
        """Return the fields of `Sums`, a row each, for every operator of a function; of a collective that overlaps with
        others of them the device's seconds are those that do not."""
        graph_nodes, ids = self.graph.nodes, list[int]()
        others: dict[int, Cost] = {}  # those of nodes that splitting has added or renamed, by their place
        for place, node in enumerate(nodes):
            original = graph_nodes[node.id] if 0 <= node.id < len(graph_nodes) else None
            ids.append(node.id if original is not None and original.op == node.op else -1)
            if original is not node or node.signature < 0:
                others[place] = self.of(node, value or self._of_graph)
        columns = self._summed[:, ids]
        if others:
            columns[:, [*others]] = np.array(
                [(cost.device_s, cost.host_s, cost.hidden_s) for cost in others.values()]
            ).T
        if self._overlaps is not None:
            columns[0] -= self._overlaps.hidden_seconds(np.array(ids, np.int64))[ids]
        return columns

    @cached_property
    def device_seconds(self) -> Floats:
        """Seconds of the device for every node of the graph, in one forward and one backward."""
        is_forward = np.fromiter((node.part <= Part.FORWARD for node in self.graph.nodes), np.bool_)
        seconds = self.arrays.device_s
        if self._overlaps is not None:
            for runs in (is_forward, ~is_forward):
                seconds = seconds - self._overlaps.hidden_seconds(np.flatnonzero(runs))[:-1]
        return seconds

    @cached_property
    def _summed(self) -> Floats:
        """The fields of `Sums` for every node of the graph, a row each."""
        return np.array([getattr(self.arrays, name) for name in Sums._fields])

    @cached_property
    def _overlaps(self) -> Overlaps | None:
        costs = self.arrays
        return Overlaps(self._pairs, costs.overlapped_s, costs.kernel_s) if self._pairs else None

    @cached_property
    def _pairs(self) -> tuple[Pair, ...]:
        return pairs_of(self.graph, self.runtime.overlapped_collectives)

    def growing(self, node: Node, value: Lookup) -> float:
        """Return a lower bound on the part of a node's time on the device that grows with the samples of a microbatch:
        without launches, latency, and traffic of weights and their gradients. With measured operators nothing is known to
        grow."""
        if self.device.profile is not None:
            return 0.0
        # A signature does not say what a node is fused with.
        kind = (node.id, None) if node.id in self.fusions else (self._kind(node), node.part)
        if node.signature < 0 or kind not in self._growing_by_kind:
            self._growing_by_kind[kind] = self._growing(node, value)
        return self._growing_by_kind[kind]

    def growing_with(self, node: Node, value: Lookup, share: float) -> float:
        """Return `growing` for a node with a `share` of the work, whose memory traffic may then fit the cache."""
        growing_s = self.growing(node, value)
        if not growing_s or share == 1.0 or node.op in COLLECTIVES:
            return share * growing_s
        operator = work(node, value)
        if operator.kernel not in (Kernel.MEMORY, Kernel.NORM):
            return share * growing_s
        fusion = self.fusions.get(node.id)
        num_bytes = operator.bytes_moved if fusion is None else fusion.bytes_moved
        streams = Work(operator.kernel, operator.dtype, bytes_moved=share * num_bytes)
        return min(share * growing_s, (self.device.pace or 1.0) * kernel_seconds(streams, self.device))

    def growing_among(self, node: Node, value: Lookup, num_ranks: int) -> float:
        """Return `growing` for a collective among `num_ranks` ranks of its group."""
        growing_s = self.growing(node, value)
        if not growing_s or self.runtime.overlapped_collectives != "none":
            return growing_s
        assert self.cluster is not None
        place = node.args.index(group_of(node)[0]) + 1
        among = replace(node, args=(*node.args[:place], num_ranks, *node.args[place + 1 :]))
        # Scaled up, so that latency is negligible.
        group_s, among_s = (
            collective_seconds(
                sent, value, self.cluster, self._strides, scale=_GROWN * self._sent_share(node, value)
            )
            for sent in (node, among)
        )
        return growing_s + max(0.0, self._num_copies(node) * (among_s - group_s) / _GROWN)

    def _growing(self, node: Node, value: Lookup) -> float:
        if node.op in COLLECTIVES:
            assert self.cluster is not None
            sent = self.of(node, value)
            name, size = group_of(node)
            latency_s = all_reduce_seconds(
                self.cluster, 0, slowest_group(self.cluster, size, self._strides[name])
            )
            waits_s = self._num_copies(node) * (latency_s + self.runtime.waits.collective_s)
            overlapped_s = 0.0 if self.runtime.overlapped_collectives == "none" else sent.overlapped_s
            return max(0.0, sent.device_s - max(waits_s, overlapped_s))
        operator = work(node, value)
        is_matmul = operator.kernel is Kernel.MATMUL
        if operator.kernel is Kernel.VIEW or (node.part >= Part.WEIGHT_GRAD and not is_matmul):
            return 0.0
        if node.op in UNPACKING:  # of weights
            return 0.0
        if node.id in self.fusions and not is_matmul:
            return max(0.0, self.of(node, value).device_s - self.device.launch_overhead_s)
        grown = replace(
            operator, arithmetic=_GROWN * operator.arithmetic, shapes=(),
            bytes_moved=0.0 if is_matmul else _GROWN * operator.bytes_moved,
            in_blocks=None if operator.in_blocks is None else _GROWN * operator.in_blocks,
            scores=None if operator.scores is None else operator.scores._replace(batch=_GROWN * operator.scores.batch),
        )  # fmt: skip
        seconds = _slowed(self._at_matmul_precision(grown, node, value), self.device).device_s / _GROWN
        if not is_matmul or self.device.products is None or operator.grouped:
            return seconds
        of_weights = node.part >= Part.WEIGHT_GRAD
        least = self.device.products.least_kernel_factor
        return seconds * min((least(shape, of_weights=of_weights) for shape in operator.shapes), default=1.0)

    @cached_property
    def arrays(self) -> NodeCosts:
        """Costs of all nodes of the graph."""
        if self.fusions:
            return NodeCosts.of([self.of(node, self._of_graph) for node in self.graph.nodes])
        signatures = np.fromiter(map(self._kind, self.graph.nodes), np.int64)
        _, first, inverse = np.unique(signatures, return_index=True, return_inverse=True)
        columns = NodeCosts.of([self.of(self.graph.nodes[index], self._of_graph) for index in first])
        return NodeCosts(*(column[inverse] for column in columns))

    @property
    def flop(self) -> float:
        """FLOP of one microbatch, forward and backward, as counted by `torch.utils.flop_counter`."""
        return float(self.arrays.flop.sum())

    @property
    def model_flop(self) -> float:
        """FLOP of one microbatch without recomputation."""
        return float(self.arrays.model_flop.sum())


def together(
    device_s: Floats | float,
    host_s: Floats | float,
    hidden_s: Floats | float,
) -> Floats:
    """Return the seconds of functions from the sums of their operators: the device's work, the host's, or the collectives
    that another microbatch hides, whichever takes longest."""
    return np.maximum(device_s, np.maximum(hidden_s, host_s))


def _is_of_routing(sent: TensorMeta) -> bool:
    """Whether an all-to-all sends the weights of routed tokens, or their gradients: once per layer and direction."""
    return len(sent.shape) == 1 and sent.is_differentiable


def host_optimizer_seconds(
    num_parameters: float,
    device: Device | None,
    host: Host,
    gradient: int,
    parameter: int,
    clips: bool,
    optimizer: OptimizerState = ADAMW,
) -> float:
    """Return the seconds of an optimizer on the host: gradients are copied there, the optimizer runs, parameters are copied
    back, in elements of `gradient` and `parameter` bytes. Without a `device` both are on the host already.

    These follow each other, as in the executor. Ignores: launches; that transfers use bandwidth of the host's memory.
    """
    on_host = optimizer.passes * gradient + (gradient + parameter if parameter != gradient else 0.0)
    clipping = 3.0 * gradient if clips else 0.0
    if device is None:
        return host.memory_seconds(on_host + clipping) * num_parameters
    moved = 0.0 if device.shares_host_memory else (gradient + parameter) / device.host_link_bandwidth
    clipped = (device.pace or 1.0) * device.memory_seconds(clipping)
    return (moved + host.memory_seconds(on_host) + clipped) * num_parameters


def optimizer_seconds(
    num_parameters: float,
    device: Device,
    has_master: bool,
    clips: bool,
    num_tensors: int = 0,
    optimizer: OptimizerState = ADAMW,
) -> float:
    """Return the seconds of an optimizer on parameters of 4-byte state, with clipping and, if there are masters, rounding.

    Fused AdamW reads weight, gradient and two moments and writes all but the gradient; the traffic of others is in
    `optimizer`. Clipping reads each gradient, then reads and writes it; rounding reads a master and writes two bytes. A CPU
    does each of these tensor by tensor, whereas a GPU does them for all `num_tensors` in a few kernels. Ignores: those
    launches; fp64's double width; matmuls of an optimizer.
    """
    per_parameter = 4.0 * optimizer.passes + (12.0 if clips else 0.0) + (6.0 if has_master else 0.0)
    per_tensor = (
        optimizer.calls + (2 if clips else 0) + (1 if has_master else 0) if device.kind == "cpu" else 0
    )
    return (device.pace or 1.0) * (
        device.memory_seconds(per_parameter * num_parameters)
        + per_tensor * num_tensors * device.host_overhead_s
    )
