"""Cost model of one accelerator (or one process's share of a CPU): memory, peaks, efficiencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from stagewright.cluster.attention import BACKWARD_FLOP, FORWARD_FLOP, Attention, Scores, attention_seconds
from stagewright.cluster.matmul import MatmulParameters, MatmulShape, shaped_matmul_seconds
from stagewright.cluster.profile import OperatorProfile
from stagewright.cluster.schema import SourcedModel, StrictModel, parse_amount
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
    """Return the short precision name of a tensor dtype.

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
"""Default of devices. Fitted on the L4 operator times published with Mist (EuroSys'25)."""

_VIEW_SHARE = 0.5
"""Host time of an operator that only makes a view, relative to one that launches a kernel. A guess."""


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
"""Any quantity per second."""
ByteRate = Annotated[Rate, BeforeValidator(_parse_rate)]
"""Bytes per second."""


def _zero_or_rate(rate: float) -> float:
    if 0 < rate < LEAST_RATE:
        raise ValueError(f"must be 0 or at least {LEAST_RATE:g} bytes per second")
    return rate


LinkRate = Annotated[
    float, Field(ge=0, le=MOST_RATE), AfterValidator(_zero_or_rate), BeforeValidator(_parse_rate)
]
"""Bytes per second; 0 if there is no such link."""
Flops = Annotated[float, Field(ge=LEAST_FLOPS, le=MOST_FLOPS)]
"""FLOP per second."""


class PerPrecision(StrictModel):
    """One figure per arithmetic precision; None if the device lacks it."""

    fp64: Flops | None = None
    fp32: Flops | None = None
    tf32: Flops | None = None
    bf16: Flops | None = None
    fp16: Flops | None = None
    fp8: Flops | None = None

    def available(self) -> list[str]:
        """Return the names of the precisions that have a figure."""
        return [name for name, value in self if value is not None]

    def get(self, dtype: str) -> float | None:
        """Return the figure of `dtype` (`"bf16"`, `"bfloat16"` or `"torch.bfloat16"`), None if there is none."""
        return getattr(self, precision_name(dtype), None)


class PerPrecisionFraction(PerPrecision):
    """One fraction in (0, 1] per arithmetic precision."""

    fp64: Fraction | None = None
    fp32: Fraction | None = None
    tf32: Fraction | None = None
    bf16: Fraction | None = None
    fp16: Fraction | None = None
    fp8: Fraction | None = None


_COMMUNICATORS_SHARE = 0.75
"""Fraction of a device's reserve that communicators may use before they reduce the memory of a plan."""


