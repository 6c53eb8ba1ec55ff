"""The batch script trains, and is written only for plans that `stagewright run` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.export.slurm import slurm_script
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan

JOB = Job(global_batch=16, sequence_length=32, dtype="fp32", num_steps=2)


def plan_on(name: str, **widths: Any) -> Plan:
    return estimate("tiny-llama", load_cluster(name), JOB, **{"pp": 2, "microbatch": 1, **widths})


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (
            {"runtime": "megatron-core+te", "dtype": "bf16"},
            "predicted for runtime 'megatron-core\\+te'.*plan without",
        ),
        ({"dtype": "fp8"}, "fp8 is predicted, not run"),
    ],
)
def test_a_plan_that_cannot_be_run_gets_no_script(job: dict[str, str], why: str) -> None:
    plan = plan_on("2x-h100")
    with pytest.raises(InputError, match=f"slurm: .*{why}"):
        slurm_script(plan.model_copy(update={"job": plan.job.model_copy(update=job)}), "plan.json")


@pytest.mark.multiprocess
def test_slurms_script_trains(tmp_path: Path) -> None:
    """With commands in the place of Slurm's that do their work on this machine."""
    planned = plan_on("2x-h100")
    planned.save(tmp_path / "plan.json")
    script = tmp_path / "run.slurm"
    script.write_text(slurm_script(planned, "plan.json"))
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
