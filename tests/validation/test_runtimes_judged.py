"""Published runs of other runtimes, as `stagewright estimate --runtime` predicts them: a part of each table."""

from __future__ import annotations

import csv
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import runtimes
from verdict import summary


@pytest.mark.parametrize(
    ("name", "every", "figures"),
    [
        ("megatron_core_b200.csv", 5, ("time", "allocated")),
        ("zero_bubble_measured.csv", 9, ("memory",)),
        pytest.param("mpt_fsdp_llmfoundry.csv", 20, ("time",), marks=pytest.mark.slow),
        ("torchtitan_benchmarks.csv", 5, ("reserved",)),
        pytest.param("megatron_bridge_performance.csv", 13, ("time",), marks=pytest.mark.slow),
        pytest.param("megatron_moe_zoo.csv", 3, ("time",), marks=pytest.mark.slow),
        pytest.param("megatron_a100_single_node.csv", 150, (runtimes.COMPOSED,), marks=pytest.mark.slow),
    ],
)
def test_published_runs_stay_near_their_bars(name: str, every: int, figures: tuple[str, ...]) -> None:
    source = runtimes.SOURCES[name]
    with (runtimes.DATA / source.folder / name).open(newline="", encoding="utf-8") as file:
        records = list(csv.DictReader(file))[::every]
    left_out: Counter[str] = Counter()
    with ThreadPoolExecutor(1) as pool:
        found = [row for _, row in runtimes.rows(source, records, left_out, pool)]
    for figure in figures:
        judged = [row for row in found if row.group == figure]
        assert summary(figure, judged).mean <= 1.3 * source.bars[figure]
    assert len(found) + sum(left_out.values()) >= len(records)


def test_rows_that_cannot_be_predicted_are_counted_with_their_reason() -> None:
    left_out: Counter[str] = Counter()
    record = {"system": "MegaScale"}
    with ThreadPoolExecutor(1) as pool:
        assert (
            list(runtimes.rows(runtimes.SOURCES["megascale_tab2_fig9.csv"], [record], left_out, pool)) == []
        )
    assert left_out == {"MegaScale's own kernels and network are not known": 1}


def test_rows_that_cannot_be_read_are_counted_too() -> None:
    left_out: Counter[str] = Counter()
    record = {
        "technique": "FSDP",
        "seq_len": "8192",
        "table": "1",
        "local_batch": "1",
        "tps_per_gpu": "1",
        "schedule": "",
    }
    widths = dict.fromkeys(("n_gpus", "tp", "pp", "cp"), "1")
    strange = [{}, record, record | widths | {"model": "Llama9-8B"}]
    with ThreadPoolExecutor(1) as pool:
        assert (
            list(runtimes.rows(runtimes.SOURCES["torchtitan_benchmarks.csv"], strange, left_out, pool)) == []
        )
    assert sorted(left_out) == [
        f"its row cannot be read: KeyError '{key}'" for key in ("Llama9-8B", "n_gpus", "technique")
    ]
