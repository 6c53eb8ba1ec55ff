"""Documents that we wrote and a disk has changed: every bit is missed, unless nothing hangs on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import torture
from records import record_of
from stagewright.cli.app import app
from stagewright.cli.program_file import program_text, read_predicted_program
from stagewright.cluster import load_cluster
from stagewright.documents import CHECKSUM, sealed, unsealed
from stagewright.errors import InputError, StagewrightError
from stagewright.execution.record import load_record
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.joint.prediction import prediction_of
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.search import Effort, search
from stagewright.planning.plan import Plan, load_plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.step_times import simulated
from stagewright.schedule import build
from stagewright.tracing.models.reference import resolve


@dataclass(frozen=True)
class Kind:
    """One kind of document: how a file of it is written and read."""

    name: str
    write: Callable[[Path, Plan], object]
    read: Callable[[Path], object]


def write_record(path: Path, plan: Plan) -> None:
    costs = plan.predictions.costs
    assert costs is not None
    record_of(plan, simulated(stage_program(plan), costs), [0.0, 0.5]).save(path)


def write_program(path: Path, plan: Plan) -> None:
    layers = LayerTable.of([0.1] * 4, [0.1] * 4, [0.2] * 4, saved_bytes=[8.0] * 4)
    found = search(JointProblem.of(layers, 2, 3), Effort(rounds=1))
    path.write_text(
        program_text(path, found.best.program, prediction_of(found.best, found.bound.seconds, "given"))
    )


KINDS = [
    Kind("plan.json", lambda path, plan: plan.save(path), load_plan),
    Kind("record.json", write_record, load_record),
    Kind("program.json", write_program, read_predicted_program),
]


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = Job(global_batch=4, sequence_length=16)
    return estimate(resolve("tiny-llama", {"num_hidden_layers": 2}), load_cluster("2x-h100"), job, pp=2)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def path(kind: Kind, plan: Plan, tmp_path: Path) -> Path:
    kind.write(tmp_path / kind.name, plan)
    return tmp_path / kind.name


@pytest.mark.torture
def test_no_flipped_bit_changes_what_a_document_says(
    kind: Kind, path: Path, record_property: Callable[[str, object], None]
) -> None:
    whole, dice = path.read_bytes(), torture.chance(kind.name)
    content = kind.read(path)
    num_noticed = 0
    for _ in range(torture.FLIPS):
        bit = dice.randrange(8 * (120 if dice.random() < 0.3 else len(whole)))  # the checksum comes first
        path.write_bytes(torture.flipped(whole, bit))
        try:
            assert kind.read(path) == content, f"bit {bit}"
        except StagewrightError:
            num_noticed += 1
    assert num_noticed > 0.9 * torture.FLIPS
    record_property("damage", (f"bits flipped in {kind.name}", torture.FLIPS))


def test_a_changed_document_is_refused_until_it_says_that_this_is_meant(kind: Kind, path: Path) -> None:
    content = kind.read(path)
    document = json.loads(path.read_text())
    assert next(iter(document)) == CHECKSUM  # where somebody who edits the file sees it
    path.write_text(json.dumps(document, sort_keys=True, indent=8))
    assert kind.read(path) == content
    (figure,) = {"makespan_seconds", "predicted_step_seconds", "microbatch_size"} & document.keys()
    path.write_text(json.dumps(document | {figure: document[figure] * 2}))
    with pytest.raises(
        InputError,
        match=rf"{kind.name}' has changed .* on purpose, remove the key 'checksum'",
    ):
        kind.read(path)
    del document[CHECKSUM]
    path.write_text(json.dumps(document))
    assert kind.read(path) == content


@pytest.mark.parametrize("stated", [1, None, "", [], "sha256:", "sha256:" + "0" * 64])
def test_no_other_checksum_is_right(stated: Any) -> None:
    with pytest.raises(InputError, match="here has changed since it was written"):
        unsealed({"a": 1, CHECKSUM: stated}, "here")


@pytest.mark.parametrize("document", [[], [{"checksum": 1}], 3, "checksum", None, {}, {"a": {"checksum": 1}}])
def test_what_was_not_sealed_is_taken_as_it_is(document: Any) -> None:
    assert unsealed(document, "here") == document


def test_a_sealed_text_is_json_with_the_same_content() -> None:
    content = {"a": [1.0, 1e-7, -0.0, 1e16, 2**60, None, "ä😀\n"], "b": {"": True}}
    for text in (json.dumps(content), json.dumps(content, indent=1, ensure_ascii=False)):
        assert unsealed(json.loads(sealed(text)), "here") == content


def test_a_program_that_was_changed_is_refused(tmp_path: Path) -> None:
    program, path = build("1f1b", 2, 3), tmp_path / "program.json"
    path.write_text(sealed(json.dumps(program.to_document())))
    assert read_predicted_program(path) == (program, None)
    path.write_text(path.read_text().replace('"name": "1f1b"', '"name": "1f1c"'))
    with pytest.raises(InputError, match=r"program.json' has changed"):
        read_predicted_program(path)


def test_verbs_say_that_a_file_was_changed(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(path.read_text().replace('"dp": 1', '"dp": 2'))
    for verb in ("check", "simulate", "run"):
        done = CliRunner().invoke(app, [verb, str(path)])
        assert done.exit_code == 2 and "has changed since it was written" in done.stderr
        assert done.stdout == ""
