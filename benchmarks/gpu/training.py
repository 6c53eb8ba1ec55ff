"""Whole steps of training on one device: two processes beside one, and a checkpoint."""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from budget import Row
from pair import trained
from stages import Setting, verdict

from stagewright.cluster import Cluster
from stagewright.execution.checkpoint import restore, save
from stagewright.execution.clock import synchronize
from stagewright.execution.processes import start_ranks
from stagewright.execution.session import Session
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.tracing.models.reference import ModelReference

_MICROBATCHES = 4
_STEPS = {"cuda": 8, "cpu": 4}


def plan_of(setting: Setting, cluster: Cluster, model: ModelReference, pp: int) -> Plan:
    """Microbatches of one sample through `pp` ranks on devices like that of `cluster`."""
    job = Job(global_batch=_MICROBATCHES, sequence_length=setting.length, dtype=setting.dtype)  # type: ignore[arg-type]
    group = cluster.nodes[0].model_copy(update={"devices_per_node": pp, "count": 1})
    together = Cluster(name=cluster.name, nodes=(group,), sources=cluster.sources)
    return estimate(model, together, job, dp=1, pp=pp)


def plans_of(setting: Setting, model: ModelReference, pp: int) -> list[Plan]:
    return [plan_of(setting, cluster, model, pp) for cluster in setting.described]


@contextmanager
def alone(setting: Setting) -> Iterator[None]:
    """This process is all of its group."""
    backend = "nccl" if setting.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def two_processes(setting: Setting, model: ModelReference) -> Iterator[Row | str]:
    """Of a pipeline, on the device together, beside one process."""
    ones, twos = (plans_of(setting, model, pp) for pp in (1, 2))
    steps = _STEPS[setting.device.type]
    with alone(setting):
        session = Session(ones[0], setting.device, None, True)
        plain, seconds = trained(session, range(steps))
        peak = session.metering.peak_bytes
        del session
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    step_s = [plan.predictions.step_seconds for plan in ones]
    yield f"{model.name}, one process: step s", step_s, statistics.median(seconds)
    yield f"{model.name}, one process: active peak bytes", _peaks(ones, 0), peak
    found = _in_two(twos[0], setting, steps)
    if setting.device.type == "cpu":
        step_s = [plan.predictions.step_seconds for plan in twos]
    else:
        yield (
            f"{model.name}: two processes on one GPU take turns, and exchange through the host, as NCCL refuses them; their "
            "step is predicted as that of one process"
        )
    yield f"{model.name}, two processes: step s", step_s, statistics.median(found["seconds"])
    for rank, peak in enumerate(found["peaks"]):
        yield f"{model.name}, two processes: active peak bytes of rank {rank}", _peaks(twos, rank), peak
    worst = max(abs(one / other - 1) for one, other in zip(found["losses"], plain, strict=True))
    yield verdict(f"{model.name}, losses of two processes beside one's", worst, setting.tolerance)


def _peaks(plans: Sequence[Plan], rank: int) -> list[float]:
    return [float(plan.predictions.ranks[rank].allocated_peak_bytes) for plan in plans]


def _in_two(plan: Plan, setting: Setting, steps: int) -> dict[str, list[float]]:
    """Losses, seconds and peaks of two ranks."""
    paths = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory(prefix="stagewright-campaign-") as name:
        folder = Path(name)
        plan.save(folder / "plan.json")
        device = "cpu" if setting.device.type == "cpu" else "cuda:0"
        options = {"plan": str(folder / "plan.json"), "out": str(folder / "out.json"), "device": device}
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), paths)))
        try:
            start_ranks("pair", [json.dumps({**options, "steps": steps})], [0, 1])
        finally:
            os.environ.pop("PYTHONPATH")
            os.environ |= {} if paths is None else {"PYTHONPATH": paths}
        return json.loads((folder / "out.json").read_text())


def checkpoint(setting: Setting, model: ModelReference) -> Iterator[Row | str]:
    """Saved after half of the steps, and gone on from by another session."""
    plan = plans_of(setting, model, 1)[0]
    steps = _STEPS[setting.device.type]
    half = steps // 2
    with alone(setting), tempfile.TemporaryDirectory(prefix="stagewright-campaign-") as name:
        folder = Path(name)
        session = Session(plan, setting.device, None, True)
        trained(session, range(half))
        synchronize(setting.device)
        begun = time.perf_counter()
        written = save(session, folder, half)
        yield f"{model.name}: saving s", [], time.perf_counter() - begun
        size = sum(path.stat().st_size for path in written.iterdir())
        yield f"{model.name}: bytes of the checkpoint", [], size
        wanted, _ = trained(session, range(half, steps))
        del session
        gc.collect()
        session = Session(plan, setting.device, None, True)
        begun = time.perf_counter()
        restore(session, folder)
        synchronize(setting.device)
        yield f"{model.name}: resuming s", [], time.perf_counter() - begun
        found, _ = trained(session, range(half, steps))
    first = "equal" if found[0] == wanted[0] else f"NOT EQUAL: {found[0]} and {wanted[0]}"
    yield f"{model.name}, first loss after resuming and without: {first}"
    worst = max(abs(one / other - 1) for one, other in zip(found, wanted, strict=True))
    # Backwards on a GPU may add in another order each time.
    tolerance = 0.0 if setting.device.type == "cpu" else setting.tolerance
    yield verdict(f"{model.name}, all losses after resuming", worst, tolerance)
