"""Random models, put together from constructs that people use: what autograd does besides operators, state that changes,
containers, randomness, layers that are equal and layers that only look so.

`build` is a factory as users write them, whose `seed` says which model it makes. `constructs` names what a model is made of.
"""

# Layers that are called in other ways than the others, and what types do not follow, are what this is about.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS, CLASSES = 6, 4, 9
Part = Callable[[random.Random], nn.Module]
PARTS: dict[str, Part] = {}
"""Constructs that map activations to activations, by name."""


def part(kind: Any) -> Any:
    """Register a module class, or a function that makes one, under its name."""
    PARTS[kind.__name__] = (lambda rng: kind()) if isinstance(kind, type) else kind
    return kind


class Lambda(nn.Module):
    """A function without parameters beside a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


# -- autograd functions -------------------------------------------------------------------------------------------------


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.5 * grad


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, scale: float) -> Tensor:
        return (x * weight).tanh() * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, ctx.scale = inputs
        ctx.save_for_backward(x, weight, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, output = ctx.saved_tensors
        inner = grad * ctx.scale * (1 - (output / ctx.scale) ** 2)
        return inner * weight, (inner * x).flatten(0, -2).sum(0), None


class AddedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        ctx.shape = extra.shape
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones(ctx.shape, dtype=grad.dtype)


@part
def reversed_gradient(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: Reverse.apply(x))


@part
def straight_through(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: Straight.apply(3 * x))


@part
class FunctionWithContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return SetUp.apply(x, self.weight, 2.0)


@part
class AuxiliaryLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return AddedLoss.apply(x, 0.01 * self.gate(x).logsumexp(-1).square().mean())


@part
def straight_through_by_detach(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x + (x.sign() - x).detach())


# -- hooks --------------------------------------------------------------------------------------------------------------


@part
def parameter_hook(rng: random.Random) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    module.weight.register_hook(lambda grad: 0.5 * grad)
    return module


@part
def after_accumulation_hook(rng: random.Random) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)

    def clip(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-3, 1e-3)

    module.bias.register_post_accumulate_grad_hook(clip)
    return module


@part
class TensorHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * 0.25)
        return hidden.tanh()


@part
def forward_hook(rng: random.Random) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    module.register_forward_hook(lambda module, args, output: output * 1.5)
    return module


@part
def forward_pre_hook(rng: random.Random) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    module.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    return module


@part
def full_backward_hook(rng: random.Random) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    module.register_full_backward_hook(lambda module, grad_in, grad_out: (2 * grad_in[0],))
    return module


@part
def full_backward_pre_hook(rng: random.Random) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    module.register_full_backward_pre_hook(lambda module, grad_out: (0.5 * grad_out[0],))
    return module


@part
class CapturingHook(nn.Module):
    """Keeps what an inner layer made for the outer one, as extractors of features do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.kept: dict[str, Tensor] = {}
        self.inner[0].register_forward_hook(lambda module, args, output: self.kept.update(x=output) or None)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.kept["x"].exp() * 0.1


# -- state --------------------------------------------------------------------------------------------------------------


@part
class MovingMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.detach().mean((0, 1)), 0.25)
        return x - self.mean


@part
class BufferAssigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().amax((0, 1))
        return x / self.scale


@part
class CountedSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * (1.0 + 0.1 * self.steps)


@part
class PythonCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) / self.calls


@part
class Teacher(nn.Module):
    """A momentum encoder: a parameter written in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
        return self.student(x) - self.teacher(x).detach()


@part
class WrittenThroughData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.5, 0.5)
        return x @ self.weight


@part
class PlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.tril(torch.ones(TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        return (self.mask @ x) / TOKENS


@part
class TensorList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.full((WIDTH,), 0.5 + 0.1 * index) for index in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0] + self.scales[1]


@part
class Cached(nn.Module):
    """Computes a table once, in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(1).cos()
        return x + self.table


