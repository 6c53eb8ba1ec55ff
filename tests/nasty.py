"""Small models that break naive tracing, cutting or differentiation, each with an example microbatch.

Every `forward` returns a scalar loss. The first ten are the kinds a pipeline must get right before anything is built
on it; the others are traps met on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Nasty:
    """A model and a microbatch: both made from the random state at the time of the call."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    dtype: torch.dtype


NASTY: dict[str, Nasty] = {}


def nasty(
    dtype: torch.dtype = torch.float64, **shapes: tuple[int, ...] | Callable[[], Tensor]
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a model under the name of its class, in `dtype`; a shape stands for a normal tensor of that type."""

    def batch() -> Batch:
        return {
            name: torch.randn(made, dtype=dtype) if isinstance(made, tuple) else made()
            for name, made in shapes.items()
        }

    def register(model: type[nn.Module]) -> type[nn.Module]:
        NASTY[model.__name__] = Nasty(lambda: model().to(dtype), batch, dtype)
        return model

    return register


def tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 11, shape)


# The ten


@nasty(x=(3, 4))
class SliceAssignment(nn.Module):
    """Writes to a slice, to a masked part and to a whole activation; none of the writes returns what is used later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.outer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        hidden[:, 0] = 0
        hidden[:, 1] = hidden[:, 2] * 2
        hidden[1].add_(hidden[0])
        hidden.masked_fill_(x[:, :1] > 1.0, 0.5)
        hidden.relu_()
        return self.outer(hidden).square().mean()


@nasty(x=(4, 3, 5, 5))
class BatchNorm(nn.Module):
    """Statistics change with every microbatch, on two layers, and are read by neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Linear(36, 6)
        self.flat_norm = nn.BatchNorm1d(6, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu().flatten(1)
        return self.flat_norm(self.second(hidden)).exp().mean()


@nasty(x=(2, 3, 6, 6))
class Convolution(nn.Module):
    """Convolutions of three sorts around a skip connection, with pooling whose indices are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        hidden = self.norm(self.depthwise(functional.gelu(skip))) + skip
        return self.up(functional.max_pool2d(hidden, 2)).square().mean()


@nasty(tokens=tokens(2, 6), labels=tokens(2, 6))
class TiedWeights(nn.Module):
    """One matrix embeds, is transposed in the middle, and makes the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=3)
        self.middle = nn.Linear(8, 11, bias=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.middle.weight = self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.middle(hidden).softmax(-1) @ self.embed.weight
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=5)


@nasty(x=(3, 4))
class ThreeConsumers(nn.Module):
    """A value with consumers far apart: its cotangent is added up along the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.layers[0](x).tanh()
        hidden = self.layers[1](shared).sigmoid()
        hidden = self.layers[2](hidden * shared + hidden)
        return (self.layers[3](hidden) - shared).square().sum() + shared.mean()


@nasty(x=(4, 6))
class Dropout(nn.Module):
    """Random numbers in three places, one of them used only by a mask, one of shape drawn for another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(self.first(x), 0.3)
        hidden = hidden + 0.1 * torch.randn_like(hidden)
        hidden = self.second(functional.dropout(hidden.relu(), 0.5))
        keep = torch.rand(4, 1, dtype=x.dtype) > 0.2
        return torch.where(keep, hidden, 0.0).square().mean()


@nasty(torch.float32, x=(3, 8), scale=(8,))
class Autocast(nn.Module):
    """Half precision inside, one weight cast twice, a region that opts out, a loss in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.first(self.first(x).relu())
            with torch.autocast("cpu", enabled=False):
                hidden = self.norm(hidden.float() * scale)
            logits = self.head(hidden)
        return logits.float().logsumexp(-1).mean()


@nasty(x=(4, 6))
class AliasedOutput(nn.Module):
    """Modules return views of their inputs, so that boundaries alias what is kept; views of one storage meet again."""

    class Reshaped(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.view(2, 12), x.t()

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.view = self.Reshaped()
        self.identity = nn.Identity()
        self.second = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        wide, turned = self.view(hidden)
        product = turned @ self.identity(hidden)
        return self.second(wide).square().sum() + product.exp().mean() + hidden[1:3, ::2].sum()


@nasty(x=(6, 4))
class Experts(nn.Module):
    """Two routed layers: top-2 of 4 experts by a mask, an auxiliary loss of each layer, and a bias that follows the load."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 4, bias=False)
            self.experts = nn.Parameter(torch.randn(4, 4, 4) / 2)
            self.register_buffer("bias", torch.zeros(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.gate(x).softmax(-1)
            chosen = torch.topk(scores + self.bias, 2, -1).indices
            mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
            load = mask.mean(0)
            with torch.no_grad():
                self.bias.sub_((load - load.mean()).sign(), alpha=0.05)
            mixed = torch.einsum("te,ted->td", scores * mask, torch.einsum("td,edf->tef", x, self.experts))
            return mixed, (load * scores.mean(0)).sum()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        auxiliary = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            mixed, loss = layer(x)
            x = x + mixed
            auxiliary = auxiliary + 0.01 * loss
        return x.square().mean() + auxiliary


@nasty(x=(3, 4), unused=(2,), mask=lambda: torch.rand(3, 1) > 0.3, weights=(3, 1))
class Unused(nn.Module):
    """A parameter and an input nobody reads, a frozen layer in the middle, inputs without gradient of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(5))
        self.discarded = nn.Linear(4, 2)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, unused: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        hidden = self.frozen(self.first(x)).masked_fill(mask, 0.0)
        self.discarded(hidden)
        return (self.last(hidden) * weights.cumsum(0)).square().mean()


# Further traps


@nasty(x=(3, 4))
class NoGradRegion(nn.Module):
    """Values that depend on parameters but pass no gradient: under no_grad, detached, and as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.target = nn.Linear(4, 4)
        self.table = nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            goal = self.target(hidden) * self.first.weight.norm()
            largest = hidden.argmax(-1)
        stopped = hidden.detach() * hidden + self.table(largest)
        return (stopped - goal).square().mean() + (hidden.softmax(-1) - x).abs().amax()


@nasty(x=(3, 4))
class BufferReadTwice(nn.Module):
    """A running mean is read before and after it is updated: no cut may come in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        centred = hidden + self.mean
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        self.calls += 1
        return (self.second(centred) * self.mean).square().mean() / self.calls


@nasty(x=(3, 1, 4))
class Expanded(nn.Module):
    """Boundaries with strides of zero, gaps and offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        repeated = self.first(x).expand(3, 5, 6)
        hidden = self.second(repeated.sin())[:, 1:4:2, 1:]
        return (hidden.transpose(0, 1) * hidden.flip(0).sum(1, keepdim=True).transpose(0, 1)).mean()


@nasty(x=(2, 5, 8))
class ChunkedAttention(nn.Module):
    """Pieces of one projection, as heads, cross cuts together and alone."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.project(x).chunk(3, dim=-1)
        query, key, value = (piece.unflatten(-1, (2, 4)).transpose(1, 2) for piece in pieces)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = self.norm(x + self.out(mixed.transpose(1, 2).flatten(2)))
        first, second = hidden.split([3, 5], dim=-1)
        return (first.sum(-1) * second.amax(-1)).mean()


@nasty(x=(2, 5, 8))
class Rotary(nn.Module):
    """Complex values: a table no parameter reaches, and activations turned by it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(
            torch.arange(5, dtype=torch.float64), torch.tensor([1.0, 0.1, 0.01, 0.001]).double()
        )
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(self.project(x).unflatten(-1, (4, 2)).contiguous())
        turned = torch.view_as_real(pairs * turn).flatten(2)
        return self.out(turned).square().mean() + (pairs * turn.conj()).abs().sum()


@nasty(tokens=tokens(2, 6))
class Integers(nn.Module):
    """Integer and boolean values that depend on parameters cross cuts: orders, ranks and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.score = nn.Linear(4, 1)
        self.out = nn.Linear(4, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        scores, order = self.score(hidden).squeeze(-1).sort(-1)
        positive = scores > 0
        sorted_hidden = hidden.gather(1, order.unsqueeze(-1).expand(-1, -1, 4)) * scores.sigmoid().unsqueeze(
            -1
        )
        loss = functional.cross_entropy(self.out(sorted_hidden).transpose(1, 2), tokens, reduction="none")
        return torch.where(positive, loss, loss * order).mean()


@nasty(x=(3, 4))
class CalledTwice(nn.Module):
    """One module at two places, and a parameter whose views are used on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.between = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.scale.exp().unbind()
        hidden = self.shared(x) * first
        hidden = self.shared(self.between(hidden).relu() * second)
        return (hidden @ self.shared.weight.t() * first).square().mean()


class Block(nn.Module):
    """A block with children, so that it can be recognised as one of several equal ones."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x)).tanh()


class ScaledBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.layer_idx + 1)


class AlternatingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() if self.layer_idx == 2 else super().forward(x)


class Stacked(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@nasty(x=(3, 4))
class EqualBlocks(Stacked):
    """Blocks that differ in nothing but a number they do not compute with, and in who holds an equal function."""

    class Layer(Block):
        def __init__(self, layer_idx: int) -> None:
            super().__init__(layer_idx)
            self.activation = partial(functional.gelu, approximate="tanh")

        def forward(self, x: Tensor) -> Tensor:
            return self.activation(super().forward(x))

    def __init__(self) -> None:
        super().__init__([self.Layer(index) for index in range(4)])


@nasty(x=(3, 4))
class NumberedBlocks(Stacked):
    """Blocks that compute with the number of their layer."""

    def __init__(self) -> None:
        super().__init__([ScaledBlock(index) for index in range(4)])


@nasty(x=(3, 4))
class OddOneOut(Stacked):
    """One block in the middle behaves differently because of its number."""

    def __init__(self) -> None:
        super().__init__([AlternatingBlock(index) for index in range(5)])


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).relu() + x


@nasty(x=(5, 4))
class BatchNormBlocks(Stacked):
    """Every copy of a repeated block updates buffers of its own."""

    def __init__(self) -> None:
        super().__init__([NormBlock() for _ in range(4)])


class KeywordBlock(Block):
    def forward(self, *, state: Tensor, scale: float, gates: dict[str, Tensor]) -> dict[str, Tensor | float]:
        hidden = super().forward(state)
        return {"state": hidden * scale + gates["open"], "pooled": hidden.mean(), "scale": scale}


@nasty(x=(3, 4))
class KeywordBlocks(nn.Module):
    """Blocks called by keyword with nested arguments, returning a nest in which not all is tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordBlock(index) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state, pooled = x, []
        gates = {"open": x.sigmoid()}
        for block in self.blocks:
            out = block(state=state, scale=0.7, gates=gates)
            state = out["state"]
            pooled.append(out["pooled"])
        return state.square().mean() + torch.stack(pooled).sum() * out["scale"]


class TupleBlock(Block):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor, None]:
        residual = x if residual is None else residual
        return super().forward(x * residual), x, None


@nasty(x=(3, 4))
class TupleBlocks(nn.Module):
    """Blocks that return tuples, one member of which is their own argument."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TupleBlock(index) for index in range(5))

    def forward(self, x: Tensor) -> Tensor:
        residual = None
        for block in self.blocks:
            x, residual, _ = block(x, residual)
        return (x + residual).square().mean()


@nasty(x=(3, 4))
class SharedAmongBlocks(nn.Module):
    """Repeated blocks that share one of their children, and a block used twice."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [Block() for _ in range(4)]
        for block in blocks:
            block.norm = blocks[0].norm
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return x.square().mean()


@nasty(x=(3, 4))
class DropoutBlocks(Stacked):
    """Every copy of a repeated block draws numbers of its own."""

    class Layer(Block):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(super().forward(x), 0.4)

    def __init__(self) -> None:
        super().__init__([self.Layer(index) for index in range(4)])


@nasty(torch.float32, x=(3, 4))
class AutocastBlocks(Stacked):
    """Repeated blocks under autocast, one of them again outside of it."""

    def __init__(self) -> None:
        super().__init__([Block(index) for index in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in (*self.blocks, self.blocks[1]):
                x = block(x)
        return self.blocks[2](x.float()).square().mean()


@nasty(x=(3, 4))
class NoGradBlocks(Stacked):
    """A stack that only runs forward, and the same blocks again with gradients."""

    def __init__(self) -> None:
        super().__init__([Block(index) for index in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks:
                x = block(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@nasty(x=(3, 4))
class WritingBlocks(nn.Module):
    """Blocks that add to their argument in place, and leave a loss behind for the model to collect."""

    class Layer(Block):
        def forward(self, x: Tensor) -> Tensor:
            change = self.inner(self.norm(x.clone())).tanh()
            self.penalty = change.abs().mean()
            return x.add_(change)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean() + 0.1 * sum(block.penalty for block in self.blocks)


@nasty(x=(3, 4))
class ViewsOfBuffers(nn.Module):
    """A view of a buffer is kept for the backward while the next microbatch changes the buffer; another copies weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(2, 4))
        self.register_buffer("copied", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.scale[0].view(1, 4)
        self.scale = self.scale + x.mean()
        with torch.no_grad():
            self.copied.copy_(self.second.weight.t())
        return self.second(hidden.sigmoid()).square().sum()
