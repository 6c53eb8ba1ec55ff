"""The process of a rank of `verify`, which trains a batch pipelined and compares its gradients with the plain run's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.execution.rank_process import end_process, exit_code, rank_process, start_process
from stagewright.execution.watchdog import Limits

if TYPE_CHECKING:
    from stagewright.execution.session import Session

_ROUNDING = 1e-4
"""Fraction of the largest gradient below which, with tensor parallelism, gradients are compared relative to that fraction
of it."""


def work(plan: str, folder: Path, kind: str) -> None:
    """Train and compare on this rank; rank 0 writes the outcome to `folder`: the loss, and the name and difference of every
    gradient of every rank."""
    with rank_process(kind, Limits()) as (watch, device):
        from stagewright.execution.collectives import exchange
        from stagewright.execution.session import Session
        from stagewright.execution.verification import OUTCOME, PLAIN, deterministic
        from stagewright.planning.plan import load_plan

        with deterministic(kind):
            session = Session(load_plan(plan), device, None, True, watch.at, watch.at)
            loss = session.accumulate(0)
            watch.at("comparing gradients")
            ranks = exchange(_differences(session, folder / PLAIN))
    if watch.rank == 0:
        differences = [item for rank in ranks for item in rank]
        (folder / OUTCOME).write_text(json.dumps({"loss": loss, "differences": differences}))


def _differences(session: Session, plain: Path) -> list[tuple[str, float]]:
    from safetensors import safe_open

    from stagewright.execution.verification import largest_difference

    gradients = {name: gradient.cpu() for name, gradient in session.gradients().items()}
    with safe_open(str(plain), framework="pt") as reader:
        wanted = {name: session.part(name, reader.get_tensor(name)) for name in gradients}
    least = 1e-30
    if session.mesh.tp > 1:
        # Sums over ranks round differently, and some gradients (of a key's bias) are rounding errors only.
        largest = max((float(gradient.abs().max()) for gradient in wanted.values()), default=0.0)
        least = max(least, largest * _ROUNDING)
    return [(name, largest_difference(gradient, wanted[name], least)) for name, gradient in gradients.items()]


if __name__ == "__main__":
    start_process()
    end_process(exit_code(lambda: work(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
