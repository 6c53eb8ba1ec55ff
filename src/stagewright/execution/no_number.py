"""What a run does about a step whose loss or gradients are no finite numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from stagewright.errors import RunError

if TYPE_CHECKING:
    from stagewright.execution.checkpoint import Saver

OnNan = Literal["warn", "skip", "stop"]
ON_NAN: tuple[OnNan, ...] = get_args(OnNan)


def no_number(step: int, loss: float, norm: float, saver: Saver | None) -> RunError:
    """Why a run ends at `step`, counted from 0, whose update was left out; every rank must call this. A checkpoint that is
    being written is whole then."""
    found = "no checkpoint was asked for (--checkpoint), so nothing is kept to go on from"
    if saver is not None:
        from stagewright.execution.checkpoint_folder import steps_of

        saver.finish()
        newest = next((path.name for path in steps_of(saver.folder)), None)
        found = (
            f"no checkpoint was written to '{saver.folder}' before it"
            if newest is None
            else f"the last good checkpoint is {newest} in '{saver.folder}': go on from it with --resume, with a lower "
            "--learning-rate or other data"
        )
    return RunError(f"step {step + 1} has loss {loss:g} and gradient norm {norm:g}; {found}")
