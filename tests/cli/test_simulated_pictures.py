"""`simulate` draws plans whose ranks also gather, reduce and offload: bytes at the ends of the computations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Stage
from stagewright.planning.estimate import graph_of, staged_model_of
from stagewright.planning.plan import Plan, StagePolicy, load_plan
from stagewright.planning.plan_stages import stage_cuts, stage_program
from stagewright.planning.prediction.predict import rank_memories, run_timeline
from stagewright.report.pictures.plan_memory import plan_curves
from stagewright.schedule import Kind
from stagewright.schedule.action import COMPUTE
from stagewright.schedule.lower import insert_recomputation

WORDS = (
    "plan", "tiny-llama", "--set", "num_hidden_layers=2", "--global-batch", "8", "--sequence-length", "32",
    "--dtype", "fp32", "--microbatch", "1", "--schedule", "1f1b", "--pp", "2",
)  # fmt: skip


def planned(path: Path, *words: str) -> Plan:
    done = CliRunner().invoke(app, [*WORDS, *words, "-o", str(path)])
    assert done.exit_code == 0, done.stderr
    return load_plan(path)


def offloading(plan: Plan) -> Plan:
    """`plan`, with half of what the stages save on the host in the meantime."""
    graph = graph_of(plan)
    stages = split_graph(graph, stage_cuts(plan, graph))
    program = insert_recomputation(stage_program(plan), range(len(stages)))
    policies = tuple(StagePolicy(offload=_saved_names(stage)[::2]) for stage in stages)
    return plan.model_copy(update={"program": tuple(map(_texts, program.ranks)), "memory_policy": policies})


def _texts(actions: tuple) -> tuple[str, ...]:
    return tuple(map(str, actions))


def _saved_names(stage: Stage) -> tuple[str, ...]:
    made = (stage.graph.values[value].node for value in stage.saved)
    return tuple(sorted({stage.graph.nodes[node].name for node in made if node in stage.graph.position}))


def check_drawn(path: Path, plan: Plan, kind: Kind) -> None:
    assert kind in {action.kind for action in stage_program(plan)}
    files = {name: path.with_suffix(f".{name}") for name in ("svg", "html", "trace")}
    options = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    done = CliRunner().invoke(app, ["simulate", str(path), *options])
    assert done.exit_code == 0, done.output
    assert files["svg"].read_text().startswith("<svg ")
    assert json.loads(files["trace"].read_text())["traceEvents"]
    line = staged_model_of(plan, plan.cluster.load())
    timeline, memories = run_timeline(line), rank_memories(line)
    for rank, curve in enumerate(plan_curves(line, timeline)):
        ends = [event.end_s for event in timeline.events(rank) if event.action.kind in COMPUTE]
        times = curve.time_s.tolist()
        assert times == sorted(times) and {0.0, *ends} <= {*times} and len(times) > 2 * len(ends)
        assert len(curve.held) == len(times) and 0.7 * curve.peak < curve.held.max() <= curve.peak
        assert np.unique(curve.held).size > 2
        assert np.array_equal(sum(curve.categories.values()), curve.held)
        assert min(values.min() for values in curve.categories.values()) >= 0
        if curve.held.max() == curve.peak:
            at_peak = {name: values[curve.held.argmax()] for name, values in curve.categories.items()}
            told = memories[rank].categories
            assert {name: size for name, size in at_peak.items() if size} == {
                n: b for n, b in told.items() if b
            }


def test_a_plan_whose_replicas_share_parameters_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    check_drawn(path, planned(path, "--cluster", "4x-rtx3090", "--dp", "2", "--zero", "3"), Kind.GATHER)


def test_a_plan_that_offloads_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = offloading(planned(path, "--cluster", "2x-rtx3090", "--dp", "1"))
    plan.save(path)
    check_drawn(path, plan, Kind.R)
