"""Custom `torch.autograd.Function`s keep their own backward: in modules, in equal layers, cut anywhere."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_nasty import legal_cuts
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from in_turn import Outcome, Pipeline, assert_equal, run_plain
from stagewright.errors import TraceError
from stagewright.graph import OperatorGraph
from stagewright.graph.document import graph_from_bytes, graph_to_bytes
from stagewright.tracing.trace import trace_module

Function = torch.autograd.Function


class Reverse(Function):
    """Returns its argument, and keeps a number on its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.weight * gradient, None


class ClippedWithLargest(Function):
    """New style; its second output passes no gradient."""

    @staticmethod
    def forward(x: Tensor, limit: float) -> Any:
        return x * 1.0, x.detach().abs().max()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.limit = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        return gradient.clamp(-ctx.limit, ctx.limit), None


class Rounded(Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        scale = weight.abs().mean()
        return (weight / scale).round().clamp(-1, 1) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class WithAuxiliary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class PositivePart(Function):
    """Writes to what it makes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        result = x.clone()
        result[x < 0] = 0
        return result.mul_(2.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = gradient.clone()
        result[x < 0] = 0
        return result.mul_(3.0)


class Affine(Function):
    """Looks at what needs a gradient; a parameter's comes from what its forward saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        hidden = x.tanh()
        ctx.save_for_backward(hidden, weight)
        ctx.has_bias = bias is not None
        result = hidden @ weight.t()
        return result if bias is None else result + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = (gradient @ weight) * (1 - hidden.square()) * 0.5
        if ctx.needs_input_grad[1]:
            for_weight = gradient.t() @ hidden
        if ctx.has_bias and ctx.needs_input_grad[2]:
            for_bias = gradient.sum(0)
        return for_x, for_weight, for_bias


class Both(Function):
    """Two outputs, of which one may get no gradient; tensors in a list pass none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: list[Tensor]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.scale = scales[0]
        return x * scales[0], x + 1

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        total = None if second is None else second.exp()
        if first is not None:
            total = first * ctx.scale if total is None else total + first * ctx.scale
        return total, None


class Dropped(Function):
    """Draws random numbers in its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) > 0.3
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] * 2


