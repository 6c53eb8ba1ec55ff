"""Builds the model a reference names, with the loss inside and the inputs of one microbatch beside it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stagewright.errors import InputError, nearest
from stagewright.tracing.models import grouped_mm
from stagewright.tracing.models.reference import ModelReference

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Job:
    """Shape and precision of one microbatch: samples, tokens per sample, and the type of parameters."""

    microbatch_size: int
    sequence_length: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("microbatch_size", "sequence_length"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"{name} is {value}: give a whole number of at least 1")
        if self.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise InputError(f"unknown dtype '{self.dtype}'{nearest(self.dtype, _DTYPES)}: one of {known}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]


@dataclass
class BuiltModel:
    """A model ready to trace or train.

    `module(**inputs)` returns the scalar mean loss of one microbatch; `inputs` are example inputs, batch
    first; `num_tokens` counts its tokens (a sequence-to-sequence model's source and target tokens, a
    classifier's images, the samples of a factory that takes no sequence length).
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    num_tokens: int


def build(
    reference: ModelReference,
    microbatch_size: int,
    sequence_length: int,
    dtype: str = "float32",
    seed: int = 0,
    fake: bool = False,
    fake_mode: FakeTensorMode | None = None,
) -> BuiltModel:
    """The model of `reference` on the CPU, in training mode, with `dtype` parameters drawn from `seed`.

    With `fake` (or a `fake_mode` to use) nothing is allocated or initialised: parameters and inputs are fake
    tensors. Raises `InputError` for what the model class or factory refuses.
    """
    job = Job(microbatch_size, sequence_length, dtype)
    grouped_mm.allow_tracing()
    if fake and fake_mode is None:
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]), fake_mode or contextlib.nullcontext():
        torch.manual_seed(seed)
        if reference.kind == "factory":
            from stagewright.tracing.models.factories import build_from_factory

            module, inputs, num_tokens = build_from_factory(reference, job)
        else:
            from stagewright.tracing.models.from_config import build_from_config

            module, inputs, num_tokens = build_from_config(reference, job, initialise=fake_mode is None)
    return BuiltModel(module.train(), inputs, num_tokens)
