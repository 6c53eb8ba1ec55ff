"""The joint graph of a captured model: its forward, and the backward that autograd would run for it."""

from __future__ import annotations

from typing import Any

from stagewright.graph import OperatorGraph, Origin, Value
from stagewright.graph.depth import REPEATS
from stagewright.graph.simplify import compact
from stagewright.tracing.arguments import contents
from stagewright.tracing.capture import Captured
from stagewright.tracing.draft import Draft
from stagewright.tracing.joint_backward import BackwardPass
from stagewright.tracing.joint_forward import ForwardPass
from stagewright.tracing.rules import Rules


def build_joint(name: str, captured: Captured, rules: Rules, facts: dict[str, Any]) -> OperatorGraph:
    """The operator graph of a captured model.

    Raises:
        TraceError: an operator cannot be differentiated.
        ContractError: an operator writes to its arguments.
    """
    draft = Draft()
    forward = ForwardPass(captured, draft, rules)
    forward.run()
    number = forward.number
    backward = BackwardPass(draft, forward.calls, rules)
    backward.run(number[captured.loss])
    by_source = {(source.origin, source.name): number[source.number] for source in captured.sources}
    parameters = {
        alias: by_source[Origin.PARAMETER, first]
        for alias, first in captured.aliases.items()
        if (Origin.PARAMETER, first) in by_source
    }
    graph = OperatorGraph(
        name=name,
        values=tuple(
            Value(index, value.meta, value.storage, value.origin, value.name, value.node, value.needs_grad)
            for index, value in enumerate(draft.values)
        ),
        nodes=tuple(draft.nodes),
        parameters=parameters,
        buffers={name: value for (origin, name), value in by_source.items() if origin is Origin.BUFFER},
        inputs={name: value for (origin, name), value in by_source.items() if origin is Origin.INPUT},
        loss=number[captured.loss],
        seed=backward.seed,
        gradients=backward.gradients,
        contributions={
            gradient: tuple(sorted(found, key=lambda item: -item[0]))
            for gradient, found in backward.contributions.items()
        },
        mutations=tuple(
            (by_source[Origin.BUFFER, buffer], number[changed]) for buffer, changed in captured.mutations
        ),
        num_draws=draft.num_draws,
        constants={name: contents(tensor) for name, tensor in captured.constants.items()},
        facts=facts | ({REPEATS: captured.repeats} if captured.repeats else {}),
    )
    return compact(graph)
