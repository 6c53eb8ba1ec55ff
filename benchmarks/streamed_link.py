"""Streamed weights over a slow link: measured beside predicted, as ratios to the same plan with its weights on the devices.

    python benchmarks/streamed_link.py [--steps 6] [--rate 1e9] [--json]

Two local processes train a small Llama, with adapters or whole, in breadth-first order. The link between "device" and host
is simulated: what GATHER and REDUCE copy is there once it would have arrived at `--rate` bytes/s, one copy after the other
per direction, while the rank computes on. Steps of the streamed plan and of the plain one alternate, so that the
machine's speed does not matter; predicted are both by the same estimate, of which the link's rate is given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from figures import machine
from local_cluster import start_ranks

BAR = 0.10
CASES = {
    "adapters, 8 microbatches of 128": {"lora": True, "samples": 8, "tokens": 128},
    "adapters, 1 microbatch of 128": {"lora": True, "samples": 1, "tokens": 128},
    "adapters, 1 microbatch of 64": {"lora": True, "samples": 1, "tokens": 64},
    "trained whole, 2 microbatches of 128": {"lora": False, "samples": 2, "tokens": 128},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6, help="pairs of steps of each case")
    parser.add_argument("--rate", type=float, default=1e9, help="bytes/s of the link")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        _work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES.values()):
            for streamed in (False, True):
                planned(**case, is_streamed=streamed, rate=options.rate).save(
                    f"{folder}/{number}-{streamed}.json"
                )
        start_ranks(__file__, 2, *sys.argv[1:], "--folder", folder)


def planned(lora: bool, samples: int, tokens: int, is_streamed: bool, rate: float) -> Any:
    """Return the plan in breadth-first order, predicted with a link of `rate` bytes/s."""
    from unittest import mock

    import stagewright
    from stagewright.planning.prediction.sharding import HostCopies
    from stagewright.tracing.models.lora import Lora
    from stagewright.tracing.models.reference import resolve

    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16, "vocab_size": 4096}
    model = resolve("tiny-llama", shape)
    model = model.adapted(Lora(rank=8, alpha=16)) if lora else model
    job = stagewright.Job(global_batch=samples, sequence_length=tokens, dtype="fp32")
    with mock.patch.object(HostCopies, "_seconds", lambda self, num_bytes: num_bytes / rate):
        return stagewright.estimate(
            model, _machine(), job, pp=2, dp=1, schedule="breadth-first", chunks=8, recompute="full", streamed=is_streamed,
            layers_per_stage=[1] * 16,
        )  # fmt: skip


@lru_cache
def _machine() -> Any:
    """Return this machine as measured, with a host of its own memory, where the optimizer of a streamed model is."""
    from stagewright.cluster.host import Host
    from stagewright.execution.kept_probe import this_machine

    cluster, _ = this_machine("cpu", 2, lambda what, done: None)
    (node,) = cluster.nodes
    host = Host(
        name="this machine", num_devices=2, memory_bytes=2 * node.device.memory_bytes,
        memory_bandwidth=2 * node.device.memory_bandwidth, memory_efficiency=1.0,
        sources=dict.fromkeys(("memory_bandwidth", "memory_bytes", "memory_efficiency"), "measured: each device's"),
    )  # fmt: skip
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"host": host}),)})


class _Link:
    """A link on which copies arrive one after the other."""

    def __init__(self, rate: float) -> None:
        self.rate, self.free = rate, 0.0

    def arrival(self, num_bytes: int) -> float:
        self.free = max(time.perf_counter(), self.free) + num_bytes / self.rate
        return self.free


def _throttle(rate: float) -> None:
    """Let streamed buffers arrive as over a link; the device reads host memory in place of its copy."""
    from stagewright.execution.shards import FlatBuffer, StreamedBuffer

    to_device, to_host = _Link(rate), _Link(rate)

    def gather(self: Any) -> None:
        self.whole = self.shard
        self._arrival = to_device.arrival(self.shard.numel() * self.shard.element_size())

    def gathered(self: Any) -> Any:
        time.sleep(max(0.0, self._arrival - time.perf_counter()))
        return FlatBuffer.gathered(self)

    reduce, settle = StreamedBuffer.reduce, StreamedBuffer.settle

    def slow_reduce(self: Any) -> None:
        num_bytes = self.gradient.numel() * self.gradient.element_size()
        reduce(self)
        self._left = to_host.arrival(num_bytes)

    def slow_settle(self: Any) -> None:
        if self._sent is not None:
            time.sleep(max(0.0, self._left - time.perf_counter()))
        settle(self)

    for name, method in {
        "gather": gather,
        "gathered": gathered,
        "reduce": slow_reduce,
        "settle": slow_settle,
    }.items():
        setattr(StreamedBuffer, name, method)


def _work(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from stagewright.execution.session import Session
    from stagewright.planning.plan import load_plan

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _throttle(options.rate)
    rows = []
    for number, name in enumerate(CASES):
        plans = {
            streamed: load_plan(options.folder / f"{number}-{streamed}.json") for streamed in (False, True)
        }
        sessions = {
            streamed: Session(plan, torch.device("cpu"), None, random_weights=True)
            for streamed, plan in plans.items()
        }
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for step in range(options.steps + 1):
            for streamed, session in sessions.items():
                dist.barrier()
                seconds[streamed].append(session.train_step(step).seconds)
        measured = statistics.median(
            there / here for here, there in zip(seconds[False][1:], seconds[True][1:], strict=True)
        )
        expected = {streamed: plan.predictions.step_seconds for streamed, plan in plans.items()}
        predicted = expected[True] / expected[False]
        plain = expected[False] / statistics.median(seconds[False][1:])
        rows.append(
            {
                "case": name,
                "measured": measured,
                "predicted": predicted,
                "off": predicted / measured - 1,
                "plain": plain,
            }
        )
        for session in sessions.values():
            session.close()
    if dist.get_rank() == 0:
        if options.json:
            print(json.dumps({"machine": machine(), "rate": options.rate, "rows": rows}, indent=1))
        else:
            for row in rows:
                verdict = "" if abs(row["off"]) <= BAR else f"; MISSES {BAR:.0%}"
                print(
                    f"{row['case']:36} measured {row['measured']:.3f}, predicted {row['predicted']:.3f}: "
                    f"{row['off']:+.1%}{verdict} (plain step predicted {row['plain']:.2f} of measured)"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
