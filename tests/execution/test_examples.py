"""The scripts in `examples`, as their first lines say that they are started."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import make_plan
from texts import tokenizer_folder, write_lines
from typer.testing import CliRunner

from stagewright.cli.app import app

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = "2x-rtx3090"

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp().parent / "traces"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """``started(name, *words)`` is what a script prints that plans and starts its own processes."""

    def start(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, "--cluster", CLUSTER, *map(str, words)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return start


def launched(plan: Path, script: str, *words: object) -> None:
    done = CliRunner().invoke(app, ["launch", str(plan), str(EXAMPLES / script), "--", *map(str, words)])
    assert done.exit_code == 0, done.output


def test_a_loop_of_ones_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_plan(tmp_path / "plan.json", num_microbatches=2, sequence_length=32, microbatch_size=2)
    out = tmp_path / "out"
    launched(tmp_path / "plan.json", "own_loop.py", "--steps", 4, "--evaluate-every", 2, "--out", out)
    said = capfd.readouterr()
    before, after = (
        float(line.rpartition(" ")[2]) for line in (said.out + said.err).splitlines() if "held-out" in line
    )
    assert after < before
    assert "step 4/4" in said.err
    assert torch.load(out / "best.pt")["model.embed_tokens.weight"].dtype == torch.float32


@pytest.mark.slow
def test_a_llama_is_pretrained(started: Any, tmp_path: Path) -> None:
    said = started("pretrain_llama.py", "--layers", 2, "--steps", 6, "--out", tmp_path)
    before, after = map(float, re.findall(r"\d+\.\d+", said.splitlines()[0]))
    assert after < before - 1
    assert "The captain" in said


def test_a_folder_is_finetuned_on_records(started: Any, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tokenizer_folder(tmp_path / "model")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 310}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes, **ends))
    model.save_pretrained(folder)
    records = [
        {"prompt": f"the ship {number}: ", "completion": "call me what you will"} for number in range(30)
    ]
    pairs = write_lines(tmp_path / "pairs.jsonl", records)
    options = ("--length", 32, "--steps", 20, "--learning-rate", 0.03, "--out", tmp_path / "out")
    said = started("finetune_lora.py", folder, pairs, *options)
    before, after = (float(line.rpartition(" ")[2]) for line in said.splitlines())
    assert after > before + 1


def test_images_are_classified(started: Any, tmp_path: Path) -> None:
    said = started("vision.py", "--steps", 40, "--out", tmp_path)
    assert float(said.rpartition(": ")[2].rstrip("%\n")) > 80


def test_a_module_has_two_losses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {"width": 64, "depth": 2}
    make_plan(
        tmp_path / "plan.json", f"{EXAMPLES / 'two_losses.py'}:build", overrides=sizes, microbatch_size=2
    )
    launched(tmp_path / "plan.json", "two_losses.py", "--steps", 50, "--out", tmp_path / "out")
    said = capfd.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "next byte" in line]
    before, after = ([float(one) for one in re.findall(r"\d+\.\d+", line)] for line in lines)
    assert min(before) > 5 and max(after) < 4.5


@pytest.mark.slow
def test_a_run_goes_on_by_fewer_processes(started: Any, tmp_path: Path) -> None:
    said = started("fewer_processes.py", "--layers", 2, "--steps", 6, "--out", tmp_path)
    first, then = said.splitlines()
    assert first.startswith("steps 1 to 3 by 2 processes") and then.startswith("steps 4 to 6 by 1 process,")
    losses = [float(one) for one in re.findall(r"\d+\.\d+", said)]
    assert losses == sorted(losses, reverse=True)


def test_every_script_is_listed_and_short() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for script in EXAMPLES.glob("*.py"):
        assert f"]({script.name})" in listed, script
        assert len(script.read_text().splitlines()) < 100, script


def test_what_launch_says_reaches_scripts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan(tmp_path / "plan.json", num_microbatches=2, sequence_length=32)
    done = CliRunner().invoke(app, ["launch", str(tmp_path / "plan.json"), str(tmp_path / "none.py")])
    assert done.exit_code == 2 and "is not there: check the path" in " ".join(done.stderr.split())
    script = "from stagewright import Trainer\nwith Trainer(out='run') as me: print(me._watch._limits.start_s, flush=True)\n"
    (tmp_path / "limit.py").write_text(script)
    words = ["launch", str(tmp_path / "plan.json"), str(tmp_path / "limit.py"), "--start-timeout", "123"]
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, words).exit_code == 0
    said = capfd.readouterr()
    assert (said.out + said.err).count("123.0\n") == 2
    (tmp_path / "wrong.py").write_text("raise ValueError('of the script')\n")
    done = CliRunner().invoke(app, ["launch", str(tmp_path / "plan.json"), str(tmp_path / "wrong.py")])
    assert done.exit_code == 1 and "ValueError: of the script" in capfd.readouterr().err
