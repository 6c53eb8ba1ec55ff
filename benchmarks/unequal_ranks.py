"""What a plan for ranks of unequal speed gains over even layers, predicted and measured on two local processes.

    OMP_WAIT_POLICY=passive python benchmarks/unequal_ranks.py [--rounds 20] [--only threads] [--json]

Two settings, each with devices as they are probed now:

* `threads`: one process computes with every core, the other with one thread. They have one microbatch, so that one of them
  computes at a time: on this machine's cores three threads at once would take time from each other.
* `busy`: a thread and a core for each process, but a program that only counts shares the second's core. The scheduler
  gives it half of the core; so the second device is half as fast as was probed with the core free. 1F1B.

The best plan and the same plan with even layers are held by the same processes and take their steps in turn; prints the
median of the paired ratios (even over best) with a 95 % bootstrap interval, beside the predicted ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import interval, machine
from side_by_side import Seat, step_seconds

LAYERS, HIDDEN, VOCABULARY = 8, 512, 512
OVERRIDES = {
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": HIDDEN // 8, "vocab_size": VOCABULARY,
}  # fmt: skip
_RATES = "memory_bandwidth", "packing_bandwidth", "function_rate", "random_rate", "scatter_rate"
_SECONDS = (
    "host_overhead_s", "view_overhead_s", "attention_overhead_s", "message_overhead_s",
    "launch_overhead_s",
)  # fmt: skip
"""Figures of a device that its processor's speed is in, where they are known."""
_COUNTS = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@dataclass(frozen=True)
class Setting:
    """Threads and speed (against what is probed with as many threads) of two ranks, and the microbatches they share."""

    threads: tuple[int, int]
    shares: tuple[float, float]
    num_microbatches: int
    sequence_length: int
    busy_core: int | None = None


def settings() -> dict[str, Setting]:
    cores = os.cpu_count() or 1
    return {
        "threads": Setting((cores, 1), (1.0, 1.0), 1, 768),
        "busy": Setting((1, 1), (1.0, 0.5), 8, 128, busy_core=1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=list(settings()))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name, setting in settings().items():
        if options.only not in (None, name):
            continue
        found = measured(setting, options.rounds)
        if options.json:
            print(json.dumps({"setting": name, "machine": machine(), **found}))
            continue
        low, high = found["interval"]
        print(
            f"{name}: layers {found['best_layers']} on devices {found['devices']}: {found['best_s']:.3f} s "
            f"(predicted {found['best_predicted_s']:.3f}), even {found['even_s']:.3f} s ({found['even_predicted_s']:.3f}): "
            f"{found['gain']:.3f}x faster [{low:.3f}, {high:.3f}], predicted {found['predicted_gain']:.3f}x"
        )


def measured(setting: Setting, rounds: int) -> dict[str, Any]:
    """Both plans, predicted and in turns."""
    from stagewright.planning.job import Job
    from stagewright.planning.search import plan
    from stagewright.tracing.models.reference import resolve

    cluster = devices(setting)
    count = setting.num_microbatches
    job = Job(global_batch=count, sequence_length=setting.sequence_length, dtype="fp32")
    reference = resolve("tiny-llama", OVERRIDES)
    best = plan(
        reference, cluster, job, pp=2, microbatch=1, schedules=["1f1b" if count > 1 else "gpipe"]
    ).plans[0]
    even = with_even_layers(best, cluster)
    order = best.devices or (0, 1)
    seats = [Seat(setting.threads[device], _cores(setting, device)) for device in order]
    with tempfile.TemporaryDirectory() as folder, beside(setting.busy_core):
        paths = [Path(folder) / name for name in ("best.json", "even.json")]
        for path, one in zip(paths, (best, even), strict=True):
            one.save(path)
        fast, slow = step_seconds(paths, 2, rounds, seats)
    ratios = [even_s / best_s for best_s, even_s in zip(fast, slow, strict=True)]
    return {
        "best_layers": first_layers(best), "devices": order,
        "best_s": statistics.median(fast), "best_predicted_s": best.predictions.step_seconds,
        "even_s": statistics.median(slow), "even_predicted_s": even.predictions.step_seconds,
        "gain": statistics.median(ratios), "interval": interval(ratios),
        "predicted_gain": even.predictions.step_seconds / best.predictions.step_seconds,
    }  # fmt: skip


def devices(setting: Setting) -> Any:
    """A cluster of two nodes, one for each process, from a probe with as many threads."""
    from stagewright.cluster import Cluster
    from stagewright.execution.probe import probe

    cores = os.cpu_count() or 1
    probed = {threads: probe("cpu", processes=cores // threads).nodes[0] for threads in set(setting.threads)}
    nodes = []
    for index, (threads, share) in enumerate(zip(setting.threads, setting.shares, strict=True)):
        device = probed[threads].device
        own = {"name": f"process {index}", "num_threads": threads, **slower(device, share)}
        node = probed[1]  # messages are those between processes of one thread
        nodes.append(
            node.model_copy(
                update={
                    "device": device.model_copy(update=own),
                    "count": 1,
                    "devices_per_node": 1,
                    "inter_node": node.intra_node,
                }
            )
        )
    return Cluster(name="unequal processes", nodes=tuple(nodes))


def slower(device: Any, share: float) -> dict[str, Any]:
    """The figures of `device` where a process has so large a share of its processor."""
    peaks = {name: value * share for name, value in device.peak_flops if value}
    known = {name: getattr(device, name) for name in (*_RATES, *_SECONDS)}
    return {
        "peak_flops": device.peak_flops.model_copy(update=peaks),
        **{name: known[name] * share for name in _RATES if known[name] is not None},
        **{name: known[name] / share for name in _SECONDS if known[name] is not None},
    }


def with_even_layers(like: Any, cluster: Any) -> Any:
    """`like` cut in the middle of the layers."""
    from stagewright.planning.estimate import estimate

    return estimate(like.model_copy(update={"cuts": (_cut(LAYERS // 2),)}), cluster)


def first_layers(plan: Any) -> str:
    """Layers of the first and of the second stage, where the cut is in front of one."""
    for count in range(1, LAYERS):
        if plan.cuts == (_cut(count),):
            return f"{count}/{LAYERS - count}"
    return str(plan.cuts)


def _cut(num_layers: int) -> str:
    return f"net.model.layers.{num_layers}.input_layernorm:0"


def _cores(setting: Setting, device: int) -> tuple[int, ...] | None:
    return None if setting.busy_core is None else (device,)


@contextmanager
def beside(core: int | None) -> Iterator[None]:
    """Inside, a program that only counts runs on that core."""
    if core is None:
        yield
        return
    counting = subprocess.Popen([sys.executable, "-c", _COUNTS, str(core)])
    try:
        yield
    finally:
        counting.kill()
        counting.wait()


if __name__ == "__main__":
    main()
