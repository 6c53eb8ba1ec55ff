"""`export` to other frameworks and `--from` their files, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stagewright.cli.app import app
from stagewright.cluster import load_cluster
from stagewright.export.reading import ModelRead, read_configuration
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.tracing.models.reference import resolve

MODEL = ("tiny-llama", "--set", "num_hidden_layers=4")
CLUSTER = ("--cluster", "4x-h100")


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of our own runtime, cut inside layers and with a schedule of its own."""
    job = Job(global_batch=16, sequence_length=64)
    reference = resolve("tiny-llama", {"num_hidden_layers": 4})
    plan = estimate(reference, load_cluster("4x-h100"), job, pp=2, dp=2, schedule="zb-h1")
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return path


def test_what_megatron_has_not_is_said_with_its_price(plan_file: Path, tmp_path: Path) -> None:
    done = call("export", plan_file, "--to", "megatron", "-o", tmp_path / "launch")
    assert done.exit_code == 0, done.stderr
    assert "the schedule zb-h1 is not among its schedules" in done.stderr
    assert "predicted to take" in done.stderr and "(runtime megatron-core+te)" in done.stderr
    script = (tmp_path / "launch" / "train.sh").read_text()
    for line in done.stderr.splitlines():
        assert f"# {line.partition(': ')[2]}" in script
    again = call("estimate", *MODEL, *CLUSTER, "--from", tmp_path / "launch" / "train.sh", "--json")
    assert again.exit_code == 0, again.stderr
    found = json.loads(again.stdout)
    assert f"{1e3 * found['step_seconds']:.1f} ms a step" in done.stderr


def test_one_file_is_written_by_its_ending(plan_file: Path, tmp_path: Path) -> None:
    assert call("export", plan_file, "--to", "megatron", "-o", tmp_path / "mine.json").exit_code == 0
    assert json.loads((tmp_path / "mine.json").read_text())[0] == "--num-layers"
    assert call("export", plan_file, "--to", "megatron", "-o", tmp_path / "llama-3.1").exit_code == 0
    assert {path.name for path in (tmp_path / "llama-3.1").iterdir()} == {"train.sh", "argv.json"}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused = call("export", plan_file, "--to", "megatron", "-o", tmp_path / "full")
    assert refused.exit_code == 2 and "is there already" in refused.stderr


