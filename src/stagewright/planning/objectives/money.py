"""What training to a target takes in days and dollars, by size of cluster and batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stagewright.cluster import Cluster
from stagewright.cluster.prices import Price, Terms, list_prices
from stagewright.errors import InputError

DAY, HOUR = 86_400.0, 3_600.0


@dataclass(frozen=True)
class Target:
    """What is to be reached, as training with a very small batch would need it.

    Args:
        tokens: tokens of a run whose batch is far below critical.
        critical_batch: batch in samples at which twice the tokens are needed; None: every batch needs as many.
    """

    tokens: float
    critical_batch: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("critical batch", self.critical_batch)):
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} of {value}: give a finite number above 0")

    def tokens_with(self, global_batch: int) -> float:
        """Tokens needed with a batch of so many samples.

        Source: McCandlish et al. 2018 (arXiv 1812.06162), equation 2.11: samples grow with 1 + B / B_crit. Ignores: that
        the critical batch grows during training.

        >>> Target(1e9, 100).tokens_with(50)
        1500000000.0
        """
        return self.tokens * (1 + global_batch / self.critical_batch) if self.critical_batch else self.tokens


@dataclass(frozen=True)
class Bill:
    """One way to the target."""

    num_devices: int
    global_batch: int
    tokens: float
    days: float
    dollars: float | None


def bill(
    target: Target,
    global_batch: int,
    tokens_per_second: float,
    num_devices: int,
    price_per_hour: float | None,
) -> Bill:
    """Days and dollars to the target at a rate.

    >>> bill(Target(8.64e9), 8, 1e5, 16, 2.0)
    Bill(num_devices=16, global_batch=8, tokens=8640000000.0, days=1.0, dollars=768.0)
    """
    if tokens_per_second <= 0:
        raise InputError(f"{tokens_per_second} tokens per second reach no target: give a positive rate")
    check_price(price_per_hour)
    needed = target.tokens_with(global_batch)
    seconds = needed / tokens_per_second
    dollars = None if price_per_hour is None else seconds / HOUR * num_devices * price_per_hour
    return Bill(num_devices, global_batch, needed, seconds / DAY, dollars)


def check_price(price_per_hour: float | None) -> None:
    """Raises `InputError` for dollars that nothing costs."""
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise InputError(f"a price of {price_per_hour} dollars an hour: give a finite number, at least 0")


def prices_of(cluster: Cluster, terms: Terms = "on-demand") -> dict[str, Price]:
    """By the name of a kind of device its price: of the cluster's description, else of the catalog's list; without the
    kinds that have none."""
    found = {}
    for device in {group.device.name: group.device for group in cluster.nodes}.values():
        if device.price_per_hour is not None:
            found[device.name] = Price(device.price_per_hour, "the cluster's description", None)
        elif listed := list_prices(device.name).get(terms):
            found[device.name] = listed
    return found


def price_of(cluster: Cluster, terms: Terms = "on-demand") -> float | None:
    """Dollars per device and hour, on average over its kinds; None where one has no price."""
    prices, total = prices_of(cluster, terms), 0.0
    for group in cluster.nodes:
        if group.device.name not in prices:
            return None
        total += prices[group.device.name].dollars * group.count * group.devices_per_node
    return total / cluster.num_devices
