"""Which configuration is best for what: speed, cost, or time to a target; over sizes of the cluster and of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from stagewright.cluster import Cluster, NodeGroup
from stagewright.cluster.prices import Terms
from stagewright.errors import InputError, PlanError
from stagewright.planning.found import Found
from stagewright.planning.job import Job
from stagewright.planning.objectives.money import Bill, Target, bill, check_price, price_of, prices_of
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan
from stagewright.planning.space import Space
from stagewright.tracing.models.reference import ModelReference

Objective = Literal["speed", "cost", "time-to-train"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True)
class Offer:
    """The plans for one size of cluster and batch, and what the best of them takes to the target."""

    cluster: Cluster
    job: Job
    found: Found
    bill: Bill

    @property
    def best(self) -> Plan:
        return self.found.plans[0]


def offers(
    model: str | ModelReference,
    cluster: Cluster,
    job: Job,
    objective: Objective,
    target: Target,
    *,
    price_per_hour: float | None = None,
    terms: Terms = "on-demand",
    space: Space | None = None,
    keep: int | None = None,
    report: Callable[[str], None] = lambda stage: None,
    interruptible: bool = False,
) -> tuple[Offer, ...]:
    """What is best first: the cluster as it is, and each kind of its devices alone, for speed; all its halves for cost; all
    batches too for time to train. Ctrl-C ends an `interruptible` search with what was found until then. Dollars are at
    `price_per_hour` per device, else at the price of the cluster's description, or of the catalog's list for the `terms`.

    Raises:
        InputError: cost without a price, or a price that is none.
        PlanError: nothing fits on any size.
    """
    if objective == "cost" and price_per_hour is None and price_of(cluster, terms) is None:
        known = prices_of(cluster, terms)
        names = dict.fromkeys(group.device.name for group in cluster.nodes if group.device.name not in known)
        raise InputError(
            f"no price {terms} is known for device {', '.join(map(repr, names))}: give --price, dollars per device and hour"
        )
    check_price(price_per_hour)
    made: list[Offer] = []
    failure: PlanError | InputError | None = None
    for part, sized in _sizes(cluster, job, objective):

        def told(what: str, part: Cluster = part, sized: Job = sized) -> None:
            is_whole = objective == "speed" and part is cluster
            report(what if is_whole else f"{part.num_devices} devices, {sized.global_batch} samples: {what}")

        try:
            found = plan(model, part, sized, space, keep=keep, report=told, interruptible=interruptible)
        except (PlanError, InputError) as error:
            failure = failure or error
            continue
        rate = found.plans[0].predictions.tokens_per_second
        price = price_of(part, terms) if price_per_hour is None else price_per_hour
        made.append(
            Offer(part, sized, found, bill(target, sized.global_batch, rate, part.num_devices, price))
        )
        if found.is_interrupted:
            break
    if not made:
        raise failure or PlanError("nothing to try: give a larger cluster")
    by_cost = objective == "cost"
    made.sort(key=lambda offer: offer.bill.dollars or 0.0 if by_cost else offer.bill.days)
    return tuple(made)


def _sizes(cluster: Cluster, job: Job, objective: Objective) -> Iterator[tuple[Cluster, Job]]:
    batches = [job.global_batch]
    if objective == "time-to-train":
        batches = [job.global_batch * 2**power // 4 for power in range(5) if job.global_batch * 2**power >= 4]
    for part in _parts(cluster, objective):
        for batch in batches:
            yield part, job.model_copy(update={"global_batch": batch})


def _parts(cluster: Cluster, objective: Objective) -> list[Cluster]:
    """Of a cluster of several kinds of nodes, also each kind alone, which may be faster than all together."""
    if len(cluster.nodes) > 1 and cluster.measured is None:
        kinds = [_part(cluster, group) for group in cluster.nodes]
        return (
            [cluster, *kinds]
            if objective == "speed"
            else [cluster, *(one for kind in kinds for one in halves(kind))]
        )
    return [cluster] if objective == "speed" else halves(cluster)


def _part(cluster: Cluster, group: NodeGroup) -> Cluster:
    name = f"{group.count * group.devices_per_node} {group.device.name} of {cluster.name}"
    return Cluster(name=name, nodes=(group,), sources=cluster.sources)


def halves(cluster: Cluster) -> list[Cluster]:
    """The cluster and what is left of it when half of its equal nodes are taken away, again and again.

    >>> from stagewright.cluster import load_cluster
    >>> [part.num_devices for part in halves(load_cluster("32x-h100"))]
    [32, 16, 8]
    """
    (group,) = cluster.nodes if len(cluster.nodes) == 1 else (None,)
    if group is None or cluster.measured is not None:
        return [cluster]
    found, num = [cluster], group.count
    while num % 2 == 0:
        num //= 2
        found.append(_part(cluster, group.model_copy(update={"count": num})))
    return found
