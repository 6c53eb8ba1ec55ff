"""Matrix products and fused attention by shape on one device, predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from stagewright.cluster import Device
from stagewright.cluster.products import Shape
from stagewright.estimation.operators import Kernel, Work
from stagewright.estimation.time import kernel_seconds
from stagewright.execution.probe_measurements import Stopwatch

ITEM_BYTES = {"bf16": 2, "fp32": 4}
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

PRODUCTS = {
    "cuda": [(m, n, k) for m in (512, 4096, 16384) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (1536, 2560))],
    "cpu": [(256, 256, 256), (512, 1024, 256)],
}  # fmt: skip
"""Rows, columns and inner dimension, by the kind of device."""

ATTENTION = {
    "cuda": [(8, 32, 1024, 128), (2, 32, 4096, 128), (1, 32, 16384, 128), (4, 16, 4096, 64)],
    "cpu": [(1, 4, 256, 64)],
}
"""Samples, heads, tokens and width of a head; causal."""


def products(
    device: torch.device, described: Sequence[Device], dtype: str, time_box_s: float
) -> Iterator[tuple[str, list[float], float]]:
    """(shape, seconds that each description predicts, measured seconds) of every product."""
    watch = Stopwatch(device, time_box_s)
    for m, n, k in PRODUCTS[device.type]:
        left, right = (torch.randn(shape, device=device).to(TYPES[dtype]) for shape in ((m, k), (k, n)))
        taken = watch.seconds(f"{m} x {n} x {k}", partial(torch.mm, left, right))
        flop, moved = 2.0 * m * n * k, float(ITEM_BYTES[dtype] * (m * k + k * n + m * n))
        work = Work(
            Kernel.MATMUL,
            str(TYPES[dtype]).removeprefix("torch."),
            flop,
            flop,
            moved,
            shapes=(Shape(1, m, n, k),),
        )
        yield f"{m} x {n} x {k}", [_seconds(work, one) for one in described], taken


def attention(
    device: torch.device, described: Sequence[Device], dtype: str, time_box_s: float
) -> Iterator[tuple[str, list[float], float]]:
    """The same of causal attention, forward and backward."""
    watch = Stopwatch(device, time_box_s)
    for batch, heads, length, width in ATTENTION[device.type]:
        shape = (batch, heads, length, width)
        q, k, v = (torch.randn(shape, device=device).to(TYPES[dtype]).requires_grad_() for _ in range(3))
        call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        with torch.no_grad():
            forward = watch.seconds(f"forward {shape}", call)
        out = call()
        seed = torch.ones_like(out)
        grads = partial(torch.autograd.grad, out, (q, k, v), seed, retain_graph=True)
        backward = watch.seconds(f"backward {shape}", grads)
        flop, moved = 4.0 * batch * heads * length**2 * width, float(ITEM_BYTES[dtype] * 4 * q.numel())
        name = str(TYPES[dtype]).removeprefix("torch.")
        label = f"{batch} x {heads} heads of {width}, {length} tokens"
        for kernel, factor, taken in (
            (Kernel.ATTENTION, 1.0, forward), (Kernel.ATTENTION_BACKWARD, 2.5, backward),
        ):  # fmt: skip
            work = Work(kernel, name, factor * flop, factor * flop / 2, factor * moved)
            yield f"{kernel.value}: {label}", [_seconds(work, one) for one in described], taken


def _seconds(work: Work, device: Device) -> float:
    """What one call takes, with its gap to the next, or its issue on a CPU."""
    return kernel_seconds(work, device) + (
        device.host_overhead_s if device.kind == "cpu" else device.launch_overhead_s
    )
