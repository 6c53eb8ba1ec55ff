"""Reading and writing of operator graphs as bytes: plain data, nothing is executed, and a digest detects damage.

A file is one line that names the format and the SHA-256 of the rest, followed by JSON. Each distinct item is written once,
in `things`: ``null``, booleans, numbers and strings as they are, and ``[kind, place, ...]`` for an item made of the things
at earlier places. Values and nodes are columns of such places, one per field, which read in half the time of rows.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import starmap
from typing import Any, TypeVar

from stagewright.errors import InputError
from stagewright.graph.expert_parallel import ExpertParallel
from stagewright.graph.graph import Node, OperatorGraph, Origin, Part, Ref, Symbol, Value
from stagewright.graph.repeat import Repeat
from stagewright.graph.tensor import TensorMeta
from stagewright.graph.tensor_parallel import TensorParallel, TensorShard

Record = TypeVar("Record", Value, Node)

FORMAT = 3
_MAGIC = b"stagewright graph"


class DamagedGraph(InputError):
    """Bytes that are not a graph of this format: truncated, changed, or something else."""


def graph_to_bytes(graph: OperatorGraph) -> bytes:
    """Return `graph` in the form that `graph_from_bytes` reads.

    Raises:
        TypeError: an argument or fact of a kind that graphs do not have.
    """
    things = _Things()
    document = {
        "values": _columns(Value, graph.values, things),
        "nodes": _columns(Node, graph.nodes, things),
        "rest": {name: things.place(getattr(graph, name)) for name in _REST},
        "things": things.written,
    }
    payload = json.dumps(document, separators=(",", ":")).encode()
    return _heading(payload) + payload


def graph_from_bytes(data: bytes) -> OperatorGraph:
    """Return the graph that `graph_to_bytes` was given: equal, and with the same types throughout.

    Raises:
        DamagedGraph: the bytes are anything else. Data with a wrong digest is not parsed.
    """
    heading, _, payload = data.partition(b"\n")
    if heading + b"\n" != _heading(payload):
        raise DamagedGraph("no graph of this format, or one that has changed since it was written")
    try:
        document = json.loads(payload)
        things = _read_things(document["things"])
        return OperatorGraph(
            values=_rows(Value, document["values"], things),
            nodes=_rows(Node, document["nodes"], things),
            **{name: things[document["rest"][name]] for name in _REST},
        )
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DamagedGraph(f"not a graph: {error}") from None


def graph_digest(graph: OperatorGraph, layouts: Iterable[TensorMeta] = ()) -> str:
    """Return a digest of the forward operators, their names and `layouts`: equal for traces that share names in plans."""
    named = (f"{graph.nodes[number].name} {graph.nodes[number].op}\n" for number in graph.forward_ids)
    digest = hashlib.sha256("".join(named).encode())
    digest.update(repr([(meta.shape, meta.stride, meta.dtype, meta.offset) for meta in layouts]).encode())
    return digest.hexdigest()[:32]


def _heading(payload: bytes) -> bytes:
    return b"%s %d %s\n" % (_MAGIC, FORMAT, hashlib.sha256(payload).hexdigest().encode())


class _Things:
    """The distinct items of a document, in the order in which they are `written`."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self._places: dict[Any, int] = {}

    def place(self, thing: Any) -> int:
        """Return the index of `thing`; equal things of different types (``1``, ``1.0``, ``True``) are distinct."""
        kind = type(thing)
        if kind in _SCALARS:
            return self._placed((kind, repr(thing)), thing)
        if kind not in _PARTS:
            raise TypeError(f"graphs have no {kind.__name__}: {thing!r}")
        entry = [kind.__name__, *map(self.place, _PARTS[kind](thing))]
        return self._placed(tuple(entry), entry)

    def _placed(self, key: Any, entry: Any) -> int:
        place = self._places.setdefault(key, len(self.written))
        if place == len(self.written):
            self.written.append(entry)
        return place


def _read_things(written: list[Any]) -> list[Any]:
    """Rebuild the things of a document."""
    things: list[Any] = []
    for entry in written:
        if type(entry) is list:
            kind, *places = entry
            entry = _MAKERS[kind]([things[place] for place in places])
        things.append(entry)
    return things


def _columns(record: type[Record], rows: Iterable[Record], things: _Things) -> dict[str, list[int]]:
    return {field.name: [things.place(getattr(row, field.name)) for row in rows] for field in fields(record)}


def _rows(record: type[Record], columns: Mapping[str, list[int]], things: list[Any]) -> tuple[Record, ...]:
    named = [[things[place] for place in columns[field.name]] for field in fields(record)]
    return tuple(starmap(record, zip(*named, strict=True)))


def _fields(thing: Any) -> list[Any]:
    return [getattr(thing, field.name) for field in fields(thing)]


_SCALARS = frozenset({type(None), bool, int, float, str})
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: iter,
    Ref: iter,
    Symbol: iter,
    Origin: lambda origin: [origin.value],
    Part: lambda part: [part.value],
    TensorMeta: _fields,
    TensorShard: _fields,
    TensorParallel: _fields,
    ExpertParallel: _fields,
    Repeat: _fields,
    dict: lambda items: [part for item in items.items() for part in item],
    bytes: lambda data: [base64.b64encode(data).decode()],
    complex: lambda number: [number.real, number.imag],
}
"""The parts that an item of each kind is written as."""
_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    kind.__name__: lambda parts, kind=kind: kind(*parts) for kind in _PARTS
} | {
    "tuple": tuple,
    "dict": lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "bytes": lambda parts: base64.b64decode(parts[0], validate=True),
}
_REST = tuple(field.name for field in fields(OperatorGraph) if field.name not in ("values", "nodes"))
