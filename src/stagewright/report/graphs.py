"""An operator graph summed up: as the document of `trace --json` and as text for people."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from rich.console import Group

from stagewright.graph import Node, OperatorGraph, Part
from stagewright.graph.cuts import find_cuts
from stagewright.report.tables import facts, plural, table
from stagewright.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True)
class Boundary:
    """A cut before forward operator `position`: the values that travel, and their bytes per microbatch."""

    position: int
    num_tensors: int
    num_bytes: int


def boundaries(graph: OperatorGraph) -> list[Boundary]:
    """Every legal cut of `graph`, in order, with what one forward sends across it."""
    cuts = find_cuts(graph)
    return [
        Boundary(position, int(cuts.num_values[position]), int(cuts.value_bytes[position]))
        for position in cuts.positions.tolist()
    ]


@dataclass(frozen=True, slots=True)
class Layers:
    """Modules that differ only in the number in their path; `kinds` counts the equal ones together."""

    pattern: str
    kinds: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.kinds)


def find_layers(graph: OperatorGraph) -> list[Layers]:
    """Numbered modules in the order of the model; two are equal when they run the same operators.

    An operator belongs to the first number in the path of its module: experts count with their layer.
    """
    operators: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for node_id in graph.body:
        node = graph.nodes[node_id]
        if (place := _numbered(node.module)) is not None:
            operators[place].append((node.op, node.signature))
    kinds: dict[str, dict[tuple[tuple[str, int], ...], int]] = defaultdict(lambda: defaultdict(int))
    for (pattern, _), found in operators.items():
        kinds[pattern][tuple(found)] += 1
    return [Layers(pattern, tuple(counts.values())) for pattern, counts in kinds.items()]


def _numbered(module: str) -> tuple[str, int] | None:
    """
    >>> _numbered("model.layers.3.mlp.experts.1"), _numbered("model.norm")
    (('model.layers.*', 3), None)
    """
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join([*parts[:index], "*"]), int(part)
    return None


_SHOWN_CUTS = 6


def graph_document(graph: OperatorGraph, seconds: float) -> dict[str, Any]:
    """What `trace` found: counts, layers, the narrowest cuts, parameters with two names."""
    cuts = boundaries(graph)
    return {
        "model": graph.name,
        **{
            key: graph.facts.get(key) for key in ("microbatch_size", "sequence_length", "dtype", "num_tokens")
        },
        "num_parameters": graph.num_parameters,
        "parameter_bytes": sum(graph.storage_bytes[graph.values[v].storage] for v in graph.parameter_values),
        "num_nodes": len(graph.nodes),
        "nodes_by_part": _nodes_by_part(graph),
        "num_forward_operators": len(graph.body),
        "layers": [
            {"pattern": layers.pattern, "count": layers.count, "kinds": list(layers.kinds)}
            for layers in find_layers(graph)
        ],
        "num_cuts": len(cuts),
        "narrow_cuts": [_cut_document(graph, cut) for cut in narrow(cuts)],
        "prologue": [graph.nodes[node].name for node in _prologue(graph)],
        "tied_parameters": tied_parameters(graph),
        "num_regions": len({node.region for node in graph.nodes} - {-1}),
        "inputs": {name: str(graph.values[value].meta) for name, value in graph.inputs.items()},
        "seconds": seconds,
    }


def graph_summary(document: dict[str, Any]) -> Group:
    """The document of a graph for people."""
    parts = ", ".join(f"{count} {name}" for name, count in document["nodes_by_part"].items())
    layers = "; ".join(_layers_text(found) for found in document["layers"]) or "none found"
    tied = "; ".join(" = ".join(names) for names in document["tied_parameters"]) or "none"
    cuts = document["narrow_cuts"]
    regions = plural(document["num_regions"], "region") if document["num_regions"] else ""
    width = cuts[0]["num_tensors"] if cuts else 0
    summary = facts(
        [
            ("model", document["model"]),
            (
                "parameters",
                f"{format_count(document['num_parameters'])} ({format_bytes(document['parameter_bytes'])})",
            ),
            ("microbatch", ", ".join(f"{name} {meta}" for name, meta in document["inputs"].items())),
            ("operators", f"{document['num_nodes']}: {parts}"),
            ("layers", layers),
            (
                "prologue",
                f"{len(document['prologue'])} operators depend on no parameter; repeated where used",
            ),
            ("tied parameters", tied),
            *([("checkpointed", f"{regions} by the model's own code")] if regions else []),
            (
                "cuts",
                f"{document['num_cuts']} legal; the narrowest, {len(cuts)}, carry {plural(width, 'tensor')}",
            ),
            ("seconds", format_seconds(document["seconds"])),
        ]
    )
    shown = cuts if len(cuts) <= _SHOWN_CUTS else [*cuts[: _SHOWN_CUTS - 1], None, cuts[-1]]
    rows = [
        ("...", "", "") if cut is None else (cut["after"], cut["position"], format_bytes(cut["num_bytes"]))
        for cut in shown
    ]
    return Group(summary, table("Narrowest cuts", ("after", "position", "bytes across"), rows))


def _plain(fact: object) -> object:
    return asdict(fact) if is_dataclass(fact) and not isinstance(fact, type) else fact


def listing(graph: OperatorGraph) -> dict[str, Any]:
    """Every node and value as plain data, for other programs."""
    return {
        "name": graph.name,
        "facts": {name: _plain(fact) for name, fact in graph.facts.items()},
        "parameters": graph.parameters,
        "buffers": graph.buffers,
        "inputs": graph.inputs,
        "loss": graph.loss,
        "gradients": {str(value): gradient for value, gradient in graph.gradients.items()},
        "values": [
            {
                "id": value.id, "name": value.name, "origin": value.origin, "dtype": value.meta.dtype,
                "shape": value.meta.shape, "stride": value.meta.stride, "offset": value.meta.offset,
                "storage": value.storage,
            }
            for value in graph.values
        ],
        "nodes": [_node_document(node) for node in graph.nodes],
    }  # fmt: skip


def narrow(cuts: list[Boundary]) -> list[Boundary]:
    """The cuts that the fewest tensors cross."""
    fewest = min((cut.num_tensors for cut in cuts), default=0)
    return [cut for cut in cuts if cut.num_tensors == fewest]


def tied_parameters(graph: OperatorGraph) -> list[list[str]]:
    """Groups of names of one and the same parameter."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, value in graph.parameters.items():
        names[value].append(name)
    return [group for group in names.values() if len(group) > 1]


