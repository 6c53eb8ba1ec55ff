"""How many configurations a search fits: each takes up to seconds of a large model, so that their number is its time."""

from __future__ import annotations

from typing import Any

import pytest
from small_devices import with_room

from stagewright.cluster import Cluster, load_cluster
from stagewright.planning.fitters import OperatorFitter
from stagewright.planning.memory.fitting import Fit
from stagewright.planning.search import plan
from stagewright.units import MIB


def small() -> Cluster:
    whole = load_cluster("8x-h100")
    (node,) = whole.nodes
    return whole.model_copy(
        update={"nodes": (node.model_copy(update={"device": with_room(node.device, 900 * MIB)}),)}
    )


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "tokens", "most"),
    [("gpt2", small(), 32, 512, 75), ("llama-3-70b", load_cluster("64x8x-h100"), 1024, 8192, 55)],
    ids=["gpt2", "llama-3-70b"],
)
def test_a_search_fits_few_configurations(
    model: str, cluster: Cluster, batch: int, tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_fits, fit = 0, OperatorFitter.fit

    def counted(self: OperatorFitter, *arguments: Any) -> Fit | None:
        nonlocal num_fits
        num_fits += 1
        return fit(self, *arguments)

    monkeypatch.setattr(OperatorFitter, "fit", counted)
    plan(model, cluster, {"global_batch": batch, "sequence_length": tokens})
    assert 0 < num_fits <= most
