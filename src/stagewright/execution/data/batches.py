"""Microbatches of data: sample `index` of `step` is the same under every plan, and made by each rank that needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from stagewright.errors import InputError
from stagewright.execution.data.order import OnceThrough, SampleOrder, number_of
from stagewright.execution.data.prepared import PreparedData, PreparedSource
from stagewright.execution.data.samples import Sample, Samples, Windows, samples_of
from stagewright.execution.data.store import open_store
from stagewright.execution.data.user_dataset import UserSample, user_samples
from stagewright.execution.data_identity import tokens_of
from stagewright.graph import OperatorGraph
from stagewright.graph.tensor import TensorMeta
from stagewright.planning.job import Job
from stagewright.tracing.arguments import DTYPES
from stagewright.tracing.models.losses import IGNORED


class Batches:
    """Samples of one or several sources, mixed by weight.

    Args:
        sources: for each source, a function that returns its samples of a length.
        weights: weights of the sources.
        job: the job with seed, batch size and sequence lengths of steps.
        is_once: whether to take every sample once, in the order of the sources, ignoring weights: for evaluation.
    """

    def __init__(
        self,
        sources: Sequence[Callable[[int], Samples]],
        weights: Sequence[float],
        job: Job,
        is_once: bool = False,
    ) -> None:
        self._sources, self._weights, self._job, self._is_once = sources, weights, job, is_once
        self._of_length: dict[int, tuple[list[Samples], SampleOrder | OnceThrough]] = {}

    @property
    def num_samples(self) -> int:
        """Number of samples of all sources, at the job's longest sequence length. Raises `InputError` where a source has no
        known size."""
        sizes = [samples(self._job.sequence_length).size for samples in self._sources]
        if any(size is None for size in sizes):
            raise InputError("evaluation needs data of known size: give its dataset a __len__")
        return sum(size for size in sizes if size is not None)

    def microbatch(
        self, step: int, first: int, graph: OperatorGraph, names: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the inputs with these `names`, or all inputs, from sample `first` of the step on."""
        metas = {name: graph.values[value].meta for name, value in graph.inputs.items()}
        wanted = [name for name in metas if names is None or name in names]
        rows = metas[wanted[0]].shape[0] if wanted else 0
        samples = [self._sample(step, first + row) for row in range(rows)]
        return {name: torch.stack([row_of(sample, name, metas) for sample in samples]) for name in wanted}

    def open(self, step: int) -> tuple[list[Samples], SampleOrder | OnceThrough]:
        """Return the samples of each source for the length of a step, and their order; both are made at first use."""
        length = self._job.length_of(step)
        if length not in self._of_length:
            of_length = [samples(length) for samples in self._sources]
            sizes = [samples.size for samples in of_length]
            once = OnceThrough([size or 0 for size in sizes]) if self._is_once else None
            self._of_length[length] = of_length, once or SampleOrder(sizes, self._weights, self._job.seed)
        return self._of_length[length]

    def _sample(self, step: int, index: int) -> Sample | UserSample:
        job = self._job
        of_length, order = self.open(step)
        source, place = order[number_of(step, job.sequence_lengths, job.global_batch) + index]
        return of_length[source][place]


def row_of(sample: Sample | UserSample, name: str, metas: Mapping[str, TensorMeta]) -> torch.Tensor:
    """Return a sample's row of the model's input `name`; `metas` are the layouts of all inputs in a microbatch."""
    if isinstance(sample, UserSample):
        return sample.row(name, list(metas), metas[name])
    return torch.from_numpy(_row(name, sample)).to(DTYPES[metas[name].dtype])


def _row(name: str, sample: Sample) -> np.ndarray:
    if name == "position_ids":
        return np.arange(len(sample.ids)) if sample.positions is None else sample.positions
    if name == "labels" and sample.learnt is not None:
        return np.where(sample.learnt, sample.ids, IGNORED)
    return sample.ids


def counted(labels: torch.Tensor, is_next: bool) -> torch.Tensor:
    """Return the number of `labels` (batch, sequence) that a loss counts: all that are not masked, or, where each position
    predicts the next, those after the first position."""
    return ((labels[:, 1:] if is_next else labels) != IGNORED).sum()


def open_batches(data: PreparedData, job: Job, is_once: bool = False) -> Batches:
    """Return the microbatches of a job, or with `is_once` every sample once, for evaluation. Raises `InputError` where
    prepared data no longer exists."""
    samples = [_samples_of(source, data.is_apart, job.seed) for source in data.sources]
    return Batches(samples, [source.weight for source in data.sources], job, is_once)


def _samples_of(source: PreparedSource, is_apart: bool, seed: int) -> Callable[[int], Samples]:
    """Return a function from length to samples."""
    if source.kind == "factory":
        return lambda length: user_samples(source.path, length, seed)
    if source.kind == "tokens":
        tokens = tokens_of(Path(source.path))
        return lambda length: Windows(tokens, length)
    store = open_store(Path(source.path))
    return lambda length: samples_of(store, length, seed, is_apart)
