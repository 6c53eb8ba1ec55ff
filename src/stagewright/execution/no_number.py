"""What a run does about a step whose loss or gradients are no finite numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from stagewright.errors import RunError

if TYPE_CHECKING:
    from stagewright.execution.checkpoint import Saver

OnNan = Literal["warn", "skip", "stop", "rollback"]
ON_NAN: tuple[OnNan, ...] = get_args(OnNan)
MOST_RETURNS = 3
"""To checkpoints, in one run: what does not pass in so many other batches is not in the data."""


def no_number(step: int, loss: float, norm: float, saver: Saver | None, num_returns: int = 0) -> RunError:
    """Why a run ends at `step`, counted from 0, whose update was left out, after it went back so many times; every rank must
    call this. A checkpoint that is being written is whole then."""
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
    before = f", after going back to checkpoints {num_returns} times" if num_returns else ""
    return RunError(f"step {step + 1} has loss {loss:g} and gradient norm {norm:g}{before}; {found}")


def passed_over(step: int, so_far: int, back_to: int, num_lengths: int) -> int:
    """By how many batches data is ahead of the steps of a run, once it has gone back from `step`, counted from 0, to the
    one that is next after `back_to` steps: by all that it has seen. Where batches have `num_lengths` lengths in turn, by
    whole turns.

    Source: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways" (arXiv 2204.02311), section 5.1.

    >>> passed_over(step=12, so_far=0, back_to=10, num_lengths=0), passed_over(12, 3, 10, 2)
    (3, 6)
    """
    found, turn = step + 1 + so_far - back_to, max(num_lengths, 1)
    return -(-found // turn) * turn
