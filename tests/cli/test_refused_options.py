"""What a verb would ignore in the way it is used is refused, by the name it has on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app

MODEL = ("plan", "tiny-llama", "--cluster", "2x-h100", "--global-batch", "8", "--sequence-length", "16")
FEW = ("--cp", "1", "--microbatch", "1")
COSTS = ("plan-costs", "layers.csv", "--ranks", "2", "--microbatches", "2")
ESTIMATE = (
    "estimate",
    "llama-3-8b",
    "--cluster",
    "8x-h100",
    "--global-batch",
    "8",
    "--sequence-length",
    "16",
)
TINY = ("estimate", "tiny-gpt2", "--cluster", "2x-h100", "--global-batch", "8", "--sequence-length", "64")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.csv").write_text("0F0,0B0\n1F0,1B0\n")
    (tmp_path / "layers.csv").write_text("layer,forward_s,input_grad_s,weight_grad_s\na,1,1,1\nb,1,1,1\n")
    monkeypatch.chdir(tmp_path)


def test_a_folder_of_adapters_says_what_they_are() -> None:
    refused(*MODEL, "--lora-from", "adapters", option="--lora 8", remedy="start new ones")


def test_a_number_is_no_file_for_ranks() -> None:
    code, shown = call(*MODEL, "--ranks", "4")
    assert code == 2 and "parallel degrees are --pp, --dp and --tp" in shown


def test_the_plan_of_a_run_needs_its_record() -> None:
    done = call(*COSTS, "--ran", "plan.json")
    assert done[0] == 2 and "--record RECORD" in done[1]


@pytest.mark.parametrize(
    "option",
    [
        "--schedule zb-h1",
        "--recompute auto",
        "--host-optimizer always",
        "--reduce-dtype bf16",
        "--loss-pieces 2",
    ],
)
def test_what_our_own_runtime_does_another_one_is_not_asked_for(option: str) -> None:
    code, shown = call(*MODEL, "--runtime", "megatron-core+te", *option.split())
    assert code == 2
    assert option.split()[0] in shown and "leave out --runtime" in shown


@pytest.mark.parametrize(
    "option", ["--schedule 1f1b", "--recompute full", "--zero 1", "--dp 2", "--sequence-parallel"]
)
def test_another_runtime_is_searched_within_what_is_given(option: str) -> None:
    done = CliRunner().invoke(app, [*MODEL, *FEW, "--runtime", "megatron-core+te", *option.split(), "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["plans"]


@pytest.mark.parametrize("option", ["--zero 3", "--reduce-dtype bf16", "--shard-size 2"])
@pytest.mark.parametrize("verb", [MODEL, ESTIMATE])
@pytest.mark.parametrize("widths", ["--dp 1", "--pp 2 --tp 4", "--pp 8"])
def test_one_replica_shares_nothing_out(verb: tuple[str, ...], widths: str, option: str) -> None:
    refused(*verb, "--cluster", "8x-h100", *widths.split(), option=option, remedy="--dp N")


@pytest.mark.parametrize(("verb", "width"), [(MODEL, "--tp 1"), (ESTIMATE, ""), (ESTIMATE, "--tp 1")])
def test_one_rank_a_layer_splits_no_sequence(verb: tuple[str, ...], width: str) -> None:
    refused(*verb, *width.split(), option="--sequence-parallel", remedy="give --tp N")


@pytest.mark.parametrize("picture", [(), ("--html", "page.html"), ("--trace", "trace.json")])
def test_a_dark_ground_needs_a_picture(picture: tuple[str, ...]) -> None:
    code, shown = call("schedule", "1f1b", "--ranks", "2", *picture, "--dark")
    assert code == 2 and "--dark is the background of --svg and --png" in shown


def test_what_is_drawn_is_not_overwritten(tmp_path: Path) -> None:
    before = (tmp_path / "program.csv").read_bytes()
    for option in ("--svg", "--html", "--trace"):
        code, shown = call("schedule", "program.csv", option, str(tmp_path / "program.csv"))
        assert code == 2 and "is the file to draw" in shown
    assert (tmp_path / "program.csv").read_bytes() == before


def test_a_schedule_file_needs_no_cluster() -> None:
    refused("check", "program.csv", option="--cluster 2x-h100", remedy="check the plan")


@pytest.mark.parametrize("option", ["--ranks 2", "--microbatches 1", "--chunks 1", "--set a=1"])
def test_a_program_file_is_not_reshaped(option: str) -> None:
    refused("schedule", "program.csv", option=option, remedy="name a schedule")


@pytest.mark.parametrize("option", ["--forward 2", "--input-grad 1", "--weight-grad 3"])
def test_a_table_of_costs_has_the_passes(option: str) -> None:
    refused("schedule", "1f1b", "--costs", "layers.csv", option=option, remedy="without --costs")


def call(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.stderr


def refused(*words: str, option: str, remedy: str) -> str:
    code, shown = call(*words, *option.split())
    assert code == 2, shown
    assert f"leave out {option.split()[0]}, or " in shown and remedy in shown
    return shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--runtime torch-eager --cp 2 --pp 1 --dp 1 --microbatch 8", "one device"),
        ("--runtime torch-eager --pp 1 --dp 1 --microbatch 1", "a --microbatch of the global batch"),
        ("--runtime megatron-lm --loss-pieces 2", "leave out --loss-pieces"),
        ("--layers-per-stage 1,x", "numbers of layers"),
        ("--recompute selective", "only for other runtimes"),
    ],
)
def test_what_contradicts_a_runtime_is_refused(arguments: str, said: str) -> None:
    code, shown = call(*TINY, *arguments.split())
    assert code == 2
    assert said in shown


@pytest.mark.parametrize(
    "arguments",
    ["--cp 2 --zero 1", "--runtime megatron-lm --recompute selective --pp 2", "--runtime zero-bubble --pp 2"],
)
def test_other_runtimes_and_widths_are_shown(arguments: str) -> None:
    done = CliRunner().invoke(app, [*TINY, *arguments.split()])
    assert done.exit_code == 0, done.stderr
    assert "tokens/s" in done.stdout


def test_the_graph_of_one_rank_under_another_runtime_is_shown() -> None:
    def operators(*words: str) -> tuple[int, int]:
        done = CliRunner().invoke(app, ["trace", "tiny-llama", "--sequence-length", "64", "--json", *words])
        assert done.exit_code == 0, done.stderr
        found = json.loads(done.stdout)
        return found["num_parameters"], found["num_nodes"]

    whole, plain = operators()
    same, fused = operators("--runtime", "megatron-core+te")
    half, _ = operators("--tp", "2", "--sequence-parallel", "--cp", "2")
    assert same == whole > half
    assert fused < plain


def test_a_graph_of_one_rank_a_layer_has_no_sequence_to_split() -> None:
    refused("trace", "tiny-llama", option="--sequence-parallel", remedy="give --tp N")


@pytest.mark.parametrize("widths", ["--tp 2 --sequence-parallel", "--ep 2", "--cp 2"])
def test_the_graph_of_one_rank_is_written_whole(widths: str) -> None:
    words = ["trace", "tiny-mixtral", "--sequence-length", "64", *widths.split(), "-o", "graph.json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    written = json.loads(Path("graph.json").read_text())
    assert len(written["nodes"]) > 100
    if "--ep" in widths:
        assert written["facts"]["expert_parallel"]["size"] == 2


@pytest.mark.parametrize(("ranks", "microbatches"), [("16384", "64"), ("131072", "8")])
def test_a_timetable_that_takes_minutes_is_refused_at_once(ranks: str, microbatches: str) -> None:
    code, shown = call("schedule", "1f1b", "--ranks", ranks, "--microbatches", microbatches)
    assert code == 2 and "give fewer --ranks or --microbatches" in shown
