"""Published runs of pipelines: which are judged and what is left out, and the simulator against another one."""

from __future__ import annotations

import csv
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import other_pipelines
import pytest
import runtimes
import schedule_reference
from verdict import summary

FOLDER = runtimes.DATA / "pipelines"


def records(name: str) -> list[runtimes.Record]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "judged"),
    [
        ("nanotron_bench_cluster.csv", 14),
        ("torchtitan_autopartition_3090.csv", 34),
        ("flagperf_pipelines.csv", 10),
        ("roundpipe_consumer_gpus.csv", 9),
        ("ccl_bench_training.csv", 31),
        ("ccl_search_trials.csv", 23),
        ("automodel_goldens.csv", 1),
        ("issue_thread_points.csv", 2),
    ],
)
def test_every_row_is_asked_or_left_out_with_a_reason(name: str, judged: int) -> None:
    asked = [other_pipelines.SOURCES[name].reader(record) for record in records(name)]
    assert sum(not isinstance(one, str) for one in asked) == judged
    assert all(len(one) > 10 for one in asked if isinstance(one, str))


def test_makespans_are_those_of_another_simulator() -> None:
    rows = list(schedule_reference.rows())
    bound = [row for row in rows if row.group != "roundpipe"]
    assert len(bound) == 7 and all(abs(row.error) < 2e-4 for row in bound)
    assert summary("all", rows).mean < schedule_reference.BAR


def test_rows_of_a_pair_differ_in_their_cut_alone() -> None:
    pairs = Counter(
        tuple(record[key] for key in ("model", "hidden", "layers", "schedule"))
        for record in records("torchtitan_autopartition_3090.csv")
    )
    assert set(pairs.values()) == {2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nanotron_bench_cluster.csv", "torchtitan_autopartition_3090.csv"])
def test_published_pipelines_stay_near_their_bars(name: str) -> None:
    source = other_pipelines.SOURCES[name]
    with ThreadPoolExecutor(1) as pool:
        found = [row for _, row in runtimes.rows(source, records(name), Counter(), pool)]
    for figure, bar in source.bars.items():
        assert summary(figure, [row for row in found if row.group == figure]).mean <= bar
