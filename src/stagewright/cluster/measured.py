"""Measured collectives of a cluster: curves of seconds by bytes."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from stagewright.cluster.device import Seconds
from stagewright.cluster.schema import SourcedModel
from stagewright.limits import MOST_BYTES, MOST_DEVICES

Operation = Literal["all-reduce", "all-gather", "reduce-scatter"]
Span = Literal["node", "cluster"]


class MeasuredCollective(SourcedModel):
    """Seconds of one collective by bytes of its whole buffer, on all ranks of a node or of the cluster."""

    not_figures: ClassVar[frozenset[str]] = frozenset({"operation", "spans", "num_ranks"})

    operation: Operation
    spans: Span
    num_ranks: int = Field(ge=2, le=MOST_DEVICES)
    num_bytes: tuple[Annotated[float, Field(gt=0, le=MOST_BYTES)], ...] = Field(min_length=1)
    seconds: tuple[Annotated[Seconds, Field(gt=0)], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_a_curve(self) -> MeasuredCollective:
        if len(self.num_bytes) != len(self.seconds):
            raise ValueError(
                f"{len(self.num_bytes)} sizes but {len(self.seconds)} times: give one time for each size"
            )
        if any(low >= high for low, high in zip(self.num_bytes, self.num_bytes[1:], strict=False)):
            raise ValueError("num_bytes must grow from entry to entry")
        return self


def between(sizes: tuple[float, ...], values: tuple[float, ...], size: float) -> float:
    """Interpolate the value at `size`, linearly in the logarithm of the size; beyond both ends it is the nearest value.

    >>> between((1.0, 100.0), (1.0, 3.0), 10.0)
    2.0
    >>> between((1.0, 100.0), (1.0, 3.0), 1000.0)
    3.0
    """
    if size <= sizes[0]:
        return values[0]
    if size >= sizes[-1]:
        return values[-1]
    right = bisect_right(sizes, size)
    low, high = sizes[right - 1], sizes[right]
    part = math.log(size / low) / math.log(high / low)
    return values[right - 1] + part * (values[right] - values[right - 1])
