"""Launch files are of the forms that their launchers read, and Slurm's trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.export.launch_files import launch_file
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan

JOB = Job(global_batch=16, sequence_length=32, dtype="fp32", num_steps=2)


def plan_on(name: str, **widths: Any) -> Plan:
    return estimate("tiny-llama", load_cluster(name), JOB, **{"pp": 2, "microbatch": 1, **widths})


def test_kubernetes_has_as_many_workers_as_nodes() -> None:
    document = yaml.safe_load(launch_file("kubernetes", plan_on("2x4x-h100", dp=4), "plan.json"))
    assert (document["apiVersion"], document["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert document["spec"]["nprocPerNode"] == "4"
    replicas = document["spec"]["pytorchReplicaSpecs"]
    assert {role: one["replicas"] for role, one in replicas.items()} == {"Master": 1, "Worker": 1}
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert "run /run/plan/plan.json" in container["args"][0]
    alone = yaml.safe_load(launch_file("kubernetes", plan_on("2x-mi300x"), "plan.json"))
    assert alone["spec"]["pytorchReplicaSpecs"].keys() == {"Master"}
    assert "amd.com/gpu" in str(alone)


def test_skypilot_asks_for_the_plans_devices() -> None:
    document = yaml.safe_load(launch_file("skypilot", plan_on("2x4x-a100-80", dp=4), "plan.json"))
    assert document["num_nodes"] == 2 and document["resources"]["accelerators"] == "A100-80GB:4"
    assert "--nproc-per-node 4" in document["run"]
    with pytest.raises(InputError, match="no name of it is known for 'titan-rtx'"):
        launch_file("skypilot", plan_on("2x-titan-rtx"), "plan.json")


@pytest.mark.multiprocess
def test_slurms_script_trains(tmp_path: Path) -> None:
    """With commands in the place of Slurm's that do their work on this machine."""
    planned = plan_on("2x-h100")
    planned.save(tmp_path / "plan.json")
    script = tmp_path / "run.slurm"
    script.write_text(launch_file("slurm", planned, "plan.json"))
    subprocess.run(["bash", "-n", str(script)], check=True)
    (tmp_path / "text.txt").write_text("It was a bright cold day in April. " * 200)
    commands = {
        "scontrol": "echo localhost", "srun": 'exec "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }  # fmt: skip
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": "text.txt", "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[:3000]
    assert (tmp_path / "checkpoints" / "step-000002" / "checkpoint.json").is_file()
