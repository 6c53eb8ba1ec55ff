"""Batches: sample `index` of `step` is the same whatever the plan, and made by each rank for itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from stagewright.errors import InputError
from stagewright.execution.data_identity import tokens_of
from stagewright.execution.random import key
from stagewright.graph import OperatorGraph
from stagewright.tracing.arguments import DTYPES

_TEXT_INPUTS = {"input_ids", "labels", "decoder_input_ids"}


class TextBatches:
    """Windows at random places of a text; bytes are tokens. A ``.npy`` file holds token ids instead. Raises `InputError`
    where the file cannot be read or is shorter than one sample."""

    def __init__(
        self, path: str | Path, sequence_length: int, seed: int, vocabulary: int | None = None
    ) -> None:
        self.tokens = tokens_of(path)
        if len(self.tokens) <= sequence_length:
            raise InputError(
                f"data file '{path}' holds {len(self.tokens)} tokens, fewer than one sample of {sequence_length + 1}: "
                "give a longer text or a smaller sequence length"
            )
        least, largest = int(self.tokens.min()), int(self.tokens.max())
        if least < 0:
            text = f"data file '{path}' holds token {least}, but token ids begin at 0: leave such tokens out"
            raise InputError(text)
        if vocabulary is not None and largest >= vocabulary:
            raise InputError(
                f"data file '{path}' holds token {largest}, but the model's vocabulary has {vocabulary}: tokenise the "
                "text for this model and give the ids as a .npy file"
            )
        self.sequence_length = sequence_length
        self.seed = seed

    def microbatch(self, step: int, first: int, graph: OperatorGraph) -> dict[str, torch.Tensor]:
        found = {}
        for name, value in graph.inputs.items():
            meta = graph.values[value].meta
            if name not in _TEXT_INPUTS or meta.dtype not in ("int64", "int32"):
                raise InputError(
                    f"the model's input '{name}' ({meta}) is not made of tokens: run with synthetic data (no --data)"
                )
            rows = [self._window(step, first + row, meta.shape[-1]) for row in range(meta.shape[0])]
            found[name] = torch.from_numpy(np.stack(rows)).to(DTYPES[meta.dtype])
        return found

    def _window(self, step: int, sample: int, length: int) -> np.ndarray:
        start = key(self.seed, step, sample, 0) % (len(self.tokens) - length)
        return np.asarray(self.tokens[start : start + length], dtype=np.int64)


class SyntheticBatches:
    """Random numbers in the range of the model's example inputs."""

    def __init__(self, examples: Mapping[str, torch.Tensor], seed: int) -> None:
        integers = {name: tensor for name, tensor in examples.items() if not tensor.is_floating_point()}
        self.bounds = {name: int(tensor.max()) + 1 for name, tensor in integers.items()}
        self.seed = seed

    def microbatch(self, step: int, first: int, graph: OperatorGraph) -> dict[str, torch.Tensor]:
        found = {}
        for place, (name, value) in enumerate(sorted(graph.inputs.items())):
            meta = graph.values[value].meta
            dtype = DTYPES[meta.dtype]
            rows, shape = [], meta.shape[1:]
            for row in range(meta.shape[0]):
                generator = torch.Generator().manual_seed(key(self.seed, step, first + row, place))
                if dtype.is_floating_point:
                    rows.append(torch.randn(shape, generator=generator, dtype=torch.float64))
                else:
                    bound = max(self.bounds.get(name, 2), 1)
                    rows.append(torch.randint(0, bound, shape, generator=generator))
            found[name] = torch.stack(rows).to(dtype)
        return found
