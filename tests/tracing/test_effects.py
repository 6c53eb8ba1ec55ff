"""What forward does besides operators is done as PyTorch does it, or refused by name, line and remedy."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from test_nasty import legal_cuts
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from in_turn import Pipeline, assert_equal, run_plain
from stagewright.errors import TraceError
from stagewright.tracing import effects
from stagewright.tracing.model_errors import CannotTrace
from stagewright.tracing.trace import trace_module

MASK = torch.tril(torch.ones(6, 6)).double()
STEPS = [0]
INDEX = torch.zeros((4,), dtype=torch.long)


class Layer(nn.Module):
    def __init__(self, change: Callable[[Layer], None], step: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.step = step
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.step(self, self.inner(x))


class Net(nn.Module):
    """A linear layer, and three equal ones."""

    def __init__(self, change: Callable[[Layer], None], step: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer(change, step) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def nothing(layer: Layer) -> None:
    pass


def hooked(*hooks: Callable[[Tensor], Tensor]) -> Callable[[Layer, Tensor], Tensor]:
    def step(self: Layer, x: Tensor) -> Tensor:
        for hook in hooks:
            x.register_hook(hook)
        return x.sin() * x

    return step


def hooked_weight(self: Layer, x: Tensor) -> Tensor:
    weight = self.inner.weight.t()
    weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return x.tanh() @ weight


def inference(self: Layer, x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = self.inner(x).tanh()
    return x * scale.clone()


@torch.inference_mode()
def decorated(layer: Layer, x: Tensor) -> Tensor:
    return layer.inner(x).tanh()


def nested_modes(self: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        still = self.inner(x)
        with torch.enable_grad():
            x = self.inner(x).sin()
        still = still * x
    return x * still


def recurrent(layer: Layer) -> None:
    layer.recurrent = nn.GRU(6, 6, batch_first=True)
    layer.deep = nn.LSTM(6, 6, num_layers=2, batch_first=True)


def run_recurrent(self: Layer, x: Tensor) -> Tensor:
    return self.deep(self.recurrent(x.unsqueeze(1))[0])[0].squeeze(1)


def keep_mask(layer: Layer) -> None:
    layer.mask = torch.tril(torch.ones(6, 6)).double()
    layer.masks = [layer.mask, layer.mask.t().contiguous()]


def compile_inner(layer: Layer) -> None:
    layer.inner = torch.compile(layer.inner)


def hook_forward(layer: Layer) -> None:
    layer.inner.register_forward_hook(lambda module, args, result: result.tanh())
    layer.inner.register_forward_pre_hook(lambda module, args: (args[0].sin(),))


def orthogonal(layer: Layer) -> None:
    layer.inner = parametrizations.orthogonal(layer.inner.double())


def spectral(layer: Layer) -> None:
    layer.inner = parametrizations.spectral_norm(layer.inner)


def old_spectral(layer: Layer) -> None:
    layer.inner = nn.utils.spectral_norm(layer.inner)


def follow(self: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.count += 1
    return x - self.mean


def keep_mean(layer: Layer) -> None:
    layer.register_buffer("mean", torch.zeros(6))
    layer.register_buffer("count", torch.zeros((), dtype=torch.long))


def assign_mean(self: Layer, x: Tensor) -> Tensor:
    self.mean = 0.9 * self.mean + x.detach().mean(0)
    return x - self.mean


def built_with_random(layer: Layer) -> None:
    layer.scale = random.random() + numpy.random.rand()


def cache_once(self: Layer, x: Tensor) -> Tensor:
    self.width = x.shape[1]
    return x / self.width


def cache_mask(self: Layer, x: Tensor) -> Tensor:
    if getattr(self, "mask", None) is None:
        self.mask = torch.tril(torch.ones(6, 6, dtype=x.dtype))
    return x @ self.mask


RIGHT: dict[str, tuple[Callable[[Layer], None], Callable[[Layer, Tensor], Tensor]]] = {
    "tensor_hook": (nothing, hooked(lambda gradient: gradient * 0.1)),
    "tensor_hooks_in_order": (nothing, hooked(lambda gradient: gradient.clamp(-0.1, 0.1), lambda gradient: gradient + 1)),
    "hook_on_view_of_weight": (nothing, hooked_weight),
    "inference_mode": (nothing, inference),
    "decorated": (nothing, lambda self, x: x * decorated(self, x).clone()),
    "nested_modes": (nothing, nested_modes),
    "data": (nothing, lambda self, x: x + (x.round() - x).data),
    "data_of_weight": (nothing, lambda self, x: x @ (self.inner.weight - self.inner.weight.data * 0.5)),
    "recurrent": (recurrent, run_recurrent),
    "plain_tensors": (keep_mask, lambda self, x: x @ self.mask + x @ self.masks[1]),
    "tensor_of_module": (nothing, lambda self, x: x @ MASK),
    "compiled_module": (compile_inner, lambda self, x: x.tanh()),
    "compiled_function": (nothing, lambda self, x: compiled(x)),
    "forward_hooks": (hook_forward, lambda self, x: x.tanh()),
    "orthogonal": (orthogonal, lambda self, x: x.tanh()),
    "spectral_norm": (spectral, lambda self, x: x.tanh()),
    "old_spectral_norm": (old_spectral, lambda self, x: x.tanh()),
    "buffers_in_place": (keep_mean, follow),
    "buffers_assigned": (keep_mean, assign_mean),
    "random_when_built": (built_with_random, lambda self, x: x.tanh() * self.scale),
    "cache": (nothing, cache_mask),
    "attribute_that_stays": (nothing, cache_once),
}  # fmt: skip


@torch.compile
def compiled(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("name", RIGHT)
def test_it_trains_as_plain_pytorch_does(name: str) -> None:
    torch.manual_seed(0)
    model = Net(*RIGHT[name]).double()
    batches = [{"x": torch.randn(4, 6, dtype=torch.float64)} for _ in range(2)]
    graph = trace_module(model, batches[0], name)
    with torch.compiler.set_stance("force_eager"):
        plain = run_plain(copy.deepcopy(model), batches)
    cuts = legal_cuts(graph)
    for cutting in ([], cuts[:: max(len(cuts) // 3, 1)]):
        trained = Pipeline(graph, copy.deepcopy(model), cutting, len(batches)).step(batches, True)
        if name == "recurrent":  # whose parts autograd adds up in another order
            torch.testing.assert_close(trained.gradients, plain.gradients, rtol=1e-12, atol=1e-15)
        else:
            assert_equal(plain, trained)


def hook_parameter(layer: Layer) -> None:
    layer.inner.weight.register_hook(lambda gradient: gradient * 0.1)


def hook_after_accumulation(layer: Layer) -> None:
    layer.inner.bias.register_post_accumulate_grad_hook(lambda parameter: None)


def hook_module(layer: Layer) -> None:
    layer.inner.register_full_backward_hook(lambda module, inputs, outputs: None)


def hook_module_before(layer: Layer) -> None:
    layer.inner.register_full_backward_pre_hook(lambda module, outputs: None)


def write_frozen(self: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.frozen.weight.mul_(0.9).add_(self.inner.weight, alpha=0.1)
    return self.frozen(x)


def write_trained(self: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.inner.weight.renorm_(2, 0, 1.0)
    return x


def swap_data(self: Layer, x: Tensor) -> Tensor:
    self.frozen.weight.data = self.frozen.weight.data * 0.9
    return self.frozen(x)


def own_generators(layer: Layer) -> None:
    layer.generator, layer.rng = random.Random(3), numpy.random.default_rng(3)


def count(self: Layer, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return x / self.calls


def count_in_list(self: Layer, x: Tensor) -> Tensor:
    STEPS[0] += 1
    return x / STEPS[0]


def count_in_dict(layer: Layer) -> None:
    layer.state, layer.numbers = {"calls": 0}, itertools.count(1)


def write_dict(self: Layer, x: Tensor) -> Tensor:
    self.state["calls"] += 1
    return x / self.state["calls"]


def count_in_class(self: Layer, x: Tensor) -> Tensor:
    type(self).calls_of_all = getattr(type(self), "calls_of_all", 0) + 1
    return x


def first_alone(self: Layer, x: Tensor) -> Tensor:
    if not getattr(self, "started", False):
        x = x / x.std()
        self.started = True
    return x


def limited_embedding(layer: Layer) -> None:
    layer.embed = nn.Embedding(4, 6, max_norm=1.0)


def sparse_embedding(layer: Layer) -> None:
    layer.embed = nn.Embedding(4, 6, sparse=True)


def hook_and_save(self: Layer, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: seen.append(gradient))
    return x


def hook_by_values(self: Layer, x: Tensor) -> Tensor:
    mask = x > 0
    x.register_hook(lambda gradient: gradient * mask)
    return x


def hook_weight_in_forward(self: Layer, x: Tensor) -> Tensor:
    self.inner.weight.register_hook(lambda gradient: gradient * 0.5)
    return x


seen: list[Any] = []
LINE = r"\S*test_effects\.py:\d+"
FORWARD = (nothing, lambda self, x: x)

REFUSED: dict[str, tuple[Any, Any, str]] = {
    "parameter_hook": (hook_parameter, FORWARD[1], r"'layers.0.inner.weight' has a hook \(register_hook\).*autograd"),
    "post_accumulate": (hook_after_accumulation, FORWARD[1], r"'layers.0.inner.bias' has a hook \(register_post_acc"),
    "module_hook": (hook_module, FORWARD[1], "module 'layers.0.inner' has a backward hook.*register_hook"),
    "module_pre_hook": (hook_module_before, FORWARD[1], "module 'layers.0.inner' has a backward hook"),
    "frozen_written": (nothing, write_frozen, "writes to parameter 'layers.0.frozen.weight'.*register it as a buffer"),
    "trained_written": (nothing, write_trained, "writes to parameter 'layers.0.inner.weight'.*after the step"),
    "data_set": (nothing, swap_data, f"module 'layers.0' at {LINE}.*data is set in forward.*buffer"),
    "random": (nothing, lambda self, x: x * random.random(), f"module 'layers.0' at {LINE}.*Python's.*torch.rand"),
    "numpy": (nothing, lambda self, x: x * numpy.random.rand(), f"module 'layers.0' at {LINE}.*numpy's.*torch.rand"),
    "own_random": (own_generators, lambda self, x: x * self.generator.random(), f"'layers.0' at {LINE}.*its own generator"),
    "own_numpy": (own_generators, lambda self, x: x * self.rng.random(), f"'layers.0' at {LINE}.*its own generator"),
    "clock": (nothing, lambda self, x: x * (time.time() % 2), f"module 'layers.0' at {LINE}.*reads the clock"),
    "counter": (nothing, count, f"module 'layers.0' at {LINE}.*changes 'calls' with every call.*buffer"),
    "counter_in_list": (nothing, count_in_list, "changes 'STEPS' with every call"),
    "counter_in_dict": (count_in_dict, write_dict, f"module 'layers.0' at {LINE}.*changes 'state' with every call"),
    "iterator": (count_in_dict, lambda self, x: x / next(self.numbers), f"'layers.0' at {LINE}.*changes 'numbers'"),
    "counter_in_class": (nothing, count_in_class, f"at {LINE}.*changes 'Layer.calls_of_all'"),
    "first_alone": (nothing, first_alone, "'layers.0': its first forward runs other operators.*changes 'started'"),
    "max_norm": (limited_embedding, lambda self, x: x + self.embed(INDEX), "'layers.0.embed.weight'"),
    "sparse": (sparse_embedding, lambda self, x: x + self.embed(INDEX), "leave sparse=True out"),
    "saving_hook": (nothing, hook_and_save, f"registered at {LINE}.*returns no gradient"),
    "hook_by_values": (nothing, hook_by_values, f"registered at {LINE}.*reads a tensor that is not among"),
    "weight_hook_in_forward": (nothing, hook_weight_in_forward, f"'layers.0.inner.weight' gets a hook in forward.*{LINE}"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name_with_what_to_do_instead(name: str) -> None:
    change, step, said = REFUSED[name]
    with pytest.raises(TraceError, match=f"(?s){said}"):
        trace_module(Net(change, step), {"x": torch.randn(4, 6)}, name)


def test_other_threads_may_read_the_clock_while_a_model_is_traced() -> None:
    """As the one that watches over a rank does."""
    outcomes: list[object] = []

    def read() -> None:
        try:
            outcomes.append(time.monotonic())
        except Exception as error:
            outcomes.append(error)

    with effects.without_effects(torch.nn.Linear(1, 1), lambda: None):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        with pytest.raises(CannotTrace, match="reads the clock"):
            time.monotonic()
    assert isinstance(outcomes[0], float)
