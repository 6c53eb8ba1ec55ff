"""What is predicted for a plan: of one step, of each rank, and of each stage."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from stagewright.cluster.schema import StrictModel
from stagewright.limits import MOST_PREDICTED, MOST_TOKENS

Seconds = Annotated[float, Field(ge=0, le=MOST_PREDICTED)]
Rate = Annotated[float, Field(ge=0, le=MOST_PREDICTED)]
Bytes = Annotated[int, Field(ge=0, le=MOST_PREDICTED)]
Position = Annotated[int, Field(ge=0, lt=2**31)]
"""Of an operator, a stage, a rank or a step among all."""


class SavedPrediction(StrictModel):
    """What one stage has saved when its rank's memory is fullest: bytes over all its microbatches."""

    stage: Position
    num_microbatches: Position
    num_bytes: Bytes


class RankPrediction(StrictModel):
    """One pipeline rank (all its replicas are alike): seconds of computation and bytes at the peak."""

    rank: Position
    busy_seconds: Seconds
    allocated_peak_bytes: Bytes
    reserved_peak_bytes: Bytes
    categories: dict[str, Bytes]
    """Bytes alive at the moment of the peak, by category; they add up to `allocated_peak_bytes`."""
    host_bytes: Bytes = 0
    """Optimizer state on the host."""
    offloaded_bytes: Bytes = 0
    """Saved values on the host when there are most."""
    communicator_bytes: Bytes = 0
    """Of the device, outside of the allocator; zero on CPUs and under runtimes of others."""
    peak_at: str = ""
    """Text of the action during which the peak is reached."""
    peak_operator: str = ""
    """Name of the operator that runs then; empty where none does."""
    saved: tuple[SavedPrediction, ...] = ()
    """Activations saved in front of that action."""


class StagePrediction(StrictModel):
    """One stage: body positions `start` to `stop`, seconds and bytes of one microbatch."""

    start: Position
    stop: Position
    forward_seconds: Seconds
    input_grad_seconds: Seconds
    weight_grad_seconds: Seconds
    parameter_bytes: Bytes
    saved_bytes: Bytes
    boundary_bytes: Bytes
    """Sent to later stages by one forward."""
    recomputed_bytes: Bytes = 0
    """Made again right before the backward, in `recompute_seconds`; not among `saved_bytes`."""
    offloaded_bytes: Bytes = 0
    """Those of `saved_bytes` that wait on the host."""
    recompute_seconds: Seconds = 0.0
    waiting_seconds: Seconds = 0.0
    """Of F and the backward, part of their seconds: for what goes to the host and comes back, where the link is late."""
    behind_seconds: Seconds = 0.0
    """Of F, I, W and R, part of their seconds: the device waits for the host to issue operators."""


class TransferCosts(StrictModel):
    """What one microbatch sends from a stage to a later one, and what comes back for it."""

    source: Position
    target: Position
    value_bytes: Bytes
    gradient_bytes: Bytes
    value_seconds: Seconds
    """On the way, beside what computes unless `receivers_wait`."""
    gradient_seconds: Seconds


class StepCosts(StrictModel):
    """What the times of a step follow from, so that a plan can be simulated without its model.

    Columns have one entry per stage, seconds of one action; none where all are zero.
    """

    forward_seconds: tuple[Seconds, ...]
    """With what posting the transfers takes of the rank, and so for gradients."""
    input_grad_seconds: tuple[Seconds, ...]
    weight_grad_seconds: tuple[Seconds, ...]
    backward_seconds: tuple[Seconds, ...]
    """Of both gradients at once."""
    recompute_seconds: tuple[Seconds, ...] = ()
    gather_seconds: tuple[Seconds, ...] = ()
    reduce_seconds: tuple[Seconds, ...] = ()
    update_seconds: tuple[Seconds, ...] = ()
    """Of programs that update parameters between the computations of a batch."""
    transfers: tuple[TransferCosts, ...]
    """Of every pair of stages between which something travels, neighbours always."""
    receivers_wait: bool = False
    """Whether receives are posted right before their use: a transfer begins when its receiver has done everything before the
    action that uses it, which waits for it."""
    sum_seconds: tuple[Seconds, ...] = ()
    """Per pipeline rank, when it is done with the batch: what no action of it has summed over replicas, or over ranks that
    hold the same parameter. None where the program updates parameters itself."""
    norm_seconds: Seconds = 0.0
    """Then, of all ranks: the norm of the gradient."""
    optimizer_seconds: tuple[Seconds, ...] = ()
    """Then, per pipeline rank: the optimizer, and the updated parameters of other replicas."""
    checks_after: bool = False
    """Whether a rank begins the next step before others have ended this one, as gradients are checked afterwards."""

    @model_validator(mode="before")
    @classmethod
    def _without_offloading(cls, document: Any) -> Any:
        """Earlier versions say what OFFLOAD and FETCH take; their programs are refused where they have any."""
        if isinstance(document, dict):
            return {key: value for key, value in document.items() if key != "offload_seconds"}
        return document


class Predictions(StrictModel):
    """What one optimizer step takes."""

    step_seconds: Annotated[Seconds, Field(gt=0)]
    lower_bound_seconds: Seconds
    """No contiguous partition and no schedule is faster at these widths and this microbatch."""
    tokens_per_second: Rate
    mfu: Rate
    """FLOP of the model's matrix products (without recomputation) over what the devices' peaks allow."""
    bubble_fraction: float = Field(ge=-1, le=1)
    measured_share: float = Field(default=0.0, ge=0, le=1)
    """Part of the operators' time on the device that is told by a profile of them and not worked out."""
    ranks: tuple[RankPrediction, ...]
    stages: tuple[StagePrediction, ...]
    costs: StepCosts | None = None
    """What the times follow from. Plans of other programs, and of older versions, may leave it out."""

    @property
    def reserved_peak_bytes(self) -> int:
        """Of the rank whose allocator reserves most."""
        return max(rank.reserved_peak_bytes for rank in self.ranks)


class LengthPrediction(StrictModel):
    """What a step takes whose samples have one of several lengths."""

    sequence_length: int = Field(ge=1, le=MOST_TOKENS)
    predictions: Predictions
