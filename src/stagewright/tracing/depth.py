"""Deep models are differentiated with a few of their equal layers; `stagewright.graph.repeat` has the others follow.

Which layers may be left out is read from the exported program, in which each of them is one opaque operator: the inner ones
of a long run of one kind, where each layer's results are used by the next layer alone, and all else that they are given is
the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import TypeAlias

import torch
from torch.export import ExportedProgram

from stagewright.graph.repeat import AFTER, BEFORE, Repeat
from stagewright.tracing.blocks import BLOCK, RepeatedBlocks
from stagewright.tracing.regions import BEGIN, END

_Node: TypeAlias = torch.fx.Node
_GETITEM = "<built-in function getitem>"


def left_out(
    model: torch.nn.Module,
    blocks: RepeatedBlocks,
    program: ExportedProgram,
    surroundings: Callable[[_Node], Hashable],
    is_check: Callable[[_Node], bool],
) -> tuple[tuple[Repeat, ...], dict[_Node, _Node]]:
    """Return the layers of `model`, after a dry run, that need not be traced, and the nodes of its exported `program` to
    skip, each with the call of the layer whose results replace its own.

    `surroundings` of a node are the further dependencies of its operators; a node for which `is_check` holds does nothing.
    """
    nodes = [node for node in program.graph.nodes if str(node.target) != _GETITEM and not is_check(node)]
    calls = {
        path: place
        for place, node in enumerate(nodes)
        if str(node.target) == BLOCK and len(blocks.calls[path := _path_of(node)]) == 1
    }
    repeats: list[Repeat] = []
    skipped: dict[_Node, _Node] = {}

    def joint(path: str, following: str) -> Hashable:
        first, second = calls.get(path, -1), calls.get(following, -1)
        if min(first, second) < 0 or {path, following} & blocks.shared:
            return None
        return _joint(nodes[first], nodes[second], nodes[first + 1 : second], surroundings)

    for path, container in model.named_modules():
        if not isinstance(container, torch.nn.ModuleList):
            continue
        names = list(container._modules)
        for run in _runs([joint(f"{path}.{name}", f"{path}.{after}") for name, after in pairwise(names)]):
            members = names[run.start : run.stop + 1]
            if len(members) <= BEFORE + AFTER:
                continue
            repeat = Repeat(path, tuple(members[:BEFORE]), tuple(members[BEFORE:-AFTER]), members[-AFTER])
            template, last = (calls[repeat.layer(name)] for name in (repeat.before[-1], repeat.missing[-1]))
            skipped.update(dict.fromkeys(nodes[template + 1 : last + 1], nodes[template]))
            repeats.append(repeat)
    return tuple(repeats), skipped


def _path_of(node: _Node) -> str:
    """Return the module path of the block that a call stands for."""
    return str(node.args[0]).split("@", 1)[1]


def _runs(joints: list[Hashable]) -> list[range]:
    """Yield ranges of equal joints, without None."""
    runs: list[range] = []
    for place, joint in enumerate(joints):
        if joint is None:
            continue
        if runs and runs[-1].stop == place and joints[place - 1] == joint:
            runs[-1] = range(runs[-1].start, place + 1)
        else:
            runs.append(range(place, place + 1))
    return runs


def _joint(
    block: _Node, following: _Node, between: list[_Node], surroundings: Callable[[_Node], Hashable]
) -> Hashable:
    """Return a comparable form of how one call of a block follows another; None if it does not, or if the results of the
    first are also used elsewhere."""
    kind, next_kind = (str(node.args[0]).split("@", 1)[0] for node in (block, following))
    marks = [str(node.target) for node in between]
    if kind != next_kind or len(following.args) != len(block.args) or not _is_regular(marks):
        return None
    results = {item: str(item.args[1]) for item in block.users}
    if any(user is not following for item in results for user in item.users):
        return None
    inputs: list[Hashable] = []
    for mine, theirs in zip(block.args[1], following.args[1], strict=True):  # type: ignore[arg-type]
        if theirs is not mine and theirs not in results:
            return None
        inputs.append(results.get(theirs, "same"))
    return kind, tuple(inputs), tuple(marks), surroundings(block) == surroundings(following)


def _is_regular(marks: list[str]) -> bool:
    """Return whether the marks between two layers end as many regions as they begin, ending first."""
    num_ends = sum(mark == END for mark in marks)
    return marks == [END] * num_ends + [BEGIN] * num_ends
