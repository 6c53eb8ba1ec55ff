"""What lets a user trust a run: `compare`, `verify`, quiet ends and honest failures.

Runs whose end or output is tested are started as a user starts them; everything else is called in this process, which has
imported torch already.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from patience import Deadline, patient
from stagewright.cli.app import app
from stagewright.errors import InputError, ScheduleError
from stagewright.execution import verification
from stagewright.execution.verification import Verification
from stagewright.planning import checks
from stagewright.planning.plan import load_plan
from stagewright.schedule.program import Program

JOB = ("--global-batch", "4", "--sequence-length", "32", "--dtype", "fp32", "--cluster", "2x-rtx3090")
SHAPE = ("--set", "num_hidden_layers=3", "--pp", "2", "--microbatch", "1")

BROKEN = """
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def make():
    print("words of the user's own code")
    if os.environ.get("RANK") == "1" and os.environ.get("BREAK_RANK_1"):
        raise OSError("the dog ate the weights")
    return Net(), (torch.randn(1, 8),)
"""


def stagewright(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagewright.cli", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=patient(200), env=environment
    )


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trust") / "plan.json"
    done = call("plan", "tiny-llama", *SHAPE, "--schedule", "zb-h1", *JOB, "-o", path)
    assert done.exit_code == 0, done.stderr
    return path


@pytest.mark.multiprocess
def test_a_run_is_compared_with_its_plan(plan: Path) -> None:
    done = stagewright("run", plan, "--steps", "3", "--device", "cpu", "--out", plan.parent / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["losses"]
    record = plan.parent / "out" / "record.json"
    compared = call("compare", plan, record, "--json")
    assert compared.exit_code == 0, compared.stderr
    found = json.loads(compared.stdout)
    kinds = {(entry["stage"], entry["action"]): entry for entry in found["actions"]}
    assert set(kinds) == {(stage, kind) for stage in (0, 1) for kind in "FIW"}
    assert all(entry["seconds"]["measured"] > 0 and entry["count"] == 4 for entry in kinds.values())
    assert found["step_seconds"]["measured"] >= found["batch_seconds"]["measured"] > 0
    for rank in found["ranks"]:
        times = rank["busy_seconds"]["measured"] + rank["idle_seconds"]["measured"]
        assert times == pytest.approx(found["batch_seconds"]["measured"])
        peak = rank["allocated_peak_bytes"]
        # A CPU's library takes no workspace.
        of_gpu = load_plan(plan).cluster.load().device.allocated_workspace_bytes
        assert peak["measured"] == pytest.approx(peak["predicted"] - of_gpu, rel=0.03)
    assert found["disagreements"] and "was run on cpu" in compared.stderr
    shown = call("compare", plan, record).stdout
    assert "The largest disagreements:" in shown and found["disagreements"][0] in shown
    assert shown.count("rank 0 ") >= 2 and shown.index("predicted\n") < shown.index("measured\n")


@pytest.mark.multiprocess
def test_a_plan_is_verified_on_a_reduced_copy(plan: Path) -> None:
    done = call("verify", plan, "--layers", "2", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["equal"] and found["dtype"] == "float64" and found["num_layers"] == 2
    assert found["schedule"] == "zb-h1" and found["num_stages"] == 2
    assert found["num_gradients"] == 21 and found["gradient_difference"] < 1e-12


def test_verifying_on_fewer_gpus_than_ranks_is_refused_or_done_on_the_cpu(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, told = load_plan(plan), list[str]()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(
        InputError, match=r"one rank per GPU: 2 ranks .* has 1 CUDA devices\. .* --device cpu"
    ):
        verification.verify("tiny-llama", loaded, device="cuda")
    assert verification._kind("auto", loaded, told.append) == "cpu"
    assert told == ["verifying on the CPU: there are fewer GPUs than the 2 ranks"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert verification._kind("auto", loaded, told.append) == "cuda" and len(told) == 1
    assert call("verify", "tiny-llama", "--plan", plan, "--device", "gpu").exit_code == 2


def test_a_program_that_would_hang_on_gpus_is_not_verified(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(program: Program, edges: object, waits_for_device: bool = False) -> None:
        raise ScheduleError("1F0 waits for 0F1")

    monkeypatch.setattr(checks, "check_lanes", hangs)
    monkeypatch.setattr(verification, "start_ranks", lambda *_: pytest.fail("processes were started"))
    done = call("verify", "tiny-llama", "--plan", plan, "--device", "cpu")
    assert done.exit_code == 2 and "1F0 waits for 0F1" in done.stderr


def test_gradients_on_gpus_are_verified_with_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.backends.cudnn.allow_tf32
    with pytest.raises(KeyError), verification.deterministic("cuda"):
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.allow_tf32
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.allow_tf32 == before
    with verification.deterministic("cpu"):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.multiprocess
def test_operators_without_float64_are_verified_in_float32(tmp_path: Path) -> None:
    """With a plan for two lengths, of which the longest is verified."""
    path, lengths = tmp_path / "plan.json", ("--sequence-lengths", "16,32")
    job = [word for word in JOB if word not in ("--sequence-length", "32")]
    fixed = ("--pp", "2", "--microbatch", "1", "--schedule", "1f1b")
    done = call("plan", "tiny-mixtral", *fixed, *job, *lengths, "-o", path)
    assert done.exit_code == 0, done.stderr
    done = call("verify", "tiny-mixtral", "--plan", path)
    assert done.exit_code == 0, done.stderr
    assert "float32" in done.stdout and "Pipelined equals plain." in done.stdout


def test_another_model_or_too_many_layers_are_refused(plan: Path) -> None:
    other = call("verify", "tiny-gpt2", "--plan", plan)
    assert other.exit_code == 2 and "the plan was made for model 'tiny-llama'" in other.stderr
    many = call("verify", "tiny-llama", "--plan", plan, "--layers", "9")
    assert many.exit_code == 2 and "has 3 layers" in many.stderr


@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_a_difference_is_exit_code_1_and_names_the_parameter(
    wrong: float, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Verification(
        "tiny-llama", 2, 100, 32, "float64", "zb-h1", 2, 1, 2, 5.0, 0.0, 3, 2, wrong, "head.weight", 1e-10
    )  # fmt: skip
    monkeypatch.setattr(verification, "verify", lambda *_: found)
    done = call("verify", "tiny-llama", "--plan", plan)
    assert done.exit_code == 1
    assert "head.weight" in done.stdout and "NOT equal" in done.stdout
    document = call("verify", "tiny-llama", "--plan", plan, "--json")
    assert document.exit_code == 1 and json.loads(document.stdout)["equal"] is False


@pytest.mark.multiprocess
def test_ctrl_c_ends_all_ranks_and_says_where_they_stood(plan: Path, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    command = [
        sys.executable,
        "-m",
        "stagewright.cli",
        "run",
        str(plan),
        "--steps",
        "100000",
        "--device",
        "cpu",
    ]
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--out", str(tmp_path / "out")],
            stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        deadline = Deadline(90)
        while "step 1/" not in errors.read_text():
            assert process.poll() is None and deadline, errors.read_text()
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(timeout=patient(60)) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    told = ("step ", "warning: ", "there are no weights next to", "compared ")
    rest = [line for line in errors.read_text().splitlines() if not line.startswith(told)]
    assert rest[0] == "stopping after this step; a second signal ends the run at once"
    assert rest[1].startswith("stopped by SIGINT after step ") and len(rest) == 2
    assert process.stdout is not None and b"step time" in process.stdout.read()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no rank is left


@pytest.mark.multiprocess
def test_a_rank_that_raises_names_itself_once(tmp_path: Path) -> None:
    """Also: what a user's code prints in a rank does not reach the document on stdout."""
    (tmp_path / "broken.py").write_text(BROKEN)
    path = tmp_path / "plan.json"
    broken = f"{tmp_path / 'broken.py'}:make"
    planned = call("plan", broken, "--pp", "2", "--microbatch", "1", *JOB, "-o", path)
    assert planned.exit_code == 0, planned.stderr
    words = ("run", path, "--steps", "1", "--device", "cpu", "--out", tmp_path / "out", "--json")
    done = stagewright(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["losses"] and "words of the user's own code" in done.stderr
    assert "warning: 1 step is too few to compare" in done.stderr
    failed = stagewright(*words, BREAK_RANK_1="yes")
    assert failed.returncode == 2 and failed.stdout == ""
    lines = [line for line in failed.stderr.splitlines() if "the dog ate the weights" in line]
    assert len(lines) == 1 and lines[0].startswith("error: the run stopped: rank 1 failed at ")
    assert "Traceback" not in failed.stderr and "ChildFailed" not in failed.stderr
