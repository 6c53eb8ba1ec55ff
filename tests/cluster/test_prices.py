"""List prices: of devices that the catalog has, dated, each with its seller; and which one dollars are at."""

from __future__ import annotations

from datetime import date

import pytest

from stagewright.cluster import load_cluster
from stagewright.cluster.catalog import device_names
from stagewright.cluster.prices import TERMS, list_prices
from stagewright.planning.cost import price_of, prices_of


@pytest.mark.parametrize("name", [name for name in device_names() if list_prices(name)])
def test_every_price_has_a_seller_and_a_day(name: str) -> None:
    prices = list_prices(name)
    assert set(prices) <= set(TERMS) and "on-demand" in prices
    for price in prices.values():
        assert 0.05 < price.dollars < 20 and "." in price.source and price.date is not None
        assert date(2026, 1, 1) <= date.fromisoformat(price.date) <= date.today()
        assert price.dollars <= prices["on-demand"].dollars


def test_prices_are_of_devices_of_the_catalog() -> None:
    from stagewright.cluster.prices import _document

    assert set(_document()) <= set(device_names())


def test_a_cluster_takes_list_prices_by_default() -> None:
    mixed = load_cluster("8x-h100+8x-a100-80")
    assert price_of(mixed) == (list_prices("h100")["on-demand"].dollars + 1.60) / 2
    assert price_of(mixed, "reserved") == (2.72 + 1.36) / 2
    assert price_of(mixed, "spot") is None and not prices_of(mixed, "spot")


def test_what_a_description_says_comes_first() -> None:
    cluster = load_cluster("8x-h100")
    (group,) = cluster.nodes
    own = group.model_copy(update={"device": group.device.model_copy(update={"price_per_hour": 1.25})})
    assert price_of(cluster.model_copy(update={"nodes": (own,)})) == 1.25
