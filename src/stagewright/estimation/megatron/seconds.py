"""Seconds of a decoder's stages under a layout: kernels by size on a device, collectives on its links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from stagewright.cluster import (
    Cluster,
    Device,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    dispatch_seconds,
    reduce_scatter_seconds,
)
from stagewright.estimation.megatron.fusion import Fusion
from stagewright.estimation.megatron.kernels import Collective, Kernel, Pass, Passes, together
from stagewright.estimation.megatron.layout import Layout
from stagewright.estimation.megatron.shape import Shape
from stagewright.estimation.megatron.stack import MegatronStack
from stagewright.estimation.megatron.work import Body
from stagewright.estimation.time import overlapped


def half_type(device: Device) -> str:
    """The half precision a device computes products in."""
    return "bf16" if device.matmul_efficiency.bf16 else "fp16"


def kernel_seconds(kernel: Kernel, device: Device, dtype: str) -> float:
    """One kernel (or its `num` equal ones) on the device, without what the host takes to launch it.

    Source and ignores: `stagewright.estimation.time.kernel_seconds`.
    """
    match kernel.kind:
        case "memory":
            busy = device.memory_seconds(kernel.num_bytes)
        case "norm":
            busy = device.norm_seconds(kernel.num_bytes)
        case "matmul":
            rounds = kernel.rounds
            busy = rounds * overlapped(
                device.matmul_seconds(kernel.flop / rounds, dtype),
                device.memory_seconds(kernel.num_bytes / rounds),
            )
        case _:
            forward = kernel.kind == "attention"
            share = device.attention_efficiency if forward else device.attention_backward_efficiency
            rate = (device.peak_flops.get(dtype) or 0.0) * share
            busy = overlapped(kernel.flop / rate, device.memory_seconds(kernel.num_bytes))
    return kernel.num * (busy + device.launch_overhead_s)


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one direction: the device's kernels, exposed collectives, what the host needs to launch both."""

    device_s: float = 0.0
    exposed_s: float = 0.0
    host_s: float = 0.0
    beside_s: float = 0.0
    """Collectives that run beside passes of another microbatch."""

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            self.device_s + other.device_s,
            self.exposed_s + other.exposed_s,
            self.host_s + other.host_s,
            self.beside_s + other.beside_s,
        )

    def exposing(self, share: float) -> PassSeconds:
        """With so much exposed of what runs beside another microbatch."""
        return replace(self, exposed_s=self.exposed_s + share * self.beside_s)

    @property
    def seconds(self) -> float:
        """The slower of device and host, which works ahead."""
        return max(self.device_s + self.exposed_s, self.host_s)


LayerSeconds = tuple[PassSeconds, PassSeconds, PassSeconds]
"""Forward, gradient of the input, gradients of weights."""


