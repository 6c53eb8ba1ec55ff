"""One accelerator (or one process's share of a CPU) as a cost model sees it: memory, peaks, efficiencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from stagewright.cluster.attention import BACKWARD_FLOP, FORWARD_FLOP, Attention, Scores, attention_seconds
from stagewright.cluster.products import Products, Shape, product_seconds
from stagewright.cluster.profile import OperatorProfile
from stagewright.cluster.strict import SourcedModel, StrictModel, parse_amount
from stagewright.errors import InputError
from stagewright.limits import (
    LEAST_FLOPS,
    LEAST_FRACTION,
    LEAST_RATE,
    MOST_BYTES,
    MOST_DEVICES,
    MOST_FLOPS,
    MOST_PRICE,
    MOST_RATE,
    MOST_SPEED_RATIO,
    check_seconds,
)

_ALIASES = {
    "float64": "fp64",
    "float32": "fp32",
    "tensorfloat32": "tf32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def precision_name(dtype: str) -> str:
    """The short precision name of a tensor dtype.

    >>> precision_name("torch.bfloat16"), precision_name("float32"), precision_name("tf32")
    ('bf16', 'fp32', 'tf32')
    """
    bare = dtype.removeprefix("torch.")
    return _ALIASES.get(bare, bare)


def _parse_rate(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value.strip().endswith("B/s"):
        raise ValueError(
            "write a bandwidth as a number of bytes per second or like '25 GB/s' (bytes, not bits)"
        )
    return parse_amount(value.strip().removesuffix("/s"))


_CACHE_SPEED_UP = 2.0
"""Where a device does not say. Fitted on the L4 operator times published with Mist (EuroSys'25)."""

_VIEW_SHARE = 0.5
"""Host time of an operator that only makes a view, as a part of one that launches a kernel. A guess."""


def _possible_seconds(seconds: float) -> float:
    try:
        return check_seconds(seconds, "it")
    except InputError as error:
        raise ValueError(
            str(error).partition(": ")[2]
        ) from None  # so that it is reported with its file and key


Seconds = Annotated[float, Field(ge=0), AfterValidator(_possible_seconds)]
Fraction = Annotated[float, Field(ge=LEAST_FRACTION, le=1)]
ByteCount = Annotated[int, Field(ge=0, le=MOST_BYTES), BeforeValidator(parse_amount)]
Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)]
"""Of anything per second."""
ByteRate = Annotated[Rate, BeforeValidator(_parse_rate)]
"""Bytes per second."""
Flops = Annotated[float, Field(ge=LEAST_FLOPS, le=MOST_FLOPS)]
"""FLOP per second."""


class PerPrecision(StrictModel):
    """One figure per arithmetic precision; None where the device lacks it."""

    fp64: Flops | None = None
    fp32: Flops | None = None
    tf32: Flops | None = None
    bf16: Flops | None = None
    fp16: Flops | None = None
    fp8: Flops | None = None

    def available(self) -> list[str]:
        """Names of the precisions that have a figure."""
        return [name for name, value in self if value is not None]

    def get(self, dtype: str) -> float | None:
        """The figure of `dtype` (`"bf16"`, `"bfloat16"` or `"torch.bfloat16"`), None where there is none."""
        return getattr(self, precision_name(dtype), None)


class PerPrecisionFraction(PerPrecision):
    """As `PerPrecision`, each figure a fraction in (0, 1]."""

    fp64: Fraction | None = None
    fp32: Fraction | None = None
    tf32: Fraction | None = None
    bf16: Fraction | None = None
    fp16: Fraction | None = None
    fp8: Fraction | None = None


_COMMUNICATORS_SHARE = 0.75
"""Of a device's reserve, that communicators may take before a plan is left less."""


