"""What is alive of one microbatch on a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stagewright.estimation.liveness import FREED
from stagewright.estimation.stage_memory import Channel
from stagewright.graph.payload import Message

Key = int


@dataclass
class Storages:
    """Those of one microbatch on a rank with the number of names each has; user inputs are always there.

    * `held`: stage -> what its forward has saved, by value;
    * `waiting`: what is made and not yet sent or used; `posted`: buffers to receive into; `sending`: what may still be on
      its way;
    * `script`: where asked for, what was made, with its bytes, and freed, with `FREED`, in order.
    """

    size: dict[Key, int] = field(default_factory=dict)
    references: dict[Key, int] = field(default_factory=dict)
    held: dict[int, dict[int, Key]] = field(default_factory=dict)
    waiting: dict[Channel, dict[int, Key]] = field(default_factory=dict)
    posted: dict[Channel, list[tuple[Message, Key]]] = field(default_factory=dict)
    sending: dict[Channel, list[Key]] = field(default_factory=dict)
    live: int = 0
    next_key: int = 0
    script: list[tuple[Key, int]] | None = None

    def copied(self) -> Storages:
        """What is inside the inner collections is never changed, only replaced."""
        return Storages(
            dict(self.size), dict(self.references), dict(self.held), dict(self.waiting), dict(self.posted),
            dict(self.sending), self.live, self.next_key, self.script,
        )  # fmt: skip

    def new(self, num_bytes: int) -> Key:
        self.next_key += 1
        self.size[self.next_key] = num_bytes
        self.references[self.next_key] = 0
        self.live += num_bytes
        if self.script is not None:
            self.script.append((self.next_key, num_bytes))
        return self.next_key

    def take(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.references[key] += 1

    def release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.references[key] -= 1
            if self.references[key] == 0:
                self.live -= self.size.pop(key)
                del self.references[key]
                if self.script is not None:
                    self.script.append((key, FREED))
