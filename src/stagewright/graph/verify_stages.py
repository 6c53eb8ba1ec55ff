"""The verifier of carved stages: what each keeps, uses and sends is what the contract allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stagewright.errors import ContractError
from stagewright.graph.graph import Origin, Part
from stagewright.graph.stage import Function, Stage


def verify_stages(stages: Sequence[Stage]) -> None:
    """Check what `carve` made of a graph that has passed `verify_graph`.

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
    kept = {"saved": stage.saved, "relayed": stage.relayed, "sent": [v for t in transfers for v in t.values]}
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
    found = stage.value(value)
    if value < len(stage.graph.values) and found.node >= 0:
        return f"value {value} of {stage.graph.describe(stage.graph.nodes[found.node])}"
    return f"value {value} ('{found.name}')"


def _check_functions(stage: Stage) -> None:
    """Every function finds what it uses: given, resident or made before; and makes what it returns."""
    functions = {"F": stage.forward, "I": stage.input_grad, "W": stage.weight_grad, "B": stage.backward}
    functions["R"] = stage.rebuild
    for name, function in functions.items():
        missing = _missing(function, stage.resident)
        if missing is not None:
            raise ContractError(
                f"stage {stage.index}: {name} uses {_describe(stage, missing)} and does not have it"
            )
    for name, given in (("I", stage.input_grad.inputs), ("B", stage.backward.inputs)):
        arriving = {value for transfer in stage.grad_receives for value in transfer.values}
        for value in given:
            if value not in arriving and value not in stage.saved and value not in stage.rebuild.outputs:
                raise ContractError(
                    f"stage {stage.index}: {name} takes {_describe(stage, value)}, which F did not save and R not rebuild"
                )
    for value in stage.rebuild.inputs:
        if value not in stage.saved:
            raise ContractError(
                f"stage {stage.index}: R takes {_describe(stage, value)}, which F did not save"
            )


def _missing(function: Function, resident: Iterable[int]) -> int | None:
    known = {*resident, *function.inputs}
    for node in function.nodes:
        for value in node.inputs:
            if value not in known:
                return value
        known.update(output for output in node.outputs if output is not None)
    return next((value for value in function.outputs if value not in known), None)


def _check_transfers(stages: Sequence[Stage]) -> None:
    """What one stage sends another receives, in the same order."""
    sent = {(s.index, t.stage): t.values for s in stages for t in s.sends}
    received = {(t.stage, s.index): t.values for s in stages for t in s.receives}
    grad_sent = {(s.index, t.stage): t.values for s in stages for t in s.grad_sends}
    grad_received = {(t.stage, s.index): t.values for s in stages for t in s.grad_receives}
    for one, other in ((sent, received), (grad_sent, grad_received)):
        for hop in (*one, *other):
            if one.get(hop) != other.get(hop):
                raise ContractError(
                    f"stage {hop[0]} sends {one.get(hop, ())} and stage {hop[1]} receives {other.get(hop, ())}"
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
