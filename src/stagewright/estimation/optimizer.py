"""What an optimizer keeps of every parameter and moves in a step, as data; `stagewright.tracing.optimizers` asks torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated

from pydantic import Field

from stagewright.cluster.schema import StrictModel
from stagewright.errors import InputError
from stagewright.graph import OperatorGraph
from stagewright.graph.layers import pattern_of
from stagewright.graph.tensor import ITEM_BYTES

_Amount = Annotated[float, Field(ge=0, le=1e6)]

FACT = "optimizer"
"""Among a graph's facts, what trains it."""


class KeptTensor(StrictModel):
    """A tensor of the state of one parameter: as long as that along `dims`, `factor` times over, of the type `dtype`; None
    is that of the weights which are updated."""

    dims: tuple[int, ...] = ()
    factor: int = Field(default=1, ge=0)
    dtype: str | None = None

    def num_bytes(self, shape: Sequence[int], item: int) -> int:
        """For a parameter of `shape`, whose weights have `item` bytes an element."""
        size = item if self.dtype is None else ITEM_BYTES[self.dtype]
        return size * self.factor * math.prod(shape[dim] for dim in self.dims)


class OptimizerState(StrictModel):
    """What an optimizer keeps and moves.

    * `of_dims`: state of a parameter by its number of dimensions; of an element-wise optimizer by that of 1, for all.
    * `of_names`: of parameters whose state is not that: by name, numbers in it replaced as `pattern_of` does.
    * `is_elementwise`: whether an element is updated by its own gradient and state alone, whatever its
      parameter's name, so that ranks may have any part of a parameter.
    * `passes`: times that a step reads or writes as many elements as there are parameters.
    * `calls`: operators that do so, one after the other.
    * `transient`: elements that are there for a moment, for each of all parameters; `transient_of_largest`: of the largest.
    * `products`: FLOP of matrix products for a matrix of s times l, s the smaller: the factors of s s l and of s s s.
    """

    is_elementwise: bool = True
    of_dims: dict[int, tuple[KeptTensor, ...]]
    of_names: dict[str, tuple[KeptTensor, ...]] = Field(default_factory=dict)
    passes: _Amount
    calls: _Amount = 1.0
    transient: _Amount = 0.0
    transient_of_largest: _Amount = 0.0
    products: tuple[_Amount, _Amount] = (0.0, 0.0)

    def __hash__(self) -> int:
        return hash((self.is_elementwise, self.passes, self.calls, tuple(self.of_dims)))

    def of(self, shape: Sequence[int]) -> tuple[KeptTensor, ...]:
        """Of a parameter of `shape`. Raises `InputError` where the optimizer takes none such."""
        dims = 1 if self.is_elementwise else len(shape)
        if dims not in self.of_dims:
            known = ", ".join(map(str, self.of_dims))
            raise InputError(
                f"the job's optimizer takes parameters of {known} dimensions, and the model has one of {len(shape)}: name a "
                "package.module:factory that gives such parameters to another optimizer"
            )
        return self.of_dims[dims]

    @property
    def by_dims(self) -> dict[int, list[str]]:
        """What is kept of parameters, whatever the order in which it is."""
        return {dims: sorted(map(repr, kept)) for dims, kept in self.of_dims.items()}

    def storages(self, shape: Sequence[int], item: int, num_spans: int = 1, name: str = "") -> Iterator[int]:
        """Bytes of each tensor that is kept of a parameter; of one in several spans each has its own numbers.

        >>> list(ADAMW.storages((3, 5), 4))
        [4, 60, 60]
        """
        own = self.of_names.get(pattern_of(name))
        size = (math.prod(shape),) if self.is_elementwise else shape
        for one in self.of(shape) if own is None else own:
            yield from [one.num_bytes(size, item)] * (1 if one.dims else num_spans)

    @property
    def num_moments(self) -> int:
        """Tensors as large as the parameter that are kept of a matrix, at the least."""
        dims = 1 if self.is_elementwise else 2
        ways = (self.of_dims.get(dims, ()), *self.of_names.values())
        return min(sum(one.dtype is None and len(one.dims) >= dims for one in kept) for kept in ways)

    def transient_bytes(self, sizes: Collection[int]) -> int:
        """For weights of so many bytes each."""
        return int(self.transient * sum(sizes) + self.transient_of_largest * max(sizes, default=0))

    def product_flop(self, shape: Sequence[int]) -> float:
        """Of the matrix products in a step on a parameter of `shape`."""
        if len(shape) != 2 or not any(self.products):
            return 0.0
        small, large = sorted(shape)
        return self.products[0] * small * small * large + self.products[1] * small**3


ADAMW = OptimizerState(
    of_dims={1: (KeptTensor(dtype="float32"), KeptTensor(dims=(0,)), KeptTensor(dims=(0,)))}, passes=7
)
"""PyTorch's fused one: a counter of steps, two moments; reads weight, gradient and moments, writes all but the gradient."""


def optimizer_of(graph: OperatorGraph) -> OptimizerState:
    """What trains the model of a graph."""
    return graph.facts.get(FACT, ADAMW)
