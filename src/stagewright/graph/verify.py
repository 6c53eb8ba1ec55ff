"""The verifier of the graph contract: run on every trace; nothing downstream repairs a graph."""

from __future__ import annotations

from stagewright.errors import ContractError
from stagewright.graph.graph import Node, OperatorGraph, Origin, Part

_RESIDENT = (Origin.PARAMETER, Origin.BUFFER, Origin.CONSTANT)


def verify_graph(graph: OperatorGraph) -> None:
    """Check the invariants a graph must have before anything is built on it.

    Raises:
        ContractError: names the invariant, the operator and its module.
    """
    _check_order(graph)
    _check_parts(graph)
    _check_storage(graph)
    _check_backward(graph)
    _check_gradients(graph)


def _fail(graph: OperatorGraph, node: Node, rule: str) -> None:
    raise ContractError(f"{rule}: {graph.describe(node)}")


def _check_order(graph: OperatorGraph) -> None:
    """One graph in running order: values are used after they are made, and made once."""
    made = {value.id for value in graph.values if value.origin is not Origin.NODE}
    for index, node in enumerate(graph.nodes):
        if node.id != index:
            _fail(graph, node, "nodes must be numbered in running order")
        for value in node.inputs:
            if value not in made:
                _fail(graph, node, f"value {value} is used before it is made")
        for value in node.outputs:
            if value is not None and value in made:
                _fail(graph, node, f"value {value} is made twice")
            if value is not None:
                made.add(value)


def _check_parts(graph: OperatorGraph) -> None:
    """A part only uses what is available when it runs, and weight gradients feed nothing but weight gradients."""
    part = {value: node.part for node in graph.nodes for value in node.outputs if value is not None}
    allowed = {
        Part.STATIC: {Part.STATIC},
        Part.DERIVED: {Part.DERIVED},
        Part.PROLOGUE: {Part.STATIC, Part.PROLOGUE},
        Part.FORWARD: {Part.STATIC, Part.DERIVED, Part.PROLOGUE, Part.FORWARD},
        Part.INPUT_GRAD: set(Part) - {Part.WEIGHT_GRAD},
        Part.WEIGHT_GRAD: set(Part),
    }
    for node in graph.nodes:
        for value in node.inputs:
            origin = graph.values[value].origin
            if origin is Origin.NODE and part[value] not in allowed[node.part]:
                _fail(graph, node, f"a {node.part.name} operator uses a value of the {part[value].name} part")
            if origin is Origin.GRADIENT and node.part is not Part.WEIGHT_GRAD:
                _fail(graph, node, "only weight-gradient operators may use the gradient of a parameter")
            if origin is Origin.PARAMETER and node.part in (Part.STATIC, Part.PROLOGUE):
                _fail(graph, node, "the prologue may not depend on a parameter")


def _check_storage(graph: OperatorGraph) -> None:
    """Every value knows the root of its storage, and roots are their own."""
    for value in graph.values:
        root = graph.values[value.storage]
        if root.storage != root.id:
            raise ContractError(f"storage roots must be roots: value {value.id} names {root.id}, a view")
        if value.id != root.id and value.origin is not Origin.NODE:
            raise ContractError(f"{value.origin} '{value.name}' must own its storage")


def _check_backward(graph: OperatorGraph) -> None:
    """Every backward operator belongs to one forward operator and uses no forward value that is not at hand there."""
    for node in graph.nodes:
        if node.forward < 0:
            if node.part is not Part.WEIGHT_GRAD:
                _fail(graph, node, "only the backward of a derived value may have lost its forward operator")
            continue
        owner = graph.nodes[node.forward]
        if node.part in (Part.INPUT_GRAD, Part.WEIGHT_GRAD):
            if owner.part not in (Part.FORWARD, Part.DERIVED):
                _fail(graph, node, "a backward operator must belong to a forward operator")
            position = owner.id
            for value in node.inputs:
                maker = graph.values[value].node
                if maker < 0:
                    continue
                made_by = graph.nodes[maker]
                if made_by.part is Part.FORWARD and made_by.id > position:
                    _fail(
                        graph, node, "a backward operator may not use the result of a later forward operator"
                    )
        elif owner.id != node.id:
            _fail(graph, node, "only backward operators belong to another operator")


def _check_gradients(graph: OperatorGraph) -> None:
    """Every trained parameter that reaches the loss has a gradient of its own layout, in autograd's order of addition."""
    for value, gradient in graph.gradients.items():
        found = graph.contributions.get(gradient, ())
        if not found:
            raise ContractError(f"the gradient of '{graph.values[value].name}' has no contribution")
        for node, contribution in found:
            meta = graph.values[contribution].meta
            if meta.shape != graph.values[value].meta.shape:
                _fail(
                    graph,
                    graph.nodes[node],
                    f"a gradient of shape {meta.shape} reaches a value of shape {graph.values[value].meta.shape}",
                )
