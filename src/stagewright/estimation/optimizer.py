"""State and memory traffic of an optimizer, as data; `stagewright.tracing.optimizers` obtains them from torch."""

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
"""Name of the graph's fact with its optimizer."""


class KeptTensor(StrictModel):
    """A tensor of the state of one parameter: with the parameter's sizes along `dims`, times `factor`, of type `dtype`;
    None is the type of the updated weights."""

    dims: tuple[int, ...] = ()
    factor: int = Field(default=1, ge=0)
    dtype: str | None = None

    def num_bytes(self, shape: Sequence[int], item: int) -> int:
        """Return its bytes for a parameter of `shape` whose weights have `item` bytes per element."""
        size = item if self.dtype is None else ITEM_BYTES[self.dtype]
        return size * self.factor * math.prod(shape[dim] for dim in self.dims)


class OptimizerState(StrictModel):
    """State and memory traffic of an optimizer.

    * `of_dims`: state of a parameter by its number of dimensions; for an elementwise optimizer under 1, for all.
    * `of_names`: state of exceptions, by name with numbers replaced as by `pattern_of`.
    * `is_elementwise`: whether the update of an element depends only on its own gradient and state, so that ranks may have
      any part of a parameter.
    * `passes`: memory traffic of a step in elements per parameter.
    * `calls`: number of operators with this traffic, one after the other.
    * `transient`: temporary elements per parameter; `transient_of_largest`: per element of the largest parameter.
    * `products`: FLOP of matmuls for an s x l matrix with s <= l: the factors of s s l and of s s s.
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
        """Return the state of a parameter of `shape`; raise `InputError` if the optimizer does not support it."""
        dims = 1 if self.is_elementwise else len(shape)
        if dims not in self.of_dims:
            supported = ", ".join(map(str, self.of_dims))
            raise InputError(
                f"the job's optimizer takes parameters of {supported} dimensions, and the model has one of {len(shape)}: "
                "name a package.module:factory that gives such parameters to another optimizer"
            )
        return self.of_dims[dims]

    @property
    def by_dims(self) -> dict[int, list[str]]:
        """State by number of dimensions, in a canonical order."""
        return {dims: sorted(map(repr, kept)) for dims, kept in self.of_dims.items()}

    def storages(self, shape: Sequence[int], item: int, num_spans: int = 1, name: str = "") -> Iterator[int]:
        """Yield the bytes of each state tensor of a parameter; with several spans each has its own scalars.

        >>> list(ADAMW.storages((3, 5), 4))
        [4, 60, 60]
        """
        named = self.of_names.get(pattern_of(name))
        size = (math.prod(shape),) if self.is_elementwise else shape
        for tensor in self.of(shape) if named is None else named:
            yield from [tensor.num_bytes(size, item)] * (1 if tensor.dims else num_spans)

    @property
    def num_moments(self) -> int:
        """Minimum number of state tensors of a matrix that are as large as the parameter."""
        dims = 1 if self.is_elementwise else 2
        states = (self.of_dims.get(dims, ()), *self.of_names.values())
        return min(
            sum(tensor.dtype is None and len(tensor.dims) >= dims for tensor in kept) for kept in states
        )

    def transient_bytes(self, sizes: Collection[int]) -> int:
        """Return the temporary bytes of a step on weights of `sizes` bytes."""
        return int(self.transient * sum(sizes) + self.transient_of_largest * max(sizes, default=0))

    def product_flop(self, shape: Sequence[int]) -> float:
        """Return the FLOP of matmuls in a step on a parameter of `shape`."""
        if len(shape) != 2 or not any(self.products):
            return 0.0
        small, large = sorted(shape)
        return self.products[0] * small * small * large + self.products[1] * small**3


ADAMW = OptimizerState(
    of_dims={1: (KeptTensor(dtype="float32"), KeptTensor(dims=(0,)), KeptTensor(dims=(0,)))}, passes=7
)
"""PyTorch's fused AdamW: a step counter and two moments; reads weight, gradient and moments, writes all but the gradient."""


def optimizer_of(graph: OperatorGraph) -> OptimizerState:
    """Return the optimizer of a graph."""
    return graph.facts.get(FACT, ADAMW)
