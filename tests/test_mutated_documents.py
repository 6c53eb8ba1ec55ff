"""Documents that are wrong in any way are refused in words, or harmless: never a fault, never without end, and no word to
the terminal that it would obey.

With STAGEWRIGHT_TORTURE=1 five thousand documents are drawn anew instead of the same few hundred.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.main import get_command

from mutations import as_json, as_lines, as_toml, as_words, mutated
from records import record_of
from stagewright.cli.app import app
from stagewright.cluster import load_cluster
from stagewright.errors import StagewrightError
from stagewright.planning.assignment.rank_file import read_rank_file
from stagewright.planning.job import load_job
from stagewright.planning.plan import ClusterSection, Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.step_times import simulated
from stagewright.schedule import build
from stagewright.schedule.torch_csv import write_torch_csv
from stagewright.tracing.models.build import build as build_model
from stagewright.tracing.models.reference import resolve
from torture import TORTURE

TOTAL = 5000 if TORTURE else 360
COMMAND = get_command(app)
"""Made once: it takes longer than reading a document."""
SECONDS = 10
"""Of a processor, after which a document counts as one without end."""


def square(figure: float) -> list[list[float]]:
    """Of every pair of four."""
    return [[0.0 if row == column else figure for column in range(4)] for row in range(4)]


STAGE = {
    "start": 0, "stop": 9, "forward_seconds": 0.1, "input_grad_seconds": 0.1, "weight_grad_seconds": 0.1,
    "parameter_bytes": 4, "saved_bytes": 8, "boundary_bytes": 2,
}  # fmt: skip
RANK = {
    "rank": 0, "busy_seconds": 0.6, "allocated_peak_bytes": 9, "reserved_peak_bytes": 9, "categories": {"saved": 9},
    "peak_at": "0F1", "saved": [{"stage": 0, "num_microbatches": 2, "num_bytes": 8}],
}  # fmt: skip
COSTS = {
    "forward_seconds": [0.1, 0.1], "input_grad_seconds": [0.1, 0.1], "weight_grad_seconds": [0.1, 0.1],
    "backward_seconds": [0.2, 0.2], "recompute_seconds": [0.0, 0.1], "sum_seconds": [0.0, 0.0], "norm_seconds": 0.01,
    "optimizer_seconds": [0.05, 0.04],
    "transfers": [
        {"source": 0, "target": 1, "value_bytes": 2, "gradient_bytes": 2, "value_seconds": 0.01, "gradient_seconds": 0.01}
    ],
}  # fmt: skip
PLAN: dict[str, Any] = {
    "version": 1,
    "stagewright": "0.1.0",
    "model": {"text": "absent_nets:build", "overrides": {"width": 4}, "digest": "0", "name": "nets"},
    "job": {"global_batch": 8, "sequence_length": 32, "dtype": "fp32", "betas": [0.9, 0.95]},
    "cluster": ClusterSection.of(load_cluster("4x-h100")).model_dump(mode="json"),
    "dp": 2,
    "pp": 2,
    "num_stages": 2,
    "microbatch_size": 2,
    "num_microbatches": 2,
    "cuts": ["layers.1:0"],
    "placement": [0, 1],
    "devices": [0, 2, 1, 3],
    "schedule": "1f1b",
    "program": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1R0", "1B0", "1F1", "1R1", "1B1"]],
    "memory_policy": ["keep", {"recompute": ["layers.1:0"], "offload": []}],
    "sharding": [1, 0],
    "predictions": {
        "step_seconds": 1.18, "lower_bound_seconds": 0.5, "tokens_per_second": 256.0, "mfu": 0.5, "bubble_fraction": 0.1,
        "ranks": [RANK, {**RANK, "rank": 1}], "stages": [STAGE, {**STAGE, "start": 9, "stop": 18}], "costs": COSTS,
    },
}  # fmt: skip
RECORD: dict[str, Any] = record_of(
    loaded := Plan.model_validate(PLAN),
    simulated(stage_program(loaded), loaded.predictions.costs),  # pyright: ignore[reportArgumentType]
    [0.0, 0.5],
).model_dump(mode="json")
RECORD["ranks"] = [
    {**rank, "rank": 2 * rank["pipeline_rank"] + replica, "replica": replica}
    for rank in RECORD["ranks"]
    for replica in (0, 1)
]
CLUSTER: dict[str, Any] = {
    "name": "ours",
    "nodes": [
        {
            "count": 2,
            "devices_per_node": 2,
            "num_nics": 1,
            "device": "h100",
            "inter_node": {"bandwidth": "25 GB/s"},
        },
    ],
    "measured": {
        "between": "ranks",
        "bandwidth": square(1e9),
        "latency_s": square(1e-5),
    },
    "collectives": [
        {
            "operation": "all-reduce",
            "spans": "cluster",
            "num_ranks": 4,
            "num_bytes": [1e3, 1e6],
            "seconds": [1e-5, 1e-3],
        }
    ],
}
WHOLE_CLUSTER: dict[str, Any] = load_cluster("2x2x-a100-40").model_dump(mode="json", exclude_none=True)
JOB: dict[str, Any] = {
    "global_batch": 8, "sequence_lengths": [16, 32], "dtype": "bf16", "memory_limit": "16GiB", "betas": [0.9, 0.95],
    "learning_rate": 3e-4, "seed": 0, "clip_norm": 1.0,
}  # fmt: skip
LAYER = {
    "layer": "block 0", "forward_s": 0.1, "input_grad_s": 0.1, "weight_grad_s": 0.1, "parameter_bytes": 4.0,
    "activation_bytes": 8.0, "boundary_bytes": 2.0,
}  # fmt: skip
COSTS_ROWS = [{**LAYER, "layer": f"block {index}"} for index in range(4)]
CONFIGS = [
    dict(resolve(name).config or {})
    for name in ("tiny-llama", "tiny-mixtral", "tiny-deepseek-v3", "tiny-gpt2")
]
PROGRAM = build("zb-h1", 2, 3)
PROMISE: dict[str, Any] = {
    "cuts": [2], "makespan_seconds": 1.32, "lower_bound_seconds": 0.5, "peak_bytes": [20.0, 20.0],
    "costs": {
        "forward_seconds": [0.1, 0.2], "input_grad_seconds": [0.1, 0.1], "weight_grad_seconds": [0.1, 0.1],
        "saved_bytes": [8.0, 8.0], "held_bytes": [8.0, 8.0], "base_bytes": [4.0, 4.0], "transfer_seconds": [0.01],
        "transfer_bytes": [2.0],
    },
    "assumptions": {
        "num_layers": 4, "bytes_per_second": 200.0, "bandwidth": "given", "speeds": [1.0, 1.0],
        "memory_limits": [99.0, 99.0],
    },
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One kind of document: valid ones, how they are written under which name, and all that reads them."""

    name: str
    documents: list[Any]
    write: Callable[[Any], str]
    read: Callable[[Path], object]


