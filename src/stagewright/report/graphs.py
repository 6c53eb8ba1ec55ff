"""Summary of an operator graph, as the document of `trace --json` and as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from rich.console import Group

from stagewright.graph import OperatorGraph, Part
from stagewright.graph.cuts import find_cuts
from stagewright.report.tables import facts, table
from stagewright.text import plural
from stagewright.units import format_bytes, format_count, format_seconds

_SHOWN_CUTS = 6


@dataclass(frozen=True, slots=True)
class NumberedModules:
    """Modules whose paths differ only in a number; `kinds` has the counts of equal ones."""

    pattern: str
    kinds: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.kinds)


def find_layers(graph: OperatorGraph) -> list[NumberedModules]:
    """Return numbered modules in the order of the model; two are equal if they run the same operators.

    An operator belongs to the first number in the path of its module: experts count with their layer.
    """
    operators: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for node_id in graph.forward_ids:
        node = graph.nodes[node_id]
        if (place := _numbered(node.module)) is not None:
            operators[place].append((node.op, node.signature))
    kinds: dict[str, Counter[tuple[tuple[str, int], ...]]] = defaultdict(Counter)
    for (pattern, _), signatures in operators.items():
        kinds[pattern][tuple(signatures)] += 1
    return [NumberedModules(pattern, tuple(counts.values())) for pattern, counts in kinds.items()]


def _numbered(module: str) -> tuple[str, int] | None:
    """Return the path of a module up to its first number, and that number; None without a number.

    >>> _numbered("model.layers.3.mlp.experts.1"), _numbered("model.norm")
    (('model.layers.*', 3), None)
    """
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join([*parts[:index], "*"]), int(part)
    return None


def graph_document(graph: OperatorGraph, seconds: float) -> dict[str, Any]:
    """Return counts, layers, the cuts that the fewest tensors cross, and tied parameters."""
    cuts = find_cuts(graph)
    fewest = min(cuts.num_values[cuts.positions], default=0)
    narrowest = [cut for cut in cuts.positions.tolist() if cuts.num_values[cut] == fewest]
    counts = Counter(node.part for node in graph.nodes)
    names: dict[int, list[str]] = defaultdict(list)
    for name, value in graph.parameters.items():
        names[value].append(name)
    return {
        "model": graph.name,
        **{name: graph.facts.get(name) for name in ("microbatch_size", "sequence_length", "dtype", "num_tokens")},
        "num_parameters": graph.num_parameters,
        "num_trained": sum(
            graph.values[value].meta.num_elements for value in graph.parameter_values if value in graph.gradients
        ),
        "parameter_bytes": sum(graph.storage_bytes[graph.values[v].storage] for v in graph.parameter_values),
        "num_nodes": len(graph.nodes),
        "nodes_by_part": {part.name.lower(): counts[part] for part in Part if counts[part]},
        "num_forward_operators": len(graph.forward_ids),
        "layers": [
            {"pattern": layers.pattern, "count": layers.count, "kinds": list(layers.kinds)}
            for layers in find_layers(graph)
        ],
        "num_cuts": len(cuts.positions),
        "narrow_cuts": [
            {
                "after": graph.nodes[graph.forward_ids[cut - 1]].name, "position": cut,
                "num_tensors": int(cuts.num_values[cut]), "num_bytes": int(cuts.value_bytes[cut]),
            }
            for cut in narrowest
        ],
        "prologue": [node.name for node in graph.nodes if node.part in (Part.STATIC, Part.PROLOGUE)],
        "tied_parameters": [group for group in names.values() if len(group) > 1],
        "num_regions": len({node.region for node in graph.nodes} - {-1}),
        "inputs": {name: str(graph.values[value].meta) for name, value in graph.inputs.items()},
        "seconds": seconds,
    }  # fmt: skip


def graph_summary(document: dict[str, Any]) -> Group:
    """Return the document of a graph as text."""
    parts = ", ".join(f"{count} {name}" for name, count in document["nodes_by_part"].items())
    cuts = document["narrow_cuts"]
    width = plural(cuts[0]["num_tensors"] if cuts else 0, "tensor")
    lines = {
        "model": document["model"],
        "parameters": f"{format_count(document['num_parameters'])} ({format_bytes(document['parameter_bytes'])})",
        "trained": f"{format_count(document['num_trained'])} of them; the others are frozen",
        "microbatch": ", ".join(f"{name} {meta}" for name, meta in document["inputs"].items()),
        "operators": f"{document['num_nodes']}: {parts}",
        "layers": "; ".join(map(_layers_text, document["layers"])) or "none found",
        "prologue": f"{plural(len(document['prologue']), 'operator')} without parameters, repeated where used",
        "tied parameters": "; ".join(" = ".join(names) for names in document["tied_parameters"]) or "none",
        "checkpointed": f"{plural(document['num_regions'], 'region')} by the model's own code",
        "cuts": f"{document['num_cuts']} legal; the narrowest, {len(cuts)}, carry {width}",
        "seconds": format_seconds(document["seconds"]),
    }
    if document["num_trained"] == document["num_parameters"]:
        del lines["trained"]
    if not document["num_regions"]:
        del lines["checkpointed"]
    shown = cuts if len(cuts) <= _SHOWN_CUTS else [*cuts[: _SHOWN_CUTS - 1], None, cuts[-1]]
    rows = [
        ("...", "", "") if cut is None else (cut["after"], cut["position"], format_bytes(cut["num_bytes"]))
        for cut in shown
    ]
    return Group(facts(lines.items()), table("Narrowest cuts", ("after", "position", "bytes across"), rows))


def _layers_text(layers: dict[str, Any]) -> str:
    kinds = layers["kinds"]
    equal = "equal" if len(kinds) == 1 else f"of {len(kinds)} kinds ({', '.join(map(str, kinds))})"
    return f"{layers['count']} x {layers['pattern']} {equal if layers['count'] > 1 else ''}".rstrip()


def listing(graph: OperatorGraph) -> dict[str, Any]:
    """Return every node and value as plain data for other programs."""
    return {
        "name": graph.name,
        "facts": {
            name: asdict(fact) if is_dataclass(fact) and not isinstance(fact, type) else fact
            for name, fact in graph.facts.items()
        },
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
        "nodes": [
            {
                "id": node.id, "op": node.op, "part": node.part.name.lower(), "inputs": node.inputs,
                "outputs": node.outputs, "forward": node.forward, "module": node.module, "ordinal": node.ordinal,
                "where": node.where,
            }
            for node in graph.nodes
        ],
    }  # fmt: skip
