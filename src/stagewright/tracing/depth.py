"""Deep models are traced with a few of their equal layers; `stagewright.graph.depth` has the rest follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from stagewright.graph.depth import BEFORE, BEHIND, Repeat
from stagewright.tracing.blocks import Blocks


def repeats_of(model: torch.nn.Module, blocks: Blocks) -> tuple[Repeat, ...]:
    """Layers of a rehearsed `model` that need not be traced: the inner ones of long runs of one kind, each called once."""
    kinds = {
        path: calls[0].key
        for path, calls in blocks.calls.items()
        if len(calls) == 1 and path not in blocks.unruly
    }
    found: list[Repeat] = []
    for path, container in model.named_modules():
        if not isinstance(container, torch.nn.ModuleList):
            continue
        names = list(container._modules)
        start = 0
        while start < len(names):
            kind = kinds.get(f"{path}.{names[start]}")
            stop = start + 1
            while kind is not None and stop < len(names) and kinds.get(f"{path}.{names[stop]}") == kind:
                stop += 1
            run = names[start:stop]
            if len(run) > BEFORE + BEHIND:
                found.append(Repeat(path, tuple(run[:BEFORE]), tuple(run[BEFORE:-BEHIND]), run[-BEHIND]))
            start = stop
    return tuple(found)


@contextmanager
def without(model: torch.nn.Module, repeats: tuple[Repeat, ...]) -> Iterator[None]:
    """Inside, `model` lacks those layers; the others keep their names."""
    whole: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for repeat in repeats:
        members = model.get_submodule(repeat.path)._modules
        whole.append((members, dict(members)))
        for name in repeat.missing:
            del members[name]
    try:
        yield
    finally:
        for members, before in reversed(whole):
            members.clear()
            members.update(before)


def called_alike(before: Blocks, after: Blocks) -> bool:
    """Whether the layers that are left are called as they were with all of them."""
    return all(_signatures(before, path) == _signatures(after, path) for path in after.calls)


def _signatures(blocks: Blocks, path: str) -> list[Any]:
    by_key: Mapping[str, Any] = {kind.key: signature for signature, kind in blocks.kinds.items()}
    return [by_key[kind.key] for kind in blocks.calls.get(path, ())]
