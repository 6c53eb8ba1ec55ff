"""Scenes: the content of a picture of a timeline, with bars, transfers and memory as arrays, and titles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Floats, Ints
from stagewright.schedule import Action, Kind
from stagewright.schedule.action import COMPUTE
from stagewright.simulation import Timeline, TransferTimes, critical_path, transfer_times
from stagewright.text import plural
from stagewright.units import format_seconds

KINDS = tuple(Kind)
"""Kinds of bars by index."""

_NONE = np.iinfo(
    np.int32
).min  # a marker, as the second part of a pair may be any number of microbatches after the first


@dataclass(frozen=True, eq=False)
class Bars:
    """Actions that take time, rank by rank in program order; both of an overlapped pair.

    `microbatch` is -1 for actions of a whole stage. `half` is 0 for a bar of full height, 1 and 2 for the upper and lower
    half of a pair. `is_overlapped` marks actions that overlap with computations, `is_critical` those that the end of the
    batch waits for. `num_bytes` are allocated when the action starts and outlive it (negative: freed when it ends).
    """

    rank: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints
    half: Ints
    is_overlapped: NDArray[np.bool_]
    is_critical: NDArray[np.bool_]
    start_s: Floats
    end_s: Floats
    num_bytes: Floats

    def __len__(self) -> int:
        return len(self.rank)

    def text(self, index: int) -> str:
        """Return the text of an action, such as ``2F0``."""
        microbatch = "" if self.microbatch[index] < 0 else self.microbatch[index]
        return f"{self.stage[index]}{KINDS[self.kind[index]].value}{microbatch}"


@dataclass(frozen=True, eq=False)
class Curve:
    """Memory of one rank: `held[i]` from `time_s[i]` on, and the peak, which may be within an action.

    `categories`: its parts, if known; their sum is `held`.
    """

    time_s: Floats
    held: Floats
    peak: float
    categories: Mapping[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Scene:
    """A timeline ready to be drawn; `curves` are in bytes, or in stage activations if bytes are unknown."""

    title: str
    subtitle: str
    makespan_s: float
    rank_of_stage: tuple[int, ...]
    bars: Bars
    transfers: TransferTimes
    curves: tuple[Curve, ...]
    curves_are_bytes: bool
    capacities: tuple[int, ...] = ()
    """Memory limit of every rank in bytes, if known."""

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of_stage) + 1

    @property
    def num_chunks(self) -> int:
        """Maximum number of stages on one rank."""
        return max(self.chunks) + 1

    @property
    def chunks(self) -> list[int]:
        """Number of lower stages on the rank of every stage."""
        return [self.rank_of_stage[:stage].count(rank) for stage, rank in enumerate(self.rank_of_stage)]

    @property
    def kinds(self) -> list[Kind]:
        """Kinds of the bars, in their usual order."""
        return [KINDS[index] for index in np.unique(self.bars.kind)]


def scene_of(
    timeline: Timeline, curves: Sequence[Curve] | None = None, capacities: Sequence[int] = ()
) -> Scene:
    """Return the scene of `timeline`; `curves` in bytes replace those of its costs; `capacities` are drawn as limits."""
    encoded = timeline.encoded
    num_stages, num_ranks = encoded.placement.num_stages, encoded.num_ranks
    stages = f"{plural(num_stages, 'stage')}, " if num_stages > num_ranks else ""
    microbatches = plural(encoded.num_microbatches, "microbatch", "microbatches")
    bubble = f"bubble {timeline.bubble_fraction:.1%}"
    has_bytes = curves is not None or bool(timeline.peak_bytes.any())
    if curves is None:
        curves = [_curve(timeline, rank, has_bytes) for rank in range(num_ranks)]
    return Scene(
        title=f"{encoded.name}: {format_seconds(timeline.makespan_s)}, {bubble}",
        subtitle=f"{plural(num_ranks, 'pipeline rank')}, {stages}{microbatches}",
        makespan_s=timeline.makespan_s,
        rank_of_stage=encoded.placement.rank_of_stage,
        bars=_bars(timeline),
        transfers=transfer_times(timeline),
        curves=tuple(curves),
        curves_are_bytes=has_bytes,
        capacities=tuple(capacities),
    )


def _bars(timeline: Timeline) -> Bars:
    encoded = timeline.encoded
    lasts = np.flatnonzero(timeline.end_s > timeline.start_s)
    is_pair = np.array([action.overlapped is not None for action in encoded.patterns], bool)
    pairs = lasts[is_pair[encoded.pattern[lasts]]]
    index = np.concatenate([lasts, pairs])
    is_second = np.arange(len(index)) >= len(lasts)
    order = np.lexsort((is_second, index))
    index, which = index[order], is_second[order].astype(int)
    pattern = encoded.pattern[index]
    kind, stage, microbatch = _parts(encoded.patterns)[:, which, pattern]
    rank = np.repeat(np.arange(encoded.num_ranks), np.diff(encoded.offsets))
    return Bars(
        rank=rank[index],
        kind=kind,
        stage=stage,
        microbatch=np.where(microbatch == _NONE, -1, microbatch + encoded.microbatch[index]),
        half=np.where(is_pair[pattern], which + 1, 0),
        is_overlapped=~timeline.is_compute[index],
        is_critical=np.isin(index, critical_path(timeline)),
        start_s=timeline.start_s[index],
        end_s=timeline.end_s[index],
        num_bytes=(timeline.pattern_bytes.at_start - timeline.pattern_bytes.at_end)[pattern],
    )


def _parts(patterns: Sequence[Action]) -> Ints:
    """Return kind, stage and microbatch of the first and of the last part of every pattern."""
    ends = [[action.parts[side] for action in patterns] for side in (0, -1)]
    kind = [[KINDS.index(part.kind) for part in parts] for parts in ends]
    stage = [[part.stage for part in parts] for parts in ends]
    microbatch = [[_NONE if part.microbatch is None else part.microbatch for part in parts] for parts in ends]
    return np.array([kind, stage, microbatch], np.int64)


def _curve(timeline: Timeline, rank: int, has_bytes: bool) -> Curve:
    """Return the memory of `rank` over time: bytes, or forwards whose backward is not done."""
    if has_bytes:
        curve = timeline.memory_curve(rank)
        return Curve(curve.time_s, curve.num_bytes, curve.peak_bytes)
    part = timeline.encoded.rank_slice(rank)
    pattern = timeline.encoded.pattern[part]
    patterns = timeline.encoded.patterns
    appear = np.array([sum(p.kind is Kind.F for p in action.parts) for action in patterns])[pattern]
    go = np.array([sum(p.kind in (Kind.B, Kind.W) for p in action.parts) for action in patterns])[pattern]
    computes = np.array([action.kind in COMPUTE for action in patterns])[pattern]
    time = np.column_stack([timeline.start_s[part], timeline.end_s[part]])[computes].ravel()
    change = np.column_stack([appear, -go])[computes].ravel()
    held = np.cumsum(change, dtype=np.float64)
    return Curve(np.r_[0.0, time], np.r_[0.0, held], float(held.max(initial=0.0)))
