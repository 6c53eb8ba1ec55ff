"""Judge predicted peak bytes on a CPU: every rank, all schedules, small models, against bytes that were really alive.

    python validation/cpu_memory.py [--models NAME ...] [--schedules NAME ...] [--ranks 4] [--json]

Local processes train each plan for three steps. In the second a dispatch mode counts the storages that are alive; it
shares no code with the estimator. In the third nobody counts, and the growth of the resident memory bounds the
count from outside: what had been forgotten would show there. Batches for that bound are large enough that the few
hundred kilobytes an interpreter takes by itself do not matter.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verdict import Row, arguments, show

from stagewright.errors import InputError, StagewrightError
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan

BAR = 0.005
RESIDENT_BAR = 0.05
MODELS = ("tiny-llama", "tiny-gpt2", "tiny-mixtral", "tiny-gemma", "tiny-vit", "tiny-t5")
LARGE = "large"
"""The case whose resident memory is looked at."""
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
"""Freed memory goes back to the system at once, so that resident memory follows what is alive."""


@dataclass(frozen=True)
class Measured:
    """One rank of one plan, in bytes; growth is from the start of the step to its worst moment."""

    label: str
    group: str
    rank: int
    predicted: int
    counted: int
    counted_growth: int
    resident_growth: int

    def row(self) -> Row:
        return Row(f"{self.label} rank {self.rank}", self.group, float(self.predicted), float(self.counted))


def plans(models: Iterable[str], schedules: Iterable[str], num_ranks: int) -> Iterator[tuple[str, Plan]]:
    """A plan for every model and schedule, and per schedule one with large batches; labels in front."""
    for model in models:
        for schedule in schedules:
            for label, sizes in ((model, (1, 32)), (f"{model} {LARGE}", (8, 256))):
                if label != model and model != MODELS[0]:
                    continue
                try:
                    wanted = plan(model, schedule, num_ranks, *sizes)
                    if any("STEP" in text for actions in wanted.program for text in actions):
                        raise InputError("it steps within a batch, which the executor does not")
                    yield f"{label} {schedule}", wanted
                except StagewrightError as error:
                    print(f"left out: {label} {schedule}: {error}", file=sys.stderr)


def plan(model: str, schedule: str, num_ranks: int, microbatch: int, length: int, count: int = 8) -> Plan:
    """`model` in `count` microbatches over `num_ranks` processes of this machine."""
    job = Job(global_batch=count * microbatch, sequence_length=length, dtype="fp32")
    return estimate(model, machine(num_ranks), job, pp=num_ranks, microbatch=microbatch, schedule=schedule)


def machine(num_ranks: int) -> Any:
    """A cluster of processes; of its figures only the kind of device matters to memory."""
    from stagewright.cluster import load_cluster

    cluster = load_cluster("8x-h100")
    node = cluster.nodes[0]
    device = node.device.model_copy(update={"name": "local", "kind": "cpu"})
    group = node.model_copy(update={"devices_per_node": num_ranks, "device": device})
    return cluster.model_copy(update={"name": "local", "nodes": (group,)})


def measure(label: str, wanted: Plan, sabotage: Callable[[Any], None] = lambda session: None) -> Measured:
    """What this rank of `wanted` holds; all ranks of the process group must call this together.

    `sabotage` may spoil the session before the counted step, to see that it is noticed.
    """
    import torch

    from stagewright.execution.metering import StorageMeter
    from stagewright.execution.session import Session

    session = Session(wanted, torch.device("cpu"))
    session.train_step(0)
    sabotage(session)
    session.train_step(1, metered=True)
    before = StorageMeter(session._lasting(session.microbatches(1, session.graph))).live_bytes
    growth = _resident_growth(lambda: session.train_step(2))
    rank = session.mesh.pipeline_rank
    predicted = wanted.predictions.ranks[rank].allocated_peak_bytes
    group = f"{wanted.model.name} {'recompute' if _recomputes(wanted) else 'keep'}"
    peak = session.metering.peak_bytes
    return Measured(label, group, rank, predicted, peak, peak - before, growth)


def _recomputes(wanted: Plan) -> bool:
    return any(policy != "keep" for policy in wanted.memory_policy)


def _resident_growth(step: Callable[[], object]) -> int:
    """Bytes by which resident memory rises above its start while `step` runs; 0 where Linux does not say."""
    gc.collect()
    _return_freed_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    except OSError:
        step()
        return 0
    start = _status("VmRSS")
    step()
    return _status("VmHWM") - start


def _return_freed_memory() -> None:
    """Blocks below the threshold of `_MALLOC` stay resident when they are freed, unless the C library is asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    from stagewright.schedule.builders import BUILDERS

    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--schedules", nargs="*", default=list(BUILDERS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", help="where plans and results of the processes lie")
    options = parser.parse_args()
    if "RANK" in os.environ:
        _work(Path(options.folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        _report(_measured(Path(folder), options), options.json)


def _measured(folder: Path, options: Namespace) -> list[Measured]:
    """Start the processes, which leave a file per rank."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    labels = []
    for index, (label, wanted) in enumerate(plans(options.models, options.schedules, options.ranks)):
        wanted.save(folder / f"{index}.json")
        labels.append(label)
    (folder / "labels").write_text(json.dumps(labels))
    os.environ.update({"OMP_NUM_THREADS": "1", **_MALLOC})
    config = LaunchConfig(
        1, 1, options.ranks, run_id="memory", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
    )
    elastic_launch(config, sys.executable)(__file__, "--folder", str(folder))
    found = [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(options.ranks)]
    return [Measured(**one) for ranks in zip(*found, strict=True) for one in ranks]


def _work(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from stagewright.planning.plan import load_plan

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for index, label in enumerate(json.loads((folder / "labels").read_text())):
        if dist.get_rank() == 0:
            print(f"running {label}", file=sys.stderr)
        found.append(measure(label, load_plan(folder / f"{index}.json")))
    (folder / f"rank-{dist.get_rank()}").write_text(json.dumps([asdict(one) for one in found]))
    dist.barrier()
    dist.destroy_process_group()


def _report(found: list[Measured], as_json: bool) -> None:
    show([one.row() for one in found], BAR, "bytes", as_json, every_row=False)
    bound = [one for one in found if LARGE in one.label and one.resident_growth]
    if not as_json and bound:
        print(
            [
                (
                    o.label,
                    o.rank,
                    o.counted_growth,
                    o.resident_growth,
                    round(o.counted_growth / o.resident_growth - 1, 4),
                )
                for o in bound
            ],
            file=sys.stderr,
        )
        ratios = [one.counted_growth / one.resident_growth - 1 for one in bound]
        worst = max(ratios, key=abs)
        print(
            f"growth counted against growth of resident memory: {len(bound)} ranks, mean "
            f"{sum(map(abs, ratios)) / len(ratios):.2%}, worst {worst:+.2%} (bar {RESIDENT_BAR:.0%})"
        )


if __name__ == "__main__":
    main()