@part
class CachedWeight(nn.Module):
    """Computes something of a parameter once, which is stale from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = self.weight.detach().cos()
        return x * self.table + self.weight


@part
class PreviousActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.last is not None:
            hidden = hidden + 0.1 * self.last
        self.last = hidden.detach()
        return hidden


# -- randomness ---------------------------------------------------------------------------------------------------------


@part
def dropout(rng: random.Random) -> nn.Module:
    return nn.Dropout(rng.choice([0.0, 0.2, 0.5]))


@part
def noise(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x + 0.1 * torch.randn_like(x))


@part
def bernoulli_mask(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)))


@part
def gumbel(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: functional.gumbel_softmax(x, tau=2.0, dim=-1))


@part
def randomised_relu(rng: random.Random) -> nn.Module:
    return nn.RReLU()


@part
def alpha_dropout(rng: random.Random) -> nn.Module:
    return nn.AlphaDropout(0.2)


@part
def python_random(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x if random.random() < 0.5 else 2 * x)


@part
def permuted_tokens(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x[:, torch.randperm(TOKENS)])


# -- norms and parametrizations -----------------------------------------------------------------------------------------


@part
def layer_norm(rng: random.Random) -> nn.Module:
    return nn.LayerNorm(WIDTH, elementwise_affine=rng.random() < 0.5)


@part
def rms_norm(rng: random.Random) -> nn.Module:
    return nn.RMSNorm(WIDTH)


@part
class BatchNorm(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@part
def batch_norm_without_momentum(rng: random.Random) -> nn.Module:
    return BatchNorm(momentum=None)


@part
def batch_norm_without_statistics(rng: random.Random) -> nn.Module:
    return BatchNorm(track_running_stats=False)


@part
class FrozenBatchNorm(BatchNorm):
    """In evaluation mode inside a model that trains."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self


@part
def group_norm(rng: random.Random) -> nn.Module:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    return Grouped()


@part
def spectral_norm(rng: random.Random) -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


@part
def old_spectral_norm(rng: random.Random) -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


@part
def weight_norm(rng: random.Random) -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


@part
def old_weight_norm(rng: random.Random) -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


@part
def parametrized(rng: random.Random) -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return (weight + weight.T) / 2

    module = nn.Linear(WIDTH, WIDTH)
    register_parametrization(module, "weight", Symmetric())
    return module


@part
class CachedParametrization(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.linear(self.linear(x))


# -- modes --------------------------------------------------------------------------------------------------------------


@part
class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.linear(x).sigmoid()
        return x * scale


@part
class GradientWithinNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.first(x)
            with torch.enable_grad():
                hidden = self.second(hidden)
        return x + hidden


@part
class InferenceMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = self.linear(x).sigmoid()
        return x * scale.clone()


@part
def detached(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x * x.detach().sigmoid())


@part
def through_data(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x * x.data.cos())


@part
def frozen(rng: random.Random) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Tanh())


@part
class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@part
def checkpointed_reentrant(rng: random.Random) -> nn.Module:
    return Checkpointed(True)


@part
class GradientPenalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        point = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.linear(point).square().sum(), point, create_graph=True)
        return x + 0.1 * slope


# -- operators ----------------------------------------------------------------------------------------------------------


@part
class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, 3))
        self.out = nn.Parameter(torch.randn(2, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.einsum("btw,hwk->bhtk", x, self.weight)
        return torch.einsum("bhtk,hkw->btw", heads.softmax(-1), self.out)


@part
class Scattered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        order = x.detach().argsort(1)
        return torch.zeros_like(x).scatter_add(1, order, self.linear(x))


@part
class IndexPut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.tensor([1, 3, 1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).transpose(0, 1)
        return hidden.index_put((self.rows,), hidden[:3] * 0.5, accumulate=True).transpose(0, 1)


@part
def cumulative(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x.cumsum(1) / TOKENS + 0.1 * x.cumprod(-1))


@part
class TopKExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        values, places = self.gate(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(*x.shape[:2], 3, dtype=x.dtype).scatter(-1, places, values)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@part
class SplitHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.linear(x).chunk(2, -1)
        return value * functional.silu(gate)


@part
class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        hidden[:, 0] = 0.5
        hidden[..., 1:3].mul_(2.0)
        view = hidden.view(-1, WIDTH)
        view.add_(1.0)
        return hidden.relu_()


@part
class WrittenView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for token in range(x.shape[1]):
            out[:, token] = self.linear(x[:, token]) * (token + 1)
        return out


@part
def masked(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x.masked_fill(x > 0.7, -1.0).where(x > -0.9, x * 0.1))


@part
def clamped(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x.clamp(-0.4, 0.4) + x.clamp(min=0.1).sqrt())


@part
def unfolded(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: functional.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1))


@part
def rolled(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x.roll(1, 1) + x.flip(1).transpose(0, 0))


@part
def extremes(rng: random.Random) -> nn.Module:
    return Lambda(
        lambda x: x - x.max(1, keepdim=True).values + x.amin(-1, keepdim=True) + x.median(1, True).values
    )


@part
def sorted_tokens(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x.sort(1, descending=True).values)


@part
def complex_numbers(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5, n=TOKENS, dim=1))


@part
def rotary(rng: random.Random) -> nn.Module:
    def turn(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        angles = torch.arange(TOKENS, dtype=x.dtype).outer(torch.arange(1, WIDTH // 2 + 1, dtype=x.dtype))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    return Lambda(turn)


@part
def in_float32(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x.float().softmax(-1).to(x.dtype))


@part
class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(functional.gelu(self.conv(x.transpose(1, 2)))).transpose(1, 2)


@part
class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool1d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x) + functional.adaptive_avg_pool1d(x, WIDTH)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


@part
def lstm(rng: random.Random) -> nn.Module:
    return Recurrent(nn.LSTM, num_layers=rng.choice([1, 2]))


@part
def gru(rng: random.Random) -> nn.Module:
    return Recurrent(nn.GRU)


@part
def rnn(rng: random.Random) -> nn.Module:
    return Recurrent(nn.RNN)


@part
class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype)
        states = []
        for token in x.unbind(1):
            state = self.cell(token, state)
            states.append(state)
        return torch.stack(states, 1)


@part
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), 1)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


@part
class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).view(x.shape[0], TOKENS, 3, 2, 3).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


