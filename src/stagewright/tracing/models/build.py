"""Construction of the model that a reference names, with its loss and the inputs of one microbatch."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from stagewright.errors import InputError, nearest
from stagewright.limits import MOST_PARAMETERS, MOST_SAMPLES, MOST_TOKENS, check_count
from stagewright.tracing.keys import key
from stagewright.tracing.models import grouped_mm
from stagewright.tracing.models.deferred import DrawingByPlace, NotOnTape, Tape
from stagewright.tracing.models.quantised import FP8, unconverted
from stagewright.tracing.models.reference import ModelReference
from stagewright.tracing.private import (
    FakeTensor,
    FakeTensorMode,
    converting_in_place,
    depends_on_data,
    without_modes,
)

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float64", "float16")}


@dataclass(frozen=True)
class MicrobatchShape:
    """Shape and precision of a microbatch: samples, tokens per sample, type of parameters, and optional further inputs."""

    microbatch_size: int
    sequence_length: int
    dtype: str = "float32"
    further_inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count(self.microbatch_size, MOST_SAMPLES, "microbatch_size", "give another number of samples")
        check_count(self.sequence_length, MOST_TOKENS, "sequence_length", "give another number of tokens")
        if self.dtype not in _DTYPES:
            supported = ", ".join(_DTYPES)
            raise InputError(
                f"unknown dtype '{self.dtype}'{nearest(self.dtype, _DTYPES)}: one of {supported}"
            )

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
    further_inputs: tuple[str, ...] = (),
) -> BuiltModel:
    """Return the model of `reference` on the CPU, in training mode, with `dtype` parameters drawn from `seed`.

    The result of a random operator depends on `seed` and on the number of earlier ones, so that `DeferredModel` can create
    single tensors alike; code of a factory that seeds torch, or has its own generator, draws from that. Numpy and Python
    draw from `seed` too, unless that code seeds them.

    With `fake` (or a `fake_mode`) nothing is allocated or initialised: parameters and inputs are fake tensors. A causal
    language model takes `further_inputs`, see `stagewright.tracing.cache.trace`. Raises `InputError` for whatever the
    model class or factory rejects.
    """
    microbatch = MicrobatchShape(microbatch_size, sequence_length, dtype, further_inputs)
    if fake and fake_mode is None:
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode = DrawingByPlace(_reseeding(seed)) if fake_mode is None else fake_mode
    try:
        return _build(reference, microbatch, mode, fake_mode is None, seed)
    except InputError as error:
        if fake_mode is None or not depends_on_data(error.__cause__):
            raise
    # The initialisation reads values.
    whole = _build(reference, microbatch, DrawingByPlace(_reseeding(seed)), True, seed)
    inputs: dict[str, Tensor] = {name: fake_mode.from_tensor(tensor) for name, tensor in whole.inputs.items()}
    return BuiltModel(fake_twin(whole.module, fake_mode), inputs, whole.num_tokens)


def fake_twin(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """Return a copy of `model` whose parameters and buffers are fake; the memory of the original is not copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if isinstance(parameter, FakeTensor):
            return model
        memo[id(parameter)] = torch.nn.Parameter(
            mode.from_tensor(parameter.detach()), parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer)
    return copy.deepcopy(model, memo)


class DeferredModel:
    """A model whose tensors are created on request, equal to those of `build` with the same seed.

    `module` is fake: it has names and layouts, but no contents.
    """

    def __init__(
        self,
        reference: ModelReference,
        microbatch_size: int,
        sequence_length: int,
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        self._microbatch = MicrobatchShape(microbatch_size, sequence_length, dtype)
        self._whole = functools.cache(lambda: build(reference, microbatch_size, sequence_length, dtype, seed))
        self._tape: Tape | None = Tape(_reseeding(seed))
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                built = _build(reference, self._microbatch, self._tape, True, seed)
        except Exception:  # e.g. initialisation that reads values; a faulty model fails again, unfaked
            self._tape, built = None, self._whole()
        self.module = built.module
        self.inputs = self._made(built.inputs, lambda whole: whole.inputs)

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        wanted, named = dict.fromkeys(names), _named(self.module)
        return self._made({name: named[name] for name in wanted}, lambda whole: _named(whole.module))

    def _made(
        self, wanted: Mapping[str, Tensor], of_whole: Callable[[BuiltModel], Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        if self._tape is not None:
            with contextlib.suppress(NotOnTape):
                return self._tape.tensors(wanted)
        tensors = of_whole(self._whole())
        return {name: tensors[name].detach() for name in wanted}


def _add_adapters(module: nn.Module, reference: ModelReference, microbatch: MicrobatchShape) -> None:
    from stagewright.tracing.models.adapters import add_adapters
    from stagewright.tracing.models.quantised_base import quantise_base

    assert reference.lora is not None and isinstance(module.net, nn.Module)
    default = torch.get_default_dtype()
    torch.set_default_dtype(microbatch.torch_dtype)
    try:
        add_adapters(module.net, reference.lora, reference.name)
    finally:
        torch.set_default_dtype(default)
    if (base := reference.lora.base) is not None:
        plain = unconverted(reference.config or {}) if base == FP8 else ()
        quantise_base(module.net, base, plain)


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _reseeding(seed: int) -> Callable[[int], None]:
    # Only of the CPU: for missing devices torch records the call site, which takes longer than to draw.
    return lambda place: torch.default_generator.manual_seed(key(seed, place)) and None


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of torch, numpy and Python inside, alike in every process; restore their states at the end."""
    states = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(seed, _BUILDING))
            numpy.random.seed(key(seed, _BUILDING) % 2**32)
            random.seed(key(seed, _BUILDING))
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


_BUILDING = 2**62
"""Stands for the number of a draw, so that no draw has the same seed."""


def _build(
    reference: ModelReference,
    microbatch: MicrobatchShape,
    mode: contextlib.AbstractContextManager[Any],
    initialise: bool,
    seed: int,
) -> BuiltModel:
    grouped_mm.allow_tracing()
    if reference.kind == "factory":
        from stagewright.tracing.models.factories import function_of

        with without_modes(), seeded(0):  # whichever build imports it, and real tensors as the module's own
            function_of(reference.text)
    with seeded(seed), mode, converting_in_place():
        if reference.kind == "factory" and microbatch.further_inputs:
            raise InputError(
                f"factory '{reference.text}' makes its own inputs, so nothing can be added to them: plan without "
                "documents_apart, or let it return position_ids and labels among them"
            )
        if reference.kind == "factory":
            from stagewright.tracing.models.factories import build_from_factory

            module, inputs, num_tokens = build_from_factory(reference, microbatch)
        else:
            from stagewright.tracing.models.from_config import build_from_config

            module, inputs, num_tokens = build_from_config(reference, microbatch, initialise)
            if reference.lora is not None:
                _add_adapters(module, reference, microbatch)
    count = sum(parameter.numel() for parameter in module.parameters())
    if count > MOST_PARAMETERS:
        raise InputError(
            f"'{reference.name}' has {count:,} parameters, more than the {MOST_PARAMETERS:,} of any model: make it smaller"
        )
    return BuiltModel(module.train(), inputs, num_tokens)
