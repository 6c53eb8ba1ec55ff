"""Operators that `stagewright profile` has timed decide over predictions, exactly, and nothing else does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stagewright.cli.app import app
from stagewright.cluster import OperatorProfile, load_cluster, load_profile
from stagewright.errors import InputError
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.tracing.models.reference import ModelReference, resolve

MODEL = ("tiny-llama", "--set", "num_hidden_layers=3", "--set", "hidden_size=64")
SHAPE = ("--sequence-length", "32", "--dtype", "fp32")
CPU = """
name = "host"
[[nodes]]
devices_per_node = 2
num_nics = 1
intra_node = { bandwidth = "4 GB/s", latency_s = 1e-4 }
inter_node = { bandwidth = "4 GB/s", latency_s = 1e-4 }
[nodes.device]
name = "host"
kind = "cpu"
num_threads = %d
memory_bytes = "8 GiB"
memory_bandwidth = "10 GB/s"
peak_flops = { fp32 = 5e10 }
matmul_efficiency = { fp32 = 0.9 }
attention_efficiency = 0.5
attention_backward_efficiency = 0.5
memory_efficiency = 0.9
launch_overhead_s = 0.0
host_overhead_s = 1e-5
context_bytes = 0
workspace_bytes = 0
reserve_fraction = 0.1
host_link_bandwidth = "10 GB/s"
"""


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def reference() -> ModelReference:
    return resolve("tiny-llama", {"num_hidden_layers": 3, "hidden_size": 64})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, once: Callable[..., Any]) -> Path:
    def file() -> Path:
        path = tmp_path_factory.mktemp("profile") / "operators.json"
        done = call("profile", *MODEL, *SHAPE, "--microbatches", "1,2", "--seconds", "0.1", "-o", path)
        assert done.exit_code == 0, done.output
        assert "mm.default" in done.stdout and f"--profile {path}" in done.stdout
        return path

    return once("profile", file)


@pytest.fixture(scope="module")
def cluster(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "host.toml"
    path.write_text(CPU % (load_profile(measured).num_threads or 1))
    return path


def predicted(
    reference: ModelReference, cluster: Path, profile: OperatorProfile, microbatch: int = 1
) -> Plan:
    job = Job(global_batch=4, sequence_length=32, dtype="fp32")
    on = load_cluster(cluster).with_profile(profile)
    return estimate(reference, on, job, dp=1, pp=2, microbatch=microbatch)


def test_every_operator_of_the_measured_microbatches_is_in_the_file(
    measured: Path, cluster: Path, reference: ModelReference
) -> None:
    profile = load_profile(measured)
    for size in (1, 2, 4):
        found = predicted(reference, cluster, profile, size).predictions.measured_share
        # What is made once per run is not in the file: the less, the slower the machine was.
        assert 0.95 < found <= 1 if size < 4 else 0 < found < 0.9


def test_predicted_seconds_are_sums_of_those_of_the_file(
    measured: Path, cluster: Path, reference: ModelReference
) -> None:
    """A table in which every operator takes as long as another number of milliseconds says."""
    profile = load_profile(measured)
    alike = profile.model_copy(update={"seconds": dict.fromkeys(profile.seconds, 1e-3)})
    twice = profile.model_copy(update={"seconds": dict.fromkeys(profile.seconds, 2e-3)})
    one, other = (predicted(reference, cluster, table).predictions.stages for table in (alike, twice))
    for stage, doubled in zip(one, other, strict=True):
        for name in ("forward_seconds", "input_grad_seconds", "weight_grad_seconds"):
            operators = (getattr(doubled, name) - getattr(stage, name)) / 1e-3
            assert operators > 10 and operators == pytest.approx(round(operators), abs=1e-6)
            assert getattr(stage, name) == pytest.approx(operators * 1e-3, rel=0.05)


def test_a_machine_that_was_slower_meanwhile_is_told_from_slow_operators() -> None:
    profile = OperatorProfile(
        device="a", kind="cpu", torch="2", processes=1, reference_s=2e-3, seconds={"aten.mm(x)": 0.5}
    )
    assert profile.at_speed(1e-3).seconds == {"aten.mm(x)": 0.25}
    assert profile.at_speed(None) is profile


def test_plans_say_how_much_is_measured_and_keep_it(measured: Path, cluster: Path, tmp_path: Path) -> None:
    words = (*MODEL, "--cluster", cluster, *SHAPE, "--global-batch", "4", "--profile", measured)
    path = tmp_path / "plan.json"
    done = call("plan", *words, "--pp", "2", "--microbatch", "2", "-o", path)
    assert done.exit_code == 0 and re.search("Measured: (9[0-9]|100)% of the operators' time", done.stdout), (
        done.output
    )  # the rest takes as long as this machine was slow when it was measured
    again = json.loads(call("estimate", path, "--json").stdout)
    assert again["measured_fraction"] > 0.9
    assert again["step_seconds"] == pytest.approx(json.loads(path.read_text())["predictions"]["step_seconds"])
    other = call("estimate", *words, "--pp", "2", "--microbatch", "4")
    assert "not in the profile" in other.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seconds": {}}, "seconds"),
        ({"seconds": {"aten.mm(x)": -1.0}}, "aten.mm(x)"),
        ({"kind": "cuda"}, "none of kind cuda"),
        ({"num_threads": 63}, "63 threads"),
    ],
)
def test_what_is_no_profile_of_this_device_is_one_error(
    change: dict, said: str, measured: Path, cluster: Path, tmp_path: Path
) -> None:
    document = json.loads(measured.read_text()) | change
    document.pop("checksum", None)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(document))
    done = call(
        "estimate",
        *MODEL,
        "--cluster",
        cluster,
        *SHAPE,
        "--global-batch",
        "4",
        "--pp",
        "2",
        "--profile",
        path,
    )
    assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.output


@pytest.mark.parametrize("words", [("--microbatches", "1,x"), ("--microbatches", "0"), ("--device", "tpu")])
def test_what_cannot_be_measured_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    done = call("profile", *MODEL, *SHAPE, *words, "-o", tmp_path / "operators.json")
    assert done.exit_code == 2 and words[1] in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_mixed_cluster_does_not_say_which_device_was_measured() -> None:
    profile = OperatorProfile(device="A100", kind="cuda", torch="2", processes=1, seconds={"aten.mm(x)": 0.5})
    with pytest.raises(InputError, match=r"A100.*8x-h100\+8x-a100-80' has h100, a100-80"):
        load_cluster("8x-h100+8x-a100-80").with_profile(profile)
