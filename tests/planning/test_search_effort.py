"""How many configurations a search fits: each takes up to seconds of a large model, so that their number is its time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from small_devices import with_room

from stagewright.cluster import Cluster, load_cluster
from stagewright.graph import OperatorGraph
from stagewright.planning import best_first
from stagewright.planning.best_first import Search
from stagewright.planning.configuration import Configuration
from stagewright.planning.fitters import OperatorFitter
from stagewright.planning.memory.fitting import Entry, Fit
from stagewright.planning.search import plan
from stagewright.tracing.ahead import Ahead
from stagewright.tracing.cache import to_trace, trace
from stagewright.tracing.models.reference import ModelReference
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


def test_other_processes_get_what_the_search_needs_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given, traced = list[dict[str, Any]](), list[Mapping[str, Any]]()

    class Others(Ahead):
        def start(self, wanted: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]] = ()) -> bool:
            given.extend(map(dict, wanted))
            return True

        def share(self, wanted: Sequence[Mapping[str, Any]]) -> None:
            given.extend(map(dict, wanted))

    def recorded(reference: ModelReference, report: Any, **settings: Any) -> OperatorGraph:
        traced.extend(to_trace(reference, [settings]))
        return trace(reference, **settings)

    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(best_first, "Ahead", Others)
    monkeypatch.setattr(best_first, "cached_trace", recorded)
    job = {"global_batch": 8, "sequence_length": 64}
    plan("tiny-llama", "8x-h100", job, trace=recorded)
    split = [
        settings for settings in traced[2:] if settings.get("tp", 1) == 1 or settings.get("splits_sequence")
    ]
    first = [settings for settings in split if settings["microbatch_size"] <= 2]
    assert {settings.get("tp", 1) for settings in first} == {1, 2, 4, 8}
    assert [settings for settings in first if settings not in given] == []


def test_a_first_plan_is_tried_without_a_pipeline_after_one_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries, calls = list[Configuration](), list[int]()

    class Nothing(OperatorFitter):
        def split(self, entry: Entry) -> tuple[float, Entry]:
            tries.append(entry.configuration)
            return 0.0, entry

        def fit(
            self, entry: Entry, best_s: float, longest_s: float, others: Iterable[Entry] = ()
        ) -> Fit | None:
            return None

    fit_first = Search._fit_first

    def counted(self: Search) -> None:
        calls.append(len(tries))
        with monkeypatch.context() as context:
            context.setattr(best_first, "fitter_of", Nothing)
            fit_first(self)

    monkeypatch.setattr(Search, "_fit_first", counted)
    job = {"global_batch": 16, "sequence_length": 64}
    plan("tiny-llama", "8x-rtx4090", job, patience_s=math.inf)
    bounds = [*calls, len(tries)]
    of_graph = [tries[start:stop] for start, stop in pairwise(bounds)]
    assert sum(map(bool, of_graph)) > 1 and len(tries) <= 6
    for configurations in of_graph:
        assert len(configurations) <= 2
        assert all(configuration.pp == 1 for configuration in configurations[1:])
