"""Loading of a `Cluster` from a name or a file, with overrides, and saving as a TOML file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
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
            _completed(node, str(path)) if isinstance(node, dict) else node for node in nodes
        ]
    return document


def _completed(node: dict[str, Any], origin: str) -> dict[str, Any]:
    """Complete a node whose `device` names a catalog entry with the figures of that entry."""
    if not isinstance(node.get("device"), str):
        return node
    base = catalog_node(node["device"])
    stated = {key: value for key, value in node.items() if key != "device"}
    return _merged(base, stated, f"given in {origin}")


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
