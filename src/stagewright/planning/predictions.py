"""What is predicted for a plan: of one step, of each rank, and of each stage."""

from __future__ import annotations

from pydantic import Field

from stagewright.cluster.strict import StrictModel


class SavedPrediction(StrictModel):
    """What one stage has saved when its rank's memory is fullest: bytes over all its microbatches."""

    stage: int = Field(ge=0)
    num_microbatches: int
    num_bytes: int


class RankPrediction(StrictModel):
    """One pipeline rank (all its replicas are alike): seconds of computation and bytes at the peak."""

    rank: int = Field(ge=0)
    busy_seconds: float
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    categories: dict[str, int]
    """Bytes alive at the moment of the peak, by category; they add up to `allocated_peak_bytes`."""
    host_bytes: int = 0
    """Optimizer state on the host."""
    peak_at: str = ""
    """Text of the action during which the peak is reached."""
    saved: tuple[SavedPrediction, ...] = ()
    """Activations saved in front of that action."""


class StagePrediction(StrictModel):
    """One stage: body positions `start` to `stop`, seconds and bytes of one microbatch."""

    start: int
    stop: int
    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    parameter_bytes: int
    saved_bytes: int
    boundary_bytes: int
    """Sent to later stages by one forward."""
    recomputed_bytes: int = 0
    """Made again right before the backward, in `recompute_seconds`; not among `saved_bytes`."""
    offloaded_bytes: int = 0
    """Those of `saved_bytes` that wait on the host."""
    recompute_seconds: float = 0.0


class Predictions(StrictModel):
    """What one optimizer step takes."""

    step_seconds: float
    lower_bound_seconds: float
    """No contiguous partition and no schedule is faster at these widths and this microbatch."""
    tokens_per_second: float
    mfu: float
    """FLOP of the model's matrix products (without recomputation) over what the devices' peaks allow."""
    bubble_fraction: float
    ranks: tuple[RankPrediction, ...]
    stages: tuple[StagePrediction, ...]

    @property
    def reserved_peak_bytes(self) -> int:
        """Of the rank whose allocator reserves most."""
        return max(rank.reserved_peak_bytes for rank in self.ranks)


class LengthPrediction(StrictModel):
    """What a step takes whose samples have one of several lengths."""

    sequence_length: int = Field(ge=1)
    predictions: Predictions