@part
def transformer_layer(rng: random.Random) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, norm_first=rng.random() < 0.5)


@part
def transformer(rng: random.Random) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, rng.choice([2, 8]), enable_nested_tensor=False)


@part
class Embedded(nn.Module):
    """A table that is read by what the activations say."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach()[..., 0] > 0).long() + 1)


@part
def embedding_of_limited_norm(rng: random.Random) -> nn.Module:
    return Embedded(max_norm=0.5)


@part
def embedding_with_padding(rng: random.Random) -> nn.Module:
    return Embedded(padding_idx=1)


@part
def embedding_by_frequency(rng: random.Random) -> nn.Module:
    return Embedded(scale_grad_by_freq=True)


@part
def sparse_embedding(rng: random.Random) -> nn.Module:
    return Embedded(sparse=True)


@part
class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(8, WIDTH, mode="mean")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bag((x.detach()[..., 0] > 0).long()).unsqueeze(1)


@part
class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@part
def vmapped(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: torch.vmap(lambda one: one @ one.T @ one)(x))


@part
def conditional(rng: random.Random) -> nn.Module:
    return Lambda(lambda x: x if x.shape[0] > 100 or not x.requires_grad else x.exp() * 0.1)


@part
class DataDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > 0 else -x


@part
class DataDependentShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[x > 0].mean()


# -- stacks of layers ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One of several equal layers."""

    def __init__(self, inner: nn.Module | None = None, index: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = inner or nn.Tanh()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.linear(x))


def blocks(
    rng: random.Random, kind: Callable[..., nn.Module] = Block, count: int | None = None
) -> nn.ModuleList:
    """Equal layers, few or more than are looked at one by one, each with an own part of the same sort."""
    inner = PARTS[rng.choice([*PLAIN_PARTS, *sorted(PARTS)])]
    state = rng.random()
    number = count or rng.choice([2, 3, 5, 9])
    return nn.ModuleList(kind(inner(random.Random(state)), index) for index in range(number))


PLAIN_PARTS = ["layer_norm", "dropout", "SplitHalves", "clamped", "rms_norm", "MovingMean", "BatchNorm"] * 8


@part
def equal_layers(rng: random.Random) -> nn.Module:
    return nn.Sequential(*blocks(rng))


