"""How the tensors of one tensor-parallel rank are cut out of those of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagewright.errors import InputError

GROUP = "tp"
"""The name by which collectives know the ranks of one tensor-parallel group."""


@dataclass(frozen=True)
class TensorShard:
    """A tensor of which every rank holds an equal part along `dim`.

    `blocks` are sizes along `dim` of parts of the whole that are split one by one (query, key and value of a fused
    projection); `padding` zeros are added at the end before splitting, when there is one block.

    >>> TensorShard(0, (6, 6)).ranges(2, 1)
    [(3, 6), (9, 12)]
    >>> TensorShard(0, (5,), padding=1).ranges(2, 1)
    [(3, 6)]
    """

    dim: int
    blocks: tuple[int, ...]
    padding: int = 0

    @property
    def whole_size(self) -> int:
        """Elements along `dim` of the whole tensor, without padding."""
        return sum(self.blocks)

    def ranges(self, num_ranks: int, rank: int) -> list[tuple[int, int]]:
        """Where along `dim` of the whole, padded tensor the parts of `rank` begin and end."""
        found, start = [], 0
        for size in self.padded_blocks:
            part = size // num_ranks
            found.append((start + rank * part, start + (rank + 1) * part))
            start += size
        return found

    @property
    def padded_blocks(self) -> tuple[int, ...]:
        return (*self.blocks[:-1], self.blocks[-1] + self.padding)


@dataclass(frozen=True)
class TensorParallel:
    """The tensor parallelism of a graph: its width, and the parameters of which each rank holds a part, by name.

    Every other parameter is whole on every rank and changes alike on all of them. With `sequence`, what lies between
    the parallel layers is split along the sequence.
    """

    size: int
    sequence: bool = False
    shards: Mapping[str, TensorShard] = field(default_factory=dict)


def even(what: str, amount: int, size: int) -> int:
    """`amount` divided by `size`.

    Raises:
        InputError: it does not divide.
    """
    if amount % size:
        divisors = [width for width in range(1, amount + 1) if amount % width == 0 and width <= 64]
        raise InputError(
            f"tensor parallelism of {size} does not divide {what} ({amount}): "
            f"choose a width among {', '.join(map(str, divisors))}"
        )
    return amount // size
