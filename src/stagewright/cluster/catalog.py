"""The catalog: one TOML file per device and its usual node, multiplied by names such as `64x-h100`."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any

from stagewright.errors import InputError, nearest
from stagewright.limits import MOST_DEVICES, check_count

_PART = re.compile(r"(?:(?P<nodes>[0-9]+)x)?(?P<count>[0-9]+)x-?(?P<device>.+?)(?:(?<=[0-9])gb)?")


@cache
def device_names() -> tuple[str, ...]:
    """Return the names of the devices in the catalog."""
    folder = resources.files("stagewright.cluster") / "catalog"
    return tuple(
        sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    )


def catalog_node(device: str) -> dict[str, Any]:
    """Return the document of one node of `device`; raise `InputError` naming the nearest device."""
    if device not in device_names():
        hint = nearest(device, device_names())
        raise InputError(f"no device '{device}' in the catalog{hint}; it has {', '.join(device_names())}")
    text = (resources.files("stagewright.cluster") / "catalog" / f"{device}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def is_catalog_name(name: str) -> bool:
    """Whether `name` has the form of a catalog cluster, whether or not its devices exist."""
    return all(_PART.fullmatch(part) for part in name.lower().split("+"))


def catalog_cluster(name: str) -> dict[str, Any]:
    """Return the document of `COUNTxDEVICE`, `NODESxCOUNTxDEVICE` or several of them joined by `+`.

    `COUNTx-DEVICE` fills nodes of the device's usual size, the last one partly if needed; `NODESxCOUNTx-DEVICE` gives the
    size of the nodes; `a100-80gb` is `a100-80`. Raises `InputError` for unknown devices and for zero counts.
    """
    groups: list[dict[str, Any]] = []
    for part in name.lower().split("+"):
        match = _PART.fullmatch(part)
        if not match:
            raise InputError(
                f"'{part}' is not a catalog name: write e.g. 8x-h100, 2x4x-a100-40 or 4x-v100-32+4x-t4"
            )
        groups += _groups(match["device"], match["nodes"], match["count"], part)
    return {"name": name, "nodes": groups}


def _groups(device: str, nodes: str | None, count: str, part: str) -> list[dict[str, Any]]:
    node = catalog_node(device)
    num_devices = _number(count) * _number(nodes or "1")
    if num_devices == 0:
        raise InputError(f"'{part}' has no devices: give a count of at least 1, e.g. 8x-{device}")
    check_count(num_devices, MOST_DEVICES, f"the number of devices of '{part}'", "give fewer")
    if nodes is not None:
        return [_sized(node, int(nodes), int(count))]
    full, remainder = divmod(num_devices, node["devices_per_node"])
    sizes = [(full, node["devices_per_node"])] * (full > 0) + [(1, remainder)] * (remainder > 0)
    return [_sized(node, num_nodes, size) for num_nodes, size in sizes]


def _number(digits: str) -> int:
    """Convert digits; return a number that is too large as well if Python refuses to convert so many."""
    return int(digits) if len(digits) < 30 else 10**30


def _sized(node: dict[str, Any], num_nodes: int, size: int) -> dict[str, Any]:
    """Return the node with `size` devices, which keep their share of the adapters (at least one)."""
    num_nics = max(1, node["num_nics"] * size // node["devices_per_node"])
    return {**node, "count": num_nodes, "devices_per_node": size, "num_nics": num_nics}
