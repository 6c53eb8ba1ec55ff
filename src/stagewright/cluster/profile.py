"""Operator profiles: measured seconds of single operators of a model, for one kind of device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from stagewright.cluster.schema import StrictModel, validated
from stagewright.documents import read_sealed_json, sealed
from stagewright.files import write_whole
from stagewright.limits import MOST_DEVICES, MOST_SECONDS

_WHAT, _FIX = "operator profile", "give a file that `stagewright profile` wrote"


class OperatorProfile(StrictModel):
    """Measured seconds of operators on a device, by signature (`stagewright.estimation.signatures`)."""

    device: str = Field(min_length=1)
    """Name of the processor or GPU."""
    kind: Literal["cuda", "cpu"]
    torch: str
    """Version of torch."""
    processes: int = Field(ge=1, le=MOST_DEVICES)
    """Number of processes that ran at once."""
    num_threads: int | None = Field(default=None, ge=1, le=MOST_DEVICES)
    """Threads of each process on a CPU."""
    reference_s: float | None = Field(default=None, gt=0, le=MOST_SECONDS)
    """Seconds of the reference computation that measures the machine's speed, as `Device.reference_s`."""
    seconds: dict[str, Annotated[float, Field(gt=0, le=MOST_SECONDS)]] = Field(min_length=1)

    def at_speed(self, reference_s: float | None) -> OperatorProfile:
        """Return the profile scaled to a machine on which the reference computation takes `reference_s`."""
        if reference_s is None or self.reference_s is None:
            return self
        ratio = reference_s / self.reference_s
        seconds = {name: operator_s * ratio for name, operator_s in self.seconds.items()}
        return self.model_copy(update={"seconds": seconds, "reference_s": reference_s})

    def save(self, path: str | Path) -> None:
        """Write the profile atomically; raise `InputError` if it cannot be written."""
        write_whole(path, sealed(json.dumps(self.model_dump(mode="json"), indent=1)) + "\n")


def load_profile(path: str | Path) -> OperatorProfile:
    """Read the profile in a file.

    Raises:
        InputError: the file cannot be read or is not a profile; names the key, the value and the rule it breaks.
    """
    return validated(OperatorProfile, read_sealed_json(path, _WHAT, _FIX), f"{_WHAT} '{path}'")
