"""The verifier: every invariant it checks, broken by hand in a graph that keeps it, is found and named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.errors import ContractError, TraceError
from stagewright.graph import Node, OperatorGraph, Part, Value
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Stage
from stagewright.graph.verify import verify_graph, verify_stages
from stagewright.tracing.trace import trace_module


class Small(nn.Module):
    """Something of everything the verifier looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(self.norm(self.conv(x * 2)), 0.5)
        return self.head(hidden.flatten(1)).square().mean()


@functools.cache
def small() -> OperatorGraph:
    return trace_module(Small(), {"x": torch.randn(4, 2, 5)})


def find(op: str, part: Part | None = None) -> Node:
    return next(node for node in small() if node.op.startswith(op) and part in (None, node.part))


def with_node(node: Node, **changes: Any) -> OperatorGraph:
    nodes = list(small().nodes)
    nodes[node.id] = replace(node, **changes)
    return replace(small(), nodes=tuple(nodes))


def with_value(value: int, **changes: Any) -> OperatorGraph:
    values = list(small().values)
    values[value] = replace(values[value], **changes)
    return replace(small(), values=tuple(values))


def made_by(op: str, part: Part | None = None) -> Value:
    output = next(value for value in find(op, part).outputs if value is not None)
    return small().values[output]


def swapped() -> OperatorGraph:
    nodes = list(small().nodes)
    conv, norm = find("aten.convolution.default"), find("aten._native_batch_norm")
    nodes[conv.id], nodes[norm.id] = replace(norm, id=conv.id), replace(conv, id=norm.id)
    return replace(small(), nodes=tuple(nodes))


def in_place() -> OperatorGraph:
    return with_node(find("aten.mul.Tensor"), op="aten.mul_.Tensor")


def buffer_with_two_values() -> OperatorGraph:
    return replace(small(), mutations=(*small().mutations, small().mutations[0]))


def parameter_that_changes() -> OperatorGraph:
    return replace(small(), mutations=((small().parameters["conv.bias"], small().mutations[0][1]),))


def buffer_of_another_layout() -> OperatorGraph:
    return replace(small(), mutations=((small().buffers["norm.running_mean"], small().loss),))


def weight_gradient_in_the_input_gradient() -> OperatorGraph:
    return with_node(find("aten.convolution_backward", Part.WEIGHT_GRAD), part=Part.INPUT_GRAD)


def mixed_mask() -> OperatorGraph:
    node = find("aten.native_batch_norm_backward", Part.INPUT_GRAD)
    return with_node(node, args=(*node.args[:-1], (True, True, True)))


def result_outside_the_mask() -> OperatorGraph:
    node = find("aten.native_batch_norm_backward", Part.INPUT_GRAD)
    return with_node(node, args=(*node.args[:-1], (False, False, False)))


def input_gradient_from_a_weight_gradient() -> OperatorGraph:
    return with_node(find("aten.mm.default", Part.INPUT_GRAD), part=Part.WEIGHT_GRAD)


def prologue_in_the_body() -> OperatorGraph:
    return with_node(find("aten.mul.Tensor", Part.PROLOGUE), part=Part.FORWARD)


def integer_with_gradient() -> OperatorGraph:
    value = made_by("aten._native_batch_norm")
    return with_value(value.id, meta=replace(value.meta, dtype="int64"))


def storage_of_nobody() -> OperatorGraph:
    view = find("aten.view.default", Part.FORWARD).outputs[0]
    assert view is not None
    return with_value(view, storage=small().inputs["x"])


def root_that_is_a_view() -> OperatorGraph:
    return with_value(made_by("aten.convolution.default").id, storage=small().loss)


def backward_of_nothing() -> OperatorGraph:
    return with_node(find("aten.native_dropout_backward"), forward=find("aten.mul.Tensor", Part.PROLOGUE).id)


def late_value() -> OperatorGraph:
    return with_node(find("aten.native_dropout_backward"), forward=find("aten.convolution.default").id)


def gradient_of_another_shape() -> OperatorGraph:
    value, gradient = next(iter(small().gradients.items()))
    node, _ = small().contributions[gradient][0]
    assert small().values[value].meta.shape != ()
    return replace(small(), contributions={**small().contributions, gradient: ((node, small().loss),)})


def gradient_of_nothing() -> OperatorGraph:
    gradient = small().gradients[small().parameters["conv.bias"]]
    return replace(small(), contributions={**small().contributions, gradient: ()})


def draw_without_key() -> OperatorGraph:
    return with_node(find("aten.native_dropout.default"), draw=-1)


def draw_out_of_order() -> OperatorGraph:
    return with_node(find("aten.native_dropout.default"), draw=7)


def shape_from_data() -> OperatorGraph:
    return with_node(find("aten.mul.Tensor", Part.PROLOGUE), op="aten.nonzero.default")


def unknown_size() -> OperatorGraph:
    value = made_by("aten.convolution.default")
    return with_value(value.id, meta=replace(value.meta, shape=(-1, *value.meta.shape[1:])))


def two_of_one_name() -> OperatorGraph:
    other = find("aten.convolution.default")
    return with_node(find("aten.native_dropout.default"), module=other.module, ordinal=other.ordinal)


def no_op() -> OperatorGraph:
    return with_node(find("aten.view.default", Part.FORWARD), op="aten.detach.default")


def view_that_changes_nothing() -> OperatorGraph:
    node = find("aten.view.default", Part.FORWARD)
    (output,) = node.outputs
    assert output is not None
    return with_value(output, meta=small().values[node.inputs[0]].meta)


