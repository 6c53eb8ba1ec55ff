"""V-shaped schedules, with two stages per rank, down the ranks and back up: ZB-V and DualPipeV."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from stagewright.schedule.action import Action, Kind, pair
from stagewright.schedule.builders.pieces import numbered
from stagewright.schedule.placement import v
from stagewright.schedule.program import Program, build_program

Step = tuple[Kind, int | None]


def zb_v(num_ranks: int, num_microbatches: int) -> Program:
    """Zero-bubble schedule with the memory of 1F1B: no bubble for t_F = t_I = t_W and at least ``2 P - 1`` microbatches.

    Rank r holds the stages r and 2 P - 1 - r. With fewer microbatches it is the same order without the
    missing ones.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6 (arXiv 2401.10241);
    the order of ScheduleZBVZeroBubble of torch.distributed.pipelining (PyTorch 2.13).

    >>> print("\\n".join(zb_v(2, 3).lines()))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    full = max(num_microbatches, 2 * num_ranks - 1)

    def steps(rank: int) -> Iterator[Step]:
        down, up = rank, 2 * num_ranks - 1 - rank
        yield from [(Kind.F, down)] * (2 * (num_ranks - rank) - 1)
        yield from [(Kind.F, up), (Kind.F, down)] * rank
        yield from [(Kind.F, up), (Kind.I, up), (Kind.W, up)] * (num_ranks - rank)
        num_down, num_up = 2 * num_ranks - 1 - rank, num_ranks
        while num_up < full:
            yield from [(Kind.F, down)] * (num_down < full)
            yield from [(Kind.I, down), (Kind.W, down), (Kind.F, up), (Kind.I, up), (Kind.W, up)]
            num_down, num_up = num_down + (num_down < full), num_up + 1
        yield from [(Kind.I, down), (Kind.I, up)] * rank
        yield from [(Kind.I, down), (Kind.W, down)] * (num_ranks - rank)
        yield from [(Kind.W, up)] * full + [(Kind.W, down)] * full

    return _v_program("zb-v", num_ranks, num_microbatches, steps)


def dualpipe_v(num_ranks: int, num_microbatches: int, *, overlap: bool = False) -> Program:
    """Forwards of one stage of a rank alternate with backwards of the other; backwards are split only at the ends.

    With `overlap` a forward directly before a full backward of the other stage runs as one pair with it. A rank holds at
    most ``2 P + 1`` stage activations and, with pairs of t_P seconds, idles ``(P - 1)(t_P + t_B - 3 t_W)``. Fewer than ``2
    P`` microbatches run in the same order without the missing ones.

    Source: DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.1 (arXiv 2412.19437), and
    github.com/deepseek-ai/DualPipe; the order of ScheduleDualPipeV of torch.distributed.pipelining (PyTorch
    2.13).

    >>> print("\\n".join(dualpipe_v(2, 4).lines()))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """
    full = max(num_microbatches, 2 * num_ranks)

    def steps(rank: int) -> Iterator[Step]:
        down, up = rank, 2 * num_ranks - 1 - rank
        below = num_ranks - 1 - rank
        yield from [(Kind.F, down)] * (2 * below)
        yield from [(Kind.F, down), (Kind.F, up)] * (rank + 1)
        yield from [(Kind.I, up), (Kind.W, None), (Kind.F, up)] * below
        both = [(Kind.F, down), (Kind.B, up), (Kind.F, up), (Kind.B, down)]
        yield from both * (full - 2 * num_ranks + rank + 1)
        yield from [(Kind.B, up), (Kind.F, up), (Kind.B, down)] * below
        last = [up, down] * (rank + 1)
        yield from [(Kind.B, stage) for stage in last[: rank + 1]]
        yield from [(Kind.I, stage) for stage in last[rank + 1 :]]
        yield from [(Kind.W, None), (Kind.I, down)] * below
        yield from [(Kind.W, None)] * (rank + 1)

    program = _v_program("dualpipe-v", num_ranks, num_microbatches, steps)
    if not overlap:
        return program
    return program.with_ranks(
        _paired(actions, rank == num_ranks - 1) for rank, actions in enumerate(program.ranks)
    )


def _paired(actions: Sequence[Action], skip_first: bool) -> Iterator[Action]:
    """Pair each forward directly before a full backward of the other stage with it.

    `skip_first`: the last rank does not overlap its first pair, so that the backward that all ranks wait for ends early.
    """
    remaining = deque(actions)
    while remaining:
        action = remaining.popleft()
        if (
            action.kind is Kind.F
            and remaining
            and remaining[0].kind is Kind.B
            and remaining[0].stage != action.stage
        ):
            action = action if skip_first else pair(action, remaining.popleft())
            skip_first = False
        yield action


def _v_program(
    name: str, num_ranks: int, num_microbatches: int, steps: Callable[[int], Iterable[Step]]
) -> Program:
    def order(rank: int) -> Iterator[Action]:
        return numbered(steps(rank), num_microbatches)

    return build_program(name, v(num_ranks), num_microbatches, order)
