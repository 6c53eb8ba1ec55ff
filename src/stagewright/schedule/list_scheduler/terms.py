"""What a list schedule is made from and what it makes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FORWARD, INPUT_GRAD, WEIGHT_GRAD = range(3)
TINY = 1e-9

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Stages(NamedTuple):
    """What the stages of a layout cost, in seconds and bytes.

    `start[s]` is the first layer of stage `s`, `hop[s]` the transfer between stages ``s - 1`` and ``s``;
    `room[s]` what the later stages of its rank save together; `limit` the bytes per rank for saved
    activations. Rank `r` holds the stages ``members[offsets[r]:offsets[r + 1]]``.
    """

    start: Ints
    rank: Ints
    forward: Floats
    input_grad: Floats
    weight_grad: Floats
    hop: Floats
    saved: Floats
    held: Floats
    room: Floats
    limit: Floats
    members: Ints
    offsets: Ints


class Rule(NamedTuple):
    """How a rank chooses among work that is ready.

    Input gradients go first, or with `forward_next` a forward right after an input gradient (2: also where weight
    gradients came between). `oldest` takes
    input gradients by microbatch, else the deepest stage first; `deep_forwards` takes the deepest forward,
    else the oldest microbatch. `depth` scales how many microbatches a stage may hold; see `window`. A weight
    gradient runs when nothing else is ready and at least `share` of it fits before other work arrives, or
    when more than `backlog` wait. `holds_back` is AdaPtis' rule against transfers that could not hide.

    With a positive `stretch` all this gives way to due dates: see `due_dates`.

    Numbers are of the types given here, never a bool for an int: what is compiled is compiled anew for other types.
    """

    forward_next: int
    oldest: bool
    deep_forwards: bool
    depth: float
    share: float
    backlog: int
    holds_back: bool
    stretch: float


class Due(NamedTuple):
    """In what order passes should run: when those of microbatch 0 at each stage, and by how much later each further
    one; `cycle` is the seconds of the busiest rank. A rule without a stretch has no times but counts there."""

    forward: Floats
    input_grad: Floats
    forward_pace: Floats
    input_grad_pace: Floats
    cycle: float


class Order(NamedTuple):
    """Passes and stages in the order each rank runs them; rank `r` from ``3 M offsets[r]`` on."""

    passes: NDArray[np.int8]
    stages: NDArray[np.int16]
