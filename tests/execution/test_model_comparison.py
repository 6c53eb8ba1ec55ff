"""A graph is compared with its model before the first run: what differs is refused by name, and what is equal is kept."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from plans import make_plan
from torch import Tensor, nn

import random_models
from multiprocess import run_ranks
from stagewright.errors import RunError, TraceError
from stagewright.execution import first_comparison
from stagewright.execution.model_comparison import TOLERANCES, Refusal, differences, tolerance_of
from stagewright.execution.trainer import Trainer
from stagewright.tracing.cache import is_compared, trace
from stagewright.tracing.models.build import BuiltModel
from stagewright.tracing.models.reference import resolve
from stagewright.tracing.trace import trace_module

FACTORY = f"{Path(random_models.__file__)}:build"


class Net(nn.Module):
    """A linear layer, whose output goes through `rest`."""

    def __init__(self, rest: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.linear, self.rest, self.num_calls = nn.Linear(4, 4), rest, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.linear(x)).square().mean()


def hooked() -> nn.Module:
    net = Net()
    net.linear.weight.register_hook(lambda grad: grad * 2)
    return net


def module_hooked() -> nn.Module:
    net = Net()
    net.linear.register_full_backward_hook(lambda module, inputs, outputs: None)

    def clear(bias: Tensor) -> None:
        bias.grad = torch.zeros_like(bias)

    net.linear.bias.register_post_accumulate_grad_hook(clear)
    return net


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x) / self.num_calls


class Writing(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.bias.mul_(0.5)
        return super().forward(x)


MODELS = {
    "a hook": (
        hooked,
        "gradient of 'linear.weight' .* The cause: the hook hooked.* on parameter 'linear.weight'",
    ),
    "a hook after accumulation": (module_hooked, "gradient of 'linear.bias' .* on parameter 'linear.bias'"),
    "a function": (partial(Net, random_models.Reverse.apply), "gradient .* a custom backward in Reverse"),
    "a counter": (Counting, "forward changes 'num_calls' of module ''"),
    "a parameter that is written": (Writing, "parameter 'linear.bias'"),
}


def maker(model: Callable[[], nn.Module]) -> Callable[[], BuiltModel]:
    def make() -> BuiltModel:
        torch.manual_seed(0)
        net = model().double()
        return BuiltModel(net, {"x": torch.randn(3, 4, dtype=torch.float64)}, 3)

    return make


@pytest.mark.parametrize("what", MODELS)
def test_a_graph_that_lacks_something_of_its_model_is_refused_with_the_cause(what: str) -> None:
    """The graph is that of the model without it, as a trace that loses it would have it."""
    model, expected = MODELS[what]
    plain = maker(lambda: Net(torch.neg) if what == "a function" else Net())()
    graph = trace_module(plain.module, plain.inputs)
    differing = differences(maker(model), graph)
    with pytest.raises(TraceError, match=f"'it' is not the model: .*{expected}.*--no-compare"):
        raise Refusal("it", differing, maker(model), 0).error()


def test_other_random_draws_are_a_difference() -> None:
    plain = maker(lambda: Net(nn.Dropout(0.5)))()
    graph = trace_module(plain.module, plain.inputs)
    assert differences(maker(lambda: Net(nn.Dropout(0.5))), graph) == []
    twice = differences(maker(lambda: Net(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0001)))), graph)
    assert any("draws random numbers 2 times and its graph 1 times" in str(one) for one in twice)


def test_random_numbers_of_python_are_refused_also_where_both_runs_drew_alike() -> None:
    plain = maker(Net)()
    graph = trace_module(plain.module, plain.inputs)
    make = maker(lambda: Net(lambda x: x.tanh() * (1 + (random.random() > 0.85))))
    random.seed(0)  # then the first two draws are what they mostly are
    with pytest.raises(
        TraceError, match=r"under other random numbers .* The cause: .* random numbers of Python or numpy"
    ):
        raise Refusal("it", differences(make, graph), make, 0).error()
    assert differences(maker(lambda: Net(lambda x: x.tanh() + 0 * random.random())), graph) == []


def test_what_begins_at_zero_hides_nothing_behind_it() -> None:
    """A gate that is zero at first, behind which the gradient is wrong."""

    class Gated(Net):
        def __init__(self, rest: Any = torch.tanh) -> None:
            super().__init__(rest)
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.gate * self.rest(self.linear(x))).square().mean()

    plain = maker(lambda: Gated(lambda x: x.view_as(x)))()
    graph = trace_module(plain.module, plain.inputs)
    differing = differences(maker(lambda: Gated(random_models.Reverse.apply)), graph)
    assert {one.parameter for one in differing} == {"linear.weight", "linear.bias"}


def test_a_large_model_is_compared_narrow_with_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = resolve("tiny-llama", {"num_hidden_layers": 5, "hidden_size": 256, "intermediate_size": 640})
    asked = {
        "microbatch_size": 4,
        "sequence_length": 128,
        "dtype": "bfloat16",
        "target": "cuda",
        "autocast": None,
    }
    monkeypatch.setattr(first_comparison, "MOST_FLOP", 5e8)
    said = first_comparison.compare(reference, asked)
    assert "every layer of it, but narrow, microbatch 2, 64 tokens a sample, float64" in said
    monkeypatch.setattr(first_comparison, "MOST_FLOP", 1.0)
    assert first_comparison.compare(reference, asked).startswith(
        "warning: 'tiny-llama' and its graph are not compared"
    )


@pytest.mark.compares
def test_equal_models_are_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path))
    plan = make_plan(tmp_path / "plan.json", FACTORY, overrides={"seed": 1, "only": "SplitHalves"}, pp=1)
    assert not plan.is_compared
    first_comparison.compare_once(plan)
    said = capsys.readouterr().err
    assert said.startswith("compared 'build' with its graph (as it is, microbatch 1, 32 tokens a sample, ")
    assert plan.is_compared and is_compared(plan.model.resolved(), plan.traced_whole())
    monkeypatch.setattr(first_comparison, "compare", None)
    first_comparison.compare_once(plan)
    assert capsys.readouterr().err == ""


def test_children_run_backwards_after_a_trace_and_a_backward() -> None:
    """Builds of torch for GPUs pretend in a trace that there is one, for which a backward would start a thread."""
    script = """
        import os
        import torch
        from stagewright.machine import forked
        from stagewright.tracing.trace import trace_module

        trace_module(torch.nn.Linear(2, 1), {"input": torch.ones(1, 2)})

        def backward(answers):
            torch.ones((), requires_grad=True).backward()
            answers.write(b"done")

        backward(open(os.devnull, "wb"))
        child, answers = forked(backward)
        print(os.read(answers, 4).decode())
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.compares
def test_a_process_whose_children_cannot_run_backwards_compares_by_itself(tmp_path: Path) -> None:
    make_plan(tmp_path / "plan.json", FACTORY, overrides={"seed": 1, "only": "SplitHalves"}, pp=1)
    script = """
        import sys
        import torch
        from stagewright.execution.first_comparison import compare_once
        from stagewright.planning.plan import load_plan

        class Nested(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, depth):
                ctx.depth = depth
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                if ctx.depth:
                    with torch.enable_grad():
                        Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()
                return grad, None

        Nested.apply(torch.ones(1, requires_grad=True), 100).backward()  # starts threads from depth 60 on
        compare_once(load_plan(sys.argv[1]))
    """
    command = [sys.executable, "-c", dedent(script), str(tmp_path / "plan.json")]
    environment = {**os.environ, "STAGEWRIGHT_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stderr.startswith("compared 'build' with its graph (as it is"), done.stderr


@pytest.mark.compares
def test_the_death_of_the_process_that_compares_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path))
    plan = make_plan(tmp_path / "plan.json", FACTORY, overrides={"seed": 1, "only": "SplitHalves"}, pp=1)
    monkeypatch.setattr(first_comparison, "compare", lambda *given: os.kill(os.getpid(), 15))
    with pytest.raises(
        TraceError, match=r"PyTorch ended the process \(SIGTERM\) that ran 'build' and its graph"
    ):
        first_comparison.compare_once(plan)
    assert not plan.is_compared