class Recomputed(Function):
    """Goes forward again under autograd in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = (x @ weight).sin()
        return torch.autograd.grad(result, (x, weight), gradient)


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Reverse.apply(x.sin(), 2.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Reverse.apply(gradient, 4.0)


_Step = Callable[["Layer", Tensor], Tensor]

STEPS: dict[str, _Step] = {
    "reverse": lambda self, x: Reverse.apply(self.inner(x), 0.5).tanh(),
    "clipped": lambda self, x: ClippedWithLargest.apply(self.inner(x), 1e-3)[0].tanh(),
    "largest": lambda self, x: (lambda a, b: a.tanh() * b)(*ClippedWithLargest.apply(self.inner(x), 1e-3)),
    "rounded_weight": lambda self, x: nn.functional.linear(x, Rounded.apply(self.inner.weight), self.inner.bias).tanh(),
    "reversed_weight": lambda self, x: (x @ Reverse.apply(self.inner.weight, 0.5)).tanh(),
    "rounded_view": lambda self, x: (x @ Rounded.apply(self.inner.weight.t())).tanh(),
    "auxiliary": lambda self, x: WithAuxiliary.apply(self.inner(x), self.inner(x).softmax(-1).mean(0).square().sum()),
    "in_place": lambda self, x: PositivePart.apply(self.inner(x)),
    "affine": lambda self, x: Affine.apply(self.inner(x), self.inner.weight, self.inner.bias),
    "affine_without_bias": lambda self, x: Affine.apply(x.detach(), self.inner.weight, None),
    "same_twice": lambda self, x: (lambda y: Affine.apply(y, y, None).sum() * x)(self.inner(x)),
    "both": lambda self, x: (lambda a, b: a.sin() * b)(*Both.apply(self.inner(x), [x.detach()])),
    "second_alone": lambda self, x: Both.apply(self.inner(x), [x.detach()])[1].sin(),
    "dropped": lambda self, x: Dropped.apply(self.inner(x)).sin(),
    "recomputed": lambda self, x: Recomputed.apply(self.inner(x), self.inner.weight),
    "nested": lambda self, x: Nested.apply(self.inner(x)),
    "no_grad": lambda self, x: self.inner(x) * _without_gradient(lambda: Reverse.apply(self.inner(x), 0.5)),
    "written_after": lambda self, x: PositivePart.apply(self.inner(x)).add_(1.0).sin(),
}  # fmt: skip


def _without_gradient(function: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return function()


class Layer(nn.Module):
    def __init__(self, step: _Step) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return x + self.step(self, x)


class Layers(nn.Module):
    """Three equal layers after a linear one, so that they are traced once."""

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer(step) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@functools.cache
def prepared(name: str) -> tuple[nn.Module, OperatorGraph, list[dict[str, Tensor]], Outcome]:
    torch.manual_seed(0)
    model = Layers(STEPS[name]).double()
    batches = [{"x": torch.randn(4, 6, dtype=torch.float64)} for _ in range(2)]
    phases: list[str] = []
    graph = trace_module(model, batches[0], name, report=phases.append)
    assert any("3 layers of its kind" in phase for phase in phases)
    return model, graph, batches, run_plain(copy.deepcopy(model), batches)


def check(name: str, cuts: list[int], split: bool) -> None:
    model, graph, batches, plain = prepared(name)
    try:
        assert_equal(plain, Pipeline(graph, copy.deepcopy(model), cuts, len(batches)).step(batches, split))
    except AssertionError as error:
        raise AssertionError(f"{name} cut at {cuts}: {error}") from None


@pytest.mark.parametrize("name", STEPS)
def test_a_custom_function_is_differentiated_by_its_own_backward_wherever_it_is_cut(name: str) -> None:
    cuts = legal_cuts(prepared(name)[1])
    check(name, [], split=False)
    check(name, [], split=True)
    for index, cut in enumerate(cuts[1::2]):
        check(name, [cut], split=bool(index % 2))
    check(name, cuts[:: max(len(cuts) // 5, 1)], split=True)


def test_a_graph_with_custom_functions_is_operators_and_the_same_when_it_is_read_again() -> None:
    graph = prepared("affine")[1]
    assert all(node.op.startswith("aten.") for node in graph.nodes)
    assert graph_from_bytes(graph_to_bytes(graph)) == graph


class LooksAtValues(Reverse):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient if gradient.sum() > 0 else -gradient), None


class DrawsInBackward(Reverse):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * torch.rand_like(gradient), None


class WritesToGradient(Reverse):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.mul_(2.0), None


class WritesToArgument(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Counts(Reverse):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        Counts.calls += 1
        return x * Counts.calls


class ReadsModule(Function):
    """Its parameters are not among the arguments, so that their gradients would be lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.module(x)
        result.backward(gradient)
        return x.grad, None


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (LooksAtValues, "Shapes and control flow must not depend on|data-dependent|Could not guard|cannot be traced"),
        (DrawsInBackward, "draws random numbers by aten.rand_like"),
        (WritesToGradient, "writes to a tensor that is given to it: clone it first"),
        (WritesToArgument, "writes to its arguments .mark_dirty.: return a new tensor"),
        (Counts, "behaves differently when called again"),
        (ReadsModule, "reads a tensor that is not among its arguments"),
    ],
)  # fmt: skip
def test_a_custom_function_that_is_no_fixed_program_is_refused_by_name(function: Any, said: str) -> None:
    def step(self: Layer, x: Tensor) -> Tensor:
        return function.apply(self.inner(x) * 1.0, self.inner if function is ReadsModule else 0.5)

    with pytest.raises(TraceError, match=f"(?s){function.__name__}.*({said})") as refusal:
        trace_module(Layers(step), {"x": torch.randn(4, 6)})
    assert "'layers." in str(refusal.value) and "test_autograd_functions.py:" in str(refusal.value)
