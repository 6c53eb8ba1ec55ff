"""Memory policies: what a stage does with the values its forward makes for its backward."""

from __future__ import annotations

from dataclasses import dataclass

Reruns = tuple[tuple[int, tuple[int, ...]], ...]
"""Pairs of an operator (id) and those that run again in its backward."""


@dataclass(frozen=True)
class Policy:
    """Values of the joint graph that a stage does not keep from F to its backward; all others that this needs it keeps.

    * `recompute`: computed again from what is kept, each right before the backward uses it; `everything` means all that
      `checkpoints` does not name.
    * `checkpoints`: kept to recompute from, whether or not the backward itself needs them.
    * `reruns`: pairs of an operator (id) and others: in the backward of the first the others run again, each right before it
      is used there and as often as it is named. With these, what is kept follows: what is used before it is made again.
      `recompute`, `everything` and `checkpoints` are not looked at then. I and W of a split backward recompute the rest
      once each.
    * `offload`: moved to the host when F is done with it and brought back where the backward needs it, also to recompute
      from. At most `fetch_ahead` bytes are back before their first use, and as many on their way to the host.

    A value stands for its whole storage, views included. Ids that a stage does not save are ignored, and so are
    checkpoints that nothing is recomputed from. Checkpointing every layer is `everything` with what enters each layer as
    checkpoints.
    """

    recompute: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()
    everything: bool = False
    checkpoints: frozenset[int] = frozenset()
    fetch_ahead: int = 0
    reruns: Reruns = ()

    @property
    def recomputes(self) -> bool:
        return self.everything or bool(self.recompute) or bool(self.reruns)


KEEP = Policy()
RECOMPUTE_ALL = Policy(everything=True)
