"""The description of this machine: its probe, kept while the hardware is the same, and the memory that others use now."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import torch
import torch.multiprocessing as mp

from stagewright.cluster import Cluster, load_cluster, save_cluster
from stagewright.errors import InputError
from stagewright.execution.accelerator import (
    accelerator_of,
    device_name,
    nccl_version,
    num_devices,
    total_bytes,
)
from stagewright.execution.probe import probe
from stagewright.execution.probe_description import processor_name
from stagewright.files import cache_folder
from stagewright.machine import free_bytes, machine_bytes, num_cores
from stagewright.text import say
from stagewright.units import GIB, format_bytes

_SEEN = 0.01
"""Fraction of a card's memory below which use by other programs is left to the reserve."""


class Card(NamedTuple):
    """A GPU as it is now: its name, its memory, and the part of it that no program uses."""

    name: str
    total_bytes: int
    free_bytes: int


def this_machine(device: str, processes: int, report: Callable[[str, float], None]) -> tuple[Cluster, bool]:
    """Return this machine as a cluster of `processes` devices, each with the memory that other programs leave, and whether
    it was measured now. Measurements that other programs disturbed are not kept. Raises as `probe` does."""
    cards = _cards()[:processes] if device == "cuda" else []
    path = cache_folder("probes") / f"{_hardware(device, processes, cards)}.toml"
    cluster = None
    with suppress(InputError):  # of another version, or damaged
        cluster = load_cluster(path) if path.exists() else None
    is_new = cluster is None
    if cluster is None:
        cluster = probe(device, processes, report)
        if cluster.cores_of_others is None:
            save_cluster(
                cluster, path, "Measured by `stagewright probe`, and kept while the hardware is the same."
            )
    return without_used(cluster, cards), is_new


def _hardware(device: str, processes: int, cards: Sequence[Card]) -> str:
    """Return a digest of all that a probe's figures depend on."""
    facts = [
        platform.node(), processor_name("cpu"), num_cores(), machine_bytes(), device, processes, torch.__version__,
        nccl_version() if device == "cuda" else None, [card[:2] for card in cards],
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _cards() -> list[Card]:
    """Return the GPUs of this machine, looked at by a process that ends: to ask takes memory on each of them."""
    if not num_devices("cuda"):
        return []
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(_looked_at)


def _looked_at() -> list[Card]:
    cards = []
    for number in range(num_devices("cuda")):
        device = torch.device("cuda", number)
        name, total = device_name(device), total_bytes(device)
        before, _ = accelerator_of(device).free_and_total_bytes()
        if getattr(torch.get_device_module(device).get_device_properties(device), "is_integrated", False):
            before = max(before, int(min(free_bytes(), total)))  # the system gives cache files' memory back
        cards.append(Card(name, total, before))
    return cards


def without_used(cluster: Cluster, cards: Sequence[Card]) -> Cluster:
    """Return `cluster`, of one node with a device for each of `cards`, with the memory that other programs leave; say on
    which cards they use some.

    The context of the process that looked counts as used by others: the same is predicted for that of a run.
    """
    if not cards:
        return cluster
    free: list[int] = []
    for number, card in enumerate(cards):
        device = cluster.device_of(number)
        used = max(0, card.total_bytes - card.free_bytes - device.context_bytes)
        if used > _SEEN * card.total_bytes:
            say(
                f"device {number} ({card.name}): other programs use {format_bytes(used)}, which is left to them"
            )
        free.append(device.memory_bytes - (used if used > _SEEN * card.total_bytes else 0))
    groups = []
    for (group, memory), ranks in groupby(
        range(len(cards)), key=lambda rank: (cluster.group_of(rank), free[rank])
    ):
        device = group.device
        if memory != device.memory_bytes:
            name = f"{device.name}-{memory / GIB:.0f}"
            device = device.model_copy(update={"memory_bytes": memory, "name": name})
        changed = {"device": device, "devices_per_node": len(list(ranks)), "same_node": bool(groups)}
        groups.append(group.model_copy(update=changed))
    return cluster.model_copy(update={"nodes": tuple(groups)})
