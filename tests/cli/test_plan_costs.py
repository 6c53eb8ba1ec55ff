"""`stagewright plan --costs`."""

import json

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.schedule import Program, verify

TABLE = "layer,forward_s,input_grad_s,weight_grad_s,activation_bytes\n" + "".join(
    f"layer{n},{1 + n % 3},{2 + n % 2},1,100\n" for n in range(6)
)


def plan(*words):
    return CliRunner().invoke(app, ["plan", *words])


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "layers.csv"
    path.write_text(TABLE)
    return path


def test_the_document_and_the_program_agree(table, tmp_path):
    output = tmp_path / "program.json"
    done = plan(
        "--costs", str(table), "--ranks", "2", "--microbatches", "3", "--seconds", "0.1", "--json", "-o", str(output)
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert (
        document["lower_bound_seconds"]
        <= document["makespan_seconds"]
        <= document["ablation"][0]["makespan_seconds"]
    )
    written = json.loads(output.read_text())
    assert written["cuts"] == document["cuts"]
    assert verify(Program.from_document(written)).placement.rank_of_stage == tuple(document["rank_of_stage"])
    assert {"1f1b, even", "AdaPtis' tuner"} <= {each["schedule"] for each in document["baselines"]}


def test_what_is_missing_is_named(table):
    done = plan("--costs", str(table), "--ranks", "2")
    assert done.exit_code == 2 and "--microbatches" in done.stderr
    done = plan("--costs", str(table), "--ranks", "2", "--microbatches", "4", "--speeds", "1,2,3")
    assert done.exit_code == 2 and "2 positive numbers" in done.stderr
    assert plan().exit_code == 2
