"""Equal layers that do more than return tensors, or are not called alike: their graphs compute what the model computes."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from in_turn import Pipeline, assert_equal, run_plain
from stagewright.tracing import blocks, capture
from stagewright.tracing.trace import trace_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


MODELS: dict[str, type[Stack]] = {}


class Stack(nn.Module):
    """Layers between an input and a loss; a subclass says what they do, and what is computed from them."""

    block: type[nn.Module] = Block
    depth = 4

    def __init_subclass__(cls, **kwargs: Any) -> None:
        MODELS[cls.__name__] = cls

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(self.depth)])
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.run(x), y)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(x) - y).square().mean()


# Deep models


class Deep(Stack):
    depth = 12


class ScaledByDepth(Stack):
    depth = 12

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x / math.sqrt(len(self.blocks)), y)


class HeadInTheMiddle(Stack):
    depth = 12

    def run(self, x: Tensor) -> Tensor:
        every = []
        for block in self.blocks:
            x = block(x)
            every.append(x)
        return x + self.out(every[7])


class SeventhLayerTwice(Stack):
    depth = 12

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(block(x)) if index == 6 else block(x)
        return x


class Backwards(Stack):
    depth = 12

    def run(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class SkipsALayer(Stack):
    depth = 12

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == 5 else block(x)
        return x


class AnotherInput(Stack):
    """One layer far from the ends is called with another tensor."""

    depth = 12

    class block(Block):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + bias

    def run(self, x: Tensor) -> Tensor:
        biases = x.mean(0), x.square().mean(0)
        for index, block in enumerate(self.blocks):
            x = block(x, biases[index == 6])
        return x


class TiedInTheMiddle(Stack):
    depth = 12

    def __init__(self) -> None:
        super().__init__()
        self.blocks[6].first.weight = self.blocks[5].first.weight


class SumOfWeights(Stack):
    """The loss has all parameters of all layers, and their number."""

    depth = 12

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        squares = sum(parameter.square().sum() for parameter in self.parameters())
        return super().loss(x, y) + 1e-3 * squares / sum(1 for _ in self.parameters())


class CheckpointOfSome(Stack):
    depth = 12

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index in (3, 7) else block(x)
        return x


# Layers that leave tensors somewhere


class Collector:
    """Losses of all layers, on a global object."""

    losses: ClassVar[list[Tensor]] = []


COLLECTOR = Collector()


class OnAGlobal(Stack):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            COLLECTOR.losses.append(self.first(x).softmax(-1).square().mean())
            return super().forward(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses, COLLECTOR.losses = COLLECTOR.losses, []
        return super().loss(x, y) + torch.stack(losses).sum()


class InputsOnAGlobal(Stack):
    """What is kept is made outside of the layer."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            COLLECTOR.losses.append(x)
            return super().forward(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses, COLLECTOR.losses = COLLECTOR.losses, []
        return super().loss(x, y) + torch.stack(losses).square().mean()


class ViewsOnAGlobal(Stack):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            COLLECTOR.losses.append(x[:, 1:])
            return super().forward(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses, COLLECTOR.losses = COLLECTOR.losses, []
        return super().loss(x, y) + torch.stack(losses).square().mean()


class OnTheLayer(Stack):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.balance = self.first(x).softmax(-1).square().mean()
            return super().forward(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + sum(block.balance for block in self.blocks)


class OnTheParent(Stack):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.kept.append(self.first(x).square().mean())
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        for block in self.blocks:
            block.kept = self.kept

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.kept.clear()
        return super().forward(x, y) + sum(self.kept)


class InAHook(Stack):
    """A hook on a part of each layer keeps what it returns."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.first.register_forward_hook(lambda module, args, output: COLLECTOR.losses.append(output))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses, COLLECTOR.losses = COLLECTOR.losses, []
        return super().loss(x, y) + torch.stack(losses).square().mean()


class HooksPutOnLate(Stack):
    """As transformers does it for router logits: by the first forward that wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.is_hooked = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.is_hooked:
            for block in self.blocks:
                block.register_forward_hook(lambda module, args, output, kept=self.kept: kept.append(output))
            self.is_hooked = True
        self.kept.clear()
        return super().forward(x, y) + torch.stack(list(self.kept)).square().mean()


# Layers that are given or return something other than tensors


class ChangesADict(Stack):
    class block(Block):
        def forward(self, batch: dict[str, Tensor]) -> None:  # type: ignore[override]
            batch["x"] = super().forward(batch["x"])

    def run(self, x: Tensor) -> Tensor:
        batch = {"x": x}
        for block in self.blocks:
            block(batch)
        return batch["x"]


class MovesWithinADict(Stack):
    """Nothing new is put into the dict, and the same layer is given it at another time."""

    class block(Block):
        def forward(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            batch["a"], batch["b"] = batch["b"], batch["a"]
            return super().forward(x) + batch["a"]

    def run(self, x: Tensor) -> Tensor:
        batch = {"a": x.sin(), "b": x.cos()}
        for block in self.blocks:
            x = block(x, batch)
        return x


class AppendsToAList(Stack):
    class block(Block):
        def forward(self, x: Tensor, every: list[Tensor]) -> Tensor:  # type: ignore[override]
            every.append(x)
            return super().forward(x)

    def run(self, x: Tensor) -> Tensor:
        every: list[Tensor] = []
        for block in self.blocks:
            x = block(x, every)
        return torch.stack(every).mean(0) + x


class WritesToItsInput(Stack):
    class block(Block):
        def forward(self, x: Tensor, total: Tensor) -> Tensor:  # type: ignore[override]
            y = super().forward(x)
            total += y
            return y

    def run(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x, total)
        return total


@dataclasses.dataclass
class Result:
    x: Tensor
    loss: Tensor


class ReturnsADataclass(Stack):
    class block(Block):
        def forward(self, x: Tensor) -> Result:  # type: ignore[override]
            y = super().forward(x)
            return Result(y, y.square().mean())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = 0.0
        for block in self.blocks:
            result = block(x)
            x, total = result.x, total + result.loss
        return self.loss(x, y) + total


class Pair(NamedTuple):
    x: Tensor
    loss: Tensor


class ReturnsANamedTuple(Stack):
    depth = 12

    class block(Block):
        def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
            y = super().forward(pair.x)
            return Pair(y, pair.loss + y.square().mean())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pair = Pair(x, x.new_zeros(()))
        for block in self.blocks:
            pair = block(pair)
        return self.loss(pair.x, y) + pair.loss


class State:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class ChangesAnObject(Stack):
    class block(Block):
        def forward(self, state: State) -> State:  # type: ignore[override]
            state.x = super().forward(state.x)
            return state

    def run(self, x: Tensor) -> Tensor:
        state = State(x)
        for block in self.blocks:
            state = block(state)
        return state.x


# Layers that are told something, or tell it, in other ways


class SetFromOutside(Stack):
    """The model sets a number on each layer just before it calls it."""

    class block(Block):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            block.scale = 1.0 / (1 + index)
            x = block(x)
        return x


class SetOnAConfig(Stack):
    """The same, on an object that all layers have."""

    class block(Block):
        config: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.config.scale

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=0.0)
        for block in self.blocks:
            block.config = self.config

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            self.config.scale = 1.0 / (1 + index)
            x = block(x)
        return x


class CountsItsCalls(Stack):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.count["calls"] += 1
            return super().forward(x) / self.count["calls"]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        count = {"calls": 0}
        for block in self.blocks:
            block.count = count
        return super().forward(x, y)


class ReadsAnotherModule(Stack):
    """Each layer uses a parameter of the model through a list, in which torch does not look for modules."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.others[0].weight

    def __init__(self) -> None:
        super().__init__()
        others = [self.out]
        for block in self.blocks:
            block.others = others


class UsesAWeightOfALayer(Stack):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x @ self.blocks[2].first.weight, y)


class ChecksTypes(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x if isinstance(block, Block) else block(x)
        return x


class WrittenToOutside(Stack):
    """What a layer returns may be its input; the model then writes to it."""

    class block(Block):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), y

    def run(self, x: Tensor) -> Tensor:
        carried = x * 1
        for block in self.blocks:
            x, returned = block(x, carried)
            returned += x
            x += carried
        return x


class TiedWithinOne(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].second.weight = self.blocks[0].first.weight


class ResultsUnused(Stack):
    """Layers are run for their buffers alone."""

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block(x)
        return x


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_computes_what_the_model_computes(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    batches = [
        {"x": torch.randn(3, 4, dtype=torch.float64), "y": torch.randn(3, 1, dtype=torch.float64)}
        for _ in range(2)
    ]
    graph = trace_module(copy.deepcopy(model), batches[0], name)
    outcome = Pipeline(graph, model, [], len(batches)).step(batches, False)
    assert_equal(run_plain(model, batches), outcome, 1e-12)


@pytest.mark.parametrize(
    ("name", "num_left_out"),
    [("Deep", 5), ("ScaledByDepth", 5), ("ReturnsANamedTuple", 5), ("AnotherInput", 0)],
)
def test_layers_are_left_out_where_they_are_called_alike(
    name: str, num_left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: list[int] = []

    def watched(*args: Any, original: Callable[..., Any] = capture.left_out) -> Any:
        repeats, skipped = original(*args)
        missing.append(sum(len(repeat.missing) for repeat in repeats))
        return repeats, skipped

    monkeypatch.setattr(capture, "left_out", watched)
    trace_module(MODELS[name](), {"x": torch.randn(3, 4), "y": torch.randn(3, 1)})
    assert missing == [num_left_out]


@pytest.mark.parametrize(
    ("name", "effect"),
    [
        ("Deep", None),
        ("ReturnsANamedTuple", None),
        ("OnAGlobal", "keeps a tensor"),
        ("InputsOnAGlobal", "keeps a tensor"),
        ("ViewsOnAGlobal", "keeps a tensor"),
        ("HooksPutOnLate", "has hooks"),
        ("ReadsAnotherModule", "uses a tensor that it is not given"),
        ("WritesToItsInput", "writes to a tensor that it is given"),
        ("MovesWithinADict", "writes to what it is given or to its attributes"),
        ("UsesAWeightOfALayer", "has tensors that the rest of the model uses"),
        ("SumOfWeights", "has modules that the rest of the model goes through"),
    ],
)
def test_effects_of_layers_are_named(name: str, effect: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found_blocks: list[blocks.RepeatedBlocks] = []
    original = capture.find_blocks
    monkeypatch.setattr(
        capture, "find_blocks", lambda model: found_blocks.append(original(model)) or found_blocks[-1]
    )
    trace_module(MODELS[name](), {"x": torch.randn(3, 4), "y": torch.randn(3, 1)})
    assert set(found_blocks[0].unruly.values()) == ({effect} if effect else set())
