"""Loading of a `Cluster` from a name or a file, with overrides, and saving as a TOML file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from stagewright.cluster.catalog import catalog_cluster, catalog_node, device_names, is_catalog_name
from stagewright.cluster.cluster import Cluster, NodeGroup
from stagewright.cluster.device import Device
from stagewright.cluster.matrices import with_matrices, write_matrices
from stagewright.cluster.schema import validated
from stagewright.documents import read_toml
from stagewright.errors import InputError, nearest
from stagewright.files import write_whole
from stagewright.limits import MOST_DEVICES

_SOURCED_TABLES = ("device", "intra_node", "inter_node", "host")
"""Tables of a node with their own `sources`."""

_EXAMPLES = (
    "8x-h100",
    "64x-h100",
    "8x-h200",
    "8x-b200",
    "8x-gh200",
    "8x-a100-80",
    "8x-a100-40",
    "8x-v100-32",
)


def load_cluster(name_or_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Cluster:
    """Load the cluster of a catalog name (`8x-h100`, `2x4x-a100-40`, `4x-v100-32+4x-t4`) or of a TOML file.

    `overrides` maps dotted keys of a node (`device.memory_bytes`, `device.peak_flops.bf16`,
    `inter_node.bandwidth`, `num_nics`; they apply to every node) or `name` to values. Raises `InputError`
    naming the file, the key, the value and the rule.
    """
    origin = str(name_or_path)
    document = _document(name_or_path)
    for key, value in (overrides or {}).items():
        _override(document, key, value)
    return validated(Cluster, document, origin)


def given_cluster(cluster: Cluster | str | Path) -> Cluster:
    """Return the cluster, loaded if it is a name or file.

    Raises:
        InputError: as `load_cluster` does.
        TypeError: it is neither.
    """
    if isinstance(cluster, str | Path):
        return load_cluster(cluster)
    if not isinstance(cluster, Cluster):
        raise TypeError(
            f"cluster is of type {type(cluster).__name__}: pass a catalog name such as '8x-h100', the path of a TOML file, "
            "or what stagewright.load_cluster returns"
        )
    return cluster


def save_cluster(cluster: Cluster, path: str | Path, provenance: str) -> None:
    """Write `cluster` as TOML that `load_cluster` reads back, under a comment with `provenance`.

    Measured links become CSV files next to it.
    """
    document = cluster.model_dump(mode="python", exclude_none=True)
    if "measured" in document:
        document = write_matrices(document, Path(path))
    write_toml(path, document, provenance)


def _document(name_or_path: str | Path) -> dict[str, Any]:
    text = str(name_or_path)
    path = Path(name_or_path)
    if os.path.isfile(path):  # which a name that is too long or has NUL in it is not, without an error
        return _from_file(path)
    if isinstance(name_or_path, str) and path.suffix != ".toml" and is_catalog_name(text):
        return catalog_cluster(text)
    if path.suffix == ".toml" or "/" in text:
        raise InputError(f"no cluster file '{text}': check the path, or name a catalog entry such as 8x-h100")
    devices = device_names()
    meant = f"8x-{text}" if any(device.startswith(text.lower()) for device in devices) else text
    names = dict.fromkeys([*_EXAMPLES, *(f"8x-{device}" for device in devices)])
    raise InputError(
        f"no cluster '{text}'{nearest(meant, names)}: give a TOML file or COUNTx-DEVICE, e.g. 8x-h100, "
        f"with a device of {', '.join(devices)}"
    )


def _from_file(path: Path) -> dict[str, Any]:
    document = read_toml(path, "cluster file")
    document.setdefault("name", path.stem)
    if isinstance(document.get("measured"), dict):
        document["measured"] = with_matrices(document["measured"], path.parent)
    elif "measured" in document:
        raise InputError(
            f"{path}: measured = {document['measured']!r}: must be a table; write [measured] with bandwidth below it"
        )
    nodes = document.get("nodes")
    if isinstance(nodes, list):
        document["nodes"] = [
            group
            for number, node in enumerate(nodes)
            for group in (_groups(node, f"{path}: nodes[{number}]") if isinstance(node, dict) else [node])
        ]
    return document


def _groups(node: dict[str, Any], origin: str) -> list[dict[str, Any]]:
    """Return the groups of a node: those of a list of `devices`, else the node, completed with the figures of the catalog if
    its `device` is a name."""
    file = origin.rpartition(":")[0]
    if "devices" in node:
        return _groups_of_list(node, origin, f"given in {file}")
    if not isinstance(node.get("device"), str):
        return [node]
    stated = {key: value for key, value in node.items() if key != "device"}
    return [_merged(catalog_node(node["device"]), stated, f"given in {file}")]


def _groups_of_list(node: dict[str, Any], origin: str, source: str) -> list[dict[str, Any]]:
    """Return a group for every run of equal names in the `devices` of a node, which are joined by PCIe and have the host
    that the node states, if any."""
    names = node["devices"]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InputError(
            f'{origin}.devices = {names!r}: must be a list of names of the catalog, e.g. ["rtx3090", "rtx4090"]'
        )
    for key in ("device", "devices_per_node", "same_node"):
        if key in node:
            raise InputError(
                f"{origin} has both devices and {key}: devices lists all of the node, so leave out {key}"
            )
    count = node.get("count", 1)
    if not isinstance(count, int) or not 1 <= count <= MOST_DEVICES:
        raise InputError(f"{origin}.count = {count!r}: must be a whole number from 1 to {MOST_DEVICES}")
    stated = {key: value for key, value in node.items() if key not in ("devices", "count")}
    if isinstance(host := stated.get("host"), Mapping):
        stated["host"] = {"num_devices": len(names), **host}
    network = catalog_node(names[0])
    groups: list[dict[str, Any]] = []
    for name, run in groupby(names):
        base = catalog_node(name)
        if not base["device"]["host_link_bandwidth"]:
            raise InputError(
                f"{origin}.devices: {name} is a machine of one device, not a card: give it [[nodes]] of its own with "
                f'device = "{name}"'
            )
        base |= {"intra_node": _pcie(base), "inter_node": network["inter_node"], "num_nics": 1}
        base.pop("host", None)
        part = {"devices_per_node": len(list(run)), "same_node": bool(groups)}
        base["sources"] = {"num_nics": "guess: one adapter"}
        groups.append(_merged(base, {**part, **stated}, source))
    validated(NodeGroup, groups[0], origin)  # what the node states is wrong in every group or in none
    return [{**groups[0], "count": count}] if len(groups) == 1 else groups * count


def _pcie(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the link over PCIe of a catalog node's device: the node's own unless it is faster than the link to the host."""
    to_host = node["device"]["host_link_bandwidth"]
    if node["intra_node"]["bandwidth"] <= to_host:
        return node["intra_node"]
    sources = {
        "latency_s": "guess: NCCL through host memory",
        "bandwidth": "guess: through host memory, at half the rate of the link to the host",
    }
    return {"latency_s": 1e-5, "bandwidth": to_host / 2, "sources": sources}


