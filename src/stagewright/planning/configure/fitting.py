"""Whether a configuration fits: a bound that takes microseconds, then the replay of its program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from stagewright.cluster import Cluster
from stagewright.estimation.megatron import Layout, MegatronStack, Shape, footprints
from stagewright.estimation.megatron.layer import Layers, saved_bytes
from stagewright.estimation.megatron.reserve import reserved_bytes
from stagewright.planning.configure.lineup import devices_of_ranks
from stagewright.planning.job import Job
from stagewright.schedule import Program, build


@dataclass(frozen=True)
class Memory:
    """Reserved bytes of the rank nearest to its limit, or a bound below them that is too much already."""

    peak_bytes: int
    usable_bytes: int
    is_bound: bool = False

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes


@dataclass(frozen=True)
class Room:
    """Memory of a model's configurations on devices whose allocators have some bytes each."""

    shape: Shape
    stack: MegatronStack

    def of(self, layout: Layout, usable_bytes: Sequence[int]) -> Memory:
        """The rank of a layout that lacks most or has least left, under its own program.

        `usable_bytes` are those of the devices of every pipeline rank.
        """
        least = self.least(layout)
        if least > usable_bytes[0]:
            return Memory(least, usable_bytes[0], is_bound=True)
        pairs = zip(self.peaks(layout), usable_bytes, strict=True)
        return Memory(*max(pairs, key=lambda pair: pair[0] - pair[1]))

    def peaks(self, layout: Layout) -> tuple[int, ...]:
        """Reserved bytes of every pipeline rank."""
        short = replace(layout, num_microbatches=_enough(layout))
        program = _program(short.schedule, short.pp, short.num_microbatches, short.num_chunks)
        ranks = footprints(self.shape, short, self.stack, program)
        return tuple(reserved_bytes(rank, self.shape, layout, self.stack) for rank in ranks)

    def least(self, layout: Layout) -> int:
        """What the first rank needs at least: its layers' state, and what they keep of the microbatches in flight.

        Ignores: embeddings, transient memory; interleaving, which keeps more.
        """
        layers = Layers(self.shape, layout, self.stack)
        counts = layout.layers(self.shape.num_layers)[:: layout.pp]
        num = sum(counts)
        own, rest = self._parameters(layout)
        stack = self.stack
        shards = layout.dp * layout.cp if layout.shards_optimizer else 1
        each = (stack.element_bytes + stack.gradient_element_bytes(layout.fp32_gradients)) * (own + rest)
        each += stack.engine_bytes * (own + rest) + stack.optimizer_bytes * rest // shards
        each += stack.optimizer_bytes * own // max(1, shards // layout.ep)
        kept = min(
            saved_bytes(layers.layer(index, layout.recompute == "full"))
            for index in (0, self.shape.num_layers - 1)
        )
        return num * (each + min(layout.pp, layout.num_microbatches) * kept)

    def _parameters(self, layout: Layout) -> tuple[int, int]:
        """The fewest of any layer on one device: of experts, and others."""
        layers = Layers(self.shape, layout, self.stack)
        return min((layers.parameters(index) for index in (0, self.shape.num_layers - 1)), key=sum)


def _enough(layout: Layout) -> int:
    """Microbatches after which a program keeps no more than before."""
    wanted = layout.pp + 1 if layout.num_chunks == 1 else 2 * layout.pp
    return min(layout.num_microbatches, wanted)


@lru_cache(maxsize=256)
def _program(schedule: str, pp: int, num_microbatches: int, num_chunks: int) -> Program:
    return build(schedule, pp, num_microbatches, num_chunks if num_chunks > 1 else None)


def usable_of_ranks(job: Job, cluster: Cluster, pp: int) -> list[int]:
    """Bytes that the allocators of every pipeline rank may reserve: those of the device with least."""
    return [
        min(job.usable_bytes(device, cluster) for device in devices)
        for devices in devices_of_ranks(cluster, pp)
    ]
