"""Random samples: the same at the same step, however a plan divides a batch."""

from __future__ import annotations

import pytest
import torch

from stagewright.execution.data.synthetic import SyntheticBatches
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import DeferredModel
from stagewright.tracing.models.reference import resolve


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-bert", "tiny-vit", "tiny-t5"])
def test_a_sample_is_the_same_in_microbatches_of_every_size(name: str) -> None:
    reference, found = resolve(name), {}
    for size in (1, 2, 4):
        batches = SyntheticBatches(DeferredModel(reference, size, 16).inputs, seed=3)
        graph = trace(reference, size, sequence_length=16)
        parts = [batches.microbatch(2, first, graph) for first in range(0, 4, size)]
        found[size] = {one: torch.cat([part[one] for part in parts]) for one in parts[0]}
    for size in (2, 4):
        assert found[size].keys() == found[1].keys()
        assert all(torch.equal(found[size][one], found[1][one]) for one in found[1])