class Device(SourcedModel):
    """The device of one rank. SI units; peaks are dense (no structured sparsity) and per device.

    The efficiencies are the constants that turn peaks into times, each with a physical meaning:

    * `matmul_efficiency`: fraction of the peak that a large matmul reaches, at the clocks of training.
    * `products`: parameters of matmuls of other shapes.
    * `matmul_half_flop`: without `products`, the size (FLOP) of a matmul in bf16 that runs at half of that rate; it accounts
      for ramp-up and partly filled waves of tiles, not for the launch of the kernel.
    * `attention_efficiency`, `attention_backward_efficiency`: fraction of the peak that fused attention
      reaches, counting 4 b h s_q s_kv d FLOP forward and 2.5 times that backward (it computes the scores again); with
      `attention`, for infinite sequences with heads of 128.
    * `attention`: parameters of attention of other shapes.
    * `memory_efficiency`: fraction of `memory_bandwidth` that a streaming kernel attains.
    * `norm_efficiency`: the same for layer and group norms; None if it is not known to be lower.
    """

    not_figures: ClassVar[frozenset[str]] = frozenset(
        {"name", "vendor", "kind", "num_threads", "profile", "pace"}
    )

    name: str = Field(min_length=1)
    vendor: str = ""
    kind: Literal["cuda", "cpu"]
    """The torch device type (AMD devices have `cuda`)."""
    memory_bytes: Annotated[ByteCount, Field(gt=0)]
    """Memory that the framework can address (`total_memory` in torch's device properties)."""
    memory_bandwidth: ByteRate
    peak_flops: PerPrecision
    """FLOP/s; a multiply-add counts as two."""
    matmul_efficiency: PerPrecisionFraction
    matmul_half_flop: float | None = Field(default=None, ge=0, le=MOST_FLOPS)
    products: MatmulParameters | None = None
    """Parameters of matmuls by shape; None: times depend on FLOP alone."""
    packing_bandwidth: Rate | None = None
    """Bytes/s at which matmuls on a CPU copy operands into blocks and results out of them; None: overlapped with
    arithmetic, as memory traffic is.
    """
    attention: Attention | None = None
    """Parameters of fused attention by shape, on the multiprocessors of `products`; None: its time depends on FLOP alone."""
    attention_efficiency: Fraction
    attention_backward_efficiency: Fraction
    best_attention_efficiency: Fraction | None = None
    """The same for the best available kernels, which not every runtime uses; None if they are not known to be faster."""
    best_attention_backward_efficiency: Fraction | None = None
    memory_efficiency: Fraction
    norm_efficiency: Fraction | None = None
    function_rate: Rate | None = None
    """Exponentials, hyperbolic tangents and similar functions per second, in addition to memory traffic; None: never the
    bound."""
    random_rate: Rate | None = None
    """Random numbers per second, in addition to memory traffic; None: never the bound."""
    cache_bytes: ByteCount | None = None
    """Last-level cache of the device; None if its effect is not known."""
    cache_speed_up: float | None = Field(default=None, ge=1, le=MOST_SPEED_RATIO)
    """Bandwidth of that cache over that of memory, for small elementwise kernels; None: 2."""
    launch_overhead_s: Seconds
    """Gap on the device between two dependent kernels."""
    host_overhead_s: Seconds
    """Host time to issue one eager operator; it bounds a sequence of small operators."""
    view_overhead_s: Seconds | None = None
    """The same for an operator that launches no kernel; None: half of `host_overhead_s`, a guess."""
    attention_overhead_s: Seconds | None = None
    """Additional seconds of fused attention; None: none."""
    scatter_rate: Rate | None = None
    """Elements per second that a CPU adds to the gradient of an embedding, row by row; None: bound by memory."""
    message_overhead_s: Seconds | None = None
    """Compute time to send a message or to post a receive; None: another processor does it."""
    reference_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Seconds of the reference computation that compares the machine's speed in a run with that of the probe; None:
    unknown."""
    context_bytes: ByteCount
    """Memory outside of the allocator: driver context, loaded kernels."""
    workspace_bytes: ByteCount
    """Workspace of the matmul library, allocated once per stream."""
    reserve_fraction: float = Field(ge=0, lt=1)
    """Fraction of the memory that a plan leaves free."""
    host_link_bandwidth: LinkRate
    """Bytes/s in one direction between this device and host memory, for offload; 0 if both share one memory, so that nothing
    is offloaded."""
    num_threads: int | None = Field(default=None, ge=1, le=MOST_DEVICES)
    """Compute threads of a process on a CPU; None: chosen by the launcher."""
    price_per_hour: float | None = Field(default=None, ge=0, le=MOST_PRICE)
    """US dollars per device and hour."""

    profile: OperatorProfile | None = None
    """Measured seconds of operators, used instead of the figures."""
    pace: float | None = Field(default=None, ge=1 / MOST_SPEED_RATIO, le=MOST_SPEED_RATIO)
    """Factor by which computations take longer than these figures say, measured in a run; None: 1."""

    @model_validator(mode="after")
    def _attention_runs_on_multiprocessors(self) -> Device:
        if self.attention is not None and self.products is None:
            raise ValueError(
                "attention is divided over multiprocessors: add products, which has their number"
            )
        return self

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.peak_flops))

    @property
    def grows_segments(self) -> bool:
        """Whether PyTorch's allocator can grow its segments. Ignores: builds for AMD that support it."""
        return not self.vendor.startswith("AMD")

    @property
    def usable_bytes(self) -> int:
        """Bytes that a plan may let the allocator reserve: memory without the context and the reserve."""
        return int(self.memory_bytes * (1 - self.reserve_fraction)) - self.context_bytes

    def usable_with_communicators(self, communicator_bytes: int) -> int:
        """Return the same with communicators: they use a part of the reserve first, then usable memory. Zero if they alone
        need more than there is."""
        in_reserve = int(_COMMUNICATORS_SHARE * self.reserve_fraction * self.memory_bytes)
        return max(0, self.usable_bytes - max(0, communicator_bytes - in_reserve))

    def matmul_flops(self, dtype: str) -> float:
        """Return FLOP/s of large matmuls in `dtype`; raise `InputError` if the device lacks it."""
        peak, efficiency = self.peak_flops.get(dtype), self.matmul_efficiency.get(dtype)
        if peak is None or efficiency is None:
            supported = ", ".join(n for n in self.peak_flops.available() if self.matmul_efficiency.get(n))
            raise InputError(
                f"device '{self.name}' has no figures for {precision_name(dtype)} arithmetic: "
                f"use one of {supported}, or add peak_flops and matmul_efficiency to its description"
            )
        return peak * efficiency

    def matmul_seconds(self, flop: float, dtype: str) -> float:
        """Return the arithmetic seconds of one matmul: `flop` FLOP at the full rate, and ramp-up.

        Ramp-up takes equally long in every precision; `matmul_half_flop` states it at the rate of bf16 (or fp16, or, if the
        device has neither, of `dtype`).

        Source: the saturation curve rate(x) = r x / (x + x_half) (Hockney and Jesshope, "Parallel Computers
        2", 1988: r_infinity and n_half). Ignores: the shape beyond its FLOP, memory traffic, launch.
        """
        if not flop:
            return 0.0
        half_precisions = (
            name
            for name in ("bf16", "fp16")
            if self.peak_flops.get(name) and self.matmul_efficiency.get(name)
        )
        ramp = (self.matmul_half_flop or 0.0) / self.matmul_flops(next(half_precisions, dtype))
        return flop / self.matmul_flops(dtype) + ramp

    def shaped_matmul_seconds(
        self,
        shapes: Sequence[MatmulShape],
        dtype: str,
        num_bytes: float,
        *,
        alone: bool = False,
        grouped: bool = False,
        aligned: bool = True,
    ) -> float:
        """Return the seconds of matmuls of known shapes, one after the other, that read and write `num_bytes` together.

        A device that was idle (`alone`) has higher clocks than one in training. Matmuls of many experts may be `grouped`,
        one kernel for each shape. `aligned`: whether all rows begin at multiples of 16 bytes.

        Source and ignores: `stagewright.cluster.matmul`, `stagewright.cluster.kernel_choice`; launch.
        """
        assert self.products is not None, "only for devices with `products`"
        parameters, flops, share = self.products, self.matmul_flops(dtype), num_bytes / len(shapes)
        precision = precision_name(dtype)
        item = 4.0 if precision in ("fp32", "tf32") else 2.0
        chosen = precision in ("bf16", "fp16") and not grouped
        if chosen and not aligned:
            flops *= parameters.unaligned_share
        return sum(
            shaped_matmul_seconds(
                parameters, shape, flops, self.memory_bandwidth, share, item, alone=alone, grouped=grouped
            )
            * (parameters.kernel_factor(shape) if chosen else 1.0)
            for shape in shapes
        )

    def attention_seconds(self, scores: Scores, dtype: str, *, backward: bool = False) -> float:
        """Return the arithmetic seconds of fused attention of a known shape, forward or backward.

        Source and ignores: `stagewright.cluster.attention`; launch, memory traffic.
        """
        assert self.attention is not None and self.products is not None, "only for devices with both"
        share = self.attention_backward_efficiency if backward else self.attention_efficiency
        flops = (self.peak_flops.get(dtype) or 0.0) * share
        flop = BACKWARD_FLOP if backward else FORWARD_FLOP
        return attention_seconds(self.attention, scores, flops, self.products.num_multiprocessors, flop)

    def with_grouped_share(self, share: float) -> Device:
        """Return this device with other kernels for matmuls of many experts."""
        if self.products is None or self.products.grouped_share == share:
            return self
        return self.model_copy(update={"products": self.products.model_copy(update={"grouped_share": share})})

    def with_best_kernels(self) -> Device:
        """Return this device with a library that chooses the fastest kernel for every matmul."""
        if self.products is None:
            return self
        return self.model_copy(update={"products": self.products.model_copy(update={"kernels": None})})

    def with_attention(self, rate: float, best: bool = False) -> Device:
        """Return this device with other attention kernels: `rate` times as fast, or the `best` available ones if known."""
        current = self.attention_efficiency, self.attention_backward_efficiency
        best_known = self.best_attention_efficiency, self.best_attention_backward_efficiency
        forward, backward = (
            min(1.0, rate * ((other if best else None) or share))
            for share, other in zip(current, best_known, strict=True)
        )
        if (forward, backward) == current:
            return self
        shape = self.attention
        if best and best_known[0] is not None and shape is not None:
            shape = shape.model_copy(update={"shares_narrow": False})
        return self.model_copy(
            update={
                "attention_efficiency": forward,
                "attention_backward_efficiency": backward,
                "attention": shape,
            }
        )

    def memory_seconds(self, num_bytes: float) -> float:
        """Return the seconds of a kernel that streams `num_bytes` of device memory, or of its cache. Ignores: launch."""
        return self._traffic(num_bytes) / (self.memory_bandwidth * self.memory_efficiency)

    def norm_seconds(self, num_bytes: float) -> float:
        """Return the seconds of a layer or group norm that streams `num_bytes`. Ignores: lengths of rows, launch."""
        return self._traffic(num_bytes) / (
            self.memory_bandwidth * (self.norm_efficiency or self.memory_efficiency)
        )

    @property
    def shares_host_memory(self) -> bool:
        """Whether the device computes on the host's memory, so that offloading frees none."""
        return self.kind == "cpu" or self.host_link_bandwidth == 0

    @property
    def allocated_workspace_bytes(self) -> int:
        """Bytes that the matmul library's workspace takes from the allocator: none on a CPU."""
        return 0 if self.kind == "cpu" else self.workspace_bytes

    @property
    def recommended_workspace_bytes(self) -> int:
        """The workspace that cuBLAS recommends for a matmul: 32 MiB from Hopper on, 4 MiB before.

        Source: cuBLAS's documentation of `cublasSetWorkspace`. Ignores: that Ada, which has matmuls in eight bits too, comes
        before Hopper.
        """
        return (32 if self.peak_flops.get("fp8") else 4) * 2**20

    @property
    def view_seconds(self) -> float:
        """Host time of an operator that only makes a view."""
        return self.host_overhead_s * _VIEW_SHARE if self.view_overhead_s is None else self.view_overhead_s

    def evaluation_seconds(self, num_functions: float, num_random: float) -> float:
        """Return the seconds to evaluate transcendental functions and draw random numbers; zero if that is hidden."""
        functions = num_functions / self.function_rate if self.function_rate else 0.0
        return functions + (num_random / self.random_rate if self.random_rate else 0.0)

    def _traffic(self, num_bytes: float) -> float:
        """Return `num_bytes` as equivalent bytes of device memory: those served by the cache count less.

        The cache serves all operands that fill at most half of it and none that fill it, linearly in between, because
        replacement is not perfect and earlier kernels have left data in it. Ignores: that old operands have been evicted.
        """
        if not self.cache_bytes:
            return num_bytes
        served = min(max(2.0 - 2.0 * num_bytes / self.cache_bytes, 0.0), 1.0)
        return num_bytes * (1.0 - served * (1.0 - 1.0 / (self.cache_speed_up or _CACHE_SPEED_UP)))
