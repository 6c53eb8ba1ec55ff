"""Judge products of experts: PyTorch's grouped products, and whole layers of experts as TensorRT-LLM computes them.

PyTorch's are judged forward and backward, at the clocks of training. Of TensorRT-LLM's layers, replayed from a CUDA graph on
one GPU, the two products are what the product's cost functions say, of grouped kernels at the dense rate; the rest (routing,
copies of rows, activation, sums) is no operator of a traced graph, and its three constants are fitted here, on half of the
rows. Experts have equal numbers of rows.
"""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fragment import Fragment
from verdict import Row, arguments, document, half_of, show

from stagewright.cluster import Device, load_cluster

DATA = Path(__file__).parent / "data" / "kernels"
BAR = 0.10
PRODUCTS, LAYERS = "PyTorch's grouped matmuls", "TensorRT-LLM's layers of experts"
_DEVICES = {"a100_sxm": "a100-80", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}

_ROUTING_S = 25e-6
"""Of a layer, to sort tokens by experts and to begin its kernels one after the other."""

_ROUTED_S = 0.5e-9
"""Of every token and expert that it is routed to, on whichever device."""

_SUMMED_RATE = 1.24e12
"""Bytes/s at which the rows of experts are read that a token's result is the sum of."""

_SLOWER = 1.1
"""A layer is taken to be measured with a kernel that was ill chosen if one with no less work took so many times less."""


class _Layer(NamedTuple):
    """Of experts: `num_tokens` go to `copies` of `num_experts`, of which a device has one in `ep`, and of each of these one
    in `tp` columns."""

    hidden: int
    inner: int
    copies: int
    num_experts: int
    gated: bool
    num_tokens: int
    tp: int
    ep: int

    def has_no_less_work(self, other: _Layer) -> bool:
        return self.num_tokens >= other.num_tokens and self.tp <= other.tp and self.ep <= other.ep


def judged_products(folder: Path = DATA) -> Iterator[Row]:
    """Forward and backward of one product, with equal numbers of rows for all experts."""
    with (folder / "grouped_gemm_b200_torchao.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            device = load_cluster(f"1x-{record['gpu'].partition(' ')[0].lower()}").device
            rows, columns, inner, experts = (
                int(record[key]) for key in ("total_tokens_m", "n", "k", "groups")
            )
            asked = Fragment("bfloat16")
            ends = asked.tensor(experts, dtype="int32")
            x, weight = asked.tensor(rows, inner), asked.tensor(experts, inner, columns)
            made = asked.call("_grouped_mm", x, weight, ends, makes=((rows, columns),))
            turned = asked.tensor(experts, columns, inner)
            asked.call("_grouped_mm", made, turned, ends, makes=((rows, inner),))
            across = asked.tensor(inner, rows)
            asked.call("_grouped_mm", across, made, ends, makes=((experts, inner, columns),))
            label = f"{device.name} {rows} rows x {inner} x {columns}, {experts} experts"
            measured = float(record["bf16_fwd_bwd_us"]) * 1e-6
            yield Row(label, device.name, asked.seconds(device), measured)  # too few to halve


def judged_layers(folder: Path = DATA, left_out: Counter[str] | None = None) -> Iterator[Row]:
    """The forward of a layer; those that cannot be asked for are counted in `left_out`."""
    counted = Counter[str]() if left_out is None else left_out
    measured: dict[str, list[tuple[_Layer, float]]] = defaultdict(list)
    with (folder / "moe_expert_compute_fwd_by_shape.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            name = _DEVICES.get(record["system"])
            if name is None:
                counted[f"the catalog has no {record['system']}"] += 1
            elif record["distribution"] != "balanced":
                counted["experts have different numbers of rows, and which is not said"] += 1
            else:
                measured[name].append((_layer(record), float(record["latency_us"]) * 1e-6))
    for name, layers in measured.items():
        device = load_cluster(f"1x-{name}").device.with_grouped_share(1.0)
        for layer, seconds in layers:
            if _is_ill_chosen(layer, seconds, layers):
                counted["the kernel was ill chosen: one with no less work took a tenth less time"] += 1
                continue
            label = f"{name} {layer.num_tokens} x {layer.hidden} to {layer.copies} of {layer.num_experts} x {layer.inner}"
            label += f"{', gated' * layer.gated}, tp {layer.tp}, ep {layer.ep}"
            yield Row(label, name, layer_seconds(layer, device), seconds, half_of(label))


def _layer(record: dict[str, str]) -> _Layer:
    names = ("hidden", "inter", "topk", "experts", "num_tokens", "moe_tp", "moe_ep")
    hidden, inner, copies, experts, tokens, tp, ep = (int(record[name]) for name in names)
    return _Layer(hidden, inner, copies, experts, "nongated" not in record["kernel"], tokens, tp, ep)


def _is_ill_chosen(layer: _Layer, seconds: float, others: Sequence[tuple[_Layer, float]]) -> bool:
    return any(
        other[:5] == layer[:5] and other.has_no_less_work(layer) and taken * _SLOWER < seconds
        for other, taken in others
    )


def layer_seconds(layer: _Layer, device: Device) -> float:
    """Of a layer on a device that was idle: its two products, and what is around them."""
    experts = max(layer.num_experts // layer.ep, 1)
    rows = max(round(layer.num_tokens * layer.copies / layer.ep), 1)
    inner = max(layer.inner // layer.tp, 1)
    made = inner * (2 if layer.gated else 1)
    asked = Fragment("bfloat16")
    ends = asked.tensor(experts, dtype="int32")
    x = asked.tensor(rows, layer.hidden)
    asked.call("_grouped_mm", x, asked.tensor(experts, layer.hidden, made), ends, makes=((rows, made),))
    down = asked.tensor(rows, inner), asked.tensor(experts, inner, layer.hidden)
    asked.call("_grouped_mm", *down, ends, makes=((rows, layer.hidden),))
    copied = 2.0 * layer.hidden * (rows + min(rows, layer.num_tokens))
    around_s = _ROUTING_S + _ROUTED_S * layer.num_tokens * layer.copies
    around_s += device.memory_seconds(copied) + device.memory_seconds(2.0 * rows * (made + inner))
    around_s += 2.0 * rows * layer.hidden / _SUMMED_RATE
    around_s += device.memory_seconds(2.0 * layer.num_tokens * layer.hidden)
    return asked.seconds_alone(device) + around_s


def main() -> None:
    parser = arguments(__doc__, DATA)
    parser.add_argument("--every-row", action="store_true", help="print every measurement")
    options = parser.parse_args()
    left_out: Counter[str] = Counter()
    parts = {
        PRODUCTS: list(judged_products(options.data)),
        LAYERS: list(judged_layers(options.data, left_out)),
    }
    if options.json:
        found = {name: document(rows, BAR) for name, rows in parts.items()}
        print(json.dumps(found | {"left_out": left_out}, indent=1))
        return
    for name, rows in parts.items():
        print(name)
        show(rows, BAR, "s", False, options.every_row)
    for reason, count in left_out.items():
        print(f"{count} rows left out: {reason}")


if __name__ == "__main__":
    main()