BROKEN: list[tuple[Callable[[], OperatorGraph], str]] = [
    (swapped, r"used before it is made: operator aten\._native_batch_norm\S+ of module 'norm'"),
    (in_place, r"writes to its argument: operator aten\.mul_\.Tensor"),
    (buffer_with_two_values, r"buffer 'norm\.\w+' takes several values"),
    (parameter_that_changes, r"'conv\.bias' changes with every microbatch"),
    (buffer_of_another_layout, r"'norm\.running_mean' .* takes a value of another layout"),
    (
        weight_gradient_in_the_input_gradient,
        r"operator of the INPUT_GRAD part computes the gradient of argument 1: operator "
        r"aten\.convolution_backward\.default of module 'conv'",
    ),
    (mixed_mask, r"INPUT_GRAD part computes the gradient of argument 1: .* of module 'norm'"),
    (result_outside_the_mask, r"result 0 is used, but the mask leaves it out: .* of module 'norm'"),
    (input_gradient_from_a_weight_gradient, r"INPUT_GRAD operator uses a value of the WEIGHT_GRAD part"),
    (prologue_in_the_body, r"belongs to the prologue: operator aten\.mul\.Tensor"),
    (integer_with_gradient, r"of type int64 passes a gradient: .* of module 'norm'"),
    (storage_of_nobody, r"lies in a storage that none of the arguments has: operator aten\.view"),
    (root_that_is_a_view, r"storage roots must be roots|storage that none of the arguments has"),
    (backward_of_nothing, r"must belong to a forward operator: operator aten\.native_dropout_backward"),
    (late_value, r"may not use the result of a later forward operator"),
    (gradient_of_another_shape, r"a gradient of shape \(\) reaches a value of shape"),
    (gradient_of_nothing, r"the gradient of 'conv\.bias' has no contribution"),
    (draw_without_key, r"random numbers without a key: operator aten\.native_dropout\.default"),
    (draw_out_of_order, r"draw 7 is out of order"),
    (shape_from_data, r"depends on data: operator aten\.nonzero"),
    (unknown_size, r"is not made of numbers: operator aten\.convolution\.default of module 'conv'"),
    (two_of_one_name, r"two operators are named 'conv:"),
    (no_op, r"does nothing: operator aten\.detach"),
    (view_that_changes_nothing, r"returns its argument: operator aten\.view"),
]


@pytest.mark.parametrize(("broken", "said"), BROKEN, ids=[broken.__name__ for broken, _ in BROKEN])
def test_a_broken_graph_is_refused(broken: Callable[[], OperatorGraph], said: str) -> None:
    verify_graph(small())
    with pytest.raises(ContractError, match=said):
        verify_graph(broken())


# Stages


def stages() -> list[Stage]:
    return split_graph(small(), [2])


def saving_a_parameter() -> Stage:
    stage = stages()[0]
    return replace(stage, saved=(*stage.saved, small().parameters["conv.weight"]))


def saving_a_view_of_a_parameter() -> Stage:
    stage = stages()[1]
    transposed = next(value for value in find("aten.t.default", Part.DERIVED).outputs if value is not None)
    return replace(stage, saved_for_weight_grad=(*stage.saved_for_weight_grad, transposed))


def sending_nothing() -> Stage:
    return replace(stages()[0], sends=())


def using_what_is_not_there() -> Stage:
    stage = stages()[0]
    return replace(stage, forward=replace(stage.forward, inputs=()))


def taking_what_was_not_saved() -> Stage:
    return replace(stages()[0], saved=())


def finishing_no_gradient() -> Stage:
    return replace(stages()[0], gradients=())


def updating_no_buffer() -> Stage:
    return replace(stages()[0], mutations=())


BROKEN_STAGES: list[tuple[Callable[[], Stage], str]] = [
    (saving_a_parameter, r"stage 0: value \d+ \('conv\.weight'\) is saved, but is part of a parameter"),
    (
        saving_a_view_of_a_parameter,
        r"operator aten\.t\.default of module 'head'.* is saved for weight gradients, but is part of a param",
    ),
    (sending_nothing, r"stage 0 sends \(\) and stage 1 receives"),
    (using_what_is_not_there, r"stage 0: F uses value \d+ \('x'\) and does not have it"),
    (taking_what_was_not_saved, r"which F did not save"),
    (finishing_no_gradient, r"no stage finishes the gradient of '(conv|norm)\.\w+'"),
    (updating_no_buffer, r"no stage updates buffer 'norm\.\w+'"),
]


@pytest.mark.parametrize(
    ("broken", "said"), BROKEN_STAGES, ids=[broken.__name__ for broken, _ in BROKEN_STAGES]
)
def test_a_broken_stage_is_refused(broken: Callable[[], Stage], said: str) -> None:
    verify_stages(stages())
    wrong = broken()
    with pytest.raises(ContractError, match=said):
        verify_stages([wrong if stage.index == wrong.index else stage for stage in stages()])


# What a trace must refuse


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden[hidden > 0].sum()


class WritingToItsInput(Sized):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2)).sum()


class Untrained(Sized):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).detach().sum() + x.mean()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Sized, r"module '\(model\)' at .*test_contract\.py:\d+: return hidden\[hidden > 0\]"),
        (WritingToItsInput, r"writes to its input 'x'"),
        (Untrained, r"depends on no parameter"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(model: type[nn.Module], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        trace_module(model(), {"x": torch.randn(2, 3)})
