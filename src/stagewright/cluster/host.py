"""Hosts: CPUs and memory of a node, for offloaded state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from stagewright.cluster.device import ByteCount, ByteRate, Fraction
from stagewright.cluster.schema import SourcedModel
from stagewright.limits import MOST_DEVICES

_DROPPED = ("peak_flops", "matmul_efficiency")
"""Figures of earlier versions, which no prediction used."""


class Host(SourcedModel):
    """All CPUs and all memory of one node, which its `num_devices` devices share evenly. SI units."""

    not_figures: ClassVar[frozenset[str]] = frozenset({"name"})

    name: str = Field(min_length=1)
    num_devices: int = Field(ge=1, le=MOST_DEVICES)
    """Devices of a whole node; a job that uses fewer of them has proportionally less of the host."""
    memory_bytes: Annotated[ByteCount, Field(gt=0)]
    memory_bandwidth: ByteRate
    memory_efficiency: Fraction
    """Fraction of `memory_bandwidth` that an optimizer attains when it streams its state."""
    reserve_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the memory left to the system and to loading data."""

    @model_validator(mode="before")
    @classmethod
    def _without_dropped_figures(cls, document: Any) -> Any:
        """Drop the figures of earlier versions and their sources, so that files and plans that have them stay valid."""
        if not isinstance(document, Mapping) or not isinstance(
            sources := document.get("sources", {}), Mapping
        ):
            return document
        kept = {key: value for key, value in document.items() if key not in _DROPPED}
        return kept | {
            "sources": {key: why for key, why in sources.items() if key.split(".")[0] not in _DROPPED}
        }

    def __hash__(self) -> int:
        return hash((self.name, self.num_devices, self.memory_bytes))

    @property
    def usable_bytes(self) -> int:
        """Bytes that a plan may use per device."""
        return int(self.memory_bytes * (1 - self.reserve_fraction)) // self.num_devices

    def memory_seconds(self, num_bytes: float) -> float:
        """Return the seconds to stream `num_bytes` while every other device of the node does the same.

        Ignores: caches, which do not help with state that is read once per step.
        """
        return num_bytes * self.num_devices / (self.memory_bandwidth * self.memory_efficiency)
