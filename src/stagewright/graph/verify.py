"""Verification of the graph contract, for every trace; nothing downstream repairs a graph.

Each check is one invariant of the contract (see the design page); its error names the operator and the module.
`verify_stages` does the same for the stages that `split_graph` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stagewright.errors import ContractError
from stagewright.graph.graph import Node, OperatorGraph, Origin, Part
from stagewright.graph.stage import Function, Stage

# Operators of which some results are gradients of parameters: a mask says which results to compute. The arguments of the
# forward operator come in the same order as the results.
_MASKED = frozenset(
    f"aten.{name}_backward.default"
    for name in ("convolution", "native_batch_norm", "native_group_norm", "native_layer_norm")
)
_RANDOM = frozenset({
    "aten.bernoulli", "aten.exponential", "aten.multinomial", "aten.native_dropout", "aten.normal", "aten.uniform",
    "aten.rand", "aten.rand_like", "aten.randn", "aten.randn_like", "aten.randint", "aten.randint_like", "aten.randperm",
})  # fmt: skip
_DEPENDING_ON_DATA = (
    "aten._local_scalar_dense", "aten._unique", "aten.bincount", "aten.masked_select", "aten.nonzero.",
    "aten.repeat_interleave.Tensor", "aten.unique",
)  # fmt: skip
_DOING_NOTHING = ("aten.alias", "aten.detach", "aten.lift", "aten._assert", "aten.sym_constrain")


def verify_graph(graph: OperatorGraph) -> None:
    """Check the invariants a graph must have before anything is built on it.

    Raises:
        ContractError: names the invariant, the operator and its module.
    """
    for check in (
        _check_order, _check_functional, _check_mutations, _check_parts, _check_prologue, _check_storage,
        _check_backward, _check_masks, _check_gradients, _check_random, _check_static_shapes, _check_names,
        _check_no_ops,
    ):  # fmt: skip
        check(graph)


def _fail(graph: OperatorGraph, node: Node, rule: str) -> None:
    raise ContractError(f"{rule}: {graph.describe(node)}")


def _check_order(graph: OperatorGraph) -> None:
    """Nodes are in running order: values are used after they are computed, and computed once."""
    defined = {value.id for value in graph.values if value.origin is not Origin.NODE}
    for index, node in enumerate(graph.nodes):
        if node.id != index:
            _fail(graph, node, "nodes must be numbered in running order")
        for value in node.inputs:
            if value not in defined:
                _fail(graph, node, f"value {value} is used before it is made")
        for value in node.outputs:
            if value is not None and value in defined:
                _fail(graph, node, f"value {value} is made twice")
            if value is not None:
                defined.add(value)


def _check_functional(graph: OperatorGraph) -> None:
    """No operator writes to its arguments: its name does not end in an underscore and it takes no ``out``."""
    for node in graph.nodes:
        _, name, overload = node.op.split(".")
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or overload == "out" or overload.endswith("_out"):
            _fail(graph, node, "an operator writes to its argument")


def _check_mutations(graph: OperatorGraph) -> None:
    """A changed buffer takes one new value, of the same shape and type."""
    changed = [buffer for buffer, _ in graph.mutations]
    for buffer, value in graph.mutations:
        old, new = graph.values[buffer], graph.values[value]
        if old.origin is not Origin.BUFFER:
            raise ContractError(f"{old.origin} '{old.name}' changes with every microbatch; only buffers may")
        if changed.count(buffer) > 1:
            raise ContractError(f"buffer '{old.name}' takes several values after one forward")
        if (old.meta.shape, old.meta.dtype) != (new.meta.shape, new.meta.dtype):
            raise ContractError(
                f"buffer '{old.name}' ({old.meta}) takes a value of another layout ({new.meta})"
            )


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


def _check_prologue(graph: OperatorGraph) -> None:
    """Operators that depend on no parameter are not forward operators, and only real and complex values pass gradients."""
    for node in graph.nodes:
        is_drawn = node.part is not Part.FORWARD or node.draw >= 0
        if not is_drawn and not any(_is_trained(graph, value) for value in node.inputs):
            _fail(graph, node, "a forward operator that depends on no parameter belongs to the prologue")
        for output in node.outputs:
            if output is not None and graph.values[output].needs_grad:
                if not graph.values[output].meta.is_differentiable:
                    _fail(graph, node, f"a value of type {graph.values[output].meta.dtype} passes a gradient")
                if node.part in (Part.STATIC, Part.PROLOGUE):
                    _fail(graph, node, "a value of the prologue passes a gradient")


def _is_trained(graph: OperatorGraph, value: int) -> bool:
    """Whether a value is a parameter or depends on one, or on random numbers."""
    described = graph.values[value]
    if described.node < 0:
        return described.origin is Origin.PARAMETER
    return graph.nodes[described.node].part in (Part.DERIVED, Part.FORWARD)


def _check_storage(graph: OperatorGraph) -> None:
    """Every value names the root of its storage; a root is its own root, and views are views of an argument."""
    for value in graph.values:
        root = graph.values[value.storage]
        if root.storage != root.id:
            raise ContractError(f"storage roots must be roots: value {value.id} names {root.id}, a view")
        if value.id != root.id and value.origin is not Origin.NODE:
            raise ContractError(f"{value.origin} '{value.name}' must own its storage")
    for node in graph.nodes:
        storages = {graph.values[value].storage for value in node.inputs}
        storages.update(value for value in node.outputs if value is not None)
        for output in node.outputs:
            if output is None:
                continue
            value = graph.values[output]
            if value.storage != output and value.storage not in storages:
                _fail(graph, node, f"value {output} lies in a storage that none of the arguments has")
            if value.meta.storage_bytes > graph.storage_bytes[value.storage]:
                _fail(graph, node, f"value {output} reaches beyond its storage")


def _check_backward(graph: OperatorGraph) -> None:
    """Every backward operator belongs to one forward operator and uses no result of a later one."""
    for node in graph.nodes:
        if node.forward < 0:
            if node.part is not Part.WEIGHT_GRAD:
                _fail(graph, node, "only the backward of a derived value may have lost its forward operator")
            continue
        owner = graph.nodes[node.forward]
        if node.part in (Part.INPUT_GRAD, Part.WEIGHT_GRAD):
            if owner.part not in (Part.FORWARD, Part.DERIVED):
                _fail(graph, node, "a backward operator must belong to a forward operator")
            makers = (graph.values[value].node for value in node.inputs)
            if any(maker > owner.id and graph.nodes[maker].part is Part.FORWARD for maker in makers):
                _fail(graph, node, "a backward operator may not use the result of a later forward operator")
        elif owner.id != node.id:
            _fail(graph, node, "only backward operators belong to another operator")


def _check_masks(graph: OperatorGraph) -> None:
    """An operator that could compute input and weight gradients at once computes one kind, as its mask says."""
    for node in graph.nodes:
        if node.op not in _MASKED or node.forward < 0:
            continue
        mask = next(
            a for a in reversed(node.args) if isinstance(a, tuple) and all(type(x) is bool for x in a)
        )
        arguments = graph.nodes[node.forward].inputs
        for place, (wanted, output) in enumerate(zip(mask, node.outputs, strict=True)):
            if output is not None and not wanted:
                _fail(graph, node, f"result {place} is used, but the mask leaves it out")
            if wanted and _is_weight(graph, arguments[place]) != (node.part is Part.WEIGHT_GRAD):
                rule = f"an operator of the {node.part.name} part computes the gradient of argument {place}"
                _fail(graph, node, rule)


def _is_weight(graph: OperatorGraph, value: int) -> bool:
    described = graph.values[value]
    if described.origin is Origin.PARAMETER:
        return True
    return described.node >= 0 and graph.nodes[described.node].part is Part.DERIVED


def _check_gradients(graph: OperatorGraph) -> None:
    """Every trained parameter that affects the loss has a gradient of the same layout, added up in autograd's order."""
    for value, gradient in graph.gradients.items():
        contributions = graph.contributions.get(gradient, ())
        if not contributions:
            raise ContractError(f"the gradient of '{graph.values[value].name}' has no contribution")
        for node, contribution in contributions:
            got, wanted = graph.values[contribution].meta.shape, graph.values[value].meta.shape
            if got != wanted:
                _fail(
                    graph, graph.nodes[node], f"a gradient of shape {got} reaches a value of shape {wanted}"
                )