def _nodes_by_part(graph: OperatorGraph) -> dict[str, int]:
    counts = Counter(node.part for node in graph.nodes)
    return {part.name.lower(): counts[part] for part in Part if counts[part]}


def _prologue(graph: OperatorGraph) -> list[int]:
    return [node.id for node in graph.nodes if node.part in (Part.STATIC, Part.PROLOGUE)]


def _cut_document(graph: OperatorGraph, cut: Boundary) -> dict[str, Any]:
    before = graph.nodes[graph.body[cut.position - 1]]
    return {
        "position": cut.position,
        "after": before.name,
        "num_tensors": cut.num_tensors,
        "num_bytes": cut.num_bytes,
    }


def _layers_text(found: dict[str, Any]) -> str:
    kinds = found["kinds"]
    equal = "equal" if len(kinds) == 1 else f"of {len(kinds)} kinds ({', '.join(map(str, kinds))})"
    return f"{found['count']} x {found['pattern']} {equal if found['count'] > 1 else ''}".rstrip()


def _node_document(node: Node) -> dict[str, Any]:
    return {
        "id": node.id, "op": node.op, "part": node.part.name.lower(), "inputs": node.inputs,
        "outputs": node.outputs, "forward": node.forward, "module": node.module, "ordinal": node.ordinal,
        "where": node.where,
    }  # fmt: skip
