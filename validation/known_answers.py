"""Configurations that were trained with, beside the ones found for the same model, cluster and batch.

Three lines each: `ran`, predicted as it ran, with the runtime of its time (to be held against the published MFU); `theirs`,
the best with the same widths and microbatches and the kernels of today, which need not recompute what was recomputed then;
`ours`, the best found.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stagewright.cli.progress import Progress
from stagewright.cluster import Cluster, load_cluster
from stagewright.errors import StagewrightError
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan as search
from stagewright.planning.space import Space
from stagewright.report.configurations import recomputed
from stagewright.tracing.models.reference import ModelReference, resolve

MODERN = "megatron-core+te"
"""The runtime of `theirs` and `ours`, and of runs that are not older."""


@dataclass(frozen=True)
class Known:
    """A published configuration: its widths, and as it ran the options of `estimate`, or why it cannot be asked for."""

    name: str
    cluster: str
    global_batch: int
    sequence_length: int
    widths: Space
    source: str
    published_mfu: float
    ran: dict[str, Any] | str
    model: str = ""
    changes: dict[str, int] = field(default_factory=dict)
    runtime: str = MODERN
    dtype: str = "bf16"

    @property
    def reference(self) -> ModelReference:
        """The model."""
        return resolve(self.model or self.name, self.changes)

    def job(self, runtime: str = MODERN, dtype: str = "bf16") -> Job:
        """The same batch under any runtime."""
        return Job.model_validate(
            {
                "global_batch": self.global_batch, "sequence_length": self.sequence_length, "runtime": runtime,
                "dtype": dtype,
            }
        )  # fmt: skip


def _selene(
    name: str, layers: int, hidden: int, heads: int, nodes: int, tp: int, pp: int, batch: int, share: float
) -> Known:
    """A row of Narayanan et al. 2021, table 1; its share of the peak counts recomputation, a quarter of the work.

    Microbatches of one sample, everything recomputed, two chunks where they divide.
    """
    dp = nodes * 8 // (tp * pp)
    ran: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "recompute": "full"}
    if pp > 1 and layers % (2 * pp) == 0 and batch // dp % pp == 0:
        ran |= {"schedule": "interleaved-1f1b", "chunks": 2}
    sizes = {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": 2048, "vocab_size": 51_200}
    return Known(
        name, f"{nodes}x8x-a100-80", batch, 2048, Space(tp=tp, cp=1, pp=pp, microbatch=1),
        "Narayanan et al. 2021, table 1", 0.75 * share, ran, "gpt2", sizes, "megatron-lm", "fp16",
    )  # fmt: skip


_LLAMA: dict[str, Any] = {
    "tp": 8, "pp": 16, "dp": 128, "sequence_parallel": True, "zero": 1, "schedule": "interleaved-1f1b", "chunks": 8,
    "layers_per_stage": (0, *(1,) * 126, 0),
}  # fmt: skip
_DEEPSEEK_V3_RATE = 1e12 / (180_000 * 3600)
"""Tokens per second and device: 180,000 hours of H800 for 10^12 tokens (DeepSeek-V3 report, arXiv 2412.19437, section 1)."""
_DEEPSEEK_V3 = (
    "its schedule, DualPipe, is none of those here (pp 16, dp 128, ep 64, zero 1, 120 microbatches of 1, in fp8; tokens go "
    "to at most four nodes, beside another microbatch: sections 3.2 and 3.3 of its report)"
)
KNOWN = (
    Known(
        "llama-3-405b", "2048x8x-h100", 2048, 8192, Space(tp=8, cp=1, pp=16, microbatch=1), "Llama 3 report, table 4",
        0.41, _LLAMA,
    ),
    Known(
        "deepseek-v3", "256x8x-h100", 15360, 4096, Space(tp=1, cp=1, pp=16, ep=64, microbatch=1),
        "DeepSeek-V3 report, fp8 on H800", _DEEPSEEK_V3_RATE * 6 * 37e9 / 989.4e12, _DEEPSEEK_V3,
    ),
    _selene("GPT 1.7B", 24, 2304, 24, 4, 1, 1, 512, 0.44),
    _selene("GPT 7.5B", 36, 4096, 32, 16, 4, 1, 512, 0.46),
    _selene("GPT 39.1B", 48, 8192, 64, 64, 8, 2, 1536, 0.44),
    _selene("GPT 145.6B", 80, 12288, 96, 192, 8, 8, 2304, 0.47),
    _selene("GPT 310.1B", 96, 16384, 128, 240, 8, 16, 2160, 0.5),
    _selene("GPT 529.6B", 105, 20480, 128, 315, 8, 35, 2520, 0.52),
    _selene("GPT 1T", 128, 25600, 160, 384, 8, 64, 3072, 0.52),
)  # fmt: skip


def answer(known: Known, report: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
    """Their configuration as it ran and with the kernels of today, and ours: what is predicted of them, or why nothing is.

    As it ran, tensor-parallel collectives are exposed: no source says otherwise.
    """
    reference, cluster = known.reference, load_cluster(known.cluster)

    def best(bounds: Space) -> Plan:
        return search(reference, cluster, known.job(), space=bounds, keep=1, report=report).plans[0]

    begun = time.process_time()
    ours = _figures(lambda: best(Space()), cluster)
    took = time.process_time() - begun
    found = {
        "ran": {"left_out": known.ran}
        if isinstance(known.ran, str)
        else _figures(lambda: as_it_ran(known, report), cluster),
        "theirs": _figures(lambda: best(known.widths), cluster),
        "ours": ours,
    }
    return {
        "name": known.name, "cluster": known.cluster, "source": known.source, "published_mfu": known.published_mfu,
        "found": found, "search_s": took,
    }  # fmt: skip


def as_it_ran(known: Known, report: Callable[[str], None] = lambda stage: None) -> Plan:
    """What is predicted of a configuration, with the runtime of its time."""
    assert not isinstance(known.ran, str)
    job = known.job(known.runtime, known.dtype)
    return estimate(known.reference, load_cluster(known.cluster), job, report=report, **known.ran)


def _figures(make: Callable[[], Plan], cluster: Cluster) -> dict[str, Any]:
    try:
        plan = make()
    except StagewrightError as error:
        return {"left_out": str(error)}
    predictions = plan.predictions
    return {
        "layout": described(plan), "step_s": predictions.step_seconds, "mfu": predictions.mfu,
        "reserved_gib": predictions.reserved_peak_bytes / 2**30,
        "fits": predictions.reserved_peak_bytes <= plan.job.usable_bytes(cluster.device, cluster),
    }  # fmt: skip


def described(plan: Plan) -> str:
    """The widths of a plan in a line."""
    widths = {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp, "dp": plan.dp, "ep": plan.ep}
    chunks = plan.num_stages // plan.pp
    words = [f"{name} {width}" for name, width in widths.items() if width > 1]
    words += [f"zero {max(plan.sharding)}"] * any(plan.sharding)
    words += [f"{plan.num_microbatches} of {plan.microbatch_size}", plan.schedule]
    words += [f"x{chunks}"] * (chunks > 1) + [f"recompute {recomputed(plan)}"] * bool(recomputed(plan))
    return " ".join(words)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document per row")
    parser.add_argument("--only", choices=[known.name for known in KNOWN], metavar="NAME", help="one model")
    given = parser.parse_args()
    for known in KNOWN:
        if given.only and given.only != known.name:
            continue
        with Progress(known.name) as progress:
            made = answer(known, lambda stage, name=known.name: progress(f"{name}: {stage}"))
        if given.json:
            print(json.dumps(made), flush=True)
            continue
        print(f"{known.name} on {known.cluster} ({known.source}; published MFU {known.published_mfu:.1%})")
        for who, one in made["found"].items():
            if "left_out" in one:
                print(f"  {who:<7}left out: {one['left_out']}")
                continue
            sizes = f"{one['step_s']:9.3f} s  MFU {one['mfu']:.1%} {one['reserved_gib']:6.1f} GiB"
            room = "" if one["fits"] else ", more than a device has"
            print(f"  {who:<7}{one['layout']:<68} {sizes}{room}")
        print(f"  searched in {made['search_s']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
