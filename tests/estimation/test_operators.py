"""FLOP of every operator against torch's counter, bytes of the others by hand, and the warning list."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from stagewright.cluster import load_cluster
from stagewright.cluster.attention import Scores
from stagewright.estimation.operators import Kernel, Work, short_name, work
from stagewright.estimation.time import Costing, cost, kernel_seconds
from stagewright.graph import Node, OperatorGraph, Origin, Part, Ref, TensorMeta, Value
from stagewright.graph.graph import UNPACKING
from stagewright.graph.tensor import contiguous
from stagewright.tracing.cache import trace
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.reference import resolve
from stagewright.tracing.trace import trace_module

MODELS = ["tiny-llama", "tiny-gpt2", "tiny-t5", "tiny-vit", "tiny-mixtral", "tiny-nemotron-h"]
COUNTED_AS = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}


class Convolutions(torch.nn.Module):
    """Strided, grouped and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
            torch.nn.Conv2d(8, 12, 5, groups=4, bias=False),
            torch.nn.ConvTranspose2d(12, 6, 3, stride=2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


@cache
def graph_of(name: str) -> OperatorGraph:
    if name == "convolutions":
        return trace_module(Convolutions(), {"x": torch.zeros(2, 3, 32, 32, requires_grad=True)})
    return trace(name, 2, 32, "float32")


def torch_flop(graph: OperatorGraph, node: Node) -> float | None:
    """What torch's counter says of a node, asked with tensors that have no data."""

    def tensor(meta: TensorMeta) -> torch.Tensor:
        return torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype), device="meta")

    def decode(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return tensor(graph.values[argument.value].meta)
        return list(map(decode, argument)) if isinstance(argument, tuple) else argument

    name = short_name(node.op)
    packet = getattr(torch.ops.aten, COUNTED_AS.get(name, name), None)
    if packet not in flop_registry:
        return None
    made = [None if output is None else tensor(graph.values[output].meta) for output in node.outputs]
    args = [decode(argument) for argument in node.args]
    if name.endswith("for_cpu_backward"):
        args = args[:6]
    return flop_registry[packet](*args, out_val=made[0] if len(made) == 1 else tuple(made))


@pytest.mark.parametrize("name", [*MODELS, "convolutions"])
def test_flop_equal_those_of_torch(name: str) -> None:
    graph = graph_of(name)
    num_compared = 0
    for node in graph.nodes:
        expected = torch_flop(graph, node)
        found = work(node, graph.values.__getitem__)
        if expected is None:
            assert found.flop == 0 or "grouped_mm" in node.op, node.op
        else:
            assert found.flop == expected, (node.op, [str(graph.values[v].meta) for v in node.inputs])
            num_compared += 1
    assert num_compared > 5


def test_grouped_convolutions_compute_less_than_the_counter_says() -> None:
    graph = graph_of("convolutions")
    nodes = [node for node in graph.nodes if short_name(node.op) == "convolution_backward"]
    works = [work(node, graph.values.__getitem__) for node in nodes if node.part is Part.WEIGHT_GRAD]
    assert sorted(found.flop / found.arithmetic for found in works) == [1, 1, 4]


def test_grouped_products_compute_every_row_once() -> None:
    graph = graph_of("tiny-mixtral")
    forward = [node for node in graph.nodes if node.op.endswith("grouped_mm_fallback.default")]
    for node in forward:
        rows, weights = (graph.values[value].meta.shape for value in node.inputs[:2])
        expected = 2 * rows[0] * weights[1] * weights[2]
        assert work(node, graph.values.__getitem__).flop == expected
    backward = [node for node in graph.nodes if "grouped_mm_fallback_backward" in node.op]
    assert all(work(node, graph.values.__getitem__).grouped for node in (*forward, *backward))
    assert sum(work(node, graph.values.__getitem__).flop for node in backward) == 2 * sum(
        work(node, graph.values.__getitem__).flop for node in forward
    )


def test_causal_attention_computes_half_the_scores_and_the_diagonal() -> None:
    graph = graph_of("tiny-llama")
    found = [work(node, graph.values.__getitem__) for node in graph.nodes if "attention" in node.op]
    assert {item.kernel for item in found} == {Kernel.ATTENTION, Kernel.ATTENTION_BACKWARD}
    assert all(item.arithmetic == item.flop * 33 / 64 for item in found)
    assert {(item.scores.seen, item.scores.edges) for item in found if item.scores} == {(16.5, 1)}


def test_attention_to_other_keys_than_the_queries_own() -> None:
    metas = [contiguous(shape, "bfloat16") for shape in ((2, 3, 8, 64), (2, 1, 32, 64), (2, 1, 32, 128))]
    values = [Value(number, meta, number, Origin.INPUT) for number, meta in enumerate(metas)]

    def attended(causal: bool, keys: int) -> Work:
        order = (0, 1, 2) if keys == 32 else (1, 0, 0)
        args = (*map(Ref, order), 0.0, causal)
        node = Node(
            0,
            "aten._scaled_dot_product_flash_attention.default",
            args,
            (),
            order,
            (),
            Part.FORWARD,
            -1,
            "",
            0,
            -1,
        )
        return work(node, values.__getitem__)

    assert attended(False, 32).scores == Scores(6, 8, 32, 2 * (64 + 128), 32)
    # Query i sees keys 0 to i: none sees those beyond the last query, the last queries see all.
    assert attended(True, 32).scores == Scores(6, 8, 8, 2 * (64 + 128), 4.5, 1)
    assert attended(True, 8).scores == Scores(2, 32, 8, 4 * 64, (36 + 24 * 8) / 32, 1)
    for causal, keys in ((False, 32), (True, 32), (True, 8)):
        found = attended(causal, keys)
        assert found.scores is not None
        assert (
            found.arithmetic
            == found.scores.flop * found.scores.batch * found.scores.queries * found.scores.seen
        )


def test_views_cost_nothing_on_the_device_and_streams_their_bytes() -> None:
    graph = graph_of("tiny-llama")
    device = load_cluster("8x-h100").device
    for node in graph.nodes:
        found = work(node, graph.values.__getitem__)
        if short_name(node.op) in ("view", "t", "transpose", "expand"):
            assert cost(found, device).device_s == 0
        if short_name(node.op) == "silu":
            size = graph.values[node.inputs[0]].meta.num_elements * 4
            assert found.bytes_moved == 2 * size
            assert kernel_seconds(found, device) == pytest.approx(device.memory_seconds(2 * size))


@pytest.mark.parametrize(("base", "passes"), [("nf4", 1), ("int8", 1), ("fp8", 3)])
def test_dequantised_weights_are_written_once_and_in_blocks_read_and_written_again(
    base: str, passes: int
) -> None:
    lora = Lora.of(2, targets="q_proj", base=base)
    graph = trace(resolve("tiny-llama", {"num_hidden_layers": 1}).adapted(lora), 1, 16, "bfloat16")
    nodes = [node for node in graph.nodes if node.op in UNPACKING]
    assert len(nodes) >= 7
    for node in nodes:
        done = work(node, graph.values.__getitem__)
        read = sum(graph.values[value].meta.payload_bytes for value in node.inputs)
        (output,) = node.outputs
        assert output is not None and done.has_rule and done.kernel is Kernel.MEMORY
        assert done.bytes_moved == read + passes * graph.values[output].meta.payload_bytes


@pytest.mark.parametrize("name", MODELS)
def test_equal_signatures_cost_the_same(name: str) -> None:
    """Costs are looked up by signature, so a signature must settle what an operator asks of a device."""
    graph = graph_of(name)
    seen: dict[int, Any] = {}
    for node in graph.nodes:
        found = work(node, graph.values.__getitem__)
        assert seen.setdefault(node.signature, found) == found, node.op


@pytest.mark.parametrize("name", [*MODELS, "convolutions"])
def test_every_operator_of_these_models_has_a_rule(name: str) -> None:
    costing = Costing(graph_of(name), load_cluster("8x-h100").device)
    assert costing.flop > 0
    assert costing.without_rule == set()


def test_an_operator_without_a_rule_is_named_and_costed_by_bytes() -> None:
    class Unusual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i1e(x * self.weight).sum()

    costing = Costing(trace_module(Unusual(), {"x": torch.ones(4, 8)}), load_cluster("8x-h100").device)
    assert costing.seconds(costing.graph.nodes) > 0
    assert "special_i1e" in costing.without_rule
