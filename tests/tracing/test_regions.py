"""Models that call `torch.utils.checkpoint`: their regions are what stages recompute, and train as autograd trains them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_nasty import legal_cuts
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from in_turn import Outcome, Pipeline, assert_equal, run_plain
from stagewright.errors import TraceError
from stagewright.graph import OperatorGraph
from stagewright.graph.document import graph_from_bytes, graph_to_bytes
from stagewright.graph.policy import KEEP, has_regions, region_policy
from stagewright.graph.split import split_graph
from stagewright.tracing.regions import without_regions
from stagewright.tracing.trace import trace_module

checkpoint = functools.partial(checkpoints.checkpoint, use_reentrant=False)
reentrant = functools.partial(checkpoints.checkpoint, use_reentrant=True)
_Forward = Callable[[Any, Tensor], Tensor]
Batch = dict[str, Tensor]
MODELS: dict[str, Callable[[], nn.Module]] = {}


class Layers(nn.Module):
    """Four linear layers, and a batch norm behind the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)

    def part(self, number: int, x: Tensor) -> Tensor:
        return self.layers[number](x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def model(forward: _Forward) -> _Forward:
    """A model whose `forward` is the function."""
    MODELS[forward.__name__] = lambda: type(forward.__name__, (Layers,), {"forward": forward})()
    return forward


@model
def dropout_inside(self: Layers, x: Tensor) -> Tensor:
    def region(x: Tensor) -> Tensor:
        x = functional.dropout(self.part(0, x), 0.4)
        return functional.dropout(self.part(1, x), 0.2) + x

    x = functional.dropout(self.layers[2](x), 0.3)
    x = checkpoint(region, x)
    return self.layers[3](functional.dropout(x, 0.5)).square().mean()


@model
def batch_norm_inside(self: Layers, x: Tensor) -> Tensor:
    x = checkpoint(lambda x: self.norm(self.part(0, x)).sigmoid() * x, x.sin())
    return self.part(1, x).square().mean()


@model
def autocast_inside(self: Layers, x: Tensor) -> Tensor:
    def region(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[1](self.layers[0](x).relu()).sigmoid()
        return (x.float().exp() * x).tanh()

    return self.layers[3](checkpoint(region, self.layers[2](x.float()))).float().logsumexp(-1).mean()


@model
def region_within_autocast(self: Layers, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = checkpoint(lambda x: self.part(1, self.part(0, x)), self.layers[2](x))
        x = self.layers[3](x)
    return x.float().logsumexp(-1).mean()


@model
def tied_weights(self: Layers, x: Tensor) -> Tensor:
    x = self.part(0, x)
    x = checkpoint(lambda x: self.part(0, x) + self.part(1, x), x)
    x = checkpoint(lambda x: self.part(1, self.part(0, x)), x)
    return self.part(1, x).square().sum()


@model
def writes_inside(self: Layers, x: Tensor) -> Tensor:
    def region(x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        hidden[:, 0] = 0
        hidden[:, 1] = hidden[:, 2] * 2
        return self.layers[1](hidden.relu_()).sigmoid_()

    return self.part(2, checkpoint(region, self.part(3, x))).square().mean()


@model
def two_consumers(self: Layers, x: Tensor) -> Tensor:
    shared = checkpoint(lambda x: self.part(1, self.part(0, x)).exp(), self.part(2, x))
    return (checkpoint(lambda y: self.part(3, y) * y, shared) + shared * shared.sin()).square().mean()


@model
def nested(self: Layers, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return functional.dropout(self.part(1, self.part(0, x)), 0.3)

    def outer(x: Tensor) -> Tensor:
        x = checkpoint(inner, functional.dropout(self.part(2, x), 0.2))
        return checkpoint(inner, x).exp()

    return self.part(3, checkpoint(outer, x.sin())).square().mean()


@model
def sequential(self: Layers, x: Tensor) -> Tensor:
    functions = [functools.partial(self.part, number % 4) for number in range(7)]
    return checkpoints.checkpoint_sequential(functions, 3, x.sin(), use_reentrant=False).square().mean()


@model
def several_tensors(self: Layers, x: Tensor) -> Tensor:
    """Through closures, keywords, tuples; some are returned as they came."""
    scale = self.part(0, x)

    def region(pair: tuple[Tensor, Tensor], *, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y = pair
        return self.part(1, x * scale + shift), y, self.part(2, y).t()

    y, same, turned = checkpoint(region, (x, scale), shift=x.cos())
    return (self.part(3, y) * same).square().mean() + (turned @ y).exp().mean()


@model
def reentrant_region(self: Layers, x: Tensor) -> Tensor:
    def region(x: Tensor, y: Tensor, factor: float) -> Tensor:
        x = functional.dropout(self.part(1, x), 0.3) * x + y
        return self.part(2, x) * factor * x

    x = self.part(0, x)
    y = reentrant(region, x, x, 0.5)
    return self.part(3, y * x + y).square().mean()


@model
def reentrant_sequence(self: Layers, x: Tensor) -> Tensor:
    functions = [functools.partial(self.part, 1), torch.sin, functools.partial(self.part, 2), torch.exp]
    x = self.part(0, x)
    return checkpoints.checkpoint_sequential(functions, 2, x, use_reentrant=True).square().mean()


def products_and_some(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op is torch.ops.aten.addmm.default:
        return CheckpointPolicy.MUST_SAVE
    if op is torch.ops.aten.sin.default:
        return CheckpointPolicy.PREFER_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE if "tanh" in str(op) else CheckpointPolicy.MUST_RECOMPUTE


@model
def selective(self: Layers, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, products_and_some)
    x = checkpoint(
        lambda x: functional.dropout(self.part(1, self.part(0, x)).sin(), 0.2).exp() * x,
        self.part(2, x),
        context_fn=contexts,
    )
    return self.part(3, x).square().mean()


@model
def every_second_product(self: Layers, x: Tensor) -> Tensor:
    def contexts() -> Any:
        count = 0

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            nonlocal count
            count += op is torch.ops.aten.addmm.default
            return op is torch.ops.aten.addmm.default and count % 2 == 0

        return create_selective_checkpoint_contexts(policy)

    for _ in range(2):
        x = checkpoint(lambda x: self.part(2, self.part(1, self.part(0, x))), x.sin(), context_fn=contexts)
    return self.part(3, x).square().mean()


class Block(nn.Module):
    """A layer that checkpoints half of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(x).sin()
        return x + checkpoint(self.mix, x)

    def mix(self, x: Tensor) -> Tensor:
        return functional.dropout(self.outer(self.inner(x).exp().tanh()), 0.2)


class Blocks(nn.Module):
    """Equal layers, with regions in them or around them."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x) if self.around else block(x)
        return x.square().mean()


MODELS["blocks_with_regions"] = lambda: Blocks(around=False)
MODELS["blocks_in_regions"] = lambda: Blocks(around=True)

FLOAT32 = ("autocast_inside", "region_within_autocast")


@functools.cache
def prepared(name: str) -> tuple[nn.Module, OperatorGraph, list[Batch], Outcome]:
    torch.manual_seed(0)
    dtype = torch.float32 if name in FLOAT32 else torch.float64
    made = MODELS[name]().to(dtype)
    batches: list[Batch] = [{"x": torch.randn(4, 6, dtype=dtype)} for _ in range(2)]
    graph = trace_module(made, batches[0], name)
    with without_regions():  # autograd's second forward would update statistics twice
        once = run_plain(copy.deepcopy(made), batches)
    plain = run_plain(copy.deepcopy(made), batches)
    return made, graph, batches, replace(plain, buffers=once.buffers)


def check(name: str, cuts: list[int], split: bool) -> Pipeline:
    made, graph, batches, plain = prepared(name)
    policies = [region_policy(graph)] * (len(cuts) + 1)
    try:
        pipeline = Pipeline(graph, copy.deepcopy(made), cuts, len(batches), policies)
        tolerance = 2.0**-6 if name in FLOAT32 else 1e-12
        assert_equal(plain, pipeline.step(batches, split), tolerance)
    except AssertionError as error:
        raise AssertionError(f"{name} cut at {cuts}: {error}") from None
    return pipeline


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_alone_equals_autograd_with_its_checkpoints(name: str, split: bool) -> None:
    check(name, [], split)


@pytest.mark.parametrize("name", MODELS)
def test_cuts_at_the_edges_of_regions_and_inside_equal_autograd_with_its_checkpoints(name: str) -> None:
    cuts = legal_cuts(prepared(name)[1])
    for index, cut in enumerate(cuts):
        check(name, [cut], split=bool(index % 2))
    check(name, cuts[:: max(len(cuts) // 5, 1)], split=True)


@pytest.mark.parametrize("name", MODELS)
def test_regions_recompute_what_is_in_them_and_nothing_else(name: str) -> None:
    _, graph, *_ = prepared(name)
    (kept,), (stage,) = split_graph(graph, []), split_graph(graph, [], [region_policy(graph)])
    again = [node for node in stage.recomputed.nodes if node.part == 3]
    assert again and all(node.region >= 0 and not node.is_kept for node in again)
    assert stage.held_bytes(stage.saved) < kept.held_bytes(kept.saved)
    assert not stage.rebuild.nodes


def num_regions(graph: OperatorGraph) -> int:
    return len({node.region for node in graph.nodes} - {-1})


def test_regions_in_equal_layers_and_around_them_are_those_of_every_layer() -> None:
    for name in ("blocks_with_regions", "blocks_in_regions"):
        phases: list[str] = []
        made, graph, batches, _ = prepared(name)
        trace_module(made, batches[0], name, report=phases.append)
        assert any("layers of its kind" in phase for phase in phases)
        assert num_regions(graph) == 4
        inside = [node for node in graph.nodes if node.region >= 0]
        norms = sum("layer_norm" in node.op for node in inside)
        assert norms == (4 if name == "blocks_in_regions" else 0)


def test_a_region_within_another_is_part_of_it() -> None:
    _, graph, *_ = prepared("nested")
    assert num_regions(graph) == 1
    (stage,) = split_graph(graph, [], [region_policy(graph)])
    assert sum(node.draw >= 0 for node in stage.recomputed.nodes) == 3


def test_selective_checkpointing_keeps_what_its_policy_says() -> None:
    _, graph, *_ = prepared("selective")
    kept = {node.op for node in graph.nodes if node.is_kept}
    assert kept == {"aten.addmm.default", "aten.sin.default"}
    (stage,) = split_graph(graph, [], [region_policy(graph)])
    assert not kept & {node.op for node in stage.recomputed.nodes}
    _, graph, *_ = prepared("every_second_product")
    assert [node.is_kept for node in graph.nodes if node.region >= 0 and "addmm" in node.op] == [
        False,
        True,
        False,
    ] * 2


def test_a_model_without_regions_keeps_everything() -> None:
    class Plain(Layers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = checkpoint(lambda x: self.part(0, x), x)  # without a backward there is nothing to keep
            return self.part(1, x).mean()

    graph = trace_module(Plain(), {"x": torch.randn(4, 6)})
    assert not has_regions(graph) and region_policy(graph) == KEEP


def test_a_graph_with_regions_is_the_same_when_it_is_read_again() -> None:
    graph = prepared("selective")[1]
    assert graph_from_bytes(graph_to_bytes(graph)) == graph


class Refused(Layers):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        return checkpoints.checkpoint(self.layers[0], x, **self.given).mean()


def own_contexts() -> Any:
    return torch.autograd.graph.save_on_cpu(), torch.autograd.graph.save_on_cpu()


def looks_at_values(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return bool(args[0].sum() > 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"use_reentrant": True},
            "at .*test_regions.py:.*no argument that requires a gradient.*use use_reentrant=False",
        ),
        ({"use_reentrant": False, "context_fn": own_contexts}, "use create_selective_checkpoint_contexts"),
        (
            {
                "use_reentrant": False,
                "context_fn": functools.partial(create_selective_checkpoint_contexts, looks_at_values),
            },
            "policy of selective checkpointing around operator .*addmm.* of module 'layers.0' at .*linear.py",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError, match=f"(?s){said}"):
        trace_module(Refused(**given), {"x": torch.randn(4, 6)})


def test_a_reentrant_region_given_tensors_in_a_tuple_is_refused() -> None:
    class Nested(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = self.part(0, x)
            return reentrant(lambda x, pair: x * pair[0], x, (x,)).mean()

    with pytest.raises(TraceError, match="pass them one by one, or use use_reentrant=False"):
        trace_module(Nested(), {"x": torch.randn(4, 6)})
