"""Megatron's rule of thumb for widths."""

from __future__ import annotations

from collections.abc import Callable

from stagewright.errors import PlanError


def megatron_rule(
    num_devices: int, devices_per_node: int, num_layers: int, fits: Callable[[int, int], bool]
) -> tuple[int, int, int]:
    """Widths (tp, pp, dp): tensor parallelism up to a node, then the fewest stages that fit, replicas for the rest.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), takeaways 1 and 2. Ignores: times; uneven stages.

    Args:
        fits: whether a model split over (tp, pp) fits in a device.

    Raises:
        PlanError: nothing fits.

    >>> megatron_rule(64, 8, 32, lambda tp, pp: tp * pp >= 16)
    (8, 2, 4)
    >>> megatron_rule(12, 8, 24, lambda tp, pp: tp * pp >= 8)
    (4, 3, 1)
    """
    tp = 1
    while tp <= devices_per_node:
        if num_devices % tp == 0 and fits(tp, 1):
            return tp, 1, num_devices // tp
        tp *= 2
    tp //= 2
    while num_devices % tp:
        tp //= 2
    for pp in range(1, num_devices // tp + 1):
        if num_devices % (tp * pp) == 0 and num_layers % pp == 0 and fits(tp, pp):
            return tp, pp, num_devices // (tp * pp)
    raise PlanError(
        f"no widths fit on {num_devices} devices in nodes of {devices_per_node}: use more devices"
    )