def _check_random(graph: OperatorGraph) -> None:
    """Operators that draw random numbers are numbered in the order of the model, which determines their keys."""
    last = -1
    for node in graph.nodes:
        if node.draw < 0:
            if node.op.rpartition(".")[0] in _RANDOM:
                _fail(graph, node, "an operator draws random numbers without a key")
            continue
        if node.part is not Part.FORWARD or not last < node.draw < graph.num_draws:
            _fail(graph, node, f"draw {node.draw} is out of order")
        last = node.draw


def _check_static_shapes(graph: OperatorGraph) -> None:
    """Shapes are numbers, and none depends on data."""
    for node in graph.nodes:
        if node.op.startswith(_DEPENDING_ON_DATA):
            _fail(graph, node, "the shape of a result depends on data")
        for output in node.outputs:
            if output is not None:
                meta = graph.values[output].meta
                numbers = (*meta.shape, *meta.stride, meta.offset)
                if not all(type(size) is int and size >= 0 for size in numbers):
                    _fail(graph, node, f"the layout of value {output} is not made of numbers")


def _check_names(graph: OperatorGraph) -> None:
    """Module path and ordinal name one operator, so that a cut can be found in another trace."""
    seen: set[str] = set()
    for node in graph.nodes:
        if node.part < Part.INPUT_GRAD and node.ordinal >= 0:
            if node.name in seen:
                _fail(graph, node, f"two operators are named '{node.name}'")
            seen.add(node.name)


