"""Pipelines that NVIDIA published, and differences between runs: a part of each table."""

from __future__ import annotations

import csv
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import differences
import pipelines
import pytest
import runtimes
from verdict import summary


def records_of(name: str) -> list[runtimes.Record]:
    with (pipelines.DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "test",
    [
        "gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline",
        "gpt3_mcore_te_tp1_pp4_vp1",
        "gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute",
        "gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings_interleaved_no_fusion",
        "gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic",
        "gpt3_mcore_te_tp2_pp1_te_8experts2parallel_overlap_grad_reduce_param_gather_groupedGEMM_1node",
        "t5_mcore_tp1_pp1_vp1_resume_torch",
    ],
)
def test_the_last_rank_allocates_what_megatrons_tests_log(test: str) -> None:
    records = [record for record in records_of("megatron_functional_tests.csv") if record["test"] == test][:2]
    with ThreadPoolExecutor(1) as pool:
        judged = runtimes.rows(pipelines.SOURCES["megatron_functional_tests.csv"], records, Counter(), pool)
        found = [row for _, row in judged]
    assert found and summary("allocated", found).mean < 0.025


def test_as_many_rows_are_judged_and_left_out_as_the_results_say() -> None:
    """`validation/results/pipelines-2026-11-28.md` and `pipelines-2026-11-29.md` state these numbers: change all or none."""
    judged = {}
    for name, source in pipelines.SOURCES.items():
        read = [source.reader(record) for record in records_of(name)]
        judged[name] = sum(not isinstance(item, str) for item in read), len(read)
    assert judged == {
        "megatron_functional_tests.csv": (312, 408), "mlperf_training.csv": (5, 42), "dgxc_benchmarking.csv": (167, 227),
        "megatron_bridge_model_cards.csv": (2, 43),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), [("mlperf_training.csv", 17), ("dgxc_benchmarking.csv", 40)])
def test_published_steps_stay_near_their_bars(name: str, index: int) -> None:
    records = [records_of(name)[index]]
    with ThreadPoolExecutor(1) as pool:
        found = [row for _, row in runtimes.rows(pipelines.SOURCES[name], records, Counter(), pool)]
    assert len(found) == 1 and abs(found[0].error) < 0.12


def test_pairs_differ_in_what_changed_alone() -> None:
    change = next(change for change in differences.CHANGES if change.name == "recomputation")
    with (runtimes.DATA / "megatron_time" / change.table).open(newline="", encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    with ThreadPoolExecutor(1) as pool:
        (pair, *_) = differences.pairs(change, records[:2], pool)
    assert pair.measured == pytest.approx(100 * (1.1 / 1.42 - 1)) and pair.is_right and pair.points < 6
