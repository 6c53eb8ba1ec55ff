"""Judge the time of fused attention by its shape, measured alone on one GPU, forward and backward.

By shape: causal forwards in bf16 as vLLM and SGLang call them on A100, H100 and B200, replayed from a CUDA graph; each
writes its keys and values to a paged cache first. Constants were fitted on the half of the shapes that a hash draws.
Published: what authors of kernels printed of theirs, 4,096 to 16,384 tokens mostly.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fragment import Fragment
from verdict import Row, arguments, document, show

from stagewright.cluster import Device, load_cluster

DATA = Path(__file__).parent / "data" / "kernels"
BAR, PUBLISHED_BAR = 0.08, 0.15


class Release(NamedTuple):
    """What a kernel is to a device's description: the kernels it describes or the best there are, and how fast beside these,
    as runtimes say it with `attention_kernels` and `attention_rate`."""

    best: bool = False
    rate: float = 1.0


BY_SHAPE = {
    ("a100_sxm", "vllm_flash_attn"): Release(rate=0.953), ("a100_sxm", "flash_attention"): Release(rate=1.114),
    ("h100_sxm", "vllm_flash_attn_fa3"): Release(best=True),
    ("b200_sxm", "vllm_flashinfer_trtllmprefill"): Release(best=True, rate=0.796),
}  # fmt: skip
"""Of systems and kernels; rates are fitted on the same half: paged caches cost FlashAttention-2 some on A100, SGLang has
other kernels there, and those of TensorRT-LLM are slower than FlashAttention-4."""

PUBLISHED = {"FA2": Release(), "FA3": Release(best=True), "FA4": Release(best=True)}
SYSTEMS = {"a100_sxm": "a100-80", "h100_sxm": "h100", "b200_sxm": "b200"}
"""What the catalog calls the devices of the tables; `CLASSES`: those that authors name by their class."""
CLASSES = {
    "Hopper (H100 class, not named)": "h100", "H100 class (not named)": "h100", "B200 class (sm100)": "b200",
}  # fmt: skip
WIDEST = 256
"""Wider heads have kernels of their own."""
CACHE_PASSES = 3
"""To read keys and values and to write them to pages of a cache, half as fast as a stream."""


def _seconds(device: Device, sizes: tuple[int, ...], causal: bool, backward: bool) -> float:
    """Of attention alone, launched; `sizes` are samples, heads, heads of keys, tokens and width."""
    batch, heads, kv_heads, tokens, width = sizes
    asked = Fragment("bfloat16")
    query, shared = (batch, heads, tokens, width), (batch, kv_heads, tokens, width)
    given = [asked.tensor(*shape) for shape in (query, shared, shared)]
    sums = (batch, heads, tokens)
    types = ("bfloat16", "float32")
    if not backward:
        asked.call(
            "_scaled_dot_product_flash_attention", *given, 0.0, causal, makes=(query, sums), dtypes=types
        )
        return asked.device_seconds(device)
    saved = [asked.tensor(*query), asked.tensor(*sums, dtype="float32")]
    asked.call(
        "_scaled_dot_product_flash_attention_backward",
        asked.tensor(*query), *given, *saved, None, None, tokens, tokens, 0.0, causal, makes=(query, shared, shared),
    )  # fmt: skip
    return asked.device_seconds(device)


def _half(*sizes: str) -> str:
    return "other" if hashlib.sha256(" ".join(sizes).encode()).digest()[0] % 2 else "fit"


def by_shape(
    folder: Path = DATA, left_out: Counter[str] | None = None, *, rated: bool = True
) -> Iterator[Row]:
    """A row per shape; those of kernels that no release stands for are counted in `left_out`. With `rated`, kernels are as
    fast as their release says beside those that a device's figures describe; else they are taken for these."""
    devices = {
        key: load_cluster(f"1x-{SYSTEMS[key[0]]}").device.with_attention(
            release.rate if rated else 1.0, release.best
        )
        for key, release in BY_SHAPE.items()
    }
    with (folder / "attention_causal_by_shape.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            names = ("batch", "seq", "heads", "kv_heads", "head_dim")
            batch, tokens, heads, kv_heads, width = (int(record[name]) for name in names)
            device = devices.get((record["system"], record["kernel"]))
            if device is None or width > WIDEST:
                if left_out is not None:
                    left_out[f"{record['system']}: heads of {width}, by {record['kernel']}"] += 1
                continue
            cached = CACHE_PASSES * 2 * 2.0 * batch * tokens * kv_heads * width
            seconds = _seconds(device, (batch, heads, kv_heads, tokens, width), causal=True, backward=False)
            seconds += device.memory_seconds(cached) + device.launch_overhead_s
            label = f"{device.name} {batch} x {tokens}, {heads}/{kv_heads} heads of {width}"
            half = _half(*(record[name] for name in names))
            yield Row(
                label, f"{device.name}: {record['kernel']}", seconds, float(record["latency_us"]) * 1e-6, half
            )


def _why_not(record: dict[str, str]) -> str:
    """Why a published row is not judged, or nothing."""
    if record["gpu"] not in CLASSES:
        return f"the catalog has no {record['gpu']}, or no attention by shape for it"
    if record["kernel"].split()[0] not in PUBLISHED:
        return f"{record['kernel']}: not fused, or sequences of several lengths"
    if record["deterministic"] == "yes" and record["pass"] != "fwd":
        return "deterministic backward"
    return ""


def published(folder: Path = DATA, left_out: Counter[str] | None = None) -> Iterator[Row]:
    """A row per figure that authors printed; those left out are counted in `left_out` by their reason."""
    with (folder / "attention_forward_backward.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            reason = _why_not(record)
            if reason:
                if left_out is not None:
                    left_out[reason] += 1
                continue
            release = PUBLISHED[record["kernel"].split()[0]]
            device = load_cluster(f"1x-{CLASSES[record['gpu']]}").device.with_attention(
                release.rate, release.best
            )
            heads, tokens, width = (int(record[key]) for key in ("batch_x_heads", "seq", "head_dim"))
            sizes, causal = (1, heads, heads, tokens, width), record["causal"] == "yes"
            passes = {"fwd": (False,), "bwd": (True,), "fwd+bwd": (False, True)}[record["pass"]]
            seconds = sum(_seconds(device, sizes, causal, backward) for backward in passes)
            kind = "causal" if causal else "full"
            label = f"{device.name} {record['kernel']} {record['pass']} {kind}, {heads} x {tokens} of {width}"
            yield Row(
                label, f"{device.name}: {record['pass']}", seconds, float(record["time_ms"]) * 1e-3, "other"
            )


def main() -> None:
    parser = arguments(__doc__, DATA)
    parser.add_argument("--every-row", action="store_true", help="print every shape, not only the groups")
    options = parser.parse_args()
    left_out: Counter[str] = Counter()
    rows, printed = list(by_shape(options.data, left_out)), list(published(options.data, left_out))
    plain = list(by_shape(options.data, rated=False))
    if options.json:
        found = {
            "by shape": document(rows, BAR),
            "by shape, all taken for the kernels that devices are described with": document(plain, BAR),
            "published by authors of kernels": document(printed, PUBLISHED_BAR),
            "left_out": left_out,
        }
        print(json.dumps(found, indent=1))
        return
    show(rows, BAR, "s", as_json=False, every_row=options.every_row)
    print("all taken for the kernels that devices are described with:")
    show(plain, BAR, "s", as_json=False, every_row=options.every_row)
    print("published by authors of kernels:")
    show(printed, PUBLISHED_BAR, "s", as_json=False, every_row=options.every_row)
    for reason, count in left_out.items():
        print(f"{count} rows left out: {reason}")


if __name__ == "__main__":
    main()
