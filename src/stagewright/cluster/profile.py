"""Operator profiles: measured seconds of single operators of a model, for one kind of device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from stagewright.cluster.strict import StrictModel, validated
from stagewright.documents import read_sealed_json, sealed
from stagewright.files import write_whole
from stagewright.limits import MOST_DEVICES, MOST_SECONDS

_WHAT, _FIX = "operator profile", "give a file that `stagewright profile` wrote"


class OperatorProfile(StrictModel):
    """What operators took of a device, by signature as `stagewright.estimation.signatures` writes them."""

    device: str = Field(min_length=1)
    """Name of the processor or GPU."""
    kind: Literal["cuda", "cpu"]
    torch: str
    """Version."""
    processes: int = Field(ge=1, le=MOST_DEVICES)
    """That were at work at once."""
    num_threads: int | None = Field(default=None, ge=1, le=MOST_DEVICES)
    """Of each process on a CPU."""
    reference_s: float | None = Field(default=None, gt=0, le=MOST_SECONDS)
    """Of the computation that tells how fast the machine was meanwhile, as `Device.reference_s`."""
    seconds: dict[str, Annotated[float, Field(gt=0, le=MOST_SECONDS)]] = Field(min_length=1)

    def at_speed(self, reference_s: float | None) -> OperatorProfile:
        """What it would have been of a machine as fast as one on which the reference computation takes so long."""
        if reference_s is None or self.reference_s is None:
            return self
        ratio = reference_s / self.reference_s
        seconds = {name: one * ratio for name, one in self.seconds.items()}
        return self.model_copy(update={"seconds": seconds, "reference_s": reference_s})

    def save(self, path: str | Path) -> None:
        """Writes the profile whole or not at all; raises `InputError` where it cannot be written."""
        write_whole(path, sealed(json.dumps(self.model_dump(mode="json"), indent=1)) + "\n")


def load_profile(path: str | Path) -> OperatorProfile:
    """The profile in a file.

    Raises:
        InputError: it cannot be read or is no profile; names the key, the value and the rule it breaks.
    """
    return validated(OperatorProfile, read_sealed_json(path, _WHAT, _FIX), f"{_WHAT} '{path}'")
