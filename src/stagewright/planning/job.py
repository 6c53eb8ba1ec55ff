"""The training job: batch, sequence length, precision, optimizer and memory limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from stagewright.cluster import Cluster, Device
from stagewright.cluster.schema import RefusedValues, StrictModel, parse_amount, validated
from stagewright.documents import read_toml
from stagewright.errors import InputError
from stagewright.estimation.optimizer import ADAMW, FACT, OptimizerState
from stagewright.estimation.precision import Precision
from stagewright.estimation.runtime import STAGEWRIGHT, Runtime, load_runtime
from stagewright.graph import OperatorGraph
from stagewright.limits import MOST_BYTES, MOST_SAMPLES, MOST_STEPS, MOST_TOKENS
from stagewright.planning.learning_rate import LearningRateSchedule, rate_fraction
from stagewright.tracing.models.source import split_factory
from stagewright.units import format_bytes

if TYPE_CHECKING:
    from stagewright.tracing.models.reference import ModelReference

_TORCH_NAMES = {
    "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "fp64": "float64",
    "autocast": "float32",
}  # fmt: skip

ADAMW_NAME = "adamw"
_OWN_DECAY = (ADAMW_NAME, "muon", "adafactor")
"""Optimizers of torch with decoupled weight decay, in proportion to the learning rate."""
_OF_ADAMW = ("betas", "eps")
_Option = bool | int | float | str | tuple[float, ...] | None
APART = ("labels", "position_ids")
"""Inputs of a causal language model, besides tokens, for documents that are kept apart."""

_Beta = Annotated[float, Field(ge=0, lt=1)]
_MOST_FACTOR = 1e3
"""Upper limit of rates and the like, which are below 1 in practice."""
_MOST_SCALE = 2.0**60
"""Upper limit of loss scales and norms: their product must be representable in fp32."""


class Job(StrictModel):
    """A training job; sizes in samples and tokens, memory in bytes.

    `dtype` is the type of parameters and computation. With ``bf16``, gradients are accumulated in fp32 and the
    optimizer keeps fp32 master weights: 18 bytes per parameter in all; with ``fp32`` it is 16 bytes. With ``autocast``
    parameters are fp32 and the model is computed under bf16 autocast, by the rules of the cluster's devices. ``tf32`` is
    fp32 with matmuls in tf32, ``fp8`` is bf16 with matmuls in fp8 where the device supports it, ``fp16`` is like bf16, with
    a scaled loss.

    >>> job = Job(global_batch=8, sequence_length=128, dtype="bf16", memory_limit="16GiB")
    >>> job.torch_name, job.memory_limit
    ('bfloat16', 17179869184)
    >>> mixed = Job(global_batch=8, sequence_length=128, dtype="autocast")
    >>> mixed.torch_name, mixed.computed_in, mixed.traced("cuda")["target"]
    ('float32', 'bfloat16', 'cuda')
    """

    global_batch: int = Field(ge=1, le=MOST_SAMPLES)
    """Samples per optimizer step, over all replicas."""
    sequence_length: int = Field(ge=1, le=MOST_TOKENS)
    """Tokens per sample, in the longest batches; models without sequences ignore it."""
    sequence_lengths: tuple[Annotated[int, Field(ge=1, le=MOST_TOKENS)], ...] = ()
    """Tokens per sample of the steps, which cycle through these lengths; a length may be named several times. Empty:
    `sequence_length` for all."""
    runtime: str = STAGEWRIGHT
    """The runtime whose execution is predicted: a bundled runtime or the path of a file; only plans of our own are run."""
    dtype: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp64", "autocast"] = "bf16"
    compiled: bool = False
    """Whether TorchInductor compiles the functions of the stages, so that memory-bound operators are fused."""
    documents_apart: bool = False
    """Whether documents in the same sample do not see each other: positions restart, attention does not cross."""
    optimizer: str = Field(default=ADAMW_NAME, min_length=1, max_length=4096)
    """A name of `torch.optim` in small letters, or a factory as package.module:function."""
    optimizer_options: dict[str, _Option] = Field(default_factory=dict)
    """Further arguments of the optimizer."""
    optimizer_state: OptimizerState | None = None
    """State and memory traffic of the optimizer, as measured with torch; None: those of PyTorch's AdamW."""
    learning_rate: float = Field(default=3e-4, gt=0, le=1e30)  # one that is too large shows in the loss
    lr_schedule: LearningRateSchedule = "constant"
    """Schedule of the learning rate after the warm-up, as in `stagewright.planning.learning_rate`."""
    warmup_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Number of steps in which the learning rate rises to its maximum."""
    decay_steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Number of last steps in which ``wsd`` decays; None: a tenth of `num_steps`."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the learning rate that remains after the last step."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, le=_MOST_FACTOR)
    weight_decay: float = Field(default=0.1, ge=0, le=_MOST_FACTOR)
    """Weight decay; by default 0 for optimizers of torch that add it to the gradient."""
    decays: Literal["matrices", "all"] = "matrices"
    """Parameters with weight decay: those of two or more dimensions, so no norms and biases, or all."""
    clip_norm: float | None = Field(default=1.0, gt=0, le=_MOST_SCALE)
    """Maximum gradient norm over all stages; None: no clipping."""
    loss_scale: float = Field(default=65536.0, gt=0, le=_MOST_SCALE)
    """Initial loss scale in fp16; halved when a gradient overflows, and that step is skipped."""
    loss_scale_window: int = Field(default=2000, ge=1, le=MOST_STEPS)
    """Steps without an overflow after which the loss scale is doubled."""
    num_steps: int = Field(default=20, ge=1, le=MOST_STEPS)
    seed: int = Field(default=0, ge=0, lt=2**63)
    memory_limit: int | None = Field(default=None, gt=0, le=MOST_BYTES)
    """Bytes of a device that a plan may use; None: its memory less reserve and context."""

    memory_to_spare: float = Field(default=0.0, ge=0, lt=1)
    """Share of every device's memory that a plan leaves free, where no limit is given."""

    @field_validator("memory_limit", mode="before")
    @classmethod
    def _of_text(cls, limit: Any) -> Any:
        """Convert a text such as ``16 GiB``."""
        return parse_amount(limit)

    @field_validator("runtime")
    @classmethod
    def _found_from_everywhere(cls, name: str) -> str:
        """Make the path of a file absolute, so that a plan finds it from another folder."""
        return str(Path(name).resolve()) if name.endswith(".toml") else name

    @model_validator(mode="before")
    @classmethod
    def _of_the_optimizer(cls, document: Any) -> Any:
        """Refuse AdamW's fields for other optimizers, whose options have other defaults, and set their weight decay."""
        name = document.get("optimizer", ADAMW_NAME) if isinstance(document, dict) else ADAMW_NAME
        if not isinstance(name, str) or name == ADAMW_NAME:
            return document
        for key in _OF_ADAMW:
            default = cls.model_fields[key].default
            given = document.get(key, default)
            if given != default and (not isinstance(given, list) or tuple(given) != default):
                raise ValueError(
                    f"{key} is AdamW's, but the optimizer is '{name}': give it in optimizer_options if that optimizer has it"
                )
        decays = split_factory(name) is not None or name in _OWN_DECAY or "weight_decay" in document
        return document if decays else {**document, "weight_decay": 0.0}

    @model_validator(mode="before")
    @classmethod
    def _of_the_longest(cls, document: Any) -> Any:
        """Set `sequence_length` to the longest of `sequence_lengths` if it is not given."""
        lengths = document.get("sequence_lengths") if isinstance(document, dict) else None
        if not isinstance(lengths, list | tuple) or not lengths or "sequence_length" in document:
            return document
        if not all(type(length) is int for length in lengths):
            raise ValueError(
                f"sequence_lengths = {list(lengths)}: give whole numbers of tokens, as [512, 1024]"
            )
        return {**document, "sequence_length": max(lengths)}

    @model_validator(mode="after")
    def _schedules_have_what_they_use(self) -> Job:
        if self.decay_steps is not None and self.lr_schedule != "wsd":
            raise ValueError(
                f"decay_steps {self.decay_steps} is only for lr_schedule wsd, not {self.lr_schedule}: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _longest_first_judged(self) -> Job:
        if self.sequence_lengths and max(self.sequence_lengths) != self.sequence_length:
            raise ValueError(
                f"sequence_length {self.sequence_length} is not the longest of sequence_lengths "
                f"{list(self.sequence_lengths)}: leave it out"
            )
        return self

    @property
    def profile(self) -> Runtime:
        """The runtime's profile.

        Raises:
            InputError: there is no runtime of this name.
        """
        return load_runtime(self.runtime)

    if not TYPE_CHECKING:  # which knows the fields as arguments

        def __init__(self, **values: Any) -> None:
            """Make a job; raises `InputError` with the name of a missing or wrong value and the rule it breaks."""
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise RefusedValues(error) from None

    @property
    def least_decayed_dims(self) -> int:
        """Minimum number of dimensions of parameters with weight decay; the others are in a separate group without it."""
        has_groups = self.decays == "matrices" and self.weight_decay > 0 and self.runtime == STAGEWRIGHT
        return 2 if has_groups else 0

    @property
    def precision(self) -> Precision:
        """Types of the parameters, gradients and state that the runtime keeps."""
        return replace(self.profile.precision(self.torch_name), num_moments=self.kept.num_moments)

    @property
    def is_plain_adamw(self) -> bool:
        """Whether the optimizer is PyTorch's AdamW with only the options that are fields of the job."""
        return self.optimizer == ADAMW_NAME and not self.optimizer_options

    @property
    def has_factory(self) -> bool:
        """Whether the optimizer comes from a factory."""
        return split_factory(self.optimizer) is not None

    @property
    def kept(self) -> OptimizerState:
        """The state that the optimizer keeps, and its memory traffic.

        Raises:
            InputError: it was not measured yet.
        """
        if self.is_plain_adamw:
            return ADAMW
        if self.optimizer_state is None:
            raise InputError(
                f"the state of optimizer '{self.optimizer}' is not in the job (optimizer_state): plan again, which measures "
                "it with torch"
            )
        return self.optimizer_state

    def with_state(self, model: ModelReference | None = None) -> Job:
        """Return this job with the state that its optimizer keeps for the parameters of `model`, measured with torch; that
        runs the code of a factory, which may distinguish parameters by their names.

        Raises:
            InputError: there is no such optimizer or option, or the runtime is predicted only with AdamW.
        """
        if self.is_plain_adamw:
            return self.model_copy(update={"optimizer_state": None}) if self.optimizer_state else self
        if self.runtime != STAGEWRIGHT:
            raise InputError(
                f"runtime '{self.runtime}' is predicted only with AdamW: leave out the optimizer and its options, or the "
                "runtime"
            )
        if self.optimizer_state is not None:
            return self
        from stagewright.tracing.optimizers import dims_of_parameters, state_fields

        named: dict[str, int] = {}
        if model is not None and self.has_factory:
            named = dims_of_parameters(model, self.sequence_length, self.torch_name)
        state = state_fields(
            self.optimizer, self.learning_rate, self.optimizer_arguments, self.precision_of_weights,
            takes_decay=self.weight_decay > 0, named=named,
        )  # fmt: skip
        return self.model_copy(update={"optimizer_state": OptimizerState.model_validate(state)})

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """Arguments of the optimizer besides learning rate and weight decay."""
        adamw = {"betas": self.betas, "eps": self.eps} if self.optimizer == ADAMW_NAME else {}
        return adamw | self.optimizer_options

    @property
    def precision_of_weights(self) -> str:
        """The type, as torch names it, of the weights that the optimizer updates."""
        return self.profile.precision(self.torch_name).state

    def rewritten(self, graph: OperatorGraph) -> OperatorGraph:
        """Return `graph` as the job's runtime runs it and its optimizer trains it."""
        rewritten = self.profile.rewrite(graph)
        return (
            rewritten
            if self.is_plain_adamw
            else replace(rewritten, facts=rewritten.facts | {FACT: self.kept})
        )

    def divides_tokens(self, sequence_parallel: bool) -> bool:
        """Return whether tensor-parallel ranks compute experts for different tokens."""
        return sequence_parallel and self.profile.experts != "split"

    def check_whole(self, tp: int, level: int) -> None:
        """Raise `InputError` where ranks would have parts of parameters that the optimizer needs as a whole."""
        if (tp > 1 or level > 0) and not self.kept.is_elementwise:
            what = f"--tp {tp} gives" if tp > 1 else f"--zero {level} gives"
            raise InputError(
                f"{what} ranks parts of parameters, and optimizer '{self.optimizer}' needs them as a whole: leave it out, "
                "or train with one that works on every element by itself, such as adamw or sgd"
            )

    def rate_of(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        >>> job = Job(global_batch=8, sequence_length=8, learning_rate=2.0, lr_schedule="linear", num_steps=4)
        >>> [job.rate_of(step) for step in range(4)]
        [2.0, 1.5, 1.0, 0.5]
        """
        return self.learning_rate * rate_fraction(
            step, self.num_steps, self.lr_schedule, self.warmup_steps, self.decay_steps, self.final_fraction
        )

    def length_of(self, step: int) -> int:
        """Return the tokens per sample of a step.

        >>> job = Job(global_batch=8, sequence_lengths=(512, 512, 4096))
        >>> job.sequence_length, [job.length_of(step) for step in range(4)]
        (4096, [512, 512, 4096, 512])
        """
        if not self.sequence_lengths:
            return self.sequence_length
        return self.sequence_lengths[step % len(self.sequence_lengths)]

    @property
    def unit(self) -> str:
        """What rates count: ``tokens``, or ``samples`` that are not made of tokens, such as images."""
        return "samples" if self.sequence_length == 1 and not self.sequence_lengths else "tokens"

    @property
    def shares(self) -> dict[int, float]:
        """The fraction of steps by sequence length, shortest first.

        >>> Job(global_batch=8, sequence_lengths=(512, 4096, 512, 512)).shares
        {512: 0.75, 4096: 0.25}
        """
        lengths = self.sequence_lengths or (self.sequence_length,)
        return {length: count / len(lengths) for length, count in sorted(Counter(lengths).items())}

    def with_rates(self, num_steps: int | None = None, **rates: Any) -> Job:
        """Return this job with `num_steps` and the learning rate fields in `rates`, on which predictions do not depend.

        Fields that are None keep their values. Raises `InputError` for an impossible value.
        """
        changes = {name: value for name, value in rates.items() if value is not None}
        if changes.get("lr_schedule", "wsd") != "wsd":
            changes.setdefault("decay_steps", None)
        return validated(
            Job, {**self.model_dump(), **changes, "num_steps": num_steps or self.num_steps}, "the job"
        )

    def at_length(self, length: int) -> Job:
        """Return this job with all batches of one sequence length."""
        return self.model_copy(update={"sequence_length": length, "sequence_lengths": ()})

    @property
    def torch_name(self) -> str:
        """The dtype of parameters as torch and the operator graph name it."""
        return _TORCH_NAMES[self.dtype]

    @property
    def computed_in(self) -> str:
        """The dtype of matmuls: that of parameters, or the one they are cast to."""
        return self.matmul_precision or self.autocast or self.torch_name

    @property
    def matmul_precision(self) -> str | None:
        """The precision of matmuls where it is not a type of tensors in the graph, else None."""
        return self.dtype if self.dtype in ("tf32", "fp8") else None

    @property
    def autocast(self) -> str | None:
        """The type that autocast casts to, as torch names it; None without autocast."""
        return "bfloat16" if self.dtype == "autocast" else None

    @property
    def not_run(self) -> str | None:
        """A message about what in this job is predicted but not run, with the remedy; None if all of it runs."""
        if self.dtype == "fp8":
            return "training in fp8 is predicted, not run: plan with --dtype bf16"
        if self.runtime != STAGEWRIGHT:
            return f"it is predicted for runtime '{self.runtime}', which Stagewright does not run: plan without --runtime"
        return None

    def uses_lanes(self, cluster: Cluster) -> bool:
        """Return whether transfers run on lanes in the order issued (`schedule.lanes`): on GPUs in our own runtime."""
        return self.runtime == STAGEWRIGHT and cluster.kind != "cpu"

    def traced(self, target: str) -> dict[str, Any]:
        """Return the arguments of `stagewright.tracing.cache.trace` for this job, for devices of type `target`."""
        return {
            "sequence_length": self.sequence_length,
            "dtype": self.torch_name,
            "target": target,
            "autocast": self.autocast,
            **({"further_inputs": APART} if self.documents_apart else {}),
            **self.profile.traced,
        }

    def usable_bytes(
        self, device: Device, cluster: Cluster | None = None, communicator_bytes: int = 0
    ) -> int:
        """Return the bytes that the allocator of `device` may reserve: the limit, or the memory less reserve, context,
        communicators and what is to be left free.

        On a `cluster` with several kinds of devices, which share one limit, the smaller of the two. Where all devices are
        equal, a limit above their memory is taken at face value.
        """
        usable = device.usable_with_communicators(communicator_bytes)
        if self.memory_limit is None:
            return int((1 - self.memory_to_spare) * usable)
        is_mixed = cluster is not None and not cluster.is_homogeneous
        return min(self.memory_limit, usable) if is_mixed else self.memory_limit

    def peak_of(self, device: Device) -> float:
        """Return the peak FLOP/s of a device at the matmuls of this job.

        Raises:
            InputError: the device has no figure for it.
        """
        peak = device.peak_flops.get(self.computed_in)
        if peak is None:
            supported = ", ".join(device.peak_flops.available())
            raise InputError(
                f"device '{device.name}' has no peak for {self.dtype}: train in one of {supported}, or add the figure "
                "to its description"
            )
        return peak

    def check_runtime(self) -> None:
        """Check the runtime before any expensive work.

        Raises:
            InputError: there is no such runtime, or it does not support this precision or compilation.
        """
        self.profile.check_dtype(self.dtype)
        if self.compiled and self.profile.kernels:
            raise InputError(
                f"runtime '{self.runtime}' defines itself which operators are fused: leave out --compiled, or --runtime"
            )

    def check_stages(self) -> None:
        """Raise as `check_runtime`, and for a runtime without stages, which cannot be searched."""
        self.check_runtime()
        if self.profile.loop is not None:
            raise InputError(
                f"runtime '{self.runtime}' runs on one device, where there is nothing to search: predict it with "
                "`stagewright estimate`, or name another --runtime"
            )

    def check_devices(self, cluster: Cluster) -> None:
        """Raise as `peak_of` for each kind of device, before any expensive work."""
        for group in cluster.nodes:
            self.peak_of(group.device)

    def beyond(self, device: Device) -> str | None:
        """Return a warning if the memory limit exceeds what `device` can give, else None."""
        if self.memory_limit is None or self.memory_limit <= device.usable_bytes:
            return None
        return (
            f"the memory limit of {format_bytes(self.memory_limit)} is more than the "
            f"{format_bytes(device.usable_bytes)} that a {device.name} can give: plans that need more do not run on it"
        )


def given_job(job: Job | Mapping[str, Any] | str | Path) -> Job:
    """Return the job, validated if it is a dict and loaded if it is a file.

    Raises:
        InputError: as `load_job` does.
        TypeError: it is nothing of that.
    """
    if isinstance(job, Job):
        return job
    if isinstance(job, Mapping):
        return load_job(None, job)
    if not isinstance(job, str | Path):
        raise TypeError(
            f"job is of type {type(job).__name__}: pass a stagewright.Job, a dict of its fields such as "
            "{'global_batch': 64, 'sequence_length': 2048}, or the path of a job.toml"
        )
    return load_job(job)


def load_job(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Job:
    """Return the job of a TOML file, if one is given, with the keys of `overrides` replaced.

    Raises:
        InputError: the file cannot be read, or a value is wrong; the message has the key, the value and the rule.
    """
    document = {} if path is None else read_toml(path, "job file")
    origin = "the job" if path is None else str(path)
    return validated(Job, {**document, **(overrides or {})}, origin)
