"""Plans name models, and factories are code: what judges a plan runs none of it unless it is allowed to."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from records import record_of
from stagewright.cli.app import app
from stagewright.cli.consent import say_what_runs
from stagewright.documents import read_sealed_json
from stagewright.errors import InputError
from stagewright.execution.model_export import _base
from stagewright.planning.plan import load_plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.step_times import simulated
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve
from stagewright.tracing.models.source import factory_file, factory_source

JOB = ("--global-batch", "4", "--sequence-length", "16", "--dtype", "fp32", "--cluster", "2x-rtx3090")
SHAPE = ("--pp", "2", "--microbatch", "1", "--schedule", "1f1b")
NET = """
from pathlib import Path
import torch
from torch import nn

Path({mark!r}).touch()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()

def build():
    Path({mark!r}).touch()
    return Net(), (torch.randn(1, 8),)
"""


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def document(*words: object) -> dict[str, Any]:
    done = call(*words, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plan of a factory, and the file that tells whether its code has run."""
    folder = tmp_path_factory.mktemp("stranger")
    mark, path = folder / "mark", folder / "plan.json"
    (folder / "net.py").write_text(NET.format(mark=str(mark)))
    done = call("plan", f"{folder / 'net.py'}:build", *SHAPE, *JOB, "-o", path)
    assert done.exit_code == 0 and mark.exists(), done.stderr
    return path, mark


@pytest.fixture
def stranger(
    planned: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Callable[[], bool]]:
    """The plan as on a machine that has never seen it, and whether its code has run since."""
    path, mark = planned
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("stagewright_factory_net")]:
        monkeypatch.delitem(sys.modules, name)
    mark.unlink(missing_ok=True)
    return path, mark.exists


def test_a_strangers_plan_is_checked_without_its_code(stranger: tuple[Path, Callable[[], bool]]) -> None:
    path, has_run = stranger
    found = document("check", path)
    assert found["passed"]
    names = [one["check"] for one in found["checks"]]
    assert names == ["document", "gradients", "program", "time", "transfers", "memory"]
    assert [one["check"] for one in found["left_out"]] == ["model"]
    shown = call("check", path)
    assert "--  model: not checked, as building it runs" in shown.stdout and not has_run()


def test_a_strangers_plan_is_simulated_as_promised(
    stranger: tuple[Path, Callable[[], bool]], tmp_path: Path
) -> None:
    path, has_run = stranger
    found = document("simulate", path)
    plan = load_plan(path)
    assert found["step_seconds"] == plan.predictions.step_seconds
    peaks = [rank.allocated_peak_bytes for rank in plan.predictions.ranks]
    assert [rank["peak_bytes"] for rank in found["ranks"]] == peaks
    drawn = call("simulate", path, "--svg", tmp_path / "plan.svg")
    assert drawn.exit_code == 0 and (tmp_path / "plan.svg").exists() and not has_run()
    assert "the picture counts activations instead of bytes" in drawn.stderr


def test_a_strangers_plan_is_estimated_as_promised(stranger: tuple[Path, Callable[[], bool]]) -> None:
    path, has_run = stranger
    done = call("estimate", path, "--json")
    assert json.loads(done.stdout)["step_seconds"] == load_plan(path).predictions.step_seconds
    assert "these are the plan's own predictions" in done.stderr and not has_run()


def test_a_strangers_plan_is_compared_without_its_code(
    stranger: tuple[Path, Callable[[], bool]], tmp_path: Path
) -> None:
    path, has_run = stranger
    plan = load_plan(path)
    assert plan.predictions.costs is not None
    timeline = simulated(stage_program(plan), plan.predictions.costs)
    record_of(plan, timeline, [0.0, 0.0]).save(tmp_path / "record.json")
    found = document("compare", path, tmp_path / "record.json")
    assert found["batch_seconds"]["predicted"] == timeline.makespan_s
    assert found["batch_seconds"]["measured"] == pytest.approx(timeline.makespan_s)
    elsewhere = call("compare", path, tmp_path / "record.json", "--cluster", "2x-h100")
    assert elsewhere.exit_code == 2 and "allow it with --with-model" in elsewhere.stderr and not has_run()


