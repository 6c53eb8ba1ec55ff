"""`stagewright plan-costs`."""

import json

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.execution.record import RankRecord, Record
from stagewright.planning.plan import load_plan
from stagewright.schedule import Program, verify

TABLE = "layer,forward_s,input_grad_s,weight_grad_s,activation_bytes\n" + "".join(
    f"layer{n},{1 + n % 3},{2 + n % 2},1,100\n" for n in range(6)
)


def plan(*words):
    verb = "plan-costs" if words and words[0].endswith(".csv") else "plan"
    return CliRunner().invoke(app, [verb, *words])


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "layers.csv"
    path.write_text(TABLE)
    return path


def test_the_document_and_the_program_agree(table, tmp_path):
    output = tmp_path / "program.json"
    done = plan(
        str(table), "--ranks", "2", "--microbatches", "3", "--seconds", "0.1", "--json", "-o", str(output)
    )  # fmt: skip
    document = json.loads(done.stdout)
    even = next(each for each in document["baselines"] if each["schedule"] == "1f1b, even")
    assert document["lower_bound_seconds"] <= document["makespan_seconds"] <= even["makespan_seconds"]
    written = json.loads(output.read_text())
    assert written["cuts"] == document["cuts"]
    assert verify(Program.from_document(written)).placement.rank_of_stage == tuple(document["rank_of_stage"])


def test_what_is_missing_is_named(table):
    done = plan(str(table), "--ranks", "2")
    assert done.exit_code == 2 and "--microbatches" in done.stderr
    done = plan(str(table), "--ranks", "2", "--microbatches", "4", "--speeds", "1,2,3")
    assert done.exit_code == 2 and "give 2 numbers" in done.stderr
    assert CliRunner().invoke(app, ["plan-costs"]).exit_code == 2


def test_a_record_says_which_rank_is_slow(table, tmp_path):
    words = (
        "--global-batch",
        "4",
        "--sequence-length",
        "32",
        "--dtype",
        "fp32",
        "--pp",
        "2",
        "--schedule",
        "1f1b",
    )
    ran, record = tmp_path / "plan.json", tmp_path / "record.json"
    assert plan("tiny-llama", "--cluster", "2x-rtx3090", *words, "-o", str(ran)).exit_code == 0
    planned = [rank.busy_seconds for rank in load_plan(ran).predictions.ranks]
    Record(
        stagewright="0", model="m", device="cpu", losses=(1.0,), gradient_norms=(1.0,), step_seconds=(1.0,),
        metered_steps=(), predicted_step_seconds=1.0,
        ranks=tuple(
            RankRecord(rank=rank, pipeline_rank=rank, replica=0, allocated_peak_bytes=1, sent_bytes=0,
                       busy_seconds=(1 + 3 * rank) * planned[rank], actions=())
            for rank in range(2)
        ),
    ).save(record)  # fmt: skip
    costs = str(table), "--ranks", "2", "--microbatches", "4", "--seconds", "0.1", "--json"
    equal, slow = (
        json.loads(plan(*costs, *more).stdout) for more in ((), ("--record", str(record), "--ran", str(ran)))
    )
    # Speeds of 1.6 and 0.4 of the median: more of the layers go to the first rank.
    assert slow["makespan_seconds"] != equal["makespan_seconds"]
    assert len(_layers_of(slow, 1)) < len(_layers_of(slow, 0))
    done = plan(*costs, "--record", str(record))
    assert done.exit_code == 2 and "--ran PLAN" in done.stderr


def _layers_of(document, rank):
    ends = [0, *document["cuts"], 6]
    return [
        layer
        for stage, on in enumerate(document["rank_of_stage"])
        if on == rank
        for layer in range(ends[stage], ends[stage + 1])
    ]
