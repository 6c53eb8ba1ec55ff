"""Packages for `torch.distributed.pipelining` run under PyTorch's own runtime, with the gradients of the plain model."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from multiprocess import run_ranks
from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.execution.initial_weights import write_initial_weights
from stagewright.export.torch_pipelining import not_translated, torch_package
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve

LLAMA = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
CLUSTER = load_cluster("4x-h100", {"device.kind": "cpu"})
JOB = Job(global_batch=8, sequence_length=16, dtype="fp64")
WAYS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b", "dp": 2, "pp": 2},
    "interleaved": {"schedule": "interleaved-1f1b", "chunks": 2},
    "breadth-first": {"schedule": "breadth-first", "chunks": 2},
    "zero bubble": {"schedule": "zb-h1"},
    "V of unequal stages": {"schedule": "zb-v"},
}


def planned(**way: Any) -> Plan:
    return estimate(
        resolve("tiny-llama", LLAMA), CLUSTER, JOB, **{"pp": 2, "dp": 1, "tp": 1, "microbatch": 1, **way}
    )


def moved(plan: Plan) -> Plan:
    """`plan` with its first cut a few operators further on, inside a layer."""
    cut = plan.cuts[0]
    graph = trace(plan.model.reference(), plan.microbatch_size, device="cpu", **plan.traced())
    from stagewright.planning.plan_stages import cut_names, stage_cuts

    first, *others = stage_cuts(plan, graph)
    found = plan.model_copy(update={"cuts": cut_names(graph, [first + 7, *others])})
    assert found.cuts[0] != cut
    return found


@pytest.mark.multiprocess
def test_gradients_under_pytorchs_runtime_are_those_of_the_plain_model(tmp_path: Path) -> None:
    plans = {name: planned(**way) for name, way in WAYS.items()}
    plans["V of unequal stages"] = moved(plans["V of unequal stages"])
    for name, plan in plans.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        graph = trace(plan.model.reference(), plan.microbatch_size, device="cpu", **plan.traced())
        package = torch_package(plan, graph)
        write_initial_weights(plan, package.tensors, folder)
        for file, text in package.files.items():
            (folder / file).write_text(text)
    for size in (2, 4):
        names = [name.replace(" ", "-") for name, plan in plans.items() if plan.num_ranks == size]
        found = run_ranks(differences, size, str(tmp_path), names, timeout=120)
        for name in names:
            seen: set[str] = set()
            for rank in found:
                assert max(rank[name].values()) < 1e-12
                seen |= rank[name].keys()
            assert len(seen) == 4 * 9 + 3


def differences(rank: int, num_ranks: int, folder: str, names: list[str]) -> dict[str, dict[str, float]]:
    """By package and parameter, how far this rank's gradients are from the plain model's."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    module = build(resolve("tiny-llama", LLAMA), 8, JOB.sequence_length, "float64", seed=JOB.seed).module
    tokens = torch.randint(0, 96, (8, JOB.sequence_length), generator=torch.Generator().manual_seed(1))
    module(input_ids=tokens).backward()
    plain = {name: parameter.grad for name, parameter in module.named_parameters()}
    found = {}
    for name in names:
        sys.path.insert(0, f"{folder}/{name}")
        for each in ("train", "stages"):
            sys.modules.pop(each, None)
        pipeline = importlib.import_module("train").Pipeline(torch.device("cpu"))
        sys.path.pop(0)
        parts = tokens.chunk(num_ranks // 2)
        pipeline.step({"input_ids": parts[pipeline.replica]})
        found[name] = {
            named: float((getattr(stage, attribute).grad - plain[named]).abs().max())
            for stage in pipeline.modules.values()
            for attribute, named in stage.NAMES.items()
            if named in plain
        }
    return found


def test_what_the_package_lacks_is_said() -> None:
    plan = planned(schedule="1f1b", dp=2, recompute="full", zero=1)
    said = list(not_translated(plan))
    assert any("recompute" in one for one in said) and any("shard" in one for one in said)
    with pytest.raises(InputError, match="tp 2"):
        torch_package(planned(tp=2), trace(plan.model.reference(), 1, device="cpu", **plan.traced()))