@pytest.mark.parametrize(
    "words",
    [
        ("check", "--cluster", "2x-h100"),
        ("simulate", "--cluster", "2x-h100"),
        ("estimate", "--cluster", "2x-h100"),
        ("estimate", "--by", "layer"),
        ("export", "--to", "deepspeed", "-o", "settings"),
        ("export", "--to", "torch-pipelining", "-o", "package"),
    ],
    ids=" ".join,
)
def test_what_needs_the_model_asks_first(
    words: tuple[str, ...], stranger: tuple[Path, Callable[[], bool]]
) -> None:
    path, has_run = stranger
    done = call(words[0], path, *words[1:])
    assert done.exit_code == 2 and "allow it with --with-model" in done.stderr and not has_run()


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", "--cluster", "2x-h100"),
        *(
            ("export", "--to", to, "-o", "out")
            for to in ("deepspeed", "megatron", "megatron-bridge", "torchtitan")
        ),
    ],
    ids=" ".join,
)
def test_an_optimizer_is_code_too(
    words: tuple[str, ...], stranger: tuple[Path, Callable[[], bool]], tmp_path: Path
) -> None:
    """Of a plan that does not say what it keeps, which predicting it anew asks its code for."""
    path, has_run = stranger
    plan = read_sealed_json(path, "plan")
    optimizer = f"{path.parent / 'net.py'}:build"
    plan["model"] |= {"text": "tiny-llama", "overrides": {}}
    plan["job"] |= {"optimizer": optimizer, "optimizer_state": None}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(plan))
    done = call(words[0], other, *words[1:])
    assert done.exit_code == 2 and f"building it runs {optimizer}: review that code" in done.stderr
    found = document("check", other)
    assert found["left_out"][0] == {
        "check": "model", "why": f"as building it runs {optimizer}; --with-model allows it"
    }  # fmt: skip
    assert call("estimate", other).exit_code == 0
    assert not has_run() and not (tmp_path / "out").exists()


def test_adapters_for_code_are_exported_only_where_it_is_named(
    stranger: tuple[Path, Callable[[], bool]], tmp_path: Path
) -> None:
    path, has_run = stranger
    model = read_sealed_json(path, "plan")["model"]
    manifest = SimpleNamespace(base=SimpleNamespace(text=model["text"]), plan={"model": model})
    checkpoint: Any = SimpleNamespace(manifest=manifest, path=tmp_path)
    with pytest.raises(
        InputError, match=r"is code, .*net\.py:build, which the export would run: .* name it with --base"
    ):
        _base(checkpoint, None)
    assert not has_run()


@pytest.mark.parametrize(
    "words", [("check",), ("simulate", "--cluster", "2x-h100"), ("estimate",)], ids=" ".join
)
def test_allowed_code_is_named_and_run(
    words: tuple[str, ...], stranger: tuple[Path, Callable[[], bool]]
) -> None:
    path, has_run = stranger
    done = call(words[0], path, *words[1:], "--with-model", "--json")
    assert done.exit_code == 0 and has_run(), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("runs ")]
    assert f"{path.parent / 'net.py'}:build" in line and line.endswith("outside this folder")
    if words == ("check",):
        found = json.loads(done.stdout)
        assert [one["check"] for one in found["checks"]][-3:] == ["model", "transfers", "memory"]
        assert found["left_out"] == []


def test_a_strangers_plan_that_breaks_its_promises_is_refused(
    stranger: tuple[Path, Callable[[], bool]], tmp_path: Path
) -> None:
    path, has_run = stranger
    plan = read_sealed_json(path, "plan")
    predictions, tight = plan["predictions"], plan["job"] | {"memory_limit": 1000}
    cases = {
        "more than it may use": plan | {"job": tight},
        "its program takes": plan | {"predictions": predictions | {"step_seconds": 1e-9}},
        "needs the": plan | {"program": [list(reversed(actions)) for actions in plan["program"]]},
    }
    for message, changed in cases.items():
        other = tmp_path / "other.json"
        other.write_text(json.dumps(changed))
        done = call("check", other)
        assert done.exit_code == 2 and message in done.stderr, (message, done.output)
    assert not has_run()


def test_an_older_plan_is_checked_as_far_as_it_goes(
    stranger: tuple[Path, Callable[[], bool]], tmp_path: Path
) -> None:
    path, has_run = stranger
    plan = read_sealed_json(path, "plan")
    del plan["predictions"]["costs"]
    old = tmp_path / "old.json"
    old.write_text(json.dumps(plan))
    found = document("check", old)
    assert [one["check"] for one in found["left_out"]] == ["model", "transfers"]
    assert found["checks"][-1]["check"] == "memory"
    simulated = call("simulate", old)
    assert simulated.exit_code == 2 and "does not state its costs needs the model" in simulated.stderr
    assert not has_run()


def test_the_plan_of_a_config_is_checked_in_full(tmp_path: Path) -> None:
    """A config is data: nothing is asked, and nothing said to run."""
    path = tmp_path / "plan.json"
    done = call("plan", "tiny-llama", *SHAPE, *JOB, "-o", path)
    assert done.exit_code == 0, done.stderr
    done = call("check", path, "--json")
    assert done.stderr == "" and json.loads(done.stdout)["left_out"] == []
    assert [one["check"] for one in json.loads(done.stdout)["checks"]][-3:] == [
        "model",
        "transfers",
        "memory",
    ]


