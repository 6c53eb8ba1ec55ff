"""Microbatches of tokens: sample `index` of `step` is the same whatever the plan, and made by each rank that needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from stagewright.execution.data.order import Order, number_of
from stagewright.execution.data.samples import Sample, Samples
from stagewright.graph import OperatorGraph
from stagewright.planning.job import Job
from stagewright.tracing.arguments import DTYPES
from stagewright.tracing.models.losses import IGNORED


class TokenBatches:
    """Samples of one or several sources, mixed by weight.

    Args:
        sources: of each the samples of a length.
        weights: of the sources.
        job: says seed, batch and lengths of steps.
    """

    def __init__(
        self, sources: Sequence[Callable[[int], Samples]], weights: Sequence[float], job: Job
    ) -> None:
        self._sources, self._weights, self._job = sources, weights, job
        self._of_length: dict[int, tuple[list[Samples], Order]] = {}

    def microbatch(
        self, step: int, first: int, graph: OperatorGraph, names: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Those of the inputs that are named, or all, from sample `first` of the step on."""
        metas = {name: graph.values[value].meta for name, value in graph.inputs.items()}
        wanted = {name: meta for name, meta in metas.items() if names is None or name in names}
        if not wanted:
            return {}
        rows, length = next(iter(metas.values())).shape[:2]
        samples = [self._sample(step, first + row, length) for row in range(rows)]
        return {
            name: torch.from_numpy(np.stack([_row(name, sample) for sample in samples])).to(
                DTYPES[meta.dtype]
            )
            for name, meta in wanted.items()
        }

    def _sample(self, step: int, index: int, length: int) -> Sample:
        if length not in self._of_length:
            of_length = [samples(length) for samples in self._sources]
            order = Order([len(samples) for samples in of_length], self._weights, self._job.seed)
            self._of_length[length] = of_length, order
        of_length, order = self._of_length[length]
        job = self._job
        lengths = job.sequence_lengths
        source, place = order[number_of(step, lengths, job.global_batch) + index]
        return of_length[source][place]


def counted(labels: torch.Tensor, is_next: bool) -> torch.Tensor:
    """How many of `labels` (batch, sequence) a loss counts: all that are given, or, where each place predicts the next,
    those behind the first."""
    return ((labels[:, 1:] if is_next else labels) != IGNORED).sum()


def _row(name: str, sample: Sample) -> np.ndarray:
    if name == "position_ids":
        return np.arange(len(sample.ids)) if sample.positions is None else sample.positions
    if name == "labels" and sample.learnt is not None:
        return np.where(sample.learnt, sample.ids, IGNORED)
    return sample.ids
