"""Plans whose stage functions go through TorchInductor, where there is a compiler and where there is none."""

from __future__ import annotations

import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cells import SMALL_GPT2, SMALL_LLAMA
from plans import make_plan

from multiprocess import run_ranks
from stagewright.planning.plan import load_plan

pytestmark = pytest.mark.multiprocess


def trained(folder: Path, without: str = "", **options: Any) -> list[tuple[list[float], list[str]]]:
    """Losses and warnings of every rank for the plan as it is, and compiled; `without`: what PATH has nothing of."""
    paths = []
    for name, compiled in (("plain", False), ("compiled", True)):
        make_plan(folder / f"{name}.json", dtype="fp64", sequence_length=16, compiled=compiled, **options)
        paths.append(str(folder / f"{name}.json"))
    ranks = run_ranks(train, 2, paths, without, timeout=400)
    (plain, _), (compiled_losses, _) = ranks[0]
    assert compiled_losses == pytest.approx(plain, rel=1e-5)
    return [results[1] for results in ranks]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_compiled_functions_learn_the_same(tmp_path: Path) -> None:
    ranks = trained(tmp_path, schedule="zb-h1", overrides=SMALL_LLAMA, num_microbatches=2)
    assert [warned for _, warned in ranks] == [[], []]


def test_without_a_compiler_the_operators_run(tmp_path: Path) -> None:
    ranks = trained(
        tmp_path, "a compiler", model="tiny-gpt2", schedule="gpipe", overrides=SMALL_GPT2, num_microbatches=2
    )
    for _, warned in ranks:
        assert any("backward is not compiled: " in text for text in warned)
        assert any("forward is not compiled: it draws random numbers" in text for text in warned), warned


def test_while_bytes_are_counted_the_operators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles nothing under a dispatch mode, and what is predicted is the operators' memory."""
    import torch

    from stagewright.execution import compiled
    from stagewright.execution.metering import StorageMeter

    calls = []
    monkeypatch.setattr(
        torch, "compile", lambda call, **_: lambda *tensors: calls.append("compiled") or call(*tensors)
    )
    pure = SimpleNamespace(call=lambda tensor: [tensor * 2], parameters=(), resident=())
    operators = SimpleNamespace(call=lambda inputs, *_: calls.append("operators") or [inputs[0] * 2])
    function = compiled._Compiled(operators, pure, "forward")  # type: ignore[arg-type]
    for metered in (True, False, True):
        with StorageMeter() if metered else nullcontext():
            (result,) = function([torch.ones(2)], {}, lambda *_: None, lambda *_: None)
            assert result.tolist() == [2.0, 2.0]
    assert calls == ["operators", "compiled", "compiled", "operators"]


def test_results_that_are_rounding_as_a_whole_do_not_differ() -> None:
    import torch

    from stagewright.execution.compiled import _difference

    large = torch.full((4,), 0.5, dtype=torch.float64)
    noise = torch.full((4,), 3e-18, dtype=torch.float64)
    assert _difference([large, -noise], [large, noise], []) == ""
    for wrong in (noise + 1e-6, noise * torch.nan):
        assert _difference([large, wrong], [large, noise], []) == "a result differs"
    assert _difference([noise, -noise], [noise, noise], []) == "a result differs"


@pytest.mark.parametrize("split", [False, True])
def test_functions_are_compiled_and_compared_before_the_first_batch(
    split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On random numbers that leave no gradient, no changed buffer and no held value behind."""
    import torch

    from nasty import NASTY
    from stagewright.execution import compiled
    from stagewright.execution.stage_runner import StageOptions, StageRunner
    from stagewright.execution.weights import Weights
    from stagewright.graph.split import split_graph
    from stagewright.schedule.action import Kind
    from stagewright.tracing.trace import trace_module

    calls: list[str] = []
    monkeypatch.setattr(
        torch, "compile", lambda call, **_: lambda *tensors: calls.append(call.__name__) or call(*tensors)
    )
    torch.manual_seed(0)
    case = NASTY["BatchNorm"]
    model, batch = case.model(), case.batch()
    (stage,) = split_graph(trace_module(model, batch), [])
    tensors = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    cpu = torch.device("cpu")
    weights = Weights([stage], tensors, cpu)
    runner = StageRunner(stage, weights, cpu, StageOptions(1.0, is_compiled=True))
    before = [tensor.clone() for tensor in (*weights.tensors.values(), *weights.gradients.values())]
    kinds = {Kind.F, Kind.I, Kind.W} if split else {Kind.F, Kind.B}
    runner.prepare(kinds)
    names = ("forward", "input_grad", "weight_grad") if split else ("forward", "backward")
    assert list(dict.fromkeys(calls)) == [f"stage0_{name}" for name in names]
    after = (*weights.tensors.values(), *weights.gradients.values())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not runner.held

    comparisons: list[object] = []
    monkeypatch.setattr(compiled, "_difference", lambda *tensors: comparisons.append(tensors) or "")
    runner.begin_step(0)
    runner.forward(0, {}, batch)
    if split:
        runner.input_grad(0, {})
        runner.weight_grad(0)
    else:
        runner.backward(0, {})
    assert not comparisons, "a batch compares nothing any more"


def train(rank: int, num_ranks: int, paths: list[str], without: str) -> list[tuple[list[float], list[str]]]:
    import torch
    import torch.distributed as dist
    from torch._inductor import config

    from stagewright.execution.session import Session

    if without:
        config.cpp.cxx = ("no-such-compiler",)
        config.force_disable_caches = True
    dist.init_process_group("gloo")
    results = []
    for path in paths:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session = Session(load_plan(path), torch.device("cpu"), None, random_weights=True)
            losses = [session.train_step(step, metered=step == 1).loss for step in range(3)]
        texts = [str(one.message) for one in caught if "is not compiled" in str(one.message)]
        results.append((losses, texts))
        dist.barrier()
    dist.destroy_process_group()
    return results
