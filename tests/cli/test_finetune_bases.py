"""`stagewright finetune --dry-run`: what the frozen model is held in is the most exact that fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from stagewright.cli import finetune_plan
from stagewright.cli.app import app
from stagewright.tracing.models.reference import resolve

SIZES = (
    "--set",
    "hidden_size=1024",
    "--set",
    "intermediate_size=4096",
    "--set",
    "num_attention_heads=8",
)
PLAN = (
    "--cluster",
    "1x-rtx3090",
    "--dry-run",
    "--microbatch",
    "1",
    "--schedule",
    "1f1b",
    "--recompute",
    "none",
)
BASES = ("bf16", "int8", "nf4")


def finetune(folder: Path, *more: object, model: object = "tiny-llama") -> Result:
    words = (
        "finetune",
        model,
        *SIZES,
        *PLAN,
        "--sequence-length",
        64,
        "--loss-pieces",
        1,
        "--out",
        folder,
        *more,
    )
    return CliRunner().invoke(app, [str(word) for word in words])


def documents(done: Result) -> Any:
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def peak(document: Any) -> int:
    return document["plan"]["ranks"][0]["reserved_peak_bytes"]


def test_the_most_exact_base_that_fits_is_taken_and_explained(tmp_path: Path) -> None:
    peaks = {base: peak(documents(finetune(tmp_path / base, "--base", base, "--json"))) for base in BASES}
    assert peaks["bf16"] > 1.3 * peaks["int8"] and peaks["int8"] > 1.2 * peaks["nf4"]
    for base, limit in (("bf16", peaks["bf16"]), ("int8", peaks["int8"]), ("nf4", peaks["nf4"])):
        options = ("--memory-limit", limit, "--host-optimizer", "never")
        done = finetune(tmp_path / f"auto-{base}", *options)
        assert done.exit_code == 0, done.stderr
        reason = {
            "bf16": "which fits",
            "int8": "as it does not fit in bf16",
            "nf4": "as it does not fit in bf16 or int8",
        }
        assert f"the model frozen in {base}, {reason[base]}" in done.stdout
        assert (f"--lora-base {base}" in done.stderr) == (base != "bf16")


def published_in_fp8(folder: Path) -> Path:
    config = {**(resolve("tiny-llama").config or {}), "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_weights_that_are_published_in_fp8_are_held_so_where_they_do_not_fit_in_bf16(tmp_path: Path) -> None:
    """Also if a file of another program says bf16, which is the type that it computes in."""
    model = published_in_fp8(tmp_path)
    axolotl = {
        "base_model": str(model),
        "adapter": "lora",
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_target_linear": True,
    }
    (tmp_path / "a.yaml").write_text(
        json.dumps({**axolotl, "bf16": True, "micro_batch_size": 16, "sequence_len": 64})
    )
    plan = documents(finetune(tmp_path / "fp8", "--base", "fp8", "--json", model=model))
    options = ("--memory-limit", peak(plan), "--host-optimizer", "never")
    done = finetune(tmp_path / "auto", *options, "--from", tmp_path / "a.yaml", model=model)
    assert "the model frozen in fp8, the numbers that are published" in done.stdout, done.stderr
    assert "--lora-base fp8" in done.stderr and "int8" not in done.stdout + done.stderr


def test_smaller_weights_that_leave_room_for_activations_are_named_and_taken_if_nothing_is_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_plan, "_GLANCE_S", 120.0)
    options = (
        "--sequence-length",
        512,
        "--recompute",
        "auto",
        "--memory-limit",
        "300MiB",
        "--host-optimizer",
        "never",
    )
    done = finetune(tmp_path / "plain", *options)
    assert "frozen in bf16, which fits" in done.stdout and "+R recomputes activations" in done.stdout, (
        done.stderr
    )
    speed = re.search(
        r"In nf4 it would be at least (.*) times as fast, with rounded weights: --base nf4.", done.stdout
    )
    assert speed is not None and 1.2 <= float(speed[1]) < 1.5
    slow = re.search(r"([\d,]+) tokens/s", done.stdout)
    fast = documents(finetune(tmp_path / "nf4", *options, "--base", "nf4", "--json"))
    assert slow is not None
    ratio = fast["plan"]["tokens_per_second"] / int(slow[1].replace(",", ""))
    assert ratio == pytest.approx(float(speed[1]), abs=0.06)
    done = finetune(tmp_path / "fp8", *options, model=published_in_fp8(tmp_path))
    assert "frozen in fp8, the numbers that are published" in done.stdout, done.stderr
    assert done.stderr.index("--lora-base fp8") > done.stderr.index("1. stagewright plan")


def test_a_model_that_fits_in_no_base_is_refused_with_its_sizes(tmp_path: Path) -> None:
    done = finetune(tmp_path / "none", "--memory-limit", "30MiB")
    assert done.exit_code == 2
    assert all(f"in {base} (" in done.stderr for base in BASES) and "30.0 MiB usable" in done.stderr


@pytest.mark.parametrize("base", ["fp8", "int8"])
def test_bases_that_contradict_or_do_not_exist_are_refused(base: str, tmp_path: Path) -> None:
    done = finetune(tmp_path, "--base", base, "--lora-base", "nf4")
    assert done.exit_code == 2
    assert f"--lora-base nf4 and --base {base} contradict each other" in done.stderr


def test_faults_in_the_data_are_said_before_the_machine_is_measured(tmp_path: Path) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"chosen": "yes", "rejected": "no", "prompt": "so?"}) + "\n")
    words = (
        "finetune",
        "tiny-llama",
        "--random-weights",
        "--data",
        data,
        "--device",
        "cpu",
        "--out",
        tmp_path / "out",
    )
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 2 and "chosen" in done.stderr
    assert not (tmp_path / "out" / "machine.toml").exists()


@pytest.mark.parametrize("text", ["{}", "[1]", '{"what": 1, "way": 2}', "{"])
def test_a_damaged_description_is_named_with_the_remedy(text: str, tmp_path: Path) -> None:
    (tmp_path / "finetune.json").write_text(text)
    done = finetune(tmp_path)
    assert done.exit_code == 2
    assert "finetune.json" in done.stderr and "remove its folder" in done.stderr
    assert (tmp_path / "finetune.json").read_text() == text