def _check_no_ops(graph: OperatorGraph) -> None:
    """No operator leaves both values and layout unchanged."""
    for node in graph.nodes:
        if node.op.startswith(_DOING_NOTHING):
            _fail(graph, node, "an operator does nothing")
        layouts = {(graph.values[value].storage, graph.values[value].meta) for value in node.inputs}
        for output in node.outputs:
            if output is not None and (graph.values[output].storage, graph.values[output].meta) in layouts:
                _fail(graph, node, "an operator returns its argument")


def verify_stages(stages: Sequence[Stage]) -> None:
    """Check the stages of a graph that has passed `verify_graph`.

    Raises:
        ContractError: names the invariant, the stage and the operator or value.
    """
    for stage in stages:
        _check_nothing_resident_is_kept(stage)
        _check_functions(stage)
    _check_transfers(stages)
    _check_complete(stages)


def _check_nothing_resident_is_kept(stage: Stage) -> None:
    """Parameters, their views and casts, and buffers that change are neither saved nor sent."""
    transfers = (*stage.sends, *stage.grad_sends)
    kept = {
        "saved": stage.saved,
        "saved for weight gradients": stage.saved_for_weight_grad,
        "sent": [value for transfer in transfers for value in transfer.values],
    }
    changing = {buffer for buffer, _ in stage.graph.mutations}
    for what, values in kept.items():
        for value in values:
            root = stage.value(value).storage
            if _is_of_a_parameter(stage, root) or root in changing:
                of = "a buffer that changes" if root in changing else "a parameter"
                raise ContractError(
                    f"stage {stage.index}: {_describe(stage, value)} is {what}, but is part of {of}"
                )


def _is_of_a_parameter(stage: Stage, root: int) -> bool:
    value = stage.value(root)
    made_by_graph = root < len(stage.graph.values) and value.node >= 0
    return value.origin is Origin.PARAMETER or (
        made_by_graph and stage.graph.nodes[value.node].part is Part.DERIVED
    )


def _describe(stage: Stage, value: int) -> str:
    described = stage.value(value)
    if value < len(stage.graph.values) and described.node >= 0:
        return f"value {value} of {stage.graph.describe(stage.graph.nodes[described.node])}"
    return f"value {value} ('{described.name}')"


def _check_functions(stage: Stage) -> None:
    """Inputs of every node are given, resident or computed before, and functions compute what they return."""
    functions = {
        "F": stage.forward, "I": stage.input_grad, "W": stage.weight_grad, "B": stage.backward, "R": stage.rebuild,
    }  # fmt: skip
    for name, function in functions.items():
        missing = _missing(function, stage.resident)
        if missing is not None:
            raise ContractError(
                f"stage {stage.index}: {name} uses {_describe(stage, missing)} and does not have it"
            )
    arriving = {value for transfer in stage.grad_receives for value in transfer.values}
    later = {*stage.saved, *arriving, *stage.rebuild.outputs}
    why = "which F did not save and R not rebuild"
    for name, there, lacks in (
        ("I", later, why),
        ("B", later, why),
        ("R", {*stage.saved}, "which F did not save"),
    ):
        for value in functions[name].inputs:
            if value not in there:
                raise ContractError(f"stage {stage.index}: {name} takes {_describe(stage, value)}, {lacks}")


def _missing(function: Function, resident: Iterable[int]) -> int | None:
    available = {*resident, *function.inputs}
    for node in function.nodes:
        for value in node.inputs:
            if value not in available:
                return value
        available.update(output for output in node.outputs if output is not None)
    return next((value for value in function.outputs if value not in available), None)


def _check_transfers(stages: Sequence[Stage]) -> None:
    """Every stage receives what another sends to it, in the same order."""
    for sends, receives in (("sends", "receives"), ("grad_sends", "grad_receives")):
        sent = {(s.index, t.stage): t.values for s in stages for t in getattr(s, sends)}
        received = {(t.stage, s.index): t.values for s in stages for t in getattr(s, receives)}
        for edge in (*sent, *received):
            if sent.get(edge) != received.get(edge):
                raise ContractError(
                    f"stage {edge[0]} sends {sent.get(edge, ())} and stage {edge[1]} receives {received.get(edge, ())}"
                )


def _check_complete(stages: Sequence[Stage]) -> None:
    """Every trained parameter gets its gradient, and every buffer that changes is updated, on some stage."""
    graph = stages[0].graph
    finished = {value for stage in stages for value, _ in stage.gradients}
    updated = {buffer for stage in stages for buffer, _ in stage.mutations}
    for value in graph.gradients:
        if graph.values[value].origin is Origin.PARAMETER and value not in finished:
            raise ContractError(f"no stage finishes the gradient of '{graph.values[value].name}'")
    for buffer, _ in graph.mutations:
        if buffer not in updated:
            raise ContractError(f"no stage updates buffer '{graph.values[buffer].name}'")
    if sum(stage.computes_loss for stage in stages) != 1:
        raise ContractError("the loss must be computed by one stage")
