"""Compare the FLOP of whole bundled models with those that PyTorch counts, forward and backward, to the digit.

PyTorch runs every model on fake tensors under `torch.utils.flop_counter`; nothing is allocated. Large models take minutes.
It has no formula for grouped products: every row is counted here as one row of its `mm`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, mm_flop

from stagewright.cluster import load_cluster
from stagewright.estimation.operators import KERNELS
from stagewright.estimation.time import Costing
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import bundled_names, resolve

LENGTH = 512


def counted(name: str) -> float:
    """FLOP of one sample, forward and backward, as PyTorch counts them."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made = build(resolve(name), 1, LENGTH, "float32", fake_mode=mode)
    with mode, FlopCounterMode(display=False, custom_mapping=_kernels_of_cpus()) as counter:
        made.module(**made.inputs).backward()
    return float(counter.get_total_flops())


def _kernels_of_cpus() -> dict[Any, Any]:
    """PyTorch's own formulas, also for the kernels that stand in on a CPU for those it has formulas for."""
    found = {}
    for name, stands_for in KERNELS.items():
        formula = flop_registry.get(getattr(torch.ops.aten, stands_for, None))
        for library in (torch.ops.aten, torch.ops.transformers):
            if formula is not None and hasattr(library, name):
                found[getattr(library, name)] = _ready(formula)
    found[torch.ops.aten._grouped_mm] = _grouped
    return found


def _grouped(rows: tuple[int, ...], weights: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    """Every row meets the weights of one expert; a gradient of weights has all rows of one expert as its sum."""
    return mm_flop(rows, weights[-2:])


def _ready(formula: Callable[..., int]) -> Callable[..., int]:
    """A registered formula takes tensors already: the mark tells PyTorch not to take their shapes again."""

    def count(*args: Any, **kwargs: Any) -> int:
        return formula(*args, **kwargs)

    count._get_raw = True  # pyright: ignore[reportFunctionMemberAccess]
    return count


def predicted(name: str) -> float:
    """FLOP of one sample by our own rules."""
    graph = trace(name, 1, sequence_length=LENGTH, dtype="float32")
    return Costing(graph, load_cluster("1x-h100").device).flop


def main() -> None:
    """Print both figures of each model; exit with 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=bundled_names())
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    for name in given.models:
        ours, theirs = predicted(name), counted(name)
        rows.append({"model": name, "ours": ours, "counted": theirs})
        if not given.json:
            print(
                f"{name:<22}{ours:>24,.0f}{theirs:>24,.0f} {'' if ours == theirs else f'{ours / theirs - 1:+.2e}'}"
            )
    if given.json:
        json.dump(rows, sys.stdout, indent=1)
    sys.exit(any(row["ours"] != row["counted"] for row in rows))


if __name__ == "__main__":
    main()
