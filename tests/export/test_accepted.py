"""What is exported is accepted by the target's own parser, and says there what the plan says.

The targets are installed by `make targets`, in an environment of their own.
"""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.export.settings import settings_files
from stagewright.export.translation import Translation
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.tracing.models.reference import resolve

PYTHON = Path(__file__).parents[2] / ".venv-targets" / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="`make targets` installs the targets that judge the exports"
)

PLANS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "interleaved": ("llama-3-8b", "8x-h100", {"pp": 4, "dp": 2, "schedule": "interleaved-1f1b", "chunks": 2}),
    "uneven": (
        "llama-3-8b", "8x-h100", {"pp": 4, "dp": 2, "layers_per_stage": (9, 8, 8, 7), "recompute": "full"},
    ),
    "an order of its own": ("llama-3-8b", "8x-h100", {"pp": 4, "dp": 2, "schedule": "zb-h1"}),
    "sharded": ("llama-3-8b", "8x-h100", {"pp": 1, "dp": 8, "zero": 3, "recompute": "full"}),
    "learned positions": ("gpt2-xl", "8x-a100-80", {"pp": 4, "dp": 2}),
    "experts": ("qwen3-30b-a3b", "8x8x-h100", {"pp": 4, "dp": 16, "ep": 8}),
    "latent attention": ("deepseek-v3", "32x8x-h100", {"pp": 16, "dp": 16, "ep": 8, "recompute": "full"}),
}  # fmt: skip
JOB: dict[str, Any] = {
    "global_batch": 256, "sequence_length": 1024, "learning_rate": 2e-4, "weight_decay": 0.2, "seed": 7,
}  # fmt: skip


@cache
def exported(name: str, to: str, runtime: str) -> tuple[dict[str, str], Translation]:
    model, cluster, configuration = PLANS[name]
    job = Job(**JOB, runtime=runtime)
    widths = {"tp": 1, "microbatch": 1, "zero": 1, **configuration}
    return settings_files(to, estimate(resolve(model), load_cluster(cluster), job, **widths))


def accepted(name: str, to: str, runtime: str, folder: Path) -> tuple[dict[str, Any], Translation]:
    """Return what the target's parser read of the export, and what was exported."""
    files, translation = exported(name, to, runtime)
    for file, text in files.items():
        (folder / file).write_text(text)
    command = [PYTHON, Path(__file__).with_name("targets.py"), to, folder, translation.plan.num_ranks]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), translation


@pytest.mark.parametrize("name", [name for name in PLANS if name != "an order of its own"])
def test_megatron_reads_the_plan(name: str, tmp_path: Path) -> None:
    read, translation = accepted(name, "megatron", "megatron-core+te", tmp_path)
    plan, counts = translation.plan, translation.configuration.layers_per_stage
    if counts is not None and len(set(counts)) > 1:
        assert read["layers"] == list(counts)
    chunks = plan.num_stages // plan.pp
    assert (read["virtual_pipeline_model_parallel_size"] or 1) == chunks
    assert read["position_embedding_type"] == ("learned_absolute" if name == "learned positions" else "rope")
    assert (read["data_parallel_size"], read["pipeline_model_parallel_size"]) == (plan.dp, plan.pp)
    assert read["expert_model_parallel_size"] == plan.ep
    assert (read["micro_batch_size"], read["global_batch_size"]) == (1, 256)
    assert read["recompute_granularity"] == ("full" if "layers" in plan.memory_policy else None)
    assert (read["use_distributed_optimizer"], read["lr"], read["weight_decay"]) == (True, 2e-4, 0.2)


@pytest.mark.parametrize("name", [name for name in PLANS if name != "learned positions"])
def test_torchtitan_reads_the_plan(name: str, tmp_path: Path) -> None:
    runtime = "stagewright" if name == "an order of its own" else "torch-fsdp"
    read, translation = accepted(name, "torchtitan", runtime, tmp_path)
    plan, parallelism, training = translation.plan, read["parallelism"], read["training"]
    assert read["pp"] == plan.pp and parallelism["data_parallel_shard_degree"] == plan.dp
    if plan.pp > 1:
        parts = parallelism["module_fqns_per_model_part"]
        counts = [sum("layers." in module for module in part) for part in parts]
        assert counts == list(translation.configuration.layers_per_stage or ())
        assert sum(counts) == read["num_layers"] and parts[-1][-1] == "lm_head"
        assert training["local_batch_size"] == plan.num_microbatches
    assert (training["global_batch_size"], training["seq_len"]) == (256, 1024)
    file = parallelism["pipeline_parallel_schedule_csv"]
    assert Path(file).is_file() if name == "an order of its own" else not file
    assert read["activation_checkpoint"] == ("FullAC.Config" if "layers" in plan.memory_policy else None)
    adamw = read["optimizer"]["param_groups"][0]["optimizer_kwargs"]
    assert (adamw["lr"], adamw["weight_decay"], read["debug"]["seed"]) == (2e-4, 0.2, 7)


@pytest.mark.parametrize("zero", [None, 1, 2, 3])
def test_deepspeed_reads_the_plan(zero: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = {"pp": 1, "dp": 8, "zero": zero}
    monkeypatch.setitem(PLANS, f"zero {zero}", ("tiny-llama", "8x-h100", configuration))
    read, _ = accepted(f"zero {zero}", "deepspeed", "stagewright", tmp_path)
    assert read == {
        "stage": zero or 0, "train_batch_size": 256, "gradient_clipping": 1.0, "bf16": True, "lr": 2e-4,
    }  # fmt: skip
