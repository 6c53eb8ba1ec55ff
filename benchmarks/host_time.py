"""Host time of the executor: per microbatch next to eager PyTorch and to a loop over the same C++ bindings with their
arguments at hand, and per action beyond its operators.

    python benchmarks/host_time.py [--repeats 30] [--microbatches 8] [--stages 4] [--json]

One process, tensors so small that the host is all there is; seconds are those the processor spent on it. What is compared
takes turns. Prints medians of the paired ratios (or differences) and 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from figures import interval, machine

os.environ.setdefault("OMP_NUM_THREADS", "1")

SIZES = {
    "tiny-llama": {
        "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
    },
    "tiny-gpt2": {"num_hidden_layers": 4, "n_embd": 32, "vocab_size": 96, "dropout": 0},
}  # fmt: skip
LENGTH = 8
BAR_RATIO, BAR_LOOP, BAR_SECONDS = 1.1, 1.15, 40e-6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    found = {model: measured(model, options) for model in SIZES}
    if options.json:
        print(json.dumps({"machine": machine(), "options": vars(options), "results": found}, indent=1))
        return
    for model, row in found.items():
        low, high = row["ratio_interval"]
        print(
            f"{model:11} a microbatch: ours {row['ours_s'] * 1e6:.0f} us, eager {row['eager_s'] * 1e6:.0f} us, ratio "
            f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}], bar {BAR_RATIO}"
        )
        low, high = row["loop_interval"]
        print(
            f"{model:11} an operator: ours {row['operator_s'] * 1e6:.2f} us, next to a loop over the {row['num_calls']} "
            f"bindings of a microbatch {row['loop_ratio']:.3f} [{low:.3f}, {high:.3f}], bar {BAR_LOOP}"
        )
        low, high = (1e6 * value for value in row["overhead_interval"])
        print(
            f"{model:11} an action beyond its operators: {row['overhead_s'] * 1e6:.1f} us [{low:.1f}, {high:.1f}], "
            f"bar {BAR_SECONDS * 1e6:.0f} us"
        )


def measured(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds in which every run has its turn."""
    count = options.microbatches
    one, _, calls = _ours(model, 1, count)
    many, operators, _ = _ours(model, options.stages, count)
    runs = {
        "ours": one, "loop": lambda: _loop(calls), "eager": _eager(model, count), "actions": many,
        "operators": operators,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for repeat in range(options.repeats + 3):
        for name in names if repeat % 2 else reversed(names):
            taken = _timed(runs[name])
            if repeat >= 3:
                seconds[name].append(taken)
    ratios = [ours / eager for ours, eager in zip(seconds["ours"], seconds["eager"], strict=True)]
    loop_ratios = [ours / loop for ours, loop in zip(seconds["ours"], seconds["loop"], strict=True)]
    num_actions = 2 * options.stages * count
    beyond = [(a - o) / num_actions for a, o in zip(seconds["actions"], seconds["operators"], strict=True)]
    return {
        "ours_s": statistics.median(seconds["ours"]) / count,
        "eager_s": statistics.median(seconds["eager"]) / count,
        "ratio": statistics.median(ratios),
        "ratio_interval": interval(ratios),
        "num_calls": len(calls) // count,
        "operator_s": statistics.median(seconds["ours"]) / len(calls),
        "loop_ratio": statistics.median(loop_ratios),
        "loop_interval": interval(loop_ratios),
        "overhead_s": statistics.median(beyond),
        "overhead_interval": interval(beyond),
    }


def _timed(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _data(count: int) -> list[dict[str, Any]]:
    import torch

    torch.manual_seed(1)
    return [{"input_ids": torch.randint(0, 96, (1, LENGTH))} for _ in range(count)]


def _eager(model: str, count: int) -> Callable[[], None]:
    from stagewright.tracing.models.build import build
    from stagewright.tracing.models.reference import resolve

    module = build(resolve(model, SIZES[model]), 1, LENGTH, "float32", seed=0).module
    data = _data(count)

    def run() -> None:
        module.zero_grad(set_to_none=False)
        for inputs in data:
            (module(**inputs) * (1.0 / count)).backward()

    return run


Calls = list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]


def _loop(calls: Calls) -> None:
    import torch

    with torch.no_grad():
        for function, args, kwargs in calls:
            function(*args, **kwargs)


def _recorded(runner: Any, run: Callable[[], None]) -> Calls:
    """Every call of an operator that `run` makes, with its arguments."""
    calls: Calls = []

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append((function, args, kwargs))
            return function(*args, **kwargs)

        return record

    scopes = [one.call.__globals__ for stage in runner.runners.values() for one in stage.functions.values()]
    originals = [{name: call for name, call in scope.items() if name.startswith("f_")} for scope in scopes]
    for scope, original in zip(scopes, originals, strict=True):
        scope.update({name: recording(call) for name, call in original.items()})
    accumulate = runner.weights.accumulate

    def add(parameter: int, gradient: Any) -> None:
        calls.append((runner.weights.gradients[parameter].add_, (gradient,), {}))
        accumulate(parameter, gradient)

    runner.weights.accumulate = add
    run()
    del runner.weights.accumulate
    for scope, original in zip(scopes, originals, strict=True):
        scope.update(original)
    return calls


def _ours(model: str, num_stages: int, count: int) -> tuple[Callable[[], None], Callable[[], None], Calls]:
    """A batch under the interpreter, the same functions of the same stages called one after the other, and the calls of
    operators that these make."""
    import torch

    from stagewright.execution.rank_runner import PipelineRank, RankRunner, stage_edges
    from stagewright.execution.stage_runner import StageOptions
    from stagewright.execution.weights import Weights
    from stagewright.graph.split import split_graph
    from stagewright.schedule.builders import build as build_schedule
    from stagewright.schedule.lower import insert_communication
    from stagewright.tracing.cache import trace
    from stagewright.tracing.models.build import build
    from stagewright.tracing.models.reference import resolve

    graph = trace(model, 1, LENGTH, "float32", SIZES[model])
    stages = split_graph(
        graph, [len(graph.forward_ids) * index // num_stages for index in range(1, num_stages)]
    )
    program = build_schedule("breadth-first", 1, count, num_stages)
    program = insert_communication(program, stage_edges(stages))
    module = build(resolve(model, SIZES[model]), 1, LENGTH, "float32", seed=0).module
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    cpu = torch.device("cpu")
    runner = RankRunner(
        stages, program, PipelineRank(0, [0]), Weights(stages, tensors, cpu), cpu, StageOptions(1.0 / count)
    )
    data = _data(count)

    def operators() -> None:
        runner.weights.begin_step()
        for stage in runner.runners.values():
            stage.begin_step(0)
        held: list[tuple[dict[int, torch.Tensor], ...]] = []
        with torch.no_grad():
            for inputs in data:
                held.append(_forwards(runner, inputs))  # noqa: PERF401 one after the other
            for values in reversed(held):
                _backwards(runner, values)

    return lambda: void(runner.run_batch(0, data)), operators, _recorded(runner, operators)


def void(result: object) -> None:
    """Lets go of a result."""


def _forwards(runner: Any, inputs: dict[str, Any]) -> tuple[dict[int, Any], ...]:
    """The forward functions of all stages; for each, the values that its backward starts from."""
    made: dict[int, Any] = {}
    kept = []
    for one in runner.runners.values():
        stage, function = one.stage, one.functions["forward"]
        made.update((value, inputs[stage.value(value).name]) for value in stage.inputs)
        outputs = function.call(
            [made[value] for value in function.inputs], one.resident, runner.weights.accumulate, one._reseed
        )
        made.update(zip(function.outputs, outputs, strict=True))
        kept.append({value: made[value] for value in stage.saved})
    return tuple(kept)


def _backwards(runner: Any, kept: tuple[dict[int, Any], ...]) -> None:
    cotangents: dict[int, Any] = {}
    for one, values in zip(reversed(runner.runners.values()), reversed(kept), strict=True):
        function, known = one.functions["backward"], {**values, **cotangents}
        inputs = [known[value] for value in function.inputs]
        outputs = function.call(inputs, one.resident, runner.weights.accumulate, one._reseed)
        cotangents.update(zip(function.outputs, outputs, strict=True))


if __name__ == "__main__":
    main()
