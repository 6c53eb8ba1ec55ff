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
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import calls
import stages
import torch
from results_file import Part, Row, options, run
from stages import Setting

from stagewright.cluster import Cluster
from stagewright.execution.verification import reduced_model, without_dropout
from stagewright.graph import OperatorGraph
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import bundled_names, resolve

Models = dict[str, dict[str, Any]]
"""Changed keys of configurations by name, the most telling first."""

BUDGET_S = 600.0
SHARES = {"names": 6, "waits": 2, "offload": 4, "memory": 3, "host": 1, "stages": 6}

_TINY: Models = {"tiny-llama": {"num_hidden_layers": 2}}
_LARGE: Models = {
    name: {"num_hidden_layers": 8}
    for name in ("gpt2-xl", "gemma-3-1b", "tiny-mixtral", "bert-large", "t5-large", "vit-huge")
}
_MICROBATCHES = 4

Results = Iterator[Row | str]


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
        "offload": {
            f"{name}, {policy}": partial(offload, setting, name, changes, policy)
            for name, changes in models.items()
            for policy in stages.POLICIES
        },
        "memory": {name: partial(memory, setting, name, changes) for name, changes in models.items()},
        "host": {name: partial(host, setting, name, changes) for name, changes in _TINY.items()},
        "stages": {
            f"{name}, {'compiled' if compiled else 'eager'}": partial(
                passes, setting, name, changes, compiled
            )
            for compiled in (False, True)
            for name, changes in models.items()
        },
    }
    return [Part(name, share, cases[name]) for name, share in SHARES.items()]


def offload(setting: Setting, model: str, changes: dict[str, Any], policy: str) -> Results:
    plan = stages.saving(setting.plan(resolve(model, changes), setting.job(1)), policy)
    return stages.steps(setting, plan, f"{model}, {policy}")


def memory(setting: Setting, model: str, changes: dict[str, Any]) -> Results:
    return stages.steps(setting, setting.plan(resolve(model, changes), setting.job(_MICROBATCHES)), model)


def host(setting: Setting, model: str, changes: dict[str, Any]) -> Results:
    return calls.issue(setting, setting.plan(resolve(model, changes), setting.job(1)))


def passes(setting: Setting, model: str, changes: dict[str, Any], compiled: bool) -> Results:
    """What draws random numbers is not compiled, so nothing is dropped out there."""
    reference = resolve(model, changes)
    reference = without_dropout(reference) if compiled else reference
    plan = setting.plan(reference, setting.job(1, compiled), "interleaved-zb")
    return stages.steps(setting, plan, f"{model}, {'compiled' if compiled else 'eager'}", by_action=True)


def names(setting: Setting, model: str) -> Results:
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


def main() -> None:
    chosen = options(argparse.ArgumentParser(description=__doc__), list(SHARES), BUDGET_S)
    as_is = mock.patch.object(torch, "compile", lambda call, **_: call) if chosen.small else nullcontext()

    def parts(described: Sequence[Cluster]) -> list[Part]:
        return parts_of(setting_of(chosen.device, chosen.small, described), chosen.small)

    with as_is:
        run("one", chosen, 1, parts)


if __name__ == "__main__":
    main()
