"""Runnable functions: the nodes of a stage as straight-line Python that frees every value at its last use.

A function takes its inputs in one list, which it empties, so that no caller keeps a value alive, and returns its outputs
in order. Resident values (parameters, buffers, static and derived values) are looked up when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import stagewright.tracing.attention
import stagewright.tracing.models.quantised_base  # noqa: F401 so does this
from stagewright.graph import Node, Ref, Symbol
from stagewright.graph.added_nodes import ACCUMULATE, FETCHED, HOST_COPIES
from stagewright.graph.stage import Function
from stagewright.graph.views import Issued, Lookup, issued
from stagewright.tracing.arguments import operator, symbol
from stagewright.tracing.bindings import Binding, binding_of
from stagewright.tracing.private import returns_list

Accumulate = Callable[[int, torch.Tensor], None]
Reseed = Callable[[int], None]


@dataclass(frozen=True)
class Runnable:
    """``call(inputs, resident, accumulate, reseed)``: `inputs` is emptied; `resident` maps value ids to tensors;
    ``accumulate(parameter, gradient)`` takes each finished gradient; ``reseed(draw)`` readies the random state."""

    call: Callable[[list[torch.Tensor], dict[int, torch.Tensor], Accumulate, Reseed], list[torch.Tensor]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    source: str


def compile_function(
    function: Function,
    resident: Iterable[int],
    device: torch.device,
    name: str = "run",
    mark: Callable[[], None] | None = None,
    host_copies: Mapping[str, Callable[..., Any]] | None = None,
    value: Lookup | None = None,
) -> Runnable:
    """Return Python code for `function`; values in `resident` are looked up instead of passed.

    `mark` is called in front of the first operator and after each. `host_copies` implement the operators in `HOST_COPIES`.
    `value` describes a value by its id: with it views that do nothing are left out, and operators are called in their
    cheapest form.
    """
    resident = frozenset(resident)
    calls = Issued(function.nodes, {}) if value is None else issued(function, value)
    outputs = calls.of(function.outputs)
    names: dict[str, Any] = {} if mark is None else {"mark": mark}
    names |= {_called(op): copy for op, copy in (host_copies or {}).items()}
    lines = [f"def {name}(inputs, resident, accumulate, reseed):"]
    last = {used: index for index, node in enumerate(calls.nodes) if node for used in node.inputs}
    if function.inputs:
        lines.append(f"    {', '.join(f'v{value}' for value in function.inputs)}, = inputs")
        lines.append("    inputs.clear()")
    looked_up = {*last, *outputs} & resident - set(function.inputs)
    lines.extend(f"    v{number} = resident[{number}]" for number in sorted(looked_up))
    unused = [number for number in function.inputs if number not in last and number not in outputs]
    if unused:
        lines.append(f"    del {', '.join(f'v{number}' for number in unused)}")
    marked = [] if mark is None else ["    mark()"]
    lines.extend(marked)
    for index, node in enumerate(calls.nodes):
        if node is not None:
            lines.append("    " + _statement(node, names, device, value))
            here = dict.fromkeys(number for number in (*node.inputs, *node.outputs) if number is not None)
            dead = [number for number in here if last.get(number, index) == index and number not in outputs]
            if dead:
                lines.append(f"    del {', '.join(f'v{number}' for number in dead)}")
        lines.extend(marked)
    lines.append(f"    return [{', '.join(f'v{number}' for number in outputs)}]")
    source = "\n".join(lines)
    scope = dict(names)
    exec(compile(source, f"<stagewright {name}>", "exec"), scope)
    return Runnable(scope[name], function.inputs, function.outputs, source)


@dataclass(frozen=True)
class Pure:
    """A function of tensors alone, for a compiler: ``call(*inputs, *resident)`` gives the outputs and then the gradients of
    `parameters`."""

    call: Callable[..., tuple[torch.Tensor, ...]]
    resident: tuple[int, ...]
    parameters: tuple[int, ...]


def pure_function(
    function: Function, resident: Iterable[int], device: torch.device, name: str = "run"
) -> Pure | None:
    """Return `function` without side effects; None if it has any besides gradients, such as drawing random numbers."""
    if any(node.draw >= 0 for node in function.nodes):
        return None
    resident = frozenset(resident)
    names: dict[str, Any] = {}
    used = {value for node in function.nodes for value in node.inputs} | set(function.outputs)
    read = tuple(sorted(used & resident - set(function.inputs)))
    given = ", ".join(f"v{value}" for value in (*function.inputs, *read))
    lines = [f"def {name}({given}):"]
    gradients: dict[int, str] = {}
    for node in function.nodes:
        if node.op != ACCUMULATE:
            lines.append("    " + _statement(node, names, device))
            continue
        parameter, gradient = dict(node.kwargs)["parameter"], f"v{node.inputs[0]}"
        if parameter in gradients:  # of several pieces of the loss
            lines.append(f"    g{parameter} = {gradients[parameter]} + {gradient}")
            gradient = f"g{parameter}"
        gradients[parameter] = gradient
    results = [*(f"v{value}" for value in function.outputs), *gradients.values()]
    lines.append(f"    return ({''.join(f'{name}, ' for name in results)})")
    scope = dict(names)
    exec(compile("\n".join(lines), f"<stagewright {name}>", "exec"), scope)
    return Pure(scope[name], read, tuple(gradients))


def _statement(node: Node, names: dict[str, Any], device: torch.device, value: Lookup | None = None) -> str:
    if node.op == ACCUMULATE:
        return f"accumulate({dict(node.kwargs)['parameter']}, v{node.inputs[0]})"
    function, given = _called(node.op), node.args
    if node.op not in HOST_COPIES:
        binding = Binding(operator(node.op)) if value is None else binding_of(node, value)
        function += f"_{binding.label}" if binding.label else ""
        names[function] = binding.function
        given = binding.arranged(given)
    arguments = [_text(argument, names, device) for argument in given]
    arguments += [f"{key}={_text(argument, names, device)}" for key, argument in node.kwargs]
    targets = [f"v{number}" if number is not None else "_" for number in node.outputs]
    is_list = node.op == FETCHED or (node.op not in HOST_COPIES and returns_list(operator(node.op)))
    assigned = "".join(f"{target}, " for target in targets) if is_list else ", ".join(targets)
    seeded = f"reseed({node.draw}); " if node.draw >= 0 else ""
    statement = f"{function}({', '.join(arguments)})"
    return f"{seeded}{assigned} = {statement}" if targets else statement


def _called(op: str) -> str:
    return "f_" + op.replace(".", "_")


def _text(argument: Any, names: dict[str, Any], device: torch.device) -> str:
    if isinstance(argument, Ref):
        return f"v{argument.value}"
    if isinstance(argument, Symbol):
        key = f"s_{argument.kind}_{''.join(c if c.isalnum() else '_' for c in argument.name)}"
        names[key] = symbol(argument, device)
        return key
    if isinstance(argument, tuple):
        return "(" + "".join(f"{_text(item, names, device)}, " for item in argument) + ")"
    if isinstance(argument, float):
        return repr(argument) if math.isfinite(argument) else f"float('{argument!r}')"
    return repr(argument)
