"""Small random networks to compare choices with an exact optimum on: of random operators, and blocks as models have them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.graph import OperatorGraph
from stagewright.tracing.private import FakeTensorMode
from stagewright.tracing.trace import trace_module

WIDTHS = (256, 512, 1024, 2048)
TOKENS = (1024, 4096, 16384)


class RandomNetwork(nn.Module):
    """`num_operators` operators, each of one or two of the values before it, rather of those not used yet."""

    def __init__(self, num_operators: int, draw: random.Random) -> None:
        super().__init__()
        widths, unused = [draw.choice(WIDTHS)], [0]
        self.first_width = widths[0]
        self.steps: list[tuple[str, tuple[int, ...], int]] = []
        self.layers = nn.ModuleDict()
        for number in range(1, num_operators + 1):
            known = (
                range(1, number) if number > 1 else range(1)
            )  # behind the first layer all depends on parameters
            source = draw.choice(unused[-2:] if unused and draw.random() < 0.75 else known)
            equal = [other for other in known if other != source and widths[other] == widths[source]]
            kind = draw.choice(
                ["linear", "linear", "gelu", "tanh", "norm", "softmax", "relu", "add", "mul", "mul"]
            )
            if number == 1 or (kind in ("add", "mul") and not equal):
                kind = "linear"
            sources = (source, draw.choice(equal)) if kind in ("add", "mul") else (source,)
            width = draw.choice(WIDTHS) if kind == "linear" else widths[source]
            if kind == "linear":
                self.layers[str(number)] = nn.Linear(widths[source], width, bias=False)
            elif kind == "norm":
                self.layers[str(number)] = nn.LayerNorm(width)
            self.steps.append((kind, sources, number))
            widths.append(width)
            unused = [one for one in unused if one not in sources] + [number]

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for kind, sources, number in self.steps:
            values.append(self._step(kind, [values[source] for source in sources], number))
        return values[-1].square().mean()

    def _step(self, kind: str, given: Sequence[Tensor], number: int) -> Tensor:
        match kind:
            case "linear" | "norm":
                return self.layers[str(number)](given[0])
            case "add":
                return given[0] + given[1]
            case "mul":
                return given[0] * given[1]
            case "softmax":
                return given[0].softmax(-1)
        return {"gelu": functional.gelu, "tanh": torch.tanh, "relu": functional.relu}[kind](given[0])


class GatedBlock(nn.Module):
    """Root-mean-square norm, gated products and a residual, as in Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.scale
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class AttentionBlock(nn.Module):
    """Layer norm, attention with explicit scores and a residual, as in GPT-2."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.queries, self.keys, self.values, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (self._heads(layer(normed)) for layer in (self.queries, self.keys, self.values))
        weights = (torch.bmm(q, k.transpose(1, 2)) * 0.125).softmax(-1)
        tokens, width = x.shape
        return x + self.out(torch.bmm(weights, v).transpose(0, 1).reshape(tokens, width))

    def _heads(self, x: Tensor) -> Tensor:
        tokens, width = x.shape
        return x.view(tokens, self.num_heads, width // self.num_heads).transpose(0, 1)


class Classified(nn.Module):
    """A layer in front of blocks and a loss behind them."""

    def __init__(self, blocks: Sequence[nn.Module], before: int, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(before, width, bias=False)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def small_stage(seed: int) -> OperatorGraph:
    """A traced network of some ten to thirty operators; every third is of blocks."""
    draw = random.Random(seed)
    is_random = seed % 3 != 0
    tokens = draw.choice(TOKENS if is_random else TOKENS[:1])
    with FakeTensorMode(allow_non_fake_inputs=True):
        if is_random:
            network = RandomNetwork(draw.randint(8, 14), draw)
            model: nn.Module = network
            width = network.first_width
        else:
            width, inner = draw.choice(WIDTHS), draw.choice(WIDTHS[1:])
            blocks = [
                GatedBlock(inner, draw.choice(WIDTHS))
                if draw.random() < 0.5
                else AttentionBlock(inner, inner // 64)
                for _ in range(draw.randint(1, 2))
            ]
            model = Classified(blocks, width, inner)
        inputs = {"x": torch.empty(tokens, width)}
    facts = {"microbatch_size": tokens, "sequence_length": 1, "num_tokens": tokens}
    return trace_module(model, inputs, f"small-{seed}", facts)
