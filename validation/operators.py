"""Judge operator times on the profiles published with Mist (EuroSys'25), taken with Aceso's profiler on four GPUs.

Every operator of a GPT layer is put together from the kernels it launches, and the product's cost functions and device
descriptions say what they take. Operators of at most 50 microseconds are left out, and so are those that contain an
all-reduce, which belongs to the cluster rather than to the device.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_operators import CLASSES, Geometry
from verdict import Row, arguments, show

from stagewright.cluster import Device, load_cluster

BAR = 0.12
SHORTEST_S = 50e-6
DATA = Path(__file__).parent / "data" / "operators"
CATALOG = {"V100-SXM2-32GB": "v100-32", "L4-24GB": "l4", "A10G-24GB": "a10g", "A100-SXM4-40GB": "a100-40"}

_REDUCES_FORWARD = {"encoder-embedding", "enc-attention-dense", "enc-MLP-GEMM-2", "gpt-post-process"}
_REDUCES_BACKWARD = {"enc-attention-qkv", "enc-MLP-GEMM-1", "gpt-post-process"}
_WEIGHT_GRADIENTS = {"A10G-24GB"}
"""Products take twice as long backward as forward in this profile, and as long as forward in the others."""
_FAILED_S = 10.0
"""What the profiler writes for an operator that ran out of memory."""
_MIB = 2**20

Record = dict[str, str]


@dataclass(frozen=True)
class Setting:
    """What one profile was taken of; `by_rows` splits the query, key and value product by rows instead."""

    profile: str
    gpu: str
    model: str
    batch: int
    width: int
    by_rows: bool

    @classmethod
    def of(cls, record: Record) -> Setting:
        batch, width = int(record["micro_batch"]), int(record["tp"])
        return cls(record["profile_set"], record["gpu"], record["model"], batch, width, record["algo"] == "1")

    @property
    def half(self) -> str:
        """Constants are fitted on every second setting, in the chequered pattern of batch and width."""
        return "kept aside" if (int(math.log2(self.batch)) + int(math.log2(self.width))) % 2 else "fit"


def judged(data: Path = DATA) -> list[Row]:
    """A row per operator and direction; the same measurement listed twice counts once."""
    settings: dict[Setting, dict[str, Record]] = {}
    with (data / "mist_aceso_op_profiles.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            settings.setdefault(Setting.of(record), {})[record["op"]] = record
    devices = {gpu: load_cluster(f"1x-{name}").device for gpu, name in CATALOG.items()}
    found: dict[tuple[object, ...], Row] = {}
    for setting, operators in settings.items():
        if not setting.by_rows:
            geometry = _geometry(setting, operators)
            for name, record in operators.items():
                for row in _rows(setting, name, record, geometry, devices[setting.gpu]):
                    found.setdefault((row.label, row.measured), row)
    return list(found.values())


def _geometry(setting: Setting, operators: dict[str, Record]) -> Geometry:
    """Sizes from the bytes of the profile: fp16 weights and activations."""

    def elements(operator: str, column: str) -> float:
        return float(operators[operator][column]) * _MIB / 2

    hidden = round(math.sqrt(elements("enc-attention-qkv", "weights_mib") * setting.width / 3))
    sequence = round(elements("final-layernorm", "output_mib") / setting.batch / hidden)
    heads = round(elements("enc-attention-softmax", "activations_mib") / setting.batch / sequence**2)
    return Geometry(
        batch=setting.batch,
        sequence=sequence,
        hidden=hidden,
        heads=heads,
        head_width=hidden // (heads * setting.width),
        inner=round(elements("enc-MLP-GEMM-1", "weights_mib") / hidden),
        vocabulary=round(elements("gpt-post-process", "weights_mib") / hidden),
        weight_gradients=setting.gpu in _WEIGHT_GRADIENTS,
        splits_vocabulary=setting.width > 1,
    )


def _rows(setting: Setting, name: str, record: Record, geometry: Geometry, device: Device) -> Iterator[Row]:
    kind, make = CLASSES[name]
    for backward in (False, True):
        reduces = name in (_REDUCES_BACKWARD if backward else _REDUCES_FORWARD)
        measured = float(record["bwd_us" if backward else "fwd_us"]) * 1e-6
        if measured <= SHORTEST_S or measured >= _FAILED_S or (setting.width > 1 and reduces):
            continue
        direction = "backward" if backward else "forward"
        label = f"{device.name} {setting.model} b{setting.batch} tp{setting.width} {name} {direction}"
        group = f"{device.name}: {kind} {direction}"
        yield Row(label, group, make(geometry, backward).seconds(device), measured, setting.half)


def main() -> None:
    parser = arguments(__doc__, DATA)
    parser.add_argument("--every-row", action="store_true", help="print every operator, not only the classes")
    options = parser.parse_args()
    show(judged(options.data), BAR, "s", options.json, options.every_row)


if __name__ == "__main__":
    main()
