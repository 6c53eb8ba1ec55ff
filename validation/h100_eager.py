"""Judge memory and time of eager training steps on one H100 against published measurements.

Each row is a model of `eager_models`, traced on fake tensors in the row's precision for CUDA's autocast rules. The runtime
`torch-eager` says the rest.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eager_models import MODELS, layers, make, returned
from verdict import Row, arguments, document, show

from stagewright.cluster import load_cluster
from stagewright.estimation.eager_step import step_memory, step_seconds
from stagewright.estimation.runtime import load_runtime
from stagewright.graph import OperatorGraph

DATA = Path(__file__).parent / "data" / "h100_eager"
CONVOLUTIONAL = {"timm_convnext_v2"}
BARS = {
    "active": 0.005,
    "reserved": 0.03,
    "time": 0.10,
}
_DTYPES = {"FP": "float32", "MP": "float32", "HP": "float16"}


@dataclass(frozen=True)
class Case:
    """One measured configuration; `image` and `sequence_length` are None where they do not apply."""

    model: str
    attention: str
    batch: int
    sequence_length: int | None
    image: int | None
    precision: str
    checkpointed: bool
    seconds: float
    active_bytes: float
    reserved_bytes: float

    @classmethod
    def of(cls, record: dict[str, str], attention: str) -> Case:
        def size(key: str) -> int | None:
            return int(record[key]) if int(record[key]) > 0 else None

        return cls(
            record["model"],
            attention,
            int(record["batch"]),
            size("seq_len"),
            size("image"),
            record["precision"],
            record["activation_checkpointing"] == "True",
            float(record["iteration_ms"]) / 1e3,
            float(record["active_peak_bytes"]),
            float(record["reserved_peak_bytes"]),
        )

    @property
    def label(self) -> str:
        sizes = "x".join(str(size) for size in (self.batch, self.sequence_length, self.image) if size)
        return f"{self.model} {sizes} {self.precision}{' AC' if self.checkpointed else ''}"

    @property
    def group(self) -> str:
        return "convolutional" if self.model in CONVOLUTIONAL else "transformer"


def read(folder: Path) -> list[Case]:
    """The rows of `folder`, with the path that attention takes in their models: the folder's own or the shipped file."""
    paths = {record["model"]: record["attention"] for record in _records(DATA / "attention.csv")}
    if (folder / "attention.csv").is_file():
        paths |= {record["model"]: record["attention"] for record in _records(folder / "attention.csv")}
    rows = _records(folder / "eager_h100_single_gpu.csv")
    return [Case.of(row, row.get("attention") or paths.get(row["model"], "none")) for row in rows]


def _records(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def graph_of(case: Case) -> OperatorGraph:
    from stagewright.tracing.trace import trace_module

    module, inputs = make(
        case.model, case.attention, case.batch, case.sequence_length, case.image, _DTYPES[case.precision]
    )
    facts = {"target": "cuda", "autocast": "float16" if case.precision == "MP" else None}
    return trace_module(module, inputs, case.model, facts)


def judge(cases: Iterable[Case]) -> dict[str, list[Row]]:
    """Rows of predicted and measured active bytes, reserved bytes and seconds."""
    device, loop = load_cluster("1x-h100").device, load_runtime("torch-eager").loop
    assert loop is not None, "that is what the runtime is"
    found: dict[str, list[Row]] = {kind: [] for kind in BARS}
    for case in cases:
        print(f"\r{case.label:<60}", end="", file=sys.stderr, flush=True)
        graph = graph_of(case)
        paths = layers(case.model, graph) if case.checkpointed else ()
        decays = MODELS[case.model].decays_weights
        results = returned(case.model, graph)
        memory = step_memory(graph, loop, device.workspace_bytes, paths, results, decays)
        for kind, predicted, measured in (
            ("active", memory.active_peak_bytes, case.active_bytes),
            ("reserved", memory.reserved_peak_bytes, case.reserved_bytes),
            ("time", step_seconds(graph, loop, device, paths, decays), case.seconds),
        ):
            found[kind].append(Row(case.label, case.group, predicted, measured))
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    return found


def main() -> None:
    parser = arguments(__doc__, DATA)
    options = parser.parse_args()
    found = judge(read(options.data))
    if options.json:
        json.dump({kind: document(rows, BARS[kind]) for kind, rows in found.items()}, sys.stdout, indent=1)
        print()
        return
    for kind, rows in found.items():
        print(f"== {kind}")
        show(rows, BARS[kind], "s" if kind == "time" else "bytes", as_json=False)


if __name__ == "__main__":
    main()