class Refused(StagewrightError):
    """What a verb said as it left with an exit code."""


def verb(*words: object) -> None:
    """One verb in this process; what it says is plain. Raises `Refused` if it leaves with 1 or 2."""
    done = CliRunner().invoke(COMMAND, [*map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    shown = [one for one in done.output if not one.isprintable() and one not in "\n\t"]
    assert not shown, f"a terminal would obey {shown!r}"
    if done.exit_code:
        assert done.exit_code in (1, 2)
        raise Refused(done.output)


def plan_verbs(path: Path) -> None:
    pictures = [
        word for kind in ("svg", "html", "trace") for word in (f"--{kind}", path.with_name(f"picture.{kind}"))
    ]
    verb("simulate", path, *pictures)
    verb("compare", path, path.with_name("record.json"))
    measured = ("--ran", path, "--record", path.with_name("record.json"))
    verb("plan-costs", path.with_name("costs.csv"), "-p", 2, "-m", 2, "--seconds", 0, *measured)
    verb("check", path)


def record_verbs(path: Path) -> None:
    verb("compare", path.with_name("plan.json"), path)
    verb("compare", path.with_name("plan.json"), path, "--json")


def program_verbs(path: Path) -> None:
    verb("schedule", path, "--trace", path.with_name("picture.trace"), "--svg", path.with_name("picture.svg"))
    verb("check", path)


def cost_verbs(path: Path) -> None:
    verb("schedule", "1f1b", "-p", 2, "-m", 3, "--costs", path)
    verb("schedule", "zb-auto", "-p", 2, "-m", 3, "--costs", path, "--json")


def used_cluster(path: Path) -> None:
    cluster = load_cluster(path)
    for src in range(min(cluster.num_devices, 4)):
        cluster.point_to_point_seconds(1e6, src, (src + 1) % cluster.num_devices)
    ClusterSection.of(cluster).model_dump_json()
    cluster.device.matmul_seconds(1e12, "bf16")
    assert cluster.device.memory_seconds(1e9) > 0


def named_matrix(path: Path) -> None:
    document = {**CLUSTER, "measured": {"between": "ranks", "bandwidth": path.name, "bandwidth_unit": "MB/s"}}
    path.with_name("of_matrix.toml").write_text(as_toml(document))
    used_cluster(path.with_name("of_matrix.toml"))


def shaped(path: Path) -> None:
    reference = resolve(str(path))
    if TORTURE:
        build_model(reference, 1, 16, fake=True)


KINDS = [
    Kind("plan.json", [PLAN], as_json, plan_verbs),
    Kind("record.json", [RECORD], as_json, record_verbs),
    Kind("program.json", [PROGRAM.to_document(), PROGRAM.to_document() | PROMISE], as_json, program_verbs),
    Kind("program.txt", [[line.split() for line in PROGRAM.to_text().splitlines()]], as_words, program_verbs),
    Kind("program.csv", [[line.split(",") for line in write_torch_csv(PROGRAM).splitlines()]], as_lines, program_verbs),
    Kind("costs.json", [COSTS_ROWS], as_json, cost_verbs),
    Kind("costs.csv", [[list(LAYER), *(list(row.values()) for row in COSTS_ROWS)]], as_lines, cost_verbs),
    Kind("cluster.toml", [CLUSTER, WHOLE_CLUSTER], as_toml, used_cluster),
    Kind("links.csv", [square(900)], as_lines, named_matrix),
    Kind("job.toml", [JOB], as_toml, load_job),
    Kind("ranks.csv", [[["rank", "node", "device"], [0, 0, 1], [1, 0, 0]]], as_lines,
         lambda path: read_rank_file(path, load_cluster("2x2x-h100"), 2)),
    Kind("config.json", CONFIGS, as_json, shaped),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a valid document of every kind, which others are read beside."""
    made = tmp_path_factory.mktemp("documents")
    for kind in KINDS:
        (made / kind.name).write_text(kind.write(kind.documents[0]))
    return made


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Ends what takes longer of the processor, whatever else the machine does meanwhile."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.torture
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_mutated_document_is_refused_in_words_or_harmless(
    kind: Kind, folder: Path, record_property: Callable[[str, object], None]
) -> None:
    for document in kind.documents:
        (folder / kind.name).write_text(kind.write(copy.deepcopy(document)))
        kind.read(folder / kind.name)  # what is not mutated is read; compiled code is loaded, too

    @settings(
        max_examples=TOTAL // len(KINDS),
        deadline=None,
        derandomize=not TORTURE,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(kind.documents).flatmap(lambda document: mutated(document, kind.write)))
    def check(content: bytes) -> None:
        (folder / kind.name).write_bytes(content)
        with limited(SECONDS):
            try:
                kind.read(folder / kind.name)
            except StagewrightError as error:
                assert str(error)

    try:
        check()
        record_property("damage", ("documents mutated", TOTAL // len(KINDS)))
    finally:
        (folder / kind.name).write_text(kind.write(kind.documents[0]))
