"""Everything that two or more GPUs of one machine can tell, in one results file, measured next to predicted.

    python benchmarks/gpu/two.py [--processes N] [--parts communicators gradients ...] [--budget-seconds 1200]
        [--catalog h100] [--output FILE]

* communicators: bytes that each takes outside of torch's allocator when it is made and warmed up;
* gradients: `stagewright verify` of some schedules, pipelined on the GPUs and plainly on one;
* schedules: a few steps of every built-in schedule with boundaries of 1 KiB and 256 MiB;
* torch: batches next to `torch.distributed.pipelining`, same model, stages, schedule, processes and moment.

Where NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU, what is computed counts, and seconds do not.
NCCL's version, channels and warnings are in the file. A schedule that hangs or fails is named with its action, and the
others go on in new processes. `--device cpu --small` runs all of it over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from results_file import Part, Results, options, run
from torch import nn

import executor
from stagewright.cluster import Cluster
from stagewright.errors import StagewrightError
from stagewright.execution.accelerator import accelerator_of
from stagewright.execution.clock import synchronize
from stagewright.execution.collectives import ProcessGroups, exchange
from stagewright.execution.device import SHARING, gpus_are_shared
from stagewright.execution.processes import start_ranks
from stagewright.execution.rank_process import end_process, exit_code, rank_process, start_process
from stagewright.execution.session import Session
from stagewright.execution.verification import verify
from stagewright.execution.watchdog import Limits, Watchdog
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, load_plan
from stagewright.schedule.builders import BUILDERS, build
from stagewright.tracing.models.reference import resolve

BUDGET_S = 1200.0
SHARES = {"communicators": 1, "gradients": 3, "schedules": 6, "torch": 5}
VERIFIED = ("dualpipe-v", "1f1b", "interleaved-1f1b", "zb-v")
SCHEDULES = tuple(name for name in BUILDERS if not name.startswith("pipedream"))
"""Those that update weights once a batch."""
SIZES = {"1 KiB": 2**8, "256 MiB": 2**26}
SMALL_SIZES = {"1 KiB": 2**8, "256 KiB": 2**16}
"""Elements of a boundary in float32."""
_LIMITS = Limits(action_s=90.0, start_s=180.0)
_STEPS = 4
_FOLDER = Path(__file__).resolve().parent


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def boundary_model(microbatch_size: int, depth: int, num_elements: int) -> tuple[Any, ...]:
    """Layers that compute next to nothing and hand over `num_elements`; the first loss is the same for all depths."""
    width = min(num_elements, 1024)
    layers = nn.Sequential(*(Scale(width) for _ in range(depth)))
    return layers, (torch.randn(microbatch_size, num_elements // width, 1),), lambda y: y.square().mean()


@dataclass(frozen=True)
class Machine:
    """`processes` devices, and the descriptions that predict them."""

    kind: str
    processes: int
    is_small: bool
    described: Sequence[Cluster]

    def parts(self) -> list[Part]:
        verified, sizes = (VERIFIED[:1], SMALL_SIZES) if self.is_small else (VERIFIED, SIZES)
        cases: dict[str, dict[str, Any]] = {
            "communicators": {"all": self.communicators},
            "gradients": {name: partial(self.gradients, name) for name in verified},
            "schedules": {label: partial(self.schedules, size) for label, size in sizes.items()},
            "torch": {"all": self.torch},
        }
        return [Part(name, share, cases[name]) for name, share in SHARES.items()]

    def communicators(self) -> Results:
        return self._in_ranks("communicators", {"communicators": {}}, {})

    def gradients(self, schedule: str) -> Results:
        job = Job(global_batch=2 * self.processes, sequence_length=64, dtype="fp32")
        depth = build(schedule, self.processes, 2 * self.processes).num_stages
        reference, cluster = resolve("tiny-llama", {"num_hidden_layers": depth}), self.described[0]
        plan = estimate(reference, cluster, job, pp=self.processes, dp=1, schedule=schedule)
        verified = verify("tiny-llama", plan, device=self.kind)
        yield (
            f"{schedule}, {verified.dtype}: {'equal' if verified.holds else 'NOT EQUAL'}, {verified.num_equal_gradients} "
            f"of {verified.num_gradients} to the last bit, largest difference {verified.gradient_difference:.1e}"
        )

    def schedules(self, size: int) -> Results:
        """Steps of every schedule with boundaries of `size` elements."""
        plans = {name: [self.boundary_plan(name, size, one) for one in self.described] for name in SCHEDULES}
        predictions = {
            f"{name}: step s": [one.predictions.step_seconds for one in plans[name]] for name in plans
        }
        losses = set[float]()
        for item in self._in_ranks(
            "steps", {name: {"plan": made[0]} for name, made in plans.items()}, predictions
        ):
            if not isinstance(item, str) and item[0].endswith("first loss"):
                losses.add(float(f"{item[2]:.5g}"))
            yield item
        yield f"first losses are {'equal' if len(losses) == 1 else 'DIFFERENT'}"

    def boundary_plan(self, schedule: str, size: int, cluster: Cluster) -> Plan:
        microbatches = 2 * self.processes
        depth = build(schedule, self.processes, microbatches).num_stages
        reference = resolve(f"{__file__}:boundary_model", {"depth": depth, "num_elements": size})
        job = Job(global_batch=microbatches, sequence_length=1, dtype="fp32")
        layers = [1] * depth
        return estimate(
            reference, cluster, job, pp=self.processes, dp=1, schedule=schedule, layers_per_stage=layers
        )

    def torch(self) -> Results:
        layers = microbatches = 2 * self.processes  # as many as interleaved schedules need
        sizes = executor.Sizes(2048, layers, 2048, microbatches, 10, "bf16")
        names = list(executor.SCHEDULES)
        if self.is_small:
            sizes, names = executor.Sizes(64, layers, 32, microbatches, 2), names[:2]
        plans = {
            name: [executor.plan_of("llama", name, sizes, self.processes, one) for one in self.described]
            for name in names
        }
        predictions = {f"{name}: batch s": list(map(executor.batch_seconds, plans[name])) for name in plans}
        tasks = {name: {"plan": made[0], "sizes": sizes} for name, made in plans.items()}
        return self._in_ranks("torch", tasks, predictions)

    def _in_ranks(
        self, task: str, arguments: dict[str, dict[str, Any]], predictions: dict[str, list[float]]
    ) -> Results:
        """Do a task with all `arguments`, by name; after a failure those that remain run in new processes."""
        paths = filter(None, (str(_FOLDER), str(_FOLDER.parent), os.environ.get("PYTHONPATH")))
        with tempfile.TemporaryDirectory(prefix="stagewright-two-") as name:
            folder, out = Path(name), Path(name) / "results.jsonl"
            log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p"}
            remaining = []
            for what, given in arguments.items():
                if "plan" in given:
                    given["plan"].save(folder / f"{what}.json")
                    given = {**given, "plan": f"{folder}/{what}.json"}
                remaining.append((what, given))
            with mock.patch.dict(os.environ, {**log, "PYTHONPATH": os.pathsep.join(paths)}):
                while remaining:
                    request, failure = json.dumps([self.kind, task, remaining, str(out)]), None
                    out.write_text("")
                    try:
                        start_ranks("two", [request], range(self.processes), _LIMITS.start_s)
                    except StagewrightError as error:
                        failure = str(error)
                    finally:
                        for line in out.read_text().splitlines():
                            what, _ = remaining.pop(0)
                            rows = {f"{what}: {figure}": value for figure, value in json.loads(line).items()}
                            yield from ((row, predictions.get(row, []), value) for row, value in rows.items())
                    if failure is not None and remaining:
                        yield f"{remaining.pop(0)[0]} FAILED: {failure}"
            if self.kind == "cuda":
                yield nccl_summary(
                    "".join(path.read_text(errors="replace") for path in folder.glob("nccl.*"))
                )


def nccl_summary(log: str) -> str:
    """The log of NCCL in a line: version, channels per peer, how pairs are connected, and warnings."""
    facts = dict.fromkeys(re.findall(r"NCCL version \S+|\d+ p2p channels per peer|NCCL WARN .*", log))
    ways = Counter(re.findall(r"Channel \S+ : \S+ -> \S+ (?:\[\w+\] )?via (\S+)", log))
    listed = (f"{count} channels via {way}" for way, count in ways.most_common())
    return "; ".join([*facts, *listed]) or "NCCL left no log"


def work(kind: str, task: str, arguments: Sequence[tuple[str, dict[str, Any]]], out: str) -> None:
    """Do a task with all `arguments`; rank 0 adds a line for each to `out`."""
    with rank_process(kind, _LIMITS) as (watch, device):
        for name, given in arguments:
            watch.at(name)
            result = TASKS[task](watch, device, name, **given)
            if watch.rank == 0:
                with Path(out).open("a") as file:
                    file.write(json.dumps(result) + "\n")


def _steps(watch: Watchdog, device: torch.device, name: str, plan: str) -> dict[str, float]:
    before = _outside(device)
    session = Session(load_plan(plan), device, None, True, watch.at, watch.at)
    results = [session.train_step(step) for step in range(_STEPS)]
    seconds = statistics.median(result.seconds for result in results[1:])
    outside = max(exchange(_outside(device) - before))
    session.close()
    return {"step s": seconds, "first loss": results[0].loss, "bytes outside of the allocator": outside}


def _communicators(watch: Watchdog, device: torch.device, name: str) -> dict[str, int]:
    """Bytes on the rank where they are most: of three lanes between the first two ranks, then of a group of all."""
    taken, groups, everyone = {}, ProcessGroups(), list(range(watch.num_ranks))
    message = torch.zeros(2**20, dtype=torch.uint8, device=device)
    for number, what in enumerate(("first lane", "second lane", "third lane", "group of all ranks")):
        before, is_lane = _outside(device), number < 3
        group = groups.new([[0, 1] if is_lane else everyone], is_lane)
        if not is_lane:
            dist.all_reduce(message, group=group)
        elif watch.rank < 2:
            (dist.send if watch.rank == 0 else dist.recv)(message, 1 - watch.rank, group)
        synchronize(device)
        taken[f"bytes of the {what}"] = max(exchange(_outside(device) - before))
    groups.destroy()
    return taken


def _outside(device: torch.device) -> int:
    """Bytes that others than torch's allocator have taken from the device; of a CPU the most of this process."""
    accelerator = accelerator_of(device)
    if device.type == "cpu":
        return accelerator.peak_reserved_bytes()
    free, total = accelerator.free_and_total_bytes()
    return total - free - accelerator.reserved_bytes()


