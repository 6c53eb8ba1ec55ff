"""Random models train as plain PyTorch trains them, or are refused: `make fuzz-models` tries 2,000, the gate a few of them.

A model is traced, compared with its graph as a first run does, and then trained for three steps on other data: loss,
gradients, buffers and parameters are those of a plain loop. Each has a process of its own, whose death is a fault too.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

import random_models
import torture
from stagewright.errors import StagewrightError
from stagewright.execution.model_comparison import (
    ComparedStep,
    GraphSteps,
    compared,
    differences,
)
from stagewright.execution.random import keyed
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve

NUM_MODELS, PER_TEST = (2000, 20) if torture.FUZZES else (16, 16)
SETTINGS: dict[str, int] = {} if torture.FUZZES else {"most": 1}
REFUSES = ("wrong", "fault", "dead")
NUM_STEPS, SIZE, RATE = 3, 3, 0.05
FACTORY = f"{Path(random_models.__file__)}:build"


@dataclass(frozen=True)
class Outcome:
    """``equal``, ``refused``, ``refused by the comparison``, ``wrong``, ``fault`` or ``dead``."""

    kind: str
    detail: str = ""


def outcome_of(**settings: object) -> Outcome:
    """What becomes of the model of these settings, in this process."""
    reference = resolve(FACTORY, settings)
    sizes = (SIZE, random_models.TOKENS)
    try:
        graph = trace(reference, *sizes, dtype="float64", use_cache=False)
    except StagewrightError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("fault", f"{type(error).__name__}: {error}")
    random_models.GLOBAL.clear()
    make = partial(build, reference, *sizes, "float64")
    try:
        differing = differences(make, graph)
    except StagewrightError as error:
        return Outcome("refused by the comparison", str(error))
    if differing:
        return Outcome("refused by the comparison", str(differing[0]))
    module = make().module
    runs = GraphSteps(graph, module, 0)
    for step in range(NUM_STEPS):
        inputs = random_models.batch(step, SIZE)
        wanted = plain_step(module, step, inputs)
        if differing := compared(runs.run(step, inputs), wanted):
            return Outcome("wrong", f"in step {step}, {differing[0]}")
        changes = {name: -RATE * p.grad for name, p in module.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for name, change in changes.items():
                module.get_parameter(name).add_(change)
        runs.update(changes)
    return Outcome("equal")


def plain_step(module: torch.nn.Module, step: int, inputs: dict[str, torch.Tensor]) -> ComparedStep:
    """Forward and backward as in a loop of one's own."""
    module.zero_grad()
    with keyed(0, step, 0) as draws:
        loss = module(**inputs)
    loss.backward()
    named = dict(module.named_parameters())
    left = {"the loss": loss.detach()}
    left |= {f"the gradient of '{name}'": parameter.grad for name, parameter in named.items()}
    left |= {f"parameter '{name}'": parameter.detach().clone() for name, parameter in named.items()}
    left |= {f"buffer '{name}'": buffer.detach().clone() for name, buffer in module.named_buffers()}
    return ComparedStep(left, draws.draws, {f"the gradient of '{name}'": name for name in named})


@functools.cache
def warm() -> Outcome:
    """What every trace needs is imported and looked up once, for all children."""
    return outcome_of(seed=0, only="layer_norm")


def in_a_child(work: Callable[[], Outcome]) -> Outcome:
    """What `work` returns in a child of this process, whose death is an outcome too."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            gc.freeze()  # finalizers of what other tests have left may need what a copy of their process lacks
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libraries write of what they refuse
            os.write(writer, pickle.dumps(work())[: 2**16])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    return pickle.loads(answer) if answer else Outcome("dead", f"status {status}")


@pytest.mark.parametrize("first", range(0, NUM_MODELS, PER_TEST))
def test_random_models_are_equal_to_plain_training_or_refused(
    first: int, record_property: Callable[[str, object], None]
) -> None:
    assert warm() == Outcome("equal")
    faults, mended = [], []
    for index in range(first, first + PER_TEST):
        seed = int(torture.SEED) * NUM_MODELS + index
        outcome = in_a_child(lambda seed=seed: outcome_of(seed=seed, **SETTINGS))
        line = f"seed={seed} ({', '.join(random_models.constructs(seed, **SETTINGS))}): {outcome.kind}: {outcome.detail}"
        if outcome.kind in REFUSES:
            faults.append(line)
        elif outcome.kind == "refused by the comparison":
            mended.append(line)
    record_property("damage", ("random models", PER_TEST))
    record_property("damage", ("of them refused by the comparison only", len(mended)))
    print("\n".join(mended))
    assert not faults, "\n".join(faults)


def test_there_are_many_constructs() -> None:
    assert len(random_models.PARTS) >= 40
