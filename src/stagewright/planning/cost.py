"""The best plans by speed or by cost over parts of a cluster, with days, dollars and prices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from stagewright.cluster import Cluster, Device, without
from stagewright.cluster.prices import Price, Terms, list_prices
from stagewright.errors import InputError, PlanError
from stagewright.planning.job import Job
from stagewright.planning.joint.top_configurations import MOST_FILLED
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan
from stagewright.planning.search_result import SearchResult
from stagewright.tracing.models.reference import ModelReference

Objective = Literal["speed", "cost"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
DAY, HOUR = 86_400.0, 3_600.0


@dataclass(frozen=True)
class Bill:
    """The days and dollars of training on `tokens`."""

    num_devices: int
    global_batch: int
    tokens: float
    days: float
    dollars: float | None


def bill(
    tokens: float,
    global_batch: int,
    tokens_per_second: float,
    num_devices: int,
    price_per_hour: float | None,
) -> Bill:
    """Return the days and dollars of training on `tokens` at a rate.

    >>> bill(8.64e9, 8, 1e5, 16, 2.0)
    Bill(num_devices=16, global_batch=8, tokens=8640000000.0, days=1.0, dollars=768.0)
    """
    if tokens_per_second <= 0:
        raise InputError(f"{tokens_per_second} tokens per second never end: give a positive rate")
    check_tokens(tokens)
    check_price(price_per_hour)
    seconds = tokens / tokens_per_second
    dollars = None if price_per_hour is None else seconds / HOUR * num_devices * price_per_hour
    return Bill(num_devices, global_batch, tokens, seconds / DAY, dollars)


def check_tokens(tokens: float) -> None:
    """Raise `InputError` unless `tokens` is positive and finite."""
    if not 0 < tokens < math.inf:
        raise InputError(f"tokens of {tokens}: give a finite number above 0")


def check_price(price_per_hour: float | None) -> None:
    """Raise `InputError` unless the price, if any, is finite and not negative."""
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise InputError(f"a price of {price_per_hour} dollars an hour: give a finite number, at least 0")


def prices_of(cluster: Cluster, terms: Terms = "on-demand") -> dict[str, Price]:
    """Return the price of each kind of device by its name: that of the cluster's description, else of the catalog's list;
    kinds without a price are left out."""
    prices = {}
    for device in {group.device.name: group.device for group in cluster.nodes}.values():
        if device.price_per_hour is not None:
            prices[device.name] = Price(device.price_per_hour, "the cluster's description", None)
        elif listed := list_prices(device.name).get(terms):
            prices[device.name] = listed
    return prices


def price_of(cluster: Cluster, terms: Terms = "on-demand") -> float | None:
    """Return dollars per device and hour, averaged over the devices, or None where a kind has no price."""
    prices, total = prices_of(cluster, terms), 0.0
    for group in cluster.nodes:
        if group.device.name not in prices:
            return None
        total += prices[group.device.name].dollars * group.count * group.devices_per_node
    return total / cluster.num_devices


@dataclass(frozen=True)
class PricedResult:
    """The plans for one part of a cluster, and the bill of training with the best of them."""

    cluster: Cluster
    result: SearchResult
    bill: Bill

    @property
    def best(self) -> Plan:
        return self.result.plans[0]


def priced_results(
    model: str | ModelReference,
    cluster: Cluster,
    job: Job,
    objective: Objective,
    tokens: float,
    *,
    price_per_hour: float | None = None,
    terms: Terms = "on-demand",
    only_best: bool = False,
    report: Callable[[str], None] = lambda stage: None,
    **options: Any,
) -> tuple[PricedResult, ...]:
    """Plan for parts of a cluster and return the results, best first: for speed, the whole cluster and each kind of its
    devices alone; for cost, its halves.

    Days and dollars are those of training on `tokens`, at `price_per_hour` per device, else at the price of the cluster's
    description, or of the catalog's list for the `terms`.

    Args:
        only_best: whether parts that are slower than others may be left out, for speed.
        options: further arguments of `stagewright.planning.search.plan`; `patience_s` is for all parts together.

    Raises:
        InputError: cost without a price, or an impossible price or number of tokens.
        PlanError: nothing fits on any size.
    """
    if objective == "cost" and price_per_hour is None and price_of(cluster, terms) is None:
        prices = prices_of(cluster, terms)
        names = dict.fromkeys(group.device.name for group in cluster.nodes if group.device.name not in prices)
        raise InputError(
            f"no {terms} price is known for device {', '.join(map(repr, names))}: give --price, dollars per device and hour"
        )
    check_tokens(tokens)
    check_price(price_per_hour)
    ranked: list[PricedResult] = []
    failure: PlanError | InputError | None = None
    ended: str | None = None
    patience_s, begun_s = options.pop("patience_s", None), time.monotonic()
    for part in _parts(cluster, objective):

        def report_part(text: str, part: Cluster = part) -> None:
            is_whole = objective == "speed" and part is cluster
            report(text if is_whole else f"{part.num_devices} devices: {text}")

        fastest_s = min((priced.best.predictions.step_seconds for priced in ranked), default=math.inf)
        # What follows on the best-first search gains less than that.
        below_s = (1 + MOST_FILLED) * fastest_s if only_best and objective == "speed" else math.inf
        left_s = None if patience_s is None else max(patience_s - (time.monotonic() - begun_s), 0.0)
        try:
            result = plan(model, part, job, report=report_part, patience_s=left_s, below_s=below_s, **options)
        except (PlanError, InputError) as error:
            failure = failure or error
            continue
        except KeyboardInterrupt as interrupt:
            if not ranked or patience_s is None:
                raise
            ended = str(interrupt) or "interrupted"
            break
        rate = result.plans[0].predictions.tokens_per_second
        price = price_of(part, terms) if price_per_hour is None else price_per_hour
        ranked.append(
            PricedResult(part, result, bill(tokens, job.global_batch, rate, part.num_devices, price))
        )
        if (ended := result.ended_early) is not None:
            break
    if not ranked:
        raise failure or PlanError("nothing to try: give a larger cluster")
    by_cost = objective == "cost"
    ranked.sort(key=lambda priced: priced.bill.dollars or 0.0 if by_cost else priced.bill.days)
    if ended is not None and ranked[0].result.ended_early is None:
        ranked[0] = replace(ranked[0], result=ranked[0].result.ended(ended, 0.0))
    return tuple(ranked)


def _parts(cluster: Cluster, objective: Objective) -> list[Cluster]:
    """Return the parts of a cluster to plan for; each kind of nodes alone may be faster than all together."""
    if len(cluster.nodes) > 1 and cluster.measured is None:
        kinds = _kinds(cluster)
        return (
            [cluster, *kinds]
            if objective == "speed"
            else [cluster, *(half for kind in kinds for half in halves(kind))]
        )
    return [cluster] if objective == "speed" else halves(cluster)


def _kinds(cluster: Cluster) -> list[Cluster]:
    """Return the parts of a cluster that have one kind of device, and as many of them on each node."""

    def kind_of(rank: int) -> tuple[Device, int]:
        group = cluster.group_of(rank)
        return group.device, group.devices_per_node

    ranks = range(cluster.num_devices)
    kinds = dict.fromkeys(map(kind_of, ranks))
    parts = (without(cluster, [rank for rank in ranks if kind_of(rank) != kind]) for kind in kinds)
    return [_named(part, cluster) for part in parts]


def _named(part: Cluster, cluster: Cluster) -> Cluster:
    name = f"{part.num_devices} {part.device.name} of {cluster.name}"
    return part.model_copy(update={"name": name, "sources": cluster.sources})


def halves(cluster: Cluster) -> list[Cluster]:
    """Return the cluster and what remains when half of its equal nodes are removed, repeatedly.

    >>> from stagewright.cluster import load_cluster
    >>> [part.num_devices for part in halves(load_cluster("32x-h100"))]
    [32, 16, 8]
    """
    (group,) = cluster.nodes if len(cluster.nodes) == 1 else (None,)
    if group is None or cluster.measured is not None:
        return [cluster]
    parts, count = [cluster], group.count
    while count % 2 == 0:
        count //= 2
        half = cluster.model_copy(
            update={"nodes": (group.model_copy(update={"count": count}),), "collectives": ()}
        )
        parts.append(_named(half, cluster))
    return parts
