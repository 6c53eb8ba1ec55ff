"""The predictions of a plan: for one step, each rank and each stage."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from stagewright.cluster.schema import StrictModel
from stagewright.limits import MOST_PREDICTED, MOST_TOKENS

Seconds = Annotated[float, Field(ge=0, le=MOST_PREDICTED)]
Rate = Annotated[float, Field(ge=0, le=MOST_PREDICTED)]
Bytes = Annotated[int, Field(ge=0, le=MOST_PREDICTED)]
Position = Annotated[int, Field(ge=0, lt=2**31)]
"""Index of an operator, a stage, a rank or a step."""


class SavedPrediction(StrictModel):
    """Saved values of one stage when its rank's memory is fullest: bytes over all its microbatches."""

    stage: Position
    num_microbatches: Position
    num_bytes: Bytes


WORKSPACE = "workspace"
"""The category of what the matrix library allocates on a GPU for itself."""


class RankPrediction(StrictModel):
    """Predictions for one pipeline rank (all its replicas are alike): seconds of computation and bytes at the peak."""

    rank: Position
    busy_seconds: Seconds
    allocated_peak_bytes: Bytes
    reserved_peak_bytes: Bytes
    categories: dict[str, Bytes]
    """Bytes alive at the moment of the peak, by category; they add up to `allocated_peak_bytes`."""
    host_bytes: Bytes = 0
    """Bytes of optimizer state on the host."""
    offloaded_bytes: Bytes = 0
    """Peak bytes of saved values on the host."""
    communicator_bytes: Bytes = 0
    """Bytes of the device that communicators take outside of the allocator; zero on CPUs and under other runtimes."""
    peak_at: str = ""
    """Text of the action during which the peak is reached."""
    peak_operator: str = ""
    """Name of the operator that runs then; empty where none does."""
    saved: tuple[SavedPrediction, ...] = ()
    """Activations saved before that action."""

    @property
    def tensor_peak_bytes(self) -> int:
        """Bytes of tensors at the peak, which are all that a run of the plan on CPUs has."""
        return self.allocated_peak_bytes - self.categories.get(WORKSPACE, 0)


class StagePrediction(StrictModel):
    """Predictions for one stage, forward operators `start` to `stop`: seconds and bytes of one microbatch."""

    start: Position
    stop: Position
    forward_seconds: Seconds
    input_grad_seconds: Seconds
    weight_grad_seconds: Seconds
    parameter_bytes: Bytes
    saved_bytes: Bytes
    boundary_bytes: Bytes
    """Bytes sent to later stages by one forward."""
    recomputed_bytes: Bytes = 0
    """Bytes recomputed right before the backward, in `recompute_seconds`; not among `saved_bytes`."""
    offloaded_bytes: Bytes = 0
    """Those of `saved_bytes` that are on the host between forward and backward."""
    recompute_seconds: Seconds = 0.0
    waiting_seconds: Seconds = 0.0
    """Seconds that F and the backward, whose times include them, wait for offloading to the host and back."""
    behind_seconds: Seconds = 0.0
    """Seconds that the device waits for the host to issue operators, included in those of F, I, W and R."""


class TransferCosts(StrictModel):
    """The transfer of one microbatch from a stage to a later one, and of its gradients back."""

    source: Position
    target: Position
    value_bytes: Bytes
    gradient_bytes: Bytes
    value_seconds: Seconds
    """Seconds of the transfer, overlapped with computations unless `receivers_wait`."""
    gradient_seconds: Seconds


class StepCosts(StrictModel):
    """The costs of the actions of a step, from which a plan can be simulated without its model.

    Columns have one entry per stage, in seconds per action; they are empty where all entries are zero.
    """

    forward_seconds: tuple[Seconds, ...]
    """Including the rank's time for posting transfers, as do the gradients."""
    input_grad_seconds: tuple[Seconds, ...]
    weight_grad_seconds: tuple[Seconds, ...]
    backward_seconds: tuple[Seconds, ...]
    """Seconds of a backward that computes both gradients."""
    recompute_seconds: tuple[Seconds, ...] = ()
    gather_seconds: tuple[Seconds, ...] = ()
    reduce_seconds: tuple[Seconds, ...] = ()
    update_seconds: tuple[Seconds, ...] = ()
    """Seconds of STEP, in programs that update parameters within a batch."""
    transfers: tuple[TransferCosts, ...]
    """Transfers between all pairs of stages that exchange something, neighbours always."""
    receivers_wait: bool = False
    """Whether receives are posted right before their use: a transfer begins when its receiver has done everything before the
    action that uses it, which waits for it."""
    sum_seconds: tuple[Seconds, ...] = ()
    """Seconds of gradient reductions after the batch, per pipeline rank: over replicas, unless actions reduced them, and
    over ranks that hold a tied parameter. Empty where the program updates parameters itself."""
    norm_seconds: Seconds = 0.0
    """Seconds of the gradient norm over all ranks, after that."""
    optimizer_seconds: tuple[Seconds, ...] = ()
    """Seconds of the optimizer and of gathering updated parameters, after that, per pipeline rank."""
    checks_after: bool = False
    """Whether a rank may begin the next step before others have ended this one, as gradients are checked afterwards."""

    @model_validator(mode="before")
    @classmethod
    def _without_offloading(cls, document: Any) -> Any:
        """Drop the costs of OFFLOAD and FETCH of earlier versions, whose programs are refused where they have any."""
        if isinstance(document, dict):
            return {key: value for key, value in document.items() if key != "offload_seconds"}
        return document


class Predictions(StrictModel):
    """The predictions for one optimizer step."""

    step_seconds: Annotated[Seconds, Field(gt=0)]
    lower_bound_seconds: Seconds
    """Lower bound over all contiguous partitions and schedules with these degrees and this microbatch."""
    tokens_per_second: Rate
    mfu: Rate
    """FLOP of the model's matmuls (without recomputation) over what the devices' peaks allow."""
    bubble_fraction: float = Field(ge=-1, le=1)
    measured_share: float = Field(default=0.0, ge=0, le=1)
    """Fraction of operator time that was measured rather than modelled."""
    ranks: tuple[RankPrediction, ...]
    stages: tuple[StagePrediction, ...]
    costs: StepCosts | None = None
    """Costs from which the times follow. Plans of other programs, and of older versions, may leave them out."""

    @property
    def reserved_peak_bytes(self) -> int:
        """Bytes on the rank whose allocator reserves most."""
        return max(rank.reserved_peak_bytes for rank in self.ranks)


class LengthPrediction(StrictModel):
    """The predictions for a step with one of several sequence lengths."""

    sequence_length: int = Field(ge=1, le=MOST_TOKENS)
    predictions: Predictions
