"""Large square matmuls on cards of many kinds against what users measured: the bounds reached."""

from __future__ import annotations

from collections import Counter

from square_matmuls import FITTED, judged
from verdict import summary

from stagewright.cluster import load_cluster


def test_rates_of_cards_stay_within_their_bounds() -> None:
    left_out: Counter[str] = Counter()
    rows = list(judged(left_out=left_out))
    assert (len(rows), left_out.total()) == (129, 1)
    unseen = [row for row in rows if row.half == "other"]
    assert summary("other", unseen).mean < 0.075
    assert all(abs(row.error) < 0.3 for row in unseen)


def test_a_card_is_met_by_the_figures_of_another_of_its_generation() -> None:
    rows = list(judged())
    for name, bound in {"rtx3080-10": 0.04, "rtx5070ti": 0.09, "rtx5060ti-16": 0.09, "rtx5080": 0.16}.items():
        assert summary(name, [row for row in rows if row.group == name]).mean < bound


def test_only_devices_that_say_fit_saw_rows() -> None:
    rows = list(judged())
    assert {row.group for row in rows if row.half == "fit"} == set(FITTED)
    for name in {row.group for row in rows}:
        device = load_cluster(f"1x-{name}").device
        uses = any("square_matmuls.csv" in source for source in device.sources.values())
        assert uses == (name in FITTED)
