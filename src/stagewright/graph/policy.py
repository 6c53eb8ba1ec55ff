"""Memory policies: what a stage does with the values its forward makes for its backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """Values of the joint graph that a stage does not keep from F to its backward; all others it keeps.

    * `recompute`: made again from what is kept, each right before the backward uses it; `everything` means all of them at
      once before the backward, so that only what the stage was given is kept.
    * `offload`: moved to the host after F and brought back before the backward.

    A value stands for its whole storage, views included. Ids that a stage does not save are ignored.
    """

    recompute: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()
    everything: bool = False

    @property
    def recomputes(self) -> bool:
        return self.everything or bool(self.recompute)


KEEP = Policy()
RECOMPUTE_ALL = Policy(everything=True)