class Loop(nn.Module):
    """Layers in a loop; `visit` says what is done with each."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.visit(index, layer, x)
        return x

    def visit(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


@part
def loop_with_scale(rng: random.Random) -> nn.Module:
    class Scaled(Loop):
        def visit(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x) * (1.0 + 0.1 * index)

    return Scaled(blocks(rng))


@part
def loop_with_taps(rng: random.Random) -> nn.Module:
    class Tapped(Loop):
        def __init__(self, layers: nn.ModuleList) -> None:
            super().__init__(layers)
            self.places = sorted({1, len(layers) - 1, len(layers) // 2})
            self.taps = nn.ModuleDict({str(place): nn.Linear(WIDTH, WIDTH) for place in self.places})

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros_like(x)
            for index, layer in enumerate(self.layers):
                x = layer(x)
                if index in self.places:
                    total = total + self.taps[str(index)](x)
            return total

    return Tapped(blocks(rng))


@part
def loop_with_early_exit(rng: random.Random) -> nn.Module:
    leave = rng.choice([1, 2, 7])

    class Left(Loop):
        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                x = layer(x)
                if index + 1 == leave:
                    break
            return x

    return Left(blocks(rng))


@part
def loop_with_long_skips(rng: random.Random) -> nn.Module:
    class Skipping(Loop):
        def forward(self, x: Tensor) -> Tensor:
            kept = []
            half = len(self.layers) // 2
            for layer in self.layers[:half]:
                x = layer(x)
                kept.append(x)
            for layer in self.layers[half:]:
                x = layer(x + (kept.pop() if kept else 0))
            return x

    return Skipping(blocks(rng))


@part
def loop_with_dense_sum(rng: random.Random) -> nn.Module:
    class Dense(Loop):
        def forward(self, x: Tensor) -> Tensor:
            states = [x]
            for layer in self.layers:
                states.append(layer(sum(states) / len(states)))
            return torch.stack(states).mean(0)

    return Dense(blocks(rng))


@part
def loop_with_depth_table(rng: random.Random) -> nn.Module:
    class Weighted(Loop):
        def __init__(self, layers: nn.ModuleList) -> None:
            super().__init__(layers)
            self.weights = nn.Parameter(torch.ones(len(layers)) * 0.5)

        def visit(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
            return x + self.weights[index] * layer(x)

    return Weighted(blocks(rng))


@part
def loop_with_detach(rng: random.Random) -> nn.Module:
    class Cut(Loop):
        def visit(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x.detach() if index == 1 else x)

    return Cut(blocks(rng))


@part
def loop_with_frozen_layers(rng: random.Random) -> nn.Module:
    layers = blocks(rng)
    for layer in layers[: len(layers) // 2]:
        layer.requires_grad_(False)
    return Loop(layers)


@part
def loop_with_a_hook_on_one(rng: random.Random) -> nn.Module:
    layers = blocks(rng)
    layers[-1].linear.weight.register_hook(lambda grad: grad * 0.5)
    return Loop(layers)


@part
def loop_with_one_evaluating(rng: random.Random) -> nn.Module:
    class Evaluating(Loop):
        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.layers[0].eval()
            return self

    return Evaluating(blocks(rng))


@part
def loop_with_checkpoints(rng: random.Random) -> nn.Module:
    class Kept(Loop):
        def visit(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
            return checkpoint(layer, x, use_reentrant=False) if index % 2 else layer(x)

    return Kept(blocks(rng))


@part
def layers_of_their_index(rng: random.Random) -> nn.Module:
    class Indexed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(self.linear(x)) / (self.index + 1)

    return Loop(blocks(rng, Indexed))


@part
def layers_of_their_parity(rng: random.Random) -> nn.Module:
    class Alternating(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + (self.inner(self.linear(x)) if self.index % 2 else self.linear(x).sin())

    return Loop(blocks(rng, Alternating))


@part
def layers_with_a_list(rng: random.Random) -> nn.Module:
    """Balancing losses that layers put into a list of the model."""

    class Writing(Block):
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
            hidden = self.linear(x)
            losses.append(hidden.square().mean())
            return x + self.inner(hidden)

    class Collecting(Loop):
        def forward(self, x: Tensor) -> Tensor:
            losses: list[Tensor] = []
            for layer in self.layers:
                x = layer(x, losses)
            return x + 0.01 * torch.stack(losses).sum()

    return Collecting(blocks(rng, Writing))


GLOBAL: list[Tensor] = []


@part
def layers_with_a_global_list(rng: random.Random) -> nn.Module:
    class Writing(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            GLOBAL.append(hidden.square().mean())
            return x + self.inner(hidden)

    class Collecting(Loop):
        def forward(self, x: Tensor) -> Tensor:
            GLOBAL.clear()
            for layer in self.layers:
                x = layer(x)
            return x + 0.01 * sum(GLOBAL)

    return Collecting(blocks(rng, Writing))


@part
def layers_with_an_attribute(rng: random.Random) -> nn.Module:
    class Writing(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            self.balance = hidden.square().mean()
            return x + self.inner(hidden)

    class Collecting(Loop):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + 0.01 * sum(layer.balance for layer in self.layers)

    return Collecting(blocks(rng, Writing))


@part
def layers_with_a_dict(rng: random.Random) -> nn.Module:
    class Writing(Block):
        def forward(self, state: dict[str, Any]) -> None:
            state["x"] = state["x"] + self.inner(self.linear(state["x"]))
            state["count"] += 1

    class Holding(Loop):
        def forward(self, x: Tensor) -> Tensor:
            state = {"x": x, "count": 0}
            for layer in self.layers:
                layer(state)
            return state["x"] / state["count"]

    return Holding(blocks(rng, Writing))


@part
def layers_with_tuples(rng: random.Random) -> nn.Module:
    class Twice(Block):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, memory = pair
            hidden = self.linear(x + memory)
            return x + self.inner(hidden), memory * 0.5 + hidden

    class Paired(Loop):
        def forward(self, x: Tensor) -> Tensor:
            pair = (x, torch.zeros_like(x))
            for layer in self.layers:
                pair = layer(pair)
            return pair[0] + pair[1]

    return Paired(blocks(rng, Twice))


@dataclass
class State:
    x: Tensor
    memory: Tensor


@part
def layers_with_dataclasses(rng: random.Random) -> nn.Module:
    class Stateful(Block):
        def forward(self, state: State) -> State:
            hidden = self.linear(state.x + state.memory)
            return State(state.x + self.inner(hidden), state.memory * 0.5 + hidden)

    class Holding(Loop):
        def forward(self, x: Tensor) -> Tensor:
            state = State(x, torch.zeros_like(x))
            for layer in self.layers:
                state = layer(state)
            return state.x + state.memory

    return Holding(blocks(rng, Stateful))


@part
def layers_with_an_object(rng: random.Random) -> nn.Module:
    class Memory:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Writing(Block):
        def forward(self, x: Tensor, memory: Memory) -> Tensor:
            memory.x = memory.x * 0.5 + self.linear(x)
            return x + self.inner(memory.x)

    class Holding(Loop):
        def forward(self, x: Tensor) -> Tensor:
            memory = Memory(torch.zeros_like(x))
            for layer in self.layers:
                x = layer(x, memory)
            return x + memory.x

    return Holding(blocks(rng, Writing))


@part
def layers_with_optional_arguments(rng: random.Random) -> nn.Module:
    class Optional(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
            hidden = self.linear(x) * scale
            return x + self.inner(hidden if mask is None else hidden * mask)

    class Given(Loop):
        def visit(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x, (x > 0).to(x.dtype) if index == 2 else None, scale=1.0 + index % 2)

    return Given(blocks(rng, Optional))


@part
def layers_with_a_closure(rng: random.Random) -> nn.Module:
    seen: list[int] = []

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.index)
            return x + self.inner(self.linear(x)) * (1.0 + len(seen) % 3)

    class Fresh(Loop):
        def forward(self, x: Tensor) -> Tensor:
            seen.clear()
            return super().forward(x)

    return Fresh(blocks(rng, Counting))


@part
def shared_layer(rng: random.Random) -> nn.Module:
    one = blocks(rng, count=1)[0]
    return nn.Sequential(one, nn.Tanh(), one)


@part
def tied_layers(rng: random.Random) -> nn.Module:
    layers = blocks(rng)
    layers[-1].linear.weight = layers[0].linear.weight
    return Loop(layers)


@part
def shared_table(rng: random.Random) -> nn.Module:
    """A module that every layer holds."""
    layers, shared = blocks(rng), nn.Linear(WIDTH, WIDTH)
    for layer in layers:
        layer.inner = shared
    return Loop(layers)


@part
def residual(rng: random.Random) -> nn.Module:
    class Residual(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.gate = inner, nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + (1 + self.gate) * self.inner(x)

    return Residual(PARTS[rng.choice(sorted(PARTS))](rng))


# -- whole models -------------------------------------------------------------------------------------------------------


class Whole(nn.Module):
    """Tokens or numbers in, a loss out."""

    def __init__(self, rng: random.Random, most: int) -> None:
        super().__init__()
        self.reads_tokens = rng.random() < 0.4
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.stem = nn.Linear(WIDTH, WIDTH)
        names = [rng.choice(sorted(PARTS)) for _ in range(min(rng.choice([1, 2, 2, 3, 4]), most))]
        self.parts = nn.ModuleList(PARTS[name](rng) for name in names)
        self.names = names
        self.norms = rng.random() < 0.5
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if self.reads_tokens and rng.random() < 0.5:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(labels.flip(1)) if self.reads_tokens else self.stem(x)
        for own in self.parts:
            x = own(x)
            if self.norms:
                x = functional.layer_norm(x, (WIDTH,))
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build(
    seed: int, only: str = "", most: int = 4, microbatch_size: int = 3
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of a seed, of so many constructs at `most`, or one of the construct `only`, with a microbatch."""
    rng = random.Random(seed)
    model = Whole(rng, most)
    if only:
        model.parts, model.names = nn.ModuleList([PARTS[only](rng)]), [only]
    GLOBAL.clear()
    return model, batch(0, microbatch_size)


def batch(step: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(CLASSES, (size, TOKENS), generator=generator)}


def constructs(seed: int, most: int = 4) -> list[str]:
    return Whole(random.Random(seed), most).names
