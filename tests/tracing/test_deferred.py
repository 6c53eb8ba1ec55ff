"""Tensors made one by one are those of the model built whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from stagewright.tracing.models.build import DeferredModel, build
from stagewright.tracing.models.factories import function_of
from stagewright.tracing.models.reference import bundled_names, resolve

TINY = [name for name in bundled_names() if name.startswith("tiny")]


def named(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in TINY), ("tiny-llama", "bfloat16")]
)
def test_every_tensor_equals_that_of_the_whole_model(name: str, dtype: str) -> None:
    reference = resolve(name)
    whole = build(reference, 1, 32, dtype, seed=3)
    model = DeferredModel(reference, 1, 32, dtype, seed=3)
    expected = named(whole.module)
    for one in reversed(expected):  # in another order than they were built, each on its own
        (made,) = model.tensors([one]).values()
        assert (made.dtype, made.stride()) == (expected[one].dtype, expected[one].stride())
        assert torch.equal(made, expected[one]), one
        assert made.untyped_storage().nbytes() == expected[one].untyped_storage().nbytes(), one
    assert all(torch.equal(model.inputs[one], tensor) for one, tensor in whole.inputs.items())


def test_another_seed_makes_other_tensors() -> None:
    first, second = (DeferredModel(resolve("tiny-llama"), 1, 32, seed=seed) for seed in (0, 1))
    name = "net.lm_head.weight"
    assert not torch.equal(first.tensors([name])[name], second.tensors([name])[name])


def test_only_what_a_tensor_depends_on_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DeferredModel(resolve("tiny-llama"), 1, 32)
    drawn: list[int] = []
    monkeypatch.setattr(model._tape, "reseed", drawn.append)
    model.tensors(["net.lm_head.weight"])
    assert len(drawn) <= 2 < model._tape.num_draws


FACTORY = """
import torch

class Model(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        with torch.no_grad():
            self.first.bias.copy_(weight)
            self.second.bias[1:] = 7.0
        self.register_buffer("table", torch.arange(4.0).exp().flip(0)[1:])

    def forward(self, x):
        return self.second(self.first(x)).sum()

def make():
    return Model(torch.load({path!r})), {{"x": torch.randn(2, 4)}}
"""


@pytest.mark.parametrize("from_file", [False, True])
def test_shared_written_and_loaded_tensors(
    from_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bias.pt"
    torch.save(torch.tensor([1.0, 2.0, 3.0, 4.0]), path)
    code = FACTORY.format(path=str(path))
    if not from_file:
        code = code.replace(f"torch.load({str(path)!r})", "torch.full((4,), 2.5)")
    module = f"deferred_{'file' if from_file else 'plain'}"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    reference = resolve(f"{module}:make")
    whole, model = build(reference, 2, 1), DeferredModel(reference, 2, 1)
    expected = named(whole.module)
    made = model.tensors(expected)
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    shared = model.tensors(["net.first.weight", "net.second.weight"])
    assert shared["net.first.weight"].data_ptr() == shared["net.second.weight"].data_ptr()
    assert made["net.first.bias"].tolist() == ([1.0, 2.0, 3.0, 4.0] if from_file else [2.5] * 4)


DRAWING = """
import random
import numpy as np
import torch
from torch import nn

TABLE = torch.randn(4)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        mine = torch.Generator().manual_seed(7)
        self.embed = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.copy_(torch.randn(4, 4, generator=mine) * 0.2)
            self.embed.weight.normal_(0, 0.5, generator=mine)
            self.layers[0].bias.fill_(random.random())
            self.layers[1].bias.copy_(torch.from_numpy(np.random.randn(4)))
            self.layers[2].bias.copy_(TABLE)
            with torch.random.fork_rng():
                torch.manual_seed(3)
                self.layers[3].bias.normal_()
            state = mine.get_state()
            self.first = nn.Parameter(torch.rand(20, generator=mine))
            mine.set_state(state)
            self.again = nn.Parameter(torch.rand(20, generator=mine))
        self.tail = nn.Linear(4, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(self.tail(x))
        return x.sum() + self.embed.weight.sum() + (self.first - self.again).sum()

def build():
    return Net(), {{"x": torch.zeros(2, 4)}}

def seeded():
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    return build()

def by_value():
    draws = torch.Generator().manual_seed(5)
    net, inputs = build()
    chosen = torch.multinomial(torch.full((4,), 0.25), 2, generator=draws)
    net.register_buffer("chosen", chosen.float())
    return net, inputs
"""


def randomness() -> list[Any]:
    """The states of the generators that a program may share with the model's code."""
    of_numpy: Any = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), of_numpy[1].tolist(), random.getstate()]


@pytest.mark.parametrize("function", ["build", "seeded", "by_value"])
def test_whatever_draws_the_weights_they_are_those_of_the_whole_model(function: str, tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING.format())
    reference = resolve(f"{tmp_path / 'drawing.py'}:{function}")
    before = randomness()
    model, whole = DeferredModel(reference, 2, 1, seed=5), build(reference, 2, 1, seed=5)
    assert randomness() == before
    expected = named(whole.module)
    for name in reversed(expected):
        assert torch.equal(model.tensors([name])[name], expected[name]), name
    assert torch.equal(expected["net.first"], expected["net.again"])
    with torch.random.fork_rng():
        plain = dict(function_of(reference.text)()[0].named_parameters())
    drawn = {"embed.weight", "layers.3.bias", "layers.1.weight", "first"}
    for name in plain if function == "seeded" else drawn:
        assert torch.equal(expected[f"net.{name}"], plain[name]), name
    other = build(reference, 2, 1, seed=6).module.get_parameter("net.tail.weight")
    assert torch.equal(other, expected["net.tail.weight"]) == (function == "seeded")
