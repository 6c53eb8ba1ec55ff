"""The process of one rank: joins the group that torchrun's environment describes, trains, reports.

Run by `stagewright.execution.launch` with one argument, the options as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.execution.member import end_process, exit_code, start_process
from stagewright.execution.no_number import OnNan


def main(options: str) -> int:
    """Run one rank; returns the exit code. `options` are those of `work`, as JSON."""
    return exit_code(lambda: work(**json.loads(options)))


def work(
    plan: str,
    out: str,
    data: dict[str, Any] | None = None,
    steps: int | None = None,
    device: str = "cpu",
    random_weights: bool = False,
    timeout: float = 1800.0,
    start_timeout: float = 300.0,
    devices: Sequence[int] | None = None,
    checkpoint: str | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
    held_out: Mapping[str, Any] | None = None,
    evaluate_every: int | None = None,
    adapt: bool = False,
    tensorboard: str | None = None,
    wandb: str | None = None,
    rates: Mapping[str, Any] | None = None,
    on_nan: OnNan = "warn",
    compare: bool = True,
) -> None:
    """Train the plan on this rank; rank 0 writes the record.

    Raises:
        InputError: the record cannot be written.
        RunError: the run failed; names the rank, the action and what it waited for.
    """
    from stagewright.execution.data.prepared import PreparedData
    from stagewright.execution.trainer import Trainer

    Trainer(
        plan, None if data is None else PreparedData(**data), steps=steps, out=out, device=device,
        random_weights=random_weights, timeout=timeout, start_timeout=start_timeout, devices=devices,
        checkpoint=checkpoint, checkpoint_every=checkpoint_every, keep_last=keep_last, keep_every=keep_every,
        held_out=None if held_out is None else PreparedData(**held_out), evaluate_every=evaluate_every, adapt=adapt,
        tensorboard=tensorboard, wandb=wandb, rates=rates, on_nan=on_nan, compare=compare,
        resume=resume, _is_checked=True,
    ).fit()  # fmt: skip


if __name__ == "__main__":
    start_process()
    end_process(main(sys.argv[1]))