def test_a_plan_whose_config_is_elsewhere_is_checked_without_it(tmp_path: Path) -> None:
    path, folder = tmp_path / "plan.json", tmp_path / "llama"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(resolve("tiny-llama").config))
    assert call("plan", folder, *SHAPE, *JOB, "-o", path).exit_code == 0
    config.write_text(json.dumps({**(resolve("tiny-llama").config or {}), "hidden_size": 64}))
    changed = call("check", path)
    assert changed.exit_code == 2 and "has changed since the plan was made" in changed.stderr
    config.unlink()
    found = document("check", path)
    assert [one["check"] for one in found["left_out"]] == ["model"]
    assert [one["check"] for one in found["checks"]][-2:] == ["transfers", "memory"]
    wanted = call("check", path, "--with-model")
    assert wanted.exit_code == 2 and "holds no config.json" in wanted.stderr


def test_a_plan_of_a_config_is_simulated_without_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    assert call("plan", "tiny-llama", *SHAPE, *JOB, "-o", path).exit_code == 0

    def traced(*_: object, **__: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr("stagewright.planning.estimate.graph_of", traced)
    found = document("simulate", path)
    assert found["step_seconds"] == load_plan(path).predictions.step_seconds > found["makespan_seconds"]


def test_a_package_is_found_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "mark"
    inner = tmp_path / "strangers_nets" / "inner"
    inner.mkdir(parents=True)
    for file in (inner.parent / "__init__.py", inner / "__init__.py"):
        file.write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    (inner / "net.py").write_text(NET.format(mark=str(mark)))
    text = "strangers_nets.inner.net:build"
    assert factory_source(text) == (inner / "net.py").read_text()
    assert factory_file(text) == inner / "net.py"
    assert resolve(text).kind == "factory"
    namespace = tmp_path / "strangers_space" / "of_names"
    namespace.mkdir(parents=True)
    (namespace / "net.py").write_text("x = 1\n")
    assert factory_source("strangers_space.of_names.net:build") == "x = 1\n"
    for missing in ("strangers_nets.outer:build", "strangers_nets.inner.net.more:build"):
        with pytest.raises(InputError, match="cannot be found"):
            factory_source(missing)
    assert not mark.exists()


def test_what_runs_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").touch()
    said = {
        "net.py:build": "runs net.py:build\n",
        "../net.py:build": f"runs ../net.py:build, in {tmp_path.parent / 'net.py'}, outside this folder\n",
        "llama-3-8b": "",
        "a\x1b[31m.py:build": "runs a\\x1b[31m.py:build\n",
    }
    for text, line in said.items():
        say_what_runs(text)
        assert capsys.readouterr().err == line


def test_verify_says_what_it_runs(
    stranger: tuple[Path, Callable[[], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stagewright.execution import launch, verification

    def stop(*_: object, **__: object) -> None:
        raise InputError("stopped")

    path, _ = stranger
    monkeypatch.setattr(verification, "verify", stop)
    monkeypatch.setattr(launch, "run", stop)
    model = f"{path.parent / 'net.py'}:build"
    for words in (("verify", model, "--plan", path), ("run", path)):
        done = call(*words)
        assert done.stderr.startswith(f"runs {model}, in ") and "error: stopped" in done.stderr


def test_a_config_with_code_beside_it_runs_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither code that `auto_map` names, nor kernels of the hub that an attention implementation names, at any depth."""
    import transformers.modeling_utils as modeling

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was loaded")

    monkeypatch.setattr(modeling, "lazy_import_flash_attention", loaded)
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stdin", None)
    mark = tmp_path / "mark"
    folder = tmp_path / "evil-llama"
    folder.mkdir()
    for name in ("modeling_evil", "configuration_evil"):
        (folder / f"{name}.py").write_text(NET.format(mark=str(mark)))
    code = {
        "auto_map": {
            "AutoConfig": "configuration_evil.Net", "AutoModelForCausalLM": "modeling_evil.Net",
            "AutoModel": "modeling_evil.Net",
        },
        "trust_remote_code": True, "attn_implementation": "evil/kernel", "_attn_implementation": "evil/kernel",
        "_attn_implementation_internal": "evil/kernel",
    }  # fmt: skip
    config = dict(resolve("tiny-llama").config or {})
    (folder / "config.json").write_text(json.dumps(config | code))
    done = call("plan", folder, *SHAPE, *JOB, "-o", tmp_path / "plan.json")
    assert done.exit_code == 0, done.stderr
    assert call("check", tmp_path / "plan.json").exit_code == 0
    assert not mark.exists()


def test_code_that_a_part_of_a_config_names_is_not_even_handed_on(tmp_path: Path) -> None:
    half = {
        **(resolve("tiny-bert").config or {}),
        "auto_map": {"AutoModel": "evil.Net"},
        "_attn_implementation": "evil/kernel",
    }
    both = {"encoder": half, "decoder": {**half, "is_decoder": True, "add_cross_attention": True}}
    config = {
        "model_type": "encoder-decoder", "architectures": ["EncoderDecoderModel"], "is_encoder_decoder": True,
        "decoder_start_token_id": 1, "pad_token_id": 0, **both,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    net: Any = build(resolve(str(tmp_path)), 1, 16, fake=True).module.net
    for part in (net.config.encoder, net.config.decoder):
        assert not hasattr(part, "auto_map") and part._attn_implementation != "evil/kernel"
