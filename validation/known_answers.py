"""Configurations that were trained with, beside the ones found for the same model, cluster and batch."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass

from stagewright.cluster import load_cluster
from stagewright.estimation.megatron import Shape, shape_of
from stagewright.planning.configure.search import Configuration, configure, described
from stagewright.planning.configure.space import Bounds
from stagewright.planning.job import Job
from stagewright.tracing.models.reference import resolve


@dataclass(frozen=True)
class Known:
    """A published configuration; `published_mfu` where its authors say it, of the same or a near run."""

    name: str
    cluster: str
    global_batch: int
    sequence_length: int
    widths: Bounds
    source: str
    published_mfu: float | None = None


def _gpt(layers: int, hidden: int, heads: int) -> Shape:
    return Shape.gpt(layers, hidden, heads, 51_200, 2048)


SHAPES = {
    "GPT 39.1B": _gpt(48, 8192, 64), "GPT 145.6B": _gpt(80, 12288, 96), "GPT 310.1B": _gpt(96, 16384, 128),
    "GPT 1T": _gpt(128, 25600, 160),
}  # fmt: skip
_SC21 = "Narayanan et al. 2021, table 1"
KNOWN = (
    Known("llama-3-405b", "2048x8x-h100", 2048, 8192, Bounds(tp=8, cp=1, pp=16), "Llama 3 report, table 4", 0.41),
    Known("deepseek-v3", "256x8x-h100", 15360, 4096, Bounds(tp=1, cp=1, pp=16, ep=64), "DeepSeek-V3 report, fp8"),
    Known("GPT 39.1B", "64x8x-a100-80", 1536, 2048, Bounds(tp=8, cp=1, pp=2), _SC21, 0.33),
    Known("GPT 145.6B", "192x8x-a100-80", 2304, 2048, Bounds(tp=8, cp=1, pp=8), _SC21, 0.355),
    Known("GPT 310.1B", "240x8x-a100-80", 2160, 2048, Bounds(tp=8, cp=1, pp=16), _SC21, 0.37),
    Known("GPT 1T", "384x8x-a100-80", 3072, 2048, Bounds(tp=8, cp=1, pp=64), _SC21, 0.39),
)  # fmt: skip
"""MFU of the last four: three quarters of the published share of the peak, which counts recomputation. Their
layouts are predicted with the kernels of today, which keep what those runs recomputed."""


def answer(known: Known) -> dict[str, object]:
    """Both configurations with what is predicted of them."""
    shape = SHAPES.get(known.name)
    if shape is None:
        config = resolve(known.name).config
        assert config is not None
        shape = shape_of(config)
    cluster = load_cluster(known.cluster)
    job = Job(global_batch=known.global_batch, sequence_length=known.sequence_length)
    begun = time.process_time()
    ours = configure(shape, cluster, job, keep=3).configurations[0]
    took = time.process_time() - begun
    theirs = configure(shape, cluster, job, keep=1, bounds=known.widths).configurations[0]
    return asdict(known) | {
        "ours": _figures(ours), "theirs": _figures(theirs), "faster_by": theirs.step_s / ours.step_s - 1, "search_s": took,
    }  # fmt: skip


def _figures(one: Configuration) -> dict[str, object]:
    return {"layout": described(one.layout), "step_s": one.step_s, "mfu": one.mfu}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document per row")
    given = parser.parse_args()
    for known in KNOWN:
        made = answer(known)
        if given.json:
            print(json.dumps(made))
            continue
        published = "-" if known.published_mfu is None else f"{known.published_mfu:.1%}"
        print(f"{known.name} on {known.cluster} ({known.source}; published MFU {published})")
        for who in ("theirs", "ours"):
            one = made[who]
            assert isinstance(one, dict)
            print(f"  {who:<7}{one['layout']:<52} {one['step_s']:9.3f} s  MFU {one['mfu']:.1%}")


if __name__ == "__main__":
    main()
