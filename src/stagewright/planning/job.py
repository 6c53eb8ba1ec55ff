"""The job: what is trained, in which precision, with which optimizer, and in how much memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from stagewright.cluster import Cluster, Device
from stagewright.cluster.strict import StrictModel, parse_amount, validated
from stagewright.documents import read_toml
from stagewright.errors import InputError
from stagewright.estimation.precision import Precision
from stagewright.estimation.runtime import STAGEWRIGHT, Runtime, load_runtime
from stagewright.limits import MOST_BYTES, MOST_SAMPLES, MOST_STEPS, MOST_TOKENS
from stagewright.units import format_bytes

_TORCH_NAMES = {
    "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "fp64": "float64",
    "autocast": "float32",
}  # fmt: skip

APART = ("labels", "position_ids")
"""What a causal language model is given, beside its tokens, of documents that are kept apart."""

_Beta = Annotated[float, Field(ge=0, lt=1)]
_MOST_FACTOR = 1e3
"""Of rates and such, which are below 1 in practice."""
_MOST_SCALE = 2.0**60
"""Of a loss or a norm: their product must stay a number of fp32."""


class Job(StrictModel):
    """One training job; sizes in samples and tokens, memory in bytes.

    `dtype` is the type of parameters and computation. With ``bf16``, gradients are added up in fp32 and the
    optimizer keeps fp32 master weights: 18 bytes a parameter in all; with ``fp32`` it is 16 bytes. With ``autocast``
    parameters are fp32 and the model is computed under bf16 autocast, by the rules of the cluster's devices. ``tf32`` is
    fp32 with products in tf32, ``fp8`` is bf16 with products in fp8 where the device has it, ``fp16`` is as bf16, with a
    scaled loss.

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
    """Tokens per sample, of the longest batches; models without sequences ignore it."""
    sequence_lengths: tuple[Annotated[int, Field(ge=1, le=MOST_TOKENS)], ...] = ()
    """Tokens per sample of the steps, which go through these lengths again and again; a length may be named several times.
    None given: `sequence_length` for all."""
    runtime: str = STAGEWRIGHT
    """Whose execution is predicted: a bundled runtime or the path of a file; plans of the own one run."""
    dtype: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp64", "autocast"] = "bf16"
    compiled: bool = False
    """Whether TorchInductor compiles the functions of the stages, so that operators bound by memory are fused."""
    documents_apart: bool = False
    """Whether documents that share a sample do not see each other: positions begin anew, attention does not cross."""
    optimizer: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0, le=1e30)  # one that is too large shows in the loss
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, le=_MOST_FACTOR)
    weight_decay: float = Field(default=0.1, ge=0, le=_MOST_FACTOR)
    clip_norm: float | None = Field(default=1.0, gt=0, le=_MOST_SCALE)
    """Largest norm of the gradient over all stages; None leaves gradients as they are."""
    loss_scale: float = Field(default=65536.0, gt=0, le=_MOST_SCALE)
    """What the loss is multiplied by at first in fp16; halved when a gradient overflows, and that step left out."""
    loss_scale_window: int = Field(default=2000, ge=1, le=MOST_STEPS)
    """Steps without an overflow after which it is doubled."""
    num_steps: int = Field(default=20, ge=1, le=MOST_STEPS)
    seed: int = Field(default=0, ge=0, lt=2**63)
    memory_limit: Annotated[int | None, BeforeValidator(parse_amount)] = Field(
        default=None, gt=0, le=MOST_BYTES
    )
    """Bytes of a device a plan may use; None: what the device has less its reserve and context."""

    @field_validator("runtime")
    @classmethod
    def _found_from_everywhere(cls, name: str) -> str:
        """A file is named by its whole path, so that a plan finds it again from another folder."""
        return str(Path(name).resolve()) if name.endswith(".toml") else name

    @model_validator(mode="before")
    @classmethod
    def _of_the_longest(cls, document: Any) -> Any:
        """Where only the set of lengths is given, its longest is the job's length."""
        lengths = document.get("sequence_lengths") if isinstance(document, dict) else None
        if not isinstance(lengths, list | tuple) or not lengths or "sequence_length" in document:
            return document
        if not all(type(length) is int for length in lengths):
            raise ValueError(
                f"sequence_lengths = {list(lengths)}: give whole numbers of tokens, as [512, 1024]"
            )
        return {**document, "sequence_length": max(lengths)}

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
        """The runtime.

        Raises:
            InputError: there is none of this name.
        """
        return load_runtime(self.runtime)

    @property
    def precision(self) -> Precision:
        """Types of what the runtime keeps of the parameters."""
        return self.profile.precision(self.torch_name)

    def length_of(self, step: int) -> int:
        """Tokens per sample of a step.

        >>> job = Job(global_batch=8, sequence_lengths=(512, 512, 4096))
        >>> job.sequence_length, [job.length_of(step) for step in range(4)]
        (4096, [512, 512, 4096, 512])
        """
        if not self.sequence_lengths:
            return self.sequence_length
        return self.sequence_lengths[step % len(self.sequence_lengths)]

    @property
    def shares(self) -> dict[int, float]:
        """The part of all steps that has each length, shortest first.

        >>> Job(global_batch=8, sequence_lengths=(512, 4096, 512, 512)).shares
        {512: 0.75, 4096: 0.25}
        """
        named = self.sequence_lengths or (self.sequence_length,)
        return {length: count / len(named) for length, count in sorted(Counter(named).items())}

    def at_length(self, length: int) -> Job:
        """This job with all batches of one length."""
        return self.model_copy(update={"sequence_length": length, "sequence_lengths": ()})

    @property
    def torch_name(self) -> str:
        """The dtype of parameters as torch and the operator graph name it."""
        return _TORCH_NAMES[self.dtype]

    @property
    def computed_in(self) -> str:
        """The dtype of matrix products: that of parameters, or the one they are cast to."""
        return self.products or self.autocast or self.torch_name

    @property
    def products(self) -> str | None:
        """The precision that matrix products are computed in, where it is no type of tensors in the graph."""
        return self.dtype if self.dtype in ("tf32", "fp8") else None

    @property
    def autocast(self) -> str | None:
        """What autocast casts to, as torch names it; None without autocast."""
        return "bfloat16" if self.dtype == "autocast" else None

    @property
    def not_run(self) -> str | None:
        """What of this job is predicted but not run, and what to do about it; None if all of it runs."""
        if self.dtype == "fp8":
            return "training in fp8 is predicted, not run: plan with --dtype bf16"
        if self.runtime != STAGEWRIGHT:
            return f"it is predicted for runtime '{self.runtime}', which is not ours to run: plan without --runtime"
        return None

    def traced(self, target: str) -> dict[str, Any]:
        """How `stagewright.tracing.cache.trace` is asked for this job's graph, for devices of type `target`."""
        return {
            "sequence_length": self.sequence_length,
            "dtype": self.torch_name,
            "target": target,
            "autocast": self.autocast,
            **({"further_inputs": APART} if self.documents_apart else {}),
            **self.profile.traced,
        }

    def usable_bytes(self, device: Device, cluster: Cluster | None = None) -> int:
        """Bytes the allocator of `device` may reserve: the limit, or the memory less reserve and context.

        Of a device of a `cluster` of several kinds, for all of which there is one limit, the smaller of the two. Where all
        devices are alike a limit above what they have is taken at its word.
        """
        if self.memory_limit is None:
            return device.usable_bytes
        is_mixed = cluster is not None and not cluster.is_homogeneous
        return min(self.memory_limit, device.usable_bytes) if is_mixed else self.memory_limit

    def peak_of(self, device: Device) -> float:
        """FLOP/s of a device at the products of this job.

        Raises:
            InputError: nothing says what it is.
        """
        peak = device.peak_flops.get(self.computed_in)
        if peak is None:
            known = ", ".join(device.peak_flops.available())
            raise InputError(
                f"device '{device.name}' has no peak for {self.dtype}: train in one of {known}, or add the figure to its "
                "description"
            )
        return peak

    def check_runtime(self) -> None:
        """Before the work that would be lost.

        Raises:
            InputError: there is no such runtime, or it does not train in this precision or compile.
        """
        self.profile.check_dtype(self.dtype)
        if self.compiled and self.profile.kernels:
            raise InputError(
                f"runtime '{self.runtime}' says itself which operators are one kernel: leave out --compiled, or --runtime"
            )

    def check_stages(self) -> None:
        """For searches: raises as `check_runtime`, and for a runtime that knows no stages."""
        self.check_runtime()
        if self.profile.loop is not None:
            raise InputError(
                f"runtime '{self.runtime}' runs on one device, where nothing is to be searched: predict it with "
                "`stagewright estimate`, or name another --runtime"
            )

    def check_devices(self, cluster: Cluster) -> None:
        """Before the work that would be lost: raises as `peak_of` for each kind of device."""
        for group in cluster.nodes:
            self.peak_of(group.device)

    def beyond(self, device: Device) -> str | None:
        """What plans within the limit may need that `device` does not have, as a warning; None if nothing."""
        if self.memory_limit is None or self.memory_limit <= device.usable_bytes:
            return None
        return (
            f"the memory limit of {format_bytes(self.memory_limit)} is more than the "
            f"{format_bytes(device.usable_bytes)} that a {device.name} can give: plans that need more do not run on it"
        )


def load_job(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Job:
    """The job of a TOML file (none: of `overrides` alone), with the keys of `overrides` in place.

    Raises:
        InputError: the file cannot be read, or names the key, the value and the rule it breaks.
    """
    document = {} if path is None else read_toml(path, "job file")
    origin = "the job" if path is None else str(path)
    return validated(Job, {**document, **(overrides or {})}, origin)
