"""Everything that one GPU can tell, in ten minutes and one results file, measured next to predicted.

    python benchmarks/gpu/one.py [--parts names waits ...] [--budget-seconds 600] [--catalog h100] [--output FILE]

* names: operators of the bundled models, traced here and as a plan for GPUs has them;
* waits: which calls wait for the device, and so would never return under a receive that nobody answers yet;
* offload: gradients, peaks and passes of stages that recompute or offload, attention among them;
* memory: active and reserved peaks of training, step time, and resuming from a checkpoint;
* host: seconds to issue an operator;
* stages: F, B, I and W, eager and compiled, and their gradients.

Predictions are of the description that `stagewright probe` makes of the device, and of the catalog's where --catalog names
it. Every part has a share of the time and writes its lines when a case is done; a case that fails leaves its error there.
`--device cpu --small` runs all of it in seconds without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import calls
import stages
import torch
import torch.distributed as dist
from results_file import Part, Row, options, run, verdict
from stages import Setting

from stagewright.cluster import Cluster
from stagewright.execution.checkpoint import restore, save
from stagewright.execution.clock import synchronize
from stagewright.execution.session import Session
from stagewright.execution.verification import reduced_model
from stagewright.graph import OperatorGraph
from stagewright.planning.estimate import estimate
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import ModelReference, bundled_names, resolve

Models = dict[str, dict[str, Any]]
"""Changed keys of configurations by name, the most telling first."""

BUDGET_S = 600.0
SHARES = {"names": 3, "waits": 2, "offload": 4, "memory": 3, "host": 1, "stages": 6}

_TINY: Models = {"tiny-llama": {"num_hidden_layers": 2}}
_LARGE: Models = {
    name: {"num_hidden_layers": 8}
    for name in ("gpt2-xl", "gemma-3-1b", "tiny-mixtral", "bert-large", "t5-large", "vit-huge")
}
_MICROBATCHES, _STEPS = 4, 6
_METERED = 1
"""The first step makes the state of the optimizer."""


def setting_of(kind: str, is_small: bool, described: Sequence[Cluster]) -> Setting:
    dtype = "bf16" if kind == "cuda" else "fp32"
    length, num_stages, repeats = (64, 2, 2) if is_small else (512, 4, 10)
    device = torch.device(kind, 0 if kind == "cuda" else None)
    return Setting(device, tuple(described), dtype, length, num_stages, repeats)


def parts_of(setting: Setting, is_small: bool) -> list[Part]:
    """In the order in which they are measured."""
    models = _TINY if is_small else _LARGE
    tiny = [name for name in bundled_names() if name.startswith("tiny-")]
    traced = ["tiny-gpt2"] if is_small else dict.fromkeys([*tiny, *bundled_names()])
    begin = calls.StandIn(setting.device).begin
    cases: dict[str, dict[str, Any]] = {
        "names": {name: partial(names, setting, name) for name in traced},
        "waits": {
            name: partial(calls.waits, setting.device, name, *pair, begin)
            for name, pair in calls.calls_of(setting.device).items()
        },
        "offload": _of_models(models, partial(stages.saving, setting)),
        "memory": _of_models(models, partial(trained, setting)),
        "host": _of_models(_TINY, partial(calls.issue, setting)),
        "stages": {
            f"{name}, {what}": case
            for what, (is_split, compiled) in {
                "F B": (False, False), "F I W": (True, False), "compiled": (True, True),
            }.items()
            for name, case in _of_models(
                models, partial(stages.passes, setting, is_split=is_split, compiled=compiled)
            ).items()
        },
    }  # fmt: skip
    return [Part(name, share, cases[name]) for name, share in SHARES.items()]


def _of_models(models: Models, measure: Callable[[ModelReference], Iterator[Row | str]]) -> dict[str, Any]:
    return {name: lambda n=name, c=changes: measure(resolve(n, c)) for name, changes in models.items()}


def names(setting: Setting, model: str) -> Iterator[Row | str]:
    """Compare operators of two layers of a model, as a plan for this kind of device names them and as a run on it does."""
    reference, kind = reduced_model(resolve(model), 2, None), setting.device.type
    traced = setting.job(1).traced(kind)
    planned, here = trace(reference, 1, **traced), trace(reference, 1, device=kind, use_cache=False, **traced)
    differences = unlike(planned, here)
    judged = f"{len(differences)} DIFFERENT" if differences else "equal"
    yield f"{model}: {len(planned.body)} forward operators, names and kinds {judged}"
    yield from (f"{model}: {difference}" for difference in differences[:3])


def unlike(planned: OperatorGraph, here: OperatorGraph) -> list[str]:
    """Forward operators that have another name or kind, or that only one of the graphs has."""
    of_plan, of_run = ({g.nodes[n].name: g.nodes[n].op for n in g.body} for g in (planned, here))
    return [
        f"{name}: {of_plan.get(name, 'nothing')} in the plan, {of_run.get(name, 'nothing')} here"
        for name in dict.fromkeys([*of_plan, *of_run])
        if of_plan.get(name) != of_run.get(name)
    ]


def trained(setting: Setting, model: ModelReference) -> Iterator[Row | str]:
    """Peaks and seconds of steps through the product's own session, and losses after it resumes from a checkpoint."""
    plans = [
        estimate(model, cluster, setting.job(_MICROBATCHES), dp=1, pp=1) for cluster in setting.described
    ]
    half = _STEPS // 2
    with alone(setting.device), tempfile.TemporaryDirectory(prefix="stagewright-one-") as name:
        session = Session(plans[0], setting.device, None, True)
        results = [session.train_step(step, metered=step == _METERED) for step in range(half)]
        seconds = statistics.median(result.seconds for result in results[_METERED + 1 :])
        yield f"{model.name}: step s", [plan.predictions.step_seconds for plan in plans], seconds
        ranks, metering = [plan.predictions.ranks[0] for plan in plans], session.metering
        active = [float(rank.allocated_peak_bytes) for rank in ranks]
        yield f"{model.name}: active peak bytes", active, metering.peak_bytes
        if metering.reserved_bytes is not None:
            reserved = [float(rank.reserved_peak_bytes) for rank in ranks]
            yield f"{model.name}: reserved peak bytes", reserved, metering.reserved_bytes
        save(session, Path(name), half)
        losses = [session.train_step(step).loss for step in range(half, _STEPS)]
        del session
        session = Session(plans[0], setting.device, None, True)
        begun = time.perf_counter()
        restore(session, Path(name))
        synchronize(setting.device)
        yield f"{model.name}: restoring a checkpoint s", [], time.perf_counter() - begun
        again = [session.train_step(step).loss for step in range(half, _STEPS)]
    worst = max(abs(one / other - 1) for one, other in zip(again, losses, strict=True))
    # Backwards on a GPU may add in another order each time.
    tolerance = 0.0 if setting.device.type == "cpu" else stages.TOLERANCES[setting.dtype]
    yield verdict(f"{model.name}, losses after resuming", worst, tolerance)


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Inside, this process is all of its group."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    chosen = options(argparse.ArgumentParser(description=__doc__), list(SHARES), BUDGET_S)
    as_is = mock.patch.object(torch, "compile", lambda call, **_: call) if chosen.small else nullcontext()
    with as_is:
        run(
            "one",
            chosen,
            1,
            lambda all_: parts_of(setting_of(chosen.device, chosen.small, all_), chosen.small),
        )


if __name__ == "__main__":
    main()