class Device(SourcedModel):
    """What one rank computes on. SI units; peaks are dense (no structured sparsity) and per device.

    The efficiencies are the few constants that turn peaks into times, each with a physical meaning:

    * `matmul_efficiency`: fraction of the peak that a matrix product reaches when it is large, at the clocks of training.
    * `products`: what decides over products of other shapes.
    * `matmul_half_flop`: without `products`, the size (FLOP) of a product in bf16 that runs at half of that rate; it stands
      for ramp-up and partly filled waves of tiles, not for the launch of the kernel.
    * `attention_efficiency`, `attention_backward_efficiency`: fraction of the peak that fused attention
      reaches, counting 4 b h s_q s_kv d FLOP forward and 2.5 times that backward (it computes the scores again); with
      `attention`, of endless sequences with heads of 128.
    * `attention`: what decides over attention of other shapes.
    * `memory_efficiency`: fraction of `memory_bandwidth` that a streaming kernel attains.
    * `norm_efficiency`: the same for layer and group norms; None where it is not known to be less.
    """

    not_figures: ClassVar[frozenset[str]] = frozenset(
        {"name", "vendor", "kind", "num_threads", "profile", "pace"}
    )

    name: str = Field(min_length=1)
    vendor: str = ""
    kind: Literal["cuda", "cpu"]
    """The torch device type it appears as (AMD devices appear as `cuda`)."""
    memory_bytes: Annotated[ByteCount, Field(gt=0)]
    """What the framework can address, as a device's properties in torch say (`total_memory`)."""
    memory_bandwidth: ByteRate
    peak_flops: PerPrecision
    """FLOP/s; a multiply-add counts as two."""
    matmul_efficiency: PerPrecisionFraction
    matmul_half_flop: float | None = Field(default=None, ge=0, le=MOST_FLOPS)
    products: Products | None = None
    """What decides over products by their shapes; None: their FLOP alone do."""
    packing_bandwidth: Rate | None = None
    """Bytes/s at which a CPU's matrix products copy their operands into blocks and results out of them; None: beside
    arithmetic, as memory traffic is.
    """
    attention: Attention | None = None
    """What decides over fused attention by its shape, on the multiprocessors of `products`; None: its FLOP alone do."""
    attention_efficiency: Fraction
    attention_backward_efficiency: Fraction
    best_attention_efficiency: Fraction | None = None
    """The same of the best kernels there are, which not every runtime calls; None where they are not known to be faster."""
    best_attention_backward_efficiency: Fraction | None = None
    memory_efficiency: Fraction
    norm_efficiency: Fraction | None = None
    function_rate: Rate | None = None
    """Exponentials, hyperbolic tangents and the like per second, beside memory traffic; None: never the bound."""
    random_rate: Rate | None = None
    """Random numbers per second, beside memory traffic; None: never the bound."""
    cache_bytes: ByteCount | None = None
    """Last-level cache of the device; None where its effect is not known."""
    cache_speed_up: float | None = Field(default=None, ge=1, le=MOST_SPEED_RATIO)
    """Bandwidth of that cache over that of memory, as small elementwise kernels attain it; None: 2."""
    launch_overhead_s: Seconds
    """Gap on the device between two dependent kernels."""
    host_overhead_s: Seconds
    """Time the host needs to issue one eager operator; it bounds a run of small operators."""
    view_overhead_s: Seconds | None = None
    """The same of an operator that launches no kernel; None: half of `host_overhead_s`, a guess."""
    attention_overhead_s: Seconds | None = None
    """Of fused attention, beyond that of any operator and its arithmetic; None: nothing."""
    scatter_rate: Rate | None = None
    """Elements per second that a CPU adds to the gradient of an embedding, row by row; None: as fast as memory."""
    message_overhead_s: Seconds | None = None
    """Of the processor that computes, to send a message or to post the buffer of one; None: another processor does it."""
    reference_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Of the computation by which a run sees whether the machine is as fast as when it was probed; None: it cannot."""
    context_bytes: ByteCount
    """Memory outside the allocator: driver context, loaded kernels."""
    workspace_bytes: ByteCount
    """Matrix-library workspace that the framework takes from its allocator, once per stream."""
    reserve_fraction: float = Field(ge=0, lt=1)
    """Fraction of the memory a plan leaves free."""
    host_link_bandwidth: ByteRate
    """One direction between this device and host memory, for offload."""
    num_threads: int | None = Field(default=None, ge=1, le=MOST_DEVICES)
    """Threads that a process computes with on a CPU; None leaves that to the launcher."""
    price_per_hour: float | None = Field(default=None, ge=0, le=MOST_PRICE)
    """US dollars per device."""

    profile: OperatorProfile | None = None
    """Operators whose measured seconds are taken in place of what the figures say."""
    pace: float | None = Field(default=None, ge=1 / MOST_SPEED_RATIO, le=MOST_SPEED_RATIO)
    """How many times as long as all this says computations take, as a run showed; None: as long."""

    @model_validator(mode="after")
    def _attention_runs_on_multiprocessors(self) -> Device:
        if self.attention is not None and self.products is None:
            raise ValueError(
                "attention is dealt out to multiprocessors: add products, which has their number"
            )
        return self

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.peak_flops))

    @property
    def usable_bytes(self) -> int:
        """What a plan may let the allocator reserve: memory without the context and the reserve."""
        return int(self.memory_bytes * (1 - self.reserve_fraction)) - self.context_bytes

    def usable_beside(self, communicator_bytes: int) -> int:
        """The same where communicators take so many bytes: of the reserve, of which a part stays, and what is more than that
        of the rest. Zero where they alone take more than there is."""
        in_reserve = int(_COMMUNICATORS_SHARE * self.reserve_fraction * self.memory_bytes)
        return max(0, self.usable_bytes - max(0, communicator_bytes - in_reserve))

    def matmul_flops(self, dtype: str) -> float:
        """FLOP/s of large matrix products in `dtype`; raises `InputError` where the device lacks it."""
        peak, efficiency = self.peak_flops.get(dtype), self.matmul_efficiency.get(dtype)
        if peak is None or efficiency is None:
            known = ", ".join(n for n in self.peak_flops.available() if self.matmul_efficiency.get(n))
            raise InputError(
                f"device '{self.name}' has no figures for {precision_name(dtype)} arithmetic: "
                f"use one of {known}, or add peak_flops and matmul_efficiency to its description"
            )
        return peak * efficiency

    def matmul_seconds(self, flop: float, dtype: str) -> float:
        """Arithmetic time of one matrix product: that of `flop` FLOP at the full rate, and of ramping up.

        Ramping up takes as long in every precision; `matmul_half_flop` states it at the rate of bf16 (or fp16, or, where
        the device has neither, of `dtype`).

        Source: the saturation curve rate(x) = r x / (x + x_half) (Hockney and Jesshope, "Parallel Computers
        2", 1988: r_infinity and n_half). Ignores: the shape beyond its FLOP, memory traffic, launch.
        """
        if not flop:
            return 0.0
        known = (
            name
            for name in ("bf16", "fp16")
            if self.peak_flops.get(name) and self.matmul_efficiency.get(name)
        )
        ramp = (self.matmul_half_flop or 0.0) / self.matmul_flops(next(known, dtype))
        return flop / self.matmul_flops(dtype) + ramp

    def product_seconds(
        self,
        shapes: Sequence[Shape],
        dtype: str,
        num_bytes: float,
        *,
        alone: bool = False,
        grouped: bool = False,
    ) -> float:
        """Time of matrix products of known shapes, one after the other, that read and write so many bytes together.

        A device that was idle (`alone`) has higher clocks than one in training. Products of many experts may be `grouped`,
        those of each shape by one kernel.

        Source and ignores: `stagewright.cluster.products`, `stagewright.cluster.kernels`; launch.
        """
        assert self.products is not None, "asked of devices that are described by it"
        products, flops, share = self.products, self.matmul_flops(dtype), num_bytes / len(shapes)
        precision = precision_name(dtype)
        item = 4.0 if precision in ("fp32", "tf32") else 2.0
        chosen = precision in ("bf16", "fp16") and not grouped
        return sum(
            product_seconds(
                products, shape, flops, self.memory_bandwidth, share, item, alone=alone, grouped=grouped
            )
            * (products.kernel_factor(shape) if chosen else 1.0)
            for shape in shapes
        )

    def attention_seconds(self, scores: Scores, dtype: str, *, backward: bool = False) -> float:
        """Arithmetic time of fused attention of a known shape, forward or backward.

        Source and ignores: `stagewright.cluster.attention`; launch, memory traffic.
        """
        assert self.attention is not None and self.products is not None, "asked of devices described by both"
        share = self.attention_backward_efficiency if backward else self.attention_efficiency
        flops = (self.peak_flops.get(dtype) or 0.0) * share
        flop = BACKWARD_FLOP if backward else FORWARD_FLOP
        return attention_seconds(self.attention, scores, flops, self.products.num_multiprocessors, flop)

    def with_grouped_share(self, share: float) -> Device:
        """This device with other kernels for products of many experts."""
        if self.products is None or self.products.grouped_share == share:
            return self
        return self.model_copy(update={"products": self.products.model_copy(update={"grouped_share": share})})

    def with_best_kernels(self) -> Device:
        """This device with a library that chooses the fastest kernel for every product."""
        if self.products is None:
            return self
        return self.model_copy(update={"products": self.products.model_copy(update={"kernels": None})})

    def with_attention(self, rate: float, best: bool = False) -> Device:
        """This device with other attention kernels: `rate` times as fast, or the `best` there are, where that is known."""
        own = self.attention_efficiency, self.attention_backward_efficiency
        known = self.best_attention_efficiency, self.best_attention_backward_efficiency
        forward, backward = (
            min(1.0, rate * ((other if best else None) or share))
            for share, other in zip(own, known, strict=True)
        )
        if (forward, backward) == own:
            return self
        shape = self.attention
        if best and known[0] is not None and shape is not None:
            shape = shape.model_copy(update={"shares_narrow": False})
        return self.model_copy(
            update={
                "attention_efficiency": forward,
                "attention_backward_efficiency": backward,
                "attention": shape,
            }
        )

    def memory_seconds(self, num_bytes: float) -> float:
        """Time of a kernel that streams `num_bytes` of device memory, or of its cache. Ignores: launch."""
        return self._traffic(num_bytes) / (self.memory_bandwidth * self.memory_efficiency)

    def norm_seconds(self, num_bytes: float) -> float:
        """Time of a layer or group norm that streams `num_bytes`. Ignores: lengths of rows, launch."""
        return self._traffic(num_bytes) / (
            self.memory_bandwidth * (self.norm_efficiency or self.memory_efficiency)
        )

    @property
    def view_seconds(self) -> float:
        """Host time of an operator that only makes a view."""
        return self.host_overhead_s * _VIEW_SHARE if self.view_overhead_s is None else self.view_overhead_s

    def evaluation_seconds(self, num_functions: float, num_random: float) -> float:
        """Time to evaluate transcendental functions and draw random numbers; none where that is hidden."""
        functions = num_functions / self.function_rate if self.function_rate else 0.0
        return functions + (num_random / self.random_rate if self.random_rate else 0.0)

    def _traffic(self, num_bytes: float) -> float:
        """`num_bytes` in bytes of device memory: what the cache serves counts less.

        The cache serves all operands that fill at most half of it and none that fill it, linear between,
        because replacement is not perfect and what ran before has left something. Ignores: that operands made
        long ago are not there.
        """
        if not self.cache_bytes:
            return num_bytes
        served = min(max(2.0 - 2.0 * num_bytes / self.cache_bytes, 0.0), 1.0)
        return num_bytes * (1.0 - served * (1.0 - 1.0 / (self.cache_speed_up or _CACHE_SPEED_UP)))
