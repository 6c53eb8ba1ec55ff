"""Evaluation graphs: a traced graph as `module.eval()` would run it, with the loss of every token instead of the mean.

Values keep their numbers, so that weights and cuts of the training graph hold for it. Its gradients are meaningless.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from stagewright.errors import InputError
from stagewright.graph import Node, OperatorGraph, Origin, Part, Ref, Value
from stagewright.graph.tensor import contiguous
from stagewright.tracing.arguments import draws, operator
from stagewright.tracing.attention import ATTENTION

NOT_COUNTED = -1.0
"""Stands for the loss of a token that does not count; no cross entropy is negative."""

_OFF = {"train": False, "training": False, "dropout_p": 0.0}
_BERNOULLI = "aten.bernoulli.p"
_NLL = "aten.nll_loss_forward.default"
_WHERE = "aten.where.self"
_SUMS = frozenset({"aten.sum.default", "aten.mean.default"})
_SHARE = "aten.div.Tensor"
_CAST = "aten._to_copy.default"
_JOINING = frozenset({"aten.add.Tensor", _SHARE, _CAST})
_REDUCTION, _IGNORED = 3, 4
"""Indices of these arguments of `_NLL`."""
_MEAN = 1
"""The reduction to a mean."""


def evaluated(graph: OperatorGraph) -> OperatorGraph:
    """Return `graph` without dropout, with the running statistics of batch normalisation and, if its loss is a cross
    entropy, with a loss of one element per token (`NOT_COUNTED` where the token does not count), else with the mean.

    Raises:
        InputError: an operator draws random numbers in a way that cannot be switched off.
    """
    # There is no backward.
    facts = {name: fact for name, fact in graph.facts.items() if name != "late"}
    nodes = list(map(_switched_off, graph.nodes))
    for node in graph.nodes:
        if node.op == _BERNOULLI and node.part is Part.FORWARD:
            _keep_all(graph, node, nodes)
    return _by_token(replace(graph, nodes=tuple(nodes), mutations=(), facts=facts))


def is_by_token(graph: OperatorGraph) -> bool:
    """Return whether the loss of an `evaluated` graph has an element per token."""
    return bool(graph.values[graph.loss].meta.shape)


def _switched_off(node: Node) -> Node:
    """Return the call without its training behaviour."""
    if node.part is not Part.FORWARD or not (node.op.startswith("aten.") or node.op == ATTENTION):
        return node
    args, kwargs = list(node.args), dict(node.kwargs)
    op = operator(node.op)
    for place, argument in enumerate(op._schema.arguments):
        if argument.name not in _OFF:
            continue
        if place < len(args):
            args[place] = _OFF[argument.name]
        else:
            kwargs[argument.name] = _OFF[argument.name]
    is_known = node.op == _BERNOULLI or any(parameter.name in _OFF for parameter in op._schema.arguments)
    if node.draw >= 0 and not is_known and draws(op, args, kwargs):
        raise _not_switched_off(node)
    return replace(node, args=tuple(args), kwargs=tuple(kwargs.items()))


def _keep_all(graph: OperatorGraph, drawn: Node, nodes: list[Node]) -> None:
    """Make a dropout composed of operators keep every element without scaling, where the drawn mask is divided by the
    probability to keep."""
    mask = drawn.outputs[0]
    users = () if mask is None else graph.consumers.get(mask, ())
    scaling = [user for user in users if graph.nodes[user].op.startswith("aten.div.")]
    if not scaling or any(graph.nodes[user].args[1] != drawn.args[1] for user in scaling):
        raise _not_switched_off(drawn)
    for place in (drawn.id, *scaling):
        node = nodes[place]
        nodes[place] = replace(node, args=(node.args[0], 1.0, *node.args[2:]))


def _not_switched_off(node: Node) -> InputError:
    return InputError(
        f"{node.op} of module '{node.module}' draws random numbers in training, in a way that cannot be switched off in the "
        "traced model: use torch.nn.functional.dropout there, or evaluate the model files of a checkpoint in plain PyTorch"
    )


def _by_token(graph: OperatorGraph) -> OperatorGraph:
    """Return `graph` with the loss of each token, in order; unchanged if the loss is not a cross entropy."""
    terms = list(_terms(graph))
    if not terms:
        return graph
    nodes, values = list(graph.nodes), list(graph.values)

    def called(
        op: str, args: tuple[object, ...], inputs: tuple[int, ...], num_elements: int, dtype: str
    ) -> int:
        """Add an operator at the end of the forward; return its result."""
        value, last = len(values), nodes[graph.forward_ids[-1]]
        values.append(Value(value, contiguous((num_elements,), dtype), value, Origin.NODE, node=len(nodes)))
        ordinal = len(nodes)
        nodes.append(
            Node(ordinal, op, args, (), inputs, (value,), Part.FORWARD, ordinal, last.module, ordinal, -1)
        )
        return value

    marked, sizes = [], []
    for loss, mask in terms:
        node = nodes[graph.values[loss].node]
        if node.op == _NLL:
            target, ignored = node.args[1], node.args[_IGNORED]
            (size,) = graph.values[target.value].meta.shape
            args = (*node.args[:_REDUCTION], 0, *node.args[_REDUCTION + 1 :])
            nodes[node.id] = replace(node, args=args)
            values[loss] = replace(values[loss], meta=contiguous((size,), values[loss].meta.dtype))
            mask = called("aten.ne.Scalar", (target, ignored), (target.value,), size, "bool")
        assert mask is not None, "a sum of losses is over a mask"
        (size,) = values[loss].meta.shape
        dtype = values[loss].meta.dtype
        shown = called(
            "aten.where.ScalarOther", (Ref(mask), Ref(loss), NOT_COUNTED), (mask, loss), size, dtype
        )
        marked.append(shown)
        sizes.append(size)
    loss = marked[0]
    if len(marked) > 1:
        args = (tuple(map(Ref, marked)), 0)
        loss = called("aten.cat.default", args, tuple(marked), sum(sizes), values[loss].meta.dtype)
    return replace(graph, nodes=tuple(nodes), values=tuple(values), loss=loss)


def _terms(graph: OperatorGraph) -> Iterator[tuple[int, int | None]]:
    """Yield the losses of the mean, in order: those of a cross entropy, or of the tokens in a mask."""
    terms: dict[int, int | None] = {}
    for node in _above(graph, graph.loss):
        if node.op == _NLL:
            if node.args[2] is not None:
                return  # with class weights the sum is not that of the tokens' losses
            if node.args[_REDUCTION] == _MEAN and node.id != _uncast(graph, graph.loss):
                return  # a mean that is scaled, or added to another loss
            terms[node.id] = None
        elif node.op in _SUMS:
            source = graph.nodes[graph.values[node.inputs[0]].node]
            if source.op != _WHERE:
                return
            terms[source.id] = source.args[0].value
    for place in sorted(terms):
        loss = graph.nodes[place].outputs[0]
        assert loss is not None, "operands of the loss are used"
        yield loss, terms[place]


def _uncast(graph: OperatorGraph, value: int) -> int:
    """Return the operator that produces a value, ignoring casts."""
    node = graph.nodes[graph.values[value].node]
    return _uncast(graph, node.inputs[0]) if node.op == _CAST else node.id


def _above(graph: OperatorGraph, loss: int) -> Iterable[Node]:
    """Yield the operators that only combine the loss, from the loss upwards, and those whose results they combine."""
    waiting, seen = [loss], set[int]()
    while waiting:
        number = graph.values[waiting.pop()].node
        if number < 0 or number in seen:
            continue
        seen.add(number)
        node = graph.nodes[number]
        yield node
        if node.op in _JOINING:
            waiting.extend(node.inputs[:1] if node.op == _SHARE else node.inputs)  # not the divisor
