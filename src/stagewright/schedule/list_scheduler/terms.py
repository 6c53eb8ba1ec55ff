"""Data types of list schedules: stage costs, rules, deadlines and orders."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Floats, Ints

FORWARD, INPUT_GRAD, WEIGHT_GRAD = range(3)
TINY = 1e-9


class Stages(NamedTuple):
    """Costs of the stages of a layout, in seconds and bytes.

    `start[s]` is the first layer of stage `s`, `transfer[s]` the seconds between stages ``s - 1`` and ``s``;
    `saved_later[s]` the bytes that the later stages of its rank save together; `limit` the bytes per rank for saved
    activations. Rank `r` holds the stages ``members[offsets[r]:offsets[r + 1]]``.
    """

    start: Ints
    rank: Ints
    forward: Floats
    input_grad: Floats
    weight_grad: Floats
    transfer: Floats
    saved: Floats
    held: Floats
    saved_later: Floats
    limit: Floats
    members: Ints
    offsets: Ints


class Rule(NamedTuple):
    """Rule by which a rank chooses among ready work.

    Input gradients go first, or with `forward_next` a forward right after an input gradient (2: also where weight
    gradients came between). `oldest` takes
    input gradients by microbatch, else the deepest stage first; `deep_forwards` takes the deepest forward,
    else the oldest microbatch. `depth` scales how many microbatches a stage may hold; see `window`. A weight
    gradient runs when nothing else is ready and at least `share` of it fits before other work arrives, or
    when more than `max_deferred` wait. `holds_back` is AdaPtis' rule against transfers that could not hide.

    With a positive `deadline_scale` deadlines replace all this: see `deadlines_of`.

    Numbers must have the types given here, never a bool for an int: kernels are compiled again for other types.
    """

    forward_next: int
    oldest: bool
    deep_forwards: bool
    depth: float
    share: float
    max_deferred: int
    holds_back: bool
    deadline_scale: float


class Deadlines(NamedTuple):
    """Order in which actions should run: the times of microbatch 0 at each stage, and the interval to each further
    microbatch; `cycle` is the seconds of the busiest rank. With a `deadline_scale` of 0 these are counts, not times."""

    forward: Floats
    input_grad: Floats
    forward_interval: Floats
    input_grad_interval: Floats
    cycle: float


class Order(NamedTuple):
    """Kinds and stages of the actions in the order of each rank; rank `r` begins at ``3 M offsets[r]``."""

    kinds: NDArray[np.int8]
    stages: NDArray[np.int16]
