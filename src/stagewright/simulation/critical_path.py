"""The chain of actions that makes a timeline as long as it is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.schedule.action import Action
from stagewright.schedule.tokens import Token
from stagewright.simulation.streams import COMPUTE_STREAM, POST, STREAM_OF
from stagewright.simulation.timeline import Timeline


class Link(NamedTuple):
    """One action of the critical path and why it started no earlier."""

    rank: int
    action: Action
    start_s: float
    end_s: float
    waited_for: str
    """'start of the batch', 'rank busy', or the token that came last."""
    transfer_s: float


def critical_path(timeline: Timeline) -> list[Link]:
    """From the first action to the last, each the latest of those its successor waited for.

    Between two links lies a transfer when their ranks differ; shortening anything off the path gains nothing.

    >>> from stagewright.schedule import build
    >>> from stagewright.simulation import StageCosts, simulate
    >>> path = critical_path(simulate(build("1f1b", 2, 2), StageCosts.uniform(2), 0.5))
    >>> " ".join(str(link.action) for link in path)
    '0F0 1F0 1B0 1F1 1B1 0B1'
    """
    if not timeline.encoded.num_actions:
        return []
    makers = _makers(timeline)
    links: list[Link] = []
    index: int | None = int(np.argmax(timeline.end_s))
    while index is not None:
        link, index = _step_back(timeline, makers, index)
        links.append(link)
    return links[::-1]


def _step_back(timeline: Timeline, makers: dict[Token, list[int]], index: int) -> tuple[Link, int | None]:
    """The link of the action at `index` and the index of the action it waited for."""
    encoded = timeline.encoded
    rank = int(np.searchsorted(encoded.offsets, index, side="right")) - 1
    action, start, end = encoded.action(index), float(timeline.start_s[index]), float(timeline.end_s[index])
    before = _before_on_stream(timeline, rank, index)
    busy_until = -1.0 if before is None else float(timeline.end_s[before])
    needs = timeline.needs(action)
    token = max(needs, key=lambda need: needs[need], default=None)
    if token is not None and needs[token] > busy_until:
        # the latest maker that comes before: a state such as gathered weights is made many times
        maker = max(
            (i for i in makers[token] if timeline.end_s[i] <= needs[token]), key=lambda i: timeline.end_s[i]
        )
        made_at = float(timeline.end_s[maker])
        return Link(rank, action, start, end, str(token), needs[token] - made_at), maker
    why = "start of the batch" if before is None else "rank busy"
    return Link(rank, action, start, end, why, 0.0), before


def _before_on_stream(timeline: Timeline, rank: int, index: int) -> int | None:
    """The last action before `index` on the compute stream or its own stream, whichever ended later."""
    encoded = timeline.encoded
    wanted = {COMPUTE_STREAM, STREAM_OF[encoded.action(index).kind]} - {POST}
    last: dict[int, int] = {}
    for earlier in range(index - 1, int(encoded.offsets[rank]) - 1, -1):
        last.setdefault(STREAM_OF[encoded.action(earlier).kind], earlier)
        if wanted <= last.keys():
            break
    return max(
        (last[stream] for stream in wanted & last.keys()), key=lambda i: timeline.end_s[i], default=None
    )


def _makers(timeline: Timeline) -> dict[Token, list[int]]:
    """For each token the indices of the actions that make it."""
    makers: dict[Token, list[int]] = {}
    for index in range(timeline.encoded.num_actions):
        for token in timeline.structure.rules.makes(timeline.encoded.action(index)):
            makers.setdefault(token, []).append(index)
    return makers
