"""Generated bindings in the place of operators: the same operators with the same arguments, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stagewright.graph import Node, Origin, Part, Ref, TensorMeta, Value
from stagewright.graph.split import split_graph
from stagewright.graph.tensor import contiguous
from stagewright.tracing import bindings
from stagewright.tracing.arguments import operator
from stagewright.tracing.bindings import binding_of
from stagewright.tracing.cache import trace
from stagewright.tracing.private import generated_bindings
from stagewright.tracing.runnable import compile_function

SQUARE = contiguous((4, 4), "float32")


def value(number: int) -> Value:
    return Value(number, SQUARE, number, Origin.NODE)


def call(op: str, *args: Any) -> Node:
    inputs = tuple(argument.value for argument in args if isinstance(argument, Ref))
    return Node(0, f"aten.{op}", args, (), inputs, (9,), Part.FORWARD, 0, "", 0, 0)


@pytest.mark.parametrize(
    ("node", "function"),
    [
        (call("mm.default", Ref(0), Ref(1)), torch.mm),
        (call("add.Tensor", Ref(0), Ref(1)), torch.add),
        (call("add.Tensor", Ref(0), 1e-5), torch.add),
        (call("transpose.int", Ref(0), 0, 1), torch.transpose),
        (call("mul.Scalar", Ref(0), 2.0), operator("aten.mul.Scalar")),  # torch.mul calls mul.Tensor
    ],
)  # fmt: skip
def test_an_operator_has_the_binding_of_its_overload(node: Node, function: Callable[..., Any]) -> None:
    assert binding_of(node, value).function is function


def test_integers_of_a_view_are_given_one_by_one() -> None:
    binding = binding_of(call("view.default", Ref(0), (2, 8)), value)
    assert binding.is_spread
    assert binding.function(torch.ones(4, 4), *binding.arranged((0, (2, 8)))[1:]).shape == (2, 8)


@pytest.mark.parametrize("name", ["view.default", "_unsafe_view.default"])
def test_a_view_copies_where_a_kernel_laid_its_argument_out_differently(name: str) -> None:
    binding = binding_of(call(name, Ref(0), (16,)), value)
    whole, turned = torch.rand(4, 4), torch.rand(4, 4).t()
    assert binding.function(whole, *binding.arranged((0, (16,)))[1:]).data_ptr() == whole.data_ptr()
    assert binding.function(turned, *binding.arranged((0, (16,)))[1:]).equal(turned.flatten())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda left, right: torch.mm(right, left),
        lambda left, right: torch.mm(left, right).clone(),
        lambda left, right: torch.matmul(left, right.detach()),
        lambda left, right: (torch.mm(left, right),),
    ],
)
def test_a_function_that_does_something_else_is_no_binding(
    wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings, "_BINDINGS", {})
    monkeypatch.setattr(bindings, "generated_bindings", lambda name: ((wrong,), None))
    node = call("mm.default", Ref(0), Ref(1))
    assert binding_of(node, value).function is operator("aten.mm.default")


def test_torch_generates_functions_and_methods() -> None:
    """Where it no longer does, every operator is called in its slow form: find their new names for `private.py`."""
    functions, method = generated_bindings("mm")
    assert functions == (torch.mm,) and method is not None
    assert len(generated_bindings("silu")[0]) == 1


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
def test_a_forward_gives_the_same_to_the_last_bit(model: str) -> None:
    graph = trace(model, 2, 8, "float32")
    (stage,) = split_graph(graph, [])
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)

    def tensor(number: int) -> torch.Tensor:
        meta: TensorMeta = stage.value(number).meta
        flat = torch.zeros(meta.extent, dtype=getattr(torch, meta.dtype))
        flat = torch.rand(flat.shape, generator=generator) if flat.is_floating_point() else flat
        return flat.as_strided(meta.shape, meta.stride)

    def seed(draw: int) -> None:
        torch.manual_seed(draw)

    function, results = stage.forward, []
    read = {number for node in function.nodes for number in node.inputs} | {*function.outputs}
    resident = {number: tensor(number) for number in sorted(read & stage.resident)}
    inputs = [tensor(number) for number in function.inputs]
    for lookup in (None, stage.value):
        runnable = compile_function(function, resident, cpu, value=lookup)
        with torch.no_grad():
            results.append(runnable.call(list(inputs), dict(resident), lambda *_: None, seed))
    for plain, cheap in zip(*results, strict=True):
        assert torch.equal(plain, cheap) and plain.stride() == cheap.stride()
