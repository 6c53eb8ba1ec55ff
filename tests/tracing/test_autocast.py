"""Autocast of another device: the rules are torch's own for that device, and a graph traced with them runs alike."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from in_turn import Pipeline, assert_equal, run_plain
from stagewright.graph import Part
from stagewright.tracing import private
from stagewright.tracing.autocast import CUDA_RULES, CastPolicy, autocast_of
from stagewright.tracing.trace import trace_module

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def test_the_operators_with_rules_are_those_torch_has_rules_for() -> None:
    theirs = {name for name in private.operator_names() if private.has_autocast_kernel(name, "CUDA")}
    theirs -= {"_cudnn_rnn"}  # of builds with CUDA alone; a trace on the CPU never meets it
    theirs -= {
        name for name in theirs if "imname" in name or ".names_" in name
    }  # named tensors, until torch 2.12
    assert theirs <= set(CUDA_RULES), "torch has new rules for CUDA's autocast: update tracing/autocast.py"


CALLS = {
    "linear": lambda x: nn.functional.linear(x, x),
    "matmul": lambda x: x @ x,
    "addmm": lambda x: torch.addmm(x, x, x),
    "bmm": lambda x: torch.bmm(x.unsqueeze(0), x.unsqueeze(0)),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "prelu": lambda x: nn.functional.prelu(x, x.select(0, 0).narrow(0, 0, 1)),
    "scaled_dot_product_attention": lambda x: nn.functional.scaled_dot_product_attention(
        x.unsqueeze(0), x.unsqueeze(0), x.unsqueeze(0)
    ),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (8,)),
    "rms_norm": lambda x: nn.functional.rms_norm(x, (8,)),
    "pow": lambda x: x**2,
    "exp": lambda x: x.exp(),
    "rsqrt": lambda x: x.rsqrt(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: torch.norm(x, 2),
    "mse_loss": lambda x: nn.functional.mse_loss(x, x),
    "softmax": lambda x: x.softmax(-1),
    "softmax to half": lambda x: x.softmax(-1, dtype=BFLOAT16),
    "sum": lambda x: x.sum(),
    "sum to half": lambda x: x.sum(0, dtype=BFLOAT16),
    "cumsum": lambda x: x.cumsum(0),
    "prod": lambda x: x.prod(0),
    "addcmul": lambda x: torch.addcmul(x.float(), x, x),
    "dot": lambda x: torch.dot(x.select(0, 0), x.select(0, 0)),
    "cross_entropy": lambda x: nn.functional.cross_entropy(x, x.argmax(-1)),
    "cat": lambda x: torch.cat([x, x]),
    "gelu": lambda x: nn.functional.gelu(x),
    "mean": lambda x: x.mean(),
    "add": lambda x: x + x.float(),
}


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32, torch.float64])
@pytest.mark.parametrize("call", CALLS)
def test_results_have_the_types_of_the_target(
    call: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is torch's own CUDA autocast, on fake tensors that say they are on a GPU."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)

    def outcome(device: str) -> object:
        with private.FakeTensorMode(), torch.autocast("cuda", BFLOAT16):
            try:
                return CALLS[call](torch.empty(8, 8, dtype=dtype, device=device)).dtype
            except RuntimeError as error:
                return type(error)

    theirs = outcome("cuda")
    with autocast_of("cuda"):
        assert outcome("cpu") == theirs


def test_rules_hold_only_while_they_are_asked_for() -> None:
    x = torch.ones(4, 4)
    with torch.autocast("cpu", BFLOAT16):
        before = (x @ x).softmax(-1).dtype
        with autocast_of("cuda"):
            during = (x @ x).softmax(-1).dtype
        after = (x @ x).softmax(-1).dtype
    assert (before, during, after) == (BFLOAT16, FLOAT32, BFLOAT16)


def test_a_loss_that_would_overflow_is_refused() -> None:
    x = torch.rand(4)
    with (
        autocast_of("cuda"),
        torch.autocast("cuda", BFLOAT16),
        pytest.raises(RuntimeError, match="with_logits"),
    ):
        nn.functional.binary_cross_entropy(x, x)


class Network(nn.Module):
    """Layers whose types differ between the autocast of a CPU and of CUDA; the code itself asks for CUDA's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", BFLOAT16):
            hidden = self.norm(self.first(x)).softmax(-1)
            logits = self.head(hidden).pow(2)
            return logits.sum()


def test_a_graph_for_a_gpu_runs_as_the_model_would_there() -> None:
    torch.manual_seed(0)
    model = Network()
    batches = [{"x": torch.randn(4, 8)} for _ in range(2)]
    graph = trace_module(model, batches[0], facts={"target": "cuda"})
    kept = {
        (node.op.removeprefix("aten.").split(".")[0], graph.values[value].meta.dtype)
        for node in graph.nodes
        if node.part is Part.FORWARD
        for value in node.outputs[:1]
        if value is not None
    }
    assert {
        ("native_layer_norm", "float32"),
        ("_softmax", "float32"),
        ("pow", "float32"),
        ("sum", "float32"),
    } <= kept
    with autocast_of("cuda"):
        plain = run_plain(copy.deepcopy(model), batches)
    for cut in range(2, len(graph.forward_ids), 3):
        assert_equal(plain, Pipeline(graph, model, [cut], len(batches)).step(batches, True), 1e-6)


def test_autocast_around_a_whole_model_is_that_of_the_target() -> None:
    class Plain(Network):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.first(x)).softmax(-1)).pow(2).sum()

    torch.manual_seed(0)
    x = {"x": torch.randn(4, 8)}
    inside = trace_module(Network(), x, facts={"target": "cuda"})
    around = trace_module(Plain(), x, facts={"target": "cuda", "autocast": "bfloat16"})
    assert [node.op for node in around.nodes] == [node.op for node in inside.nodes]


@pytest.mark.parametrize("call", ["cross_entropy", "square", "norm", "instance_norm", "conv"])
def test_operators_made_of_others_are_cast_as_in_eager_execution(call: str) -> None:
    """Export takes such operators apart below autocast; the graph must hold the casts all the same."""
    calls = {
        "cross_entropy": lambda x: nn.functional.cross_entropy(x.half(), x.argmax(-1)).float(),
        "square": lambda x: x.bfloat16().square().sum(),
        "norm": lambda x: torch.linalg.norm(x.bfloat16()),
        "instance_norm": lambda x: nn.functional.instance_norm(x[None].bfloat16()).sum(),
        "conv": lambda x: nn.functional.conv1d(x[None], x[None], padding="same").sum(),
    }

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return calls[call](x * self.weight).float()

    torch.manual_seed(0)
    model, batches = Model(), [{"x": torch.randn(8, 8)}]
    graph = trace_module(model, batches[0], facts={"target": "cuda", "autocast": "bfloat16"})
    with autocast_of("cuda"), torch.autocast("cpu", BFLOAT16):
        plain = run_plain(copy.deepcopy(model), batches)
    assert_equal(plain, Pipeline(graph, model, [], 1).step(batches, False), 1e-6)


def test_every_policy_is_used() -> None:
    assert set(CUDA_RULES.values()) == set(CastPolicy)