def _torch(watch: Watchdog, device: torch.device, name: str, plan: str, sizes: list[Any]) -> dict[str, float]:
    result = executor.compared("llama", name, executor.Sizes(*sizes), load_plan(plan), device)
    names = {
        "ours_seconds": "batch s",
        "torch_seconds": "batch s of torch.distributed.pipelining",
        "ratio": "ratio",
    }
    return {name: result[key] for key, name in names.items()} | {"ratio, 95 % below": result["interval"][1]}


TASKS = {"steps": _steps, "communicators": _communicators, "torch": _torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, help="default one per GPU; 2 on a CPU")
    chosen = options(parser, list(SHARES), BUDGET_S)
    is_cpu = chosen.device == "cpu"
    count = chosen.processes or (2 if is_cpu or gpus_are_shared() else torch.cuda.device_count())
    if count < 2:
        parser.error(
            f"a pipeline needs two GPUs, and there are {count}: run one.py, set {SHARING}=1, by which NCCL 2.30 and later "
            "let ranks share a GPU, or give --device cpu --small"
        )

    def parts(described: Sequence[Cluster]) -> list[Part]:
        return Machine(chosen.device, count, chosen.small, described).parts()

    run("two", chosen, count, parts)


if __name__ == "__main__":
    if "RANK" in os.environ:
        start_process()
        end_process(exit_code(lambda: work(*json.loads(sys.argv[1]))))
    main()