def _merged(base: dict[str, Any], stated: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return `base` with the figures of `stated`, whose source becomes `source` if they name none."""
    merged = {**base}
    sources = dict(base.get("sources", {}))
    for name in ("ring_bandwidth", "collectives"):
        # A catalog's figures of collectives belong to the catalog's links, not to the ones stated here.
        if ("bandwidth" in stated or "latency_s" in stated) and name not in stated:
            merged.pop(name, None)
            sources.pop(name, None)
    for key, value in stated.items():
        old = base.get(key)
        if key in _SOURCED_TABLES and isinstance(value, Mapping) and isinstance(old, dict):
            merged[key] = _merged(old, value, source)
        elif key != "sources" and isinstance(value, Mapping) and isinstance(old, dict):
            merged[key] = {**old, **value}
            sources |= {f"{key}.{part}": source for part in value}
        elif key != "sources":
            merged[key] = value
            if key not in NodeGroup.not_figures | Device.not_figures:
                sources[key] = source
    stated_sources = stated.get("sources", {})
    merged["sources"] = (
        {**sources, **stated_sources} if isinstance(stated_sources, Mapping) else stated_sources
    )
    return merged


def _override(document: dict[str, Any], dotted: str, value: Any) -> None:
    if dotted == "name":
        document["name"] = value
        return
    stated: Any = value
    for key in reversed(dotted.split(".")):
        stated = {key: stated}
    nodes = document.get("nodes")
    if isinstance(nodes, list):
        document["nodes"] = [
            _merged(node, stated, "given as an override") if isinstance(node, dict) else node
            for node in nodes
        ]


def dumps(document: Mapping[str, Any]) -> str:
    """Return `document` (nested mappings, lists, strings, numbers, booleans; None is left out) as TOML text.

    >>> print(dumps({"name": "a", "size": 1e9, "link": {"latency_s": 1e-05}}), end="")
    name = "a"
    size = 1000000000.0
    <BLANKLINE>
    [link]
    latency_s = 1e-05
    """
    return "\n".join(_lines(document, "")).strip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in table.items():
        if value is not None and not isinstance(value, Mapping) and not _tables(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        name = f"{path}.{_key(key)}" if path else _key(key)
        if isinstance(value, Mapping) and value:
            yield from ("", f"[{name}]", *_lines(value, name))
        for item in _tables(value):
            yield from ("", f"[[{name}]]", *_lines(item, name))


def _tables(value: Any) -> Sequence[Any]:
    """Return the tables of a value that is an array of tables; empty for any other value."""
    is_array = isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)
    return value if is_array else ()


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return repr(value)


def write_toml(path: str | Path, document: Mapping[str, Any], provenance: str) -> None:
    """Write `document` to `path` under a comment, atomically.

    Raises:
        InputError: the file cannot be written.
    """
    comment = "".join(f"# {line}\n" for line in provenance.splitlines())
    write_whole(path, f"{comment}\n{dumps(document)}")
