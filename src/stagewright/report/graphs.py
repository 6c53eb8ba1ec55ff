"""An operator graph summed up: as the document of `trace --json` and as text for people."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from rich.console import Group

from stagewright.graph import OperatorGraph, Part
from stagewright.graph.cuts import find_cuts
from stagewright.report.tables import facts, plural, table
from stagewright.units import format_bytes, format_count, format_seconds

_SHOWN_CUTS = 6


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
    for node_id in graph.forward_ids:
        node = graph.nodes[node_id]
        if (place := _numbered(node.module)) is not None:
            operators[place].append((node.op, node.signature))
    kinds: dict[str, Counter[tuple[tuple[str, int], ...]]] = defaultdict(Counter)
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


def graph_document(graph: OperatorGraph, seconds: float) -> dict[str, Any]:
    """What `trace` found: counts, layers, the cuts that the fewest tensors cross, parameters with two names."""
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
    """The document of a graph for people."""
    found = document
    parts = ", ".join(f"{count} {name}" for name, count in found["nodes_by_part"].items())
    cuts = found["narrow_cuts"]
    width = plural(cuts[0]["num_tensors"] if cuts else 0, "tensor")
    lines = {
        "model": found["model"],
        "parameters": f"{format_count(found['num_parameters'])} ({format_bytes(found['parameter_bytes'])})",
        "trained": f"{format_count(found['num_trained'])} of them; the others are frozen",
        "microbatch": ", ".join(f"{name} {meta}" for name, meta in found["inputs"].items()),
        "operators": f"{found['num_nodes']}: {parts}",
        "layers": "; ".join(map(_layers_text, found["layers"])) or "none found",
        "prologue": f"{len(found['prologue'])} operators depend on no parameter; repeated where used",
        "tied parameters": "; ".join(" = ".join(names) for names in found["tied_parameters"]) or "none",
        "checkpointed": f"{plural(found['num_regions'], 'region')} by the model's own code",
        "cuts": f"{found['num_cuts']} legal; the narrowest, {len(cuts)}, carry {width}",
        "seconds": format_seconds(found["seconds"]),
    }
    if found["num_trained"] == found["num_parameters"]:
        del lines["trained"]
    if not found["num_regions"]:
        del lines["checkpointed"]
    shown = cuts if len(cuts) <= _SHOWN_CUTS else [*cuts[: _SHOWN_CUTS - 1], None, cuts[-1]]
    rows = [
        ("...", "", "") if cut is None else (cut["after"], cut["position"], format_bytes(cut["num_bytes"]))
        for cut in shown
    ]
    return Group(facts(lines.items()), table("Narrowest cuts", ("after", "position", "bytes across"), rows))


def _layers_text(found: dict[str, Any]) -> str:
    kinds = found["kinds"]
    equal = "equal" if len(kinds) == 1 else f"of {len(kinds)} kinds ({', '.join(map(str, kinds))})"
    return f"{found['count']} x {found['pattern']} {equal if found['count'] > 1 else ''}".rstrip()


def listing(graph: OperatorGraph) -> dict[str, Any]:
    """Every node and value as plain data, for other programs."""
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
