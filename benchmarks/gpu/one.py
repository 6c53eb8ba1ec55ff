"""Everything that one GPU can tell, in ten minutes and one results file, measured next to predicted.

    python benchmarks/gpu/one.py [--parts names waits ...] [--budget-seconds 600] [--catalog h100] [--output FILE]

* names: operators of the bundled models, traced here and as a plan for GPUs has them;
* waits: which calls wait for the device, and so would never return under a receive that nobody answers yet;
* offload: gradients, peaks and passes of stages that recompute or offload, attention among them;
* memory: active and reserved peaks of training with several microbatches, and step time;
* host: seconds to issue an operator;
* stages: F, B, I and W, eager and compiled, and their gradients.

Predictions are of the description that `stagewright probe` makes of the device, and of the catalog's where --catalog names
it. Every part has a share of the time and writes its lines when a case is done; a case that fails leaves its error there.
`--device cpu --small` runs all of it in seconds without a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import calls
import stages
import torch
from results_file import Part, Results, options, run
from stages import Setting

from stagewright.cluster import Cluster
from stagewright.execution.verification import reduced_model, without_dropout
from stagewright.graph import OperatorGraph
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import bundled_names, resolve

Models = dict[str, dict[str, Any]]
"""Changed keys of configurations by name, the most telling first."""

BUDGET_S = 600.0
SHARES = {"host": 1, "names": 6, "waits": 2, "stages": 6, "memory": 3, "offload": 4}

_TINY: Models = {"tiny-llama": {"num_hidden_layers": 2}}
_LARGE: Models = {
    name: {"num_hidden_layers": 4}
    for name in ("gpt2-xl", "gemma-3-1b", "tiny-mixtral", "bert-large", "t5-large", "vit-huge")
}
_MICROBATCHES = 4


def setting_of(kind: str, is_small: bool, described: Sequence[Cluster]) -> Setting:
    dtype = "bf16" if kind == "cuda" else "fp32"
    length, num_stages, repeats = (64, 2, 2) if is_small else (512, 4, 10)
    device = torch.device("cuda:0" if kind == "cuda" else kind)
    return Setting(device, tuple(described), dtype, length, num_stages, repeats, is_small)


def parts_of(setting: Setting) -> list[Part]:
    """In the order in which they are measured."""
    models = _TINY if setting.is_small else _LARGE
    tiny = [name for name in bundled_names() if name.startswith("tiny-")]
    traced = ["tiny-gpt2"] if setting.is_small else dict.fromkeys([*tiny, *bundled_names()])
    begin = calls.StandIn(setting.device).begin
    cases: dict[str, dict[str, Any]] = {
        "names": {name: partial(names, setting, name) for name in traced},
        "waits": {
            name: partial(calls.waits, setting.device, name, *pair, begin)
            for name, pair in calls.calls_of(setting.device).items()
        },
        "offload": {
            f"{name}, {policy}": partial(steps, setting, name, changes, policy=policy)
            for name, changes in models.items()
            for policy in stages.POLICIES
        },
        "memory": {
            name: partial(steps, setting, name, changes, samples=_MICROBATCHES)
            for name, changes in models.items()
        },
        "host": {name: partial(host, setting, name, changes) for name, changes in _TINY.items()},
        "stages": {
            f"{name}{', compiled' * compiled}": partial(
                steps, setting, name, changes, "interleaved-zb", compiled
            )
            for compiled in (False, True)
            for name, changes in models.items()
        },
    }
    return [Part(name, share, cases[name]) for name, share in SHARES.items()]


def steps(
    setting: Setting, model: str, changes: dict[str, Any], schedule: str = "breadth-first", compiled: bool = False,
    policy: str = "keep", samples: int = 1,
) -> Results:  # fmt: skip
    """Schedules that split B show every action. What draws random numbers is not compiled, so nothing is dropped there."""
    reference = resolve(model, changes)
    reference = without_dropout(reference) if compiled else reference
    plan = stages.saving(setting.plan(reference, setting.job(samples, compiled), schedule), policy)
    what = f"{model}{', compiled' * compiled}, {schedule}, {policy}"
    return stages.steps(setting, plan, what, by_action=schedule != "breadth-first")


def host(setting: Setting, model: str, changes: dict[str, Any]) -> Results:
    return calls.issue(setting, setting.plan(resolve(model, changes), setting.job(1)))


def names(setting: Setting, model: str) -> Results:
    """Compare operators of two layers of a model, as a plan for this kind of device names them and as a run on it does."""
    reference, kind = reduced_model(resolve(model), 2, None), setting.device.type
    traced = setting.job(1).traced(kind)
    planned, here = trace(reference, 1, **traced), trace(reference, 1, device=kind, use_cache=False, **traced)
    differences = unlike(planned, here)
    judged = f"{len(differences)} DIFFERENT" if differences else "equal"
    layouts = sum(one.meta != other.meta for one, other in zip(planned.values, here.values, strict=False))
    yield f"{model}: {len(planned.forward_ids)} forward operators, names and kinds {judged}; {layouts} layouts differ"
    yield from (f"{model}: {difference}" for difference in differences[:3])


def unlike(planned: OperatorGraph, here: OperatorGraph) -> list[str]:
    """Forward operators that have another name or kind, or that only one of the graphs has."""
    of_plan, of_run = ({g.nodes[n].name: g.nodes[n].op for n in g.forward_ids} for g in (planned, here))
    return [
        f"{name}: {of_plan.get(name, 'nothing')} in the plan, {of_run.get(name, 'nothing')} here"
        for name in dict.fromkeys([*of_plan, *of_run])
        if of_plan.get(name) != of_run.get(name)
    ]


def main() -> None:
    chosen = options(argparse.ArgumentParser(description=__doc__), list(SHARES), BUDGET_S)
    compile_ = (lambda call, **_: call) if chosen.small else torch.compile
    with mock.patch.object(torch, "compile", compile_):
        run("one", chosen, 1, lambda described: parts_of(setting_of(chosen.device, chosen.small, described)))


if __name__ == "__main__":
    main()