LayerKey = tuple[Layout, bool, int]
"""Layout of one layer, whether it has experts, and the first of its devices."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch on a stage."""

    forward: PassSeconds
    input_grad: PassSeconds
    weight_grad: PassSeconds
    recomputed: PassSeconds
    """What the backward makes again first."""

    @property
    def backward(self) -> PassSeconds:
        return self.recomputed + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Clock:
    """Times the parts of a model on the first devices of a cluster, whose links stand for all."""

    shape: Shape
    layout: Layout
    stack: MegatronStack
    fusion: Fusion
    cluster: Cluster
    first_rank: int = 0
    known: dict[LayerKey, LayerSeconds] = field(default_factory=dict, compare=False)
    """Layers timed before; clocks of one model, runtime and cluster may share it."""

    @cached_property
    def body(self) -> Body:
        return Body(self.shape, self.layout, self.stack, self.fusion)

    @property
    def device(self) -> Device:
        return self.cluster.device_of(self.first_rank)

    @cached_property
    def dtype(self) -> str:
        """What products are computed in."""
        return self.stack.computes_in or half_type(self.device)

    @cached_property
    def stages(self) -> tuple[StageSeconds, ...]:
        """Every stage of the layout."""
        counts, found, first = self.layout.layers(self.shape.num_layers), [], 0
        again = self.layout.recomputed_layers or tuple(
            count * (self.layout.recompute == "full") for count in counts
        )
        for stage, count in enumerate(counts):
            found.append(self._stage(stage, range(first, first + count), again[stage]))
            first += count
        return tuple(found)

    @property
    def boundary_bytes(self) -> float:
        """What a stage hands to the next per device."""
        return (
            float(self.stack.element_bytes)
            * self.layout.num_tokens
            * self.shape.hidden
            / self.layout.sequence_shards
        )

    def collective_seconds(self, collective: Collective) -> float:
        """Alone on the links of the ranks along its axis."""
        ranks = self.ranks(collective.axis)
        if collective.kind == "dispatch":
            return self._dispatch_seconds(collective.num_bytes, ranks)
        rate: Callable[..., float] = {
            "all-reduce": all_reduce_seconds,
            "all-gather": all_gather_seconds,
            "reduce-scatter": reduce_scatter_seconds,
            "all-to-all": all_to_all_seconds,
            "exchange": all_gather_seconds,
        }[collective.kind]
        return rate(self.cluster, collective.num_bytes, ranks)

    def _dispatch_seconds(self, num_bytes: float, ranks: tuple[int, ...]) -> float:
        experts = self.shape.experts
        assert experts is not None
        num_nodes = len({self.cluster.node_of(rank) for rank in ranks})
        met = experts.targets(len(ranks)), experts.targets(num_nodes)
        return dispatch_seconds(self.cluster, num_bytes, ranks, *met)

    def ranks(self, axis: str) -> tuple[int, ...]:
        """Ranks that share an axis: tensor-parallel neighbours are next to each other, then context, then replicas.

        Those from the first rank on, or the last of the cluster where these would be too many.
        """
        layout = self.layout
        width, stride = {
            "tp": (layout.tp, 1),
            "cp": (layout.cp, layout.tp),
            "ep": (layout.num_expert_shards, 1),
            "dp": (layout.dp * layout.cp, layout.tp),
            "expert dp": (max(1, layout.dp * layout.cp // layout.ep), layout.num_expert_shards),
            "pp": (layout.pp, layout.tp * layout.cp * layout.dp),
        }[axis]
        first = min(self.first_rank, max(0, self.cluster.num_devices - width * stride))
        return tuple(first + index * stride for index in range(width))

    def pass_seconds(self, what: Pass) -> PassSeconds:
        """One direction through some part."""
        gap = self.fusion.product_gap_s
        device = sum(self._kernel(kernel) for kernel in what.kernels)
        device += gap * sum(kernel.num for kernel in what.kernels if kernel.kind == "matmul")
        num = sum(kernel.num for kernel in what.kernels)
        exposed, hidden, beside = what.waits_s, 0.0, 0.0
        for collective in what.collectives:
            took = self._collective(collective) + self.fusion.collective_wait_s
            if not collective.hidden:
                exposed += took
            elif collective.axis == "ep":
                beside += took
            else:
                hidden += took
        products = sum(self._kernel(kernel) for kernel in what.kernels if kernel.kind == "matmul")
        exposed += max(0.0, hidden - products)
        host = num * self.fusion.kernel_host_s
        host += sum(self.fusion.peer_host_s * (len(self.ranks(one.axis)) - 1) for one in what.collectives)
        return PassSeconds(device, exposed, host, beside)

    def passes(self, what: Passes) -> LayerSeconds:
        """Forward, gradient of the input, gradients of weights.

        What runs beside another microbatch is exposed as far as it slows down or outlasts what a microbatch computes in all
        three. Ignores: the first and last microbatches, which have none beside them.
        """
        given = what.forward, what.input_grad, what.weight_grad
        forward, input_grad, weight_grad = (self.pass_seconds(one) for one in given)
        beside = forward.beside_s + input_grad.beside_s
        if not beside:
            return forward, input_grad, weight_grad
        busy = (forward + input_grad + weight_grad).device_s
        share = max(self.fusion.dispatch_share, 1 - busy / beside)
        return forward.exposing(share), input_grad.exposing(share), weight_grad

    def _kernel(self, kernel: Kernel) -> float:
        known = self._kernels.get(kernel)
        if known is None:
            known = self._kernels[kernel] = kernel_seconds(kernel, self.device, self._dtype_of(kernel))
        return known

    def _dtype_of(self, kernel: Kernel) -> str:
        """Eight-bit recipes leave attention and the head in half precision."""
        in_half = kernel.in_half or kernel.kind != "matmul"
        return half_type(self.device) if in_half and self.dtype == "fp8" else self.dtype

    def _collective(self, collective: Collective) -> float:
        known = self._collectives.get(collective)
        if known is None:
            known = self._collectives[collective] = self.collective_seconds(collective)
        return known

    @cached_property
    def _kernels(self) -> dict[Kernel, float]:
        return {}

    @cached_property
    def _collectives(self) -> dict[Collective, float]:
        return {}

    def layer(self, index: int) -> LayerSeconds:
        """One layer; equal ones are looked at once."""
        has_experts = self.shape.experts is not None and index >= self.shape.num_dense
        key = (self._one_layer, has_experts, self.first_rank)
        if key not in self.known:
            self.known[key] = self.passes(self.body.layer(index))
        return self.known[key]

    @cached_property
    def _one_layer(self) -> Layout:
        """What the seconds of a layer depend on: no stages, replicas or microbatches beyond those of its experts."""
        layout = self.layout
        return replace(
            layout, pp=1, dp=max(1, layout.ep // layout.cp), num_microbatches=1, schedule="1f1b", num_chunks=1,
            layers_per_stage=None, recomputed_layers=None, recompute="none", shards_optimizer=False,
        )  # fmt: skip

    def _stage(self, stage: int, layers: range, num_again: int) -> StageSeconds:
        ends = []
        if stage == 0:
            ends.append(self.body.embedding())
        if stage == self.layout.num_stages - 1:
            ends.append(self.body.head())
        forward, input_grad, weight_grad = self.passes(together(ends))
        again = PassSeconds()
        core = self.pass_seconds(self.body.core.forward) if self.layout.recompute == "selective" else again
        for place, index in enumerate(layers):
            one = self.layer(index)
            forward, input_grad, weight_grad = forward + one[0], input_grad + one[1], weight_grad + one[2]
            again = again + (one[0] if place < num_again else core)
        return StageSeconds(forward, input_grad, weight_grad, again)
