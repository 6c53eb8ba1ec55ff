"""Precisions and compiled execution in estimates."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.estimation.compiled import fused
from stagewright.estimation.operators import short_name
from stagewright.estimation.time import Costing
from stagewright.graph import OperatorGraph, Part
from stagewright.planning.job import Job
from stagewright.planning.prediction.staged_model import costing
from stagewright.tracing.cache import trace
from stagewright.tracing.trace import trace_module

H100 = load_cluster("1x-h100")


@cache
def llama() -> OperatorGraph:
    return trace("tiny-llama", 1, sequence_length=64, dtype="bfloat16", target="cuda")


def seconds(graph: OperatorGraph, dtype: str, compiled: bool = False, cluster: str = "1x-h100") -> float:
    job = Job(global_batch=1, sequence_length=64, dtype=dtype, compiled=compiled)  # type: ignore[arg-type]
    return float(costing(graph, load_cluster(cluster), job).arrays[0].sum())


class Products(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().sum()


@cache
def products(dtype: torch.dtype) -> OperatorGraph:
    module = Products(4096).to(dtype)
    return trace_module(module, {"x": torch.zeros(4096, 4096, dtype=dtype)})


def test_products_take_as_long_as_their_precision_says() -> None:
    single, half = products(torch.float32), products(torch.bfloat16)
    assert seconds(single, "tf32") < 0.25 * seconds(single, "fp32")
    assert 0.5 < seconds(half, "fp8") / seconds(half, "bf16") < 0.9


def test_a_device_without_the_precision_is_refused() -> None:
    with pytest.raises(InputError, match="no figures for fp8"):
        seconds(products(torch.bfloat16), "fp8", cluster="1x-v100-32")


class Chain(torch.nn.Module):
    """``tanh(relu(x) + 1)``: one pass over `x`, whose derivative needs two values of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(x * self.scale) + 1).sum()


def test_a_chain_reads_its_input_and_writes_what_is_saved() -> None:
    graph = trace_module(Chain(), {"x": torch.zeros(1024, 1024)})
    found = fused(graph)
    forward = {
        short_name(node.op): found[node.id]
        for node in graph.nodes
        if node.part is Part.FORWARD and node.id in found
    }
    size = 4 * 1024 * 1024
    assert forward["mul"].is_launched and not forward["relu"].is_launched
    assert forward["mul"].bytes_moved == pytest.approx(size, rel=0.01), "reads x; its result stays inside"
    assert forward["relu"].bytes_moved == pytest.approx(size, rel=0.01), "saved for the backward"
    assert forward["add"].bytes_moved == 0
    assert forward["tanh"].bytes_moved == pytest.approx(size, rel=0.01), "saved for the backward"


def test_compiling_saves_time_and_leaves_products_alone() -> None:
    graph = llama()
    eager, compiled = (Costing(graph, H100.device, compiled=flag) for flag in (False, True))
    assert compiled.arrays[0].sum() < 0.8 * eager.arrays[0].sum()
    assert (compiled.arrays[0] <= eager.arrays[0] * (1 + 1e-9)).all()
    assert compiled.flop == eager.flop
    for node in graph.nodes:
        if short_name(node.op) in ("mm", "addmm", "bmm"):
            assert compiled.of(node, graph.values.__getitem__) == eager.of(node, graph.values.__getitem__)


def test_what_is_only_predicted_says_so() -> None:
    job = Job(global_batch=1, sequence_length=8, dtype="fp8")
    assert job.not_run is not None and "predicted, not run" in job.not_run
    assert Job(global_batch=1, sequence_length=8).not_run is None
