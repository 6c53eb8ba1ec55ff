"""Devices of little memory."""

from __future__ import annotations

from stagewright.cluster.device import Device

_RESERVE = 16 * 2**30


def with_room(device: Device, num_bytes: int) -> Device:
    """`device` with memory of which a plan may use so many bytes, beside a reserve that holds all communicators."""
    memory = num_bytes + device.context_bytes + _RESERVE
    return device.model_copy(update={"memory_bytes": memory, "reserve_fraction": (_RESERVE + 1) / memory})