@pytest.mark.multiprocess
def test_a_trainer_trains_no_graph_that_is_not_the_model(tmp_path: Path) -> None:
    make_plan(
        tmp_path / "plan.json", FACTORY, overrides={"seed": 1, "only": "randomised_relu"}, pp=1, num_steps=1
    )
    refused, losses = run_ranks(fit, 1, str(tmp_path), timeout=60)[0]
    assert (
        "failed at comparing the graph with the model: the graph traced from 'build' is not the model"
        in refused
    )
    assert "gradient" in refused
    assert len(losses) == 1


def fit(rank: int, num_ranks: int, folder: str) -> tuple[str, list[float]]:
    """What is said where it compares, and the losses where it does not."""
    os.environ |= {"LOCAL_RANK": str(rank), "STAGEWRIGHT_TEST_COMPARES": "1"}
    given: dict[str, Any] = {"out": f"{folder}/out", "device": "cpu"}
    record = Trainer(f"{folder}/plan.json", compare=False, **given).fit()
    assert record is not None
    with pytest.raises((RunError, TraceError)) as error:
        Trainer(f"{folder}/plan.json", **given).fit()
    return str(error.value), [float(loss or 0.0) for loss in record.losses]


def test_a_graph_that_computes_in_float32_is_allowed_its_rounding() -> None:
    graph = trace("tiny-llama", 1, 8, "float64")  # whose norms do
    assert tolerance_of(graph) == TOLERANCES["float32"]
    kept = tuple(value for value in graph.values if value.meta.dtype != "float32")
    assert tolerance_of(replace(graph, values=kept)) == TOLERANCES["float64"]