def test_options_override_the_file(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun pretrain_gpt.py --pipeline-model-parallel-size 2 --micro-batch-size 2 --bf16 --global-batch-size 16 "
        "--seq-length 64 --lr 1e-4 --use-flash-attn"
    )
    words = ("estimate", *MODEL, *CLUSTER, "--from", script)
    done = call(*words)
    assert done.exit_code == 0, done.stderr
    assert (
        "pp 2 x dp 2, 1f1b, 4 microbatches of size 2\n" in done.stdout
        and "runtime megatron-core+te" in done.stdout
    )
    assert "5 settings read, 1 without influence, 2 not taken" in done.stderr
    assert "--use-flash-attn is not in the prediction" in done.stderr
    done = call(*words, "--microbatch", "1", "--global-batch", "8", "--runtime", "stagewright")
    assert "pp 2 x dp 2, 1f1b, 4 microbatches of size 1" in done.stdout and "megatron" not in done.stdout


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "train.toml",
            "[training]\nlocal_batch_size = 8\nseq_len = 64\n[parallelism]\npipeline_parallel_degree = 2\n",
        ),
        ("deepspeed.json", '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}'),
    ],
)
def test_the_global_batch_follows_from_the_replicas(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    one_plan = [
        "--pp",
        "2",
        "--dp",
        "2",
        "--tp",
        "1",
        "--cp",
        "1",
        "--microbatch",
        "1",
        "--zero",
        "1",
        "--schedule",
        "1f1b",
        "--top",
        "1",
    ]
    for words in (("estimate", *MODEL), ("plan", *MODEL, *one_plan)):
        option = "--from" if words[0] == "estimate" else "--compare"
        done = call(*words, *CLUSTER, "--sequence-length", 64, option, tmp_path / name, "--json")
        assert done.exit_code == 0, done.stderr
        replicas = 2 if name == "train.toml" else 4
        assert f"the global batch is {8 * replicas}: 8 on each of {replicas} replicas" in done.stderr
    given = call(
        "estimate", *MODEL, *CLUSTER, "--from", tmp_path / name, "--sequence-length", 64, "--global-batch", 64
    )
    assert given.exit_code == 0 and "the global batch is" not in given.stderr


def test_a_configuration_that_does_not_fit_says_so() -> None:
    job = ("--cluster", "4x-h100", "--global-batch", 16, "--sequence-length", 64)
    roomy = call("estimate", *MODEL, *job)
    assert roomy.exit_code == 0 and "Does not fit" not in roomy.stdout
    tight = call("estimate", *MODEL, *job, "--memory-limit", "30MiB")
    assert tight.exit_code == 0 and "Does not fit: rank 0 lacks" in tight.stdout


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.sh", "--micro-batch-size x", "line 1: --micro-batch-size x: give a whole number"),
        ("a.json", "[1, 2", "a.json"),
        ("a.json", '{"a": 1}', "give a shell file or argv.json"),
        ("a.toml", "a = ", "not valid TOML"),
    ],
)
def test_a_malformed_file_is_one_error(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    done = call("estimate", *MODEL, *CLUSTER, "--from", tmp_path / name)
    assert done.exit_code == 2 and why in done.stderr and done.stderr.count("error:") == 1
    assert call("estimate", *MODEL, *CLUSTER, "--from", tmp_path / "none.sh").exit_code == 2


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A configuration that leaves half of the devices idle."""
    path = tmp_path / "mine.toml"
    path.write_text("pp = 2\ndp = 1\nglobal-batch = 16\nsequence-length = 64\nrecompute = 'full'\n")
    return path


def test_a_configuration_is_shown_beside_the_plan(theirs: Path) -> None:
    words = ("plan", *MODEL, *CLUSTER, "--compare", theirs, "--schedule", "1f1b", "--top", "1")
    done = call(*words, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    compared, best = found["compared"], found["plans"][0]
    alone = call("estimate", *MODEL, *CLUSTER, "--from", theirs, "--json")
    assert compared["step_seconds"] == json.loads(alone.stdout)["step_seconds"]
    assert compared["step_ratio"] == best["step_seconds"] / compared["step_seconds"] < 1
    differs = {one["what"]: (one["yours"], one["plan"]) for one in compared["differences"]}
    assert differs["recompute"] == ("full", "none") and differs["dp"][0] == "1"
    assert compared["not_taken"] == [] and compared["spare_bytes"] > 0
    lines = call(*words).stdout
    assert f"{100 * (compared['step_ratio'] - 1):+.1f}%" in lines and "recompute full -> none" in lines


def test_what_the_file_leaves_open_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("pp = 2\n")
    done = call("plan", *MODEL, *CLUSTER, "--compare", tmp_path / "mine.toml")
    assert done.exit_code == 2 and "give --global-batch and --sequence-length" in done.stderr


def test_nothing_is_compared_over_several_clusters(theirs: Path) -> None:
    done = call("plan", *MODEL, *CLUSTER, "--compare", theirs, "--objective", "cost")
    assert done.exit_code == 2 and "--compare" in done.stderr


@pytest.mark.parametrize(
    ("to", "files"),
    [
        ("torchtitan", {"train_config.py", "schedule.csv"}),
        ("torchtitan-0.2", {"train.toml", "schedule.csv"}),
        ("megatron-bridge", {"recipe.py"}),
    ],
)
def test_other_formats_are_folders_with_what_is_not_in_them(
    plan_file: Path, tmp_path: Path, to: str, files: set[str]
) -> None:
    done = call("export", plan_file, "--to", to, "-o", tmp_path / "there")
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in (tmp_path / "there").iterdir()} == files
    said = [line.partition(": ")[2] for line in done.stderr.splitlines()]
    written = "".join(path.read_text() for path in (tmp_path / "there").iterdir())
    assert said and all(sentence in written for sentence in said)


def test_an_order_of_its_own_is_no_single_file(plan_file: Path, tmp_path: Path) -> None:
    done = call("export", plan_file, "--to", "torchtitan", "-o", tmp_path / "train.py")
    assert done.exit_code == 2 and "name a new folder" in done.stderr


def test_the_model_may_be_left_out_where_the_file_says_it(plan_file: Path, tmp_path: Path) -> None:
    assert call("export", plan_file, "--to", "megatron", "-o", tmp_path / "launch").exit_code == 0
    named = ("--from", tmp_path / "launch" / "train.sh", "--json")
    told, read = call("estimate", *MODEL, *CLUSTER, *named), call("estimate", *CLUSTER, *named)
    assert read.exit_code == 0, read.stderr
    assert "the model is tiny-llama with num_hidden_layers = 4" in read.stderr
    assert json.loads(read.stdout) == json.loads(told.stdout)
    own = tmp_path / "own.toml"
    own.write_text('model = "tiny-llama"\npp = 2\n[set]\nnum_hidden_layers = 4\n')
    asked = (*CLUSTER, "--global-batch", "16", "--sequence-length", "64", "--json")
    done = call("estimate", *asked, "--from", own)
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["model"], document["settings"]) == ("tiny-llama", {"num_hidden_layers": 4})
    done = call("plan", *asked, "--compare", own, "--schedule", "1f1b", "--set", "num_hidden_layers=2")
    assert done.exit_code == 0 and "num_hidden_layers = 4" in done.stderr, done.stderr


def test_torchtitan_names_the_model(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    for name, flavor, text in (
        ("llama3", "8B", "llama-3-8b"),
        ("deepseek_v3", "671B", "deepseek-v3"),
        ("qwen3", "0.6B", "qwen3-0.6b"),
    ):
        path.write_text(f'[model]\nname = "{name}"\nflavor = "{flavor}"\n[training]\nseq_len = 64\n')
        assert read_configuration(path).read_model() == ModelRead(text)
    path.write_text('[model]\nname = "flux"\nflavor = "debug"\n[training]\nseq_len = 64\n')
    done = call("estimate", *CLUSTER, "--from", path)
    assert done.exit_code == 2 and "model.flavor = 'debug' is not a known model: name MODEL" in done.stderr


@pytest.mark.parametrize("words", [("estimate",), ("plan", "--global-batch", "4")])
def test_without_a_model_and_a_file_that_says_it_there_is_nothing_to_do(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    done = call(*words, *CLUSTER)
    assert done.exit_code == 2 and "no model was given: name MODEL" in done.stderr
    path = tmp_path / "deepspeed.json"
    path.write_text('{"bf16": {"enabled": true}, "train_batch_size": 8}')
    done = call(
        *words, *CLUSTER, "--from" if words[0] == "estimate" else "--compare", path, "--sequence-length", "64"
    )
    assert done.exit_code == 2 and "does not say which model it is for: name MODEL" in done.stderr


def test_a_date_among_keys_of_the_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('model = "tiny-llama"\n[set]\nrope_theta = 2026-01-01\n')
    done = call("estimate", *CLUSTER, "--from", path)
    assert done.exit_code == 2 and "set has a date or a time" in done.stderr, done.stderr
