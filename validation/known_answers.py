"""Configurations that were trained with, beside the ones found for the same model, cluster and batch.

Three lines each: `ran`, predicted as it ran, with the runtime of its time (to be held against the published MFU); `theirs`,
the same widths with the kernels of today, which keep what was recomputed then; `ours`, the best found.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from typing import Any

from stagewright.cluster import Cluster, load_cluster
from stagewright.estimation.megatron import Layout, Shape, find_megatron_stack, shape_of
from stagewright.estimation.megatron.fusion import find_fusion
from stagewright.planning.configure.iteration import Run
from stagewright.planning.configure.search import Configuration, configure, described
from stagewright.planning.configure.space import Bounds
from stagewright.planning.job import Job
from stagewright.tracing.models.reference import resolve

MODERN = "megatron-core+te"


@dataclass(frozen=True)
class Known:
    """A published configuration: its widths, and its layout as it ran where the stack here can time that."""

    name: str
    cluster: str
    global_batch: int
    sequence_length: int
    widths: Bounds
    source: str
    published_mfu: float
    ran: Layout | None = None
    runtime: str = MODERN
    policy: dict[str, Any] = field(default_factory=dict)
    """How the run differed from its runtime, as fields of `Fusion`."""
    stack: str = MODERN
    """The runtime of `theirs` and `ours`."""


def _gpt(layers: int, hidden: int, heads: int) -> Shape:
    return Shape.gpt(layers, hidden, heads, 51_200, 2048)


SHAPES = {
    "GPT 1.7B": _gpt(24, 2304, 24), "GPT 7.5B": _gpt(36, 4096, 32), "GPT 39.1B": _gpt(48, 8192, 64),
    "GPT 145.6B": _gpt(80, 12288, 96), "GPT 310.1B": _gpt(96, 16384, 128), "GPT 529.6B": _gpt(105, 20480, 128),
    "GPT 1T": _gpt(128, 25600, 160),
}  # fmt: skip


def _selene_layout(num_layers: int, tokens: int, tp: int, pp: int, dp: int, num_microbatches: int) -> Layout:
    """As Narayanan et al. 2021 trained: microbatches of one sample, everything recomputed, two chunks where they divide."""
    chunks = 2 if pp > 1 and num_layers % (2 * pp) == 0 and num_microbatches % pp == 0 else 1
    return Layout(
        tokens, tp=tp, pp=pp, dp=dp, num_microbatches=num_microbatches, recompute="full", num_chunks=chunks,
        schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
    )  # fmt: skip


def _selene(name: str, nodes: int, tp: int, pp: int, batch: int, share: float) -> Known:
    """A row of Narayanan et al. 2021, table 1; its share of the peak counts recomputation, a quarter of the work."""
    dp = nodes * 8 // (tp * pp)
    ran = _selene_layout(SHAPES[name].num_layers, 2048, tp, pp, dp, batch // dp)
    widths, source = Bounds(tp=tp, cp=1, pp=pp), "Narayanan et al. 2021, table 1"
    return Known(
        name, f"{nodes}x8x-a100-80", batch, 2048, widths, source, 0.75 * share, ran, runtime="megatron-lm"
    )


_LLAMA = Layout(
    8192, tp=8, pp=16, dp=128, num_microbatches=16, sequence_parallel=True, shards_optimizer=True,
    schedule="interleaved-1f1b", num_chunks=8, layers_per_stage=(0, *(1,) * 126, 0),
)  # fmt: skip
DISPATCHING = "megatron-core+te+deepep"
_DEEPSEEK_V3_RATE = 1e12 / (180_000 * 3600)
"""Tokens per second and device: 180,000 hours of H800 for 10^12 tokens (DeepSeek-V3 report, arXiv 2412.19437, section 1)."""
_DEEPSEEK_V3 = Layout(4096, pp=16, dp=128, ep=64, num_microbatches=120, shards_optimizer=True)
"""Sections 3.2 and 3.3 of its report: eight bits; tokens go to at most four nodes, beside another microbatch."""
_DUAL_PIPE = {
    "computes_in": "fp8", "cast_bytes": 4, "dispatch": "once per node", "hides_dispatch": True,
    "transfers": "overlapped",
}  # fmt: skip
KNOWN = (
    Known("llama-3-405b", "2048x8x-h100", 2048, 8192, Bounds(tp=8, cp=1, pp=16), "Llama 3 report, table 4", 0.41, _LLAMA),
    Known(
        "deepseek-v3", "256x8x-h100", 15360, 4096, Bounds(tp=1, cp=1, pp=16, ep=64), "DeepSeek-V3 report, fp8 on H800",
        _DEEPSEEK_V3_RATE * 6 * 37e9 / 989.4e12, _DEEPSEEK_V3, DISPATCHING, _DUAL_PIPE, DISPATCHING,
    ),
    _selene("GPT 1.7B", 4, 1, 1, 512, 0.44),
    _selene("GPT 7.5B", 16, 4, 1, 512, 0.46),
    _selene("GPT 39.1B", 64, 8, 2, 1536, 0.44),
    _selene("GPT 145.6B", 192, 8, 8, 2304, 0.47),
    _selene("GPT 310.1B", 240, 8, 16, 2160, 0.5),
    _selene("GPT 529.6B", 315, 8, 35, 2520, 0.52),
    _selene("GPT 1T", 384, 8, 64, 3072, 0.52),
)  # fmt: skip


def answer(known: Known) -> dict[str, object]:
    """Their configuration as it ran and with the kernels of today, and ours, with what is predicted of them.

    As it ran, tensor-parallel collectives are exposed: no source says otherwise.
    """
    shape = SHAPES.get(known.name)
    if shape is None:
        config = resolve(known.name).config
        assert config is not None
        shape = shape_of(config)
    cluster = load_cluster(known.cluster)
    job = Job(global_batch=known.global_batch, sequence_length=known.sequence_length)
    begun = time.process_time()
    ours = configure(shape, cluster, job, keep=3, stack=known.stack).configurations[0]
    took = time.process_time() - begun
    theirs = configure(shape, cluster, job, keep=1, bounds=known.widths, stack=known.stack).configurations[0]
    found = {"theirs": _figures(theirs), "ours": _figures(ours)}
    if known.ran is not None:
        seconds = _step_seconds(shape, known, cluster)
        mfu = theirs.mfu * theirs.step_s / seconds
        found = {"ran": {"layout": described(known.ran), "step_s": seconds, "mfu": mfu}} | found
    return {
        "name": known.name, "cluster": known.cluster, "source": known.source, "published_mfu": known.published_mfu,
        "found": found, "faster_by": theirs.step_s / ours.step_s - 1, "search_s": took,
    }  # fmt: skip


def _step_seconds(shape: Shape, known: Known, cluster: Cluster) -> float:
    """Of `known` as it ran; modern runs reduce gradients beside computations."""
    assert known.ran is not None
    policy, modern = dict(known.policy), known.runtime != "megatron-lm"
    stack = find_megatron_stack(known.runtime if modern else "megatron-deepspeed")
    stack = replace(stack, computes_in=policy.pop("computes_in", None))
    fusion = replace(find_fusion(known.runtime), hidden_gathers="none", **policy)
    return Run(shape, replace(known.ran, overlaps_reduction=modern), stack, fusion, cluster).step().seconds


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
        print(f"{known.name} on {known.cluster} ({known.source}; published MFU {known.published_mfu:.1%})")
        found = made["found"]
        assert isinstance(found, dict)
        for who, one in found.items():
            print(f"  {who:<7}{one['layout']:<52} {one['step_s']:9.3f} s  MFU {one['mfu']:.1%}")


if __name__ == "__main__":
    main()
