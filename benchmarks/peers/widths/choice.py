"""What other systems would choose: their own accounts of a configuration, with our times of its parts.

Each says what a system prefers; the best by that, of all configurations that fit, is its choice. Their profiles are stood in
for by `Account`, their memory by the estimator: AMP has none, Pipette's fitted network was never published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from peers.widths.account import Account
from peers.widths.amp import amp_seconds
from peers.widths.pipette import PipetteTimes, pipette_seconds
from peers.widths.profiled import NodeRates, ProfiledLayers, Widths
from peers.widths.varuna import VarunaStage, varuna_seconds
from stagewright.cluster import Cluster
from stagewright.errors import InputError, nearest
from stagewright.planning.bounds.layer_costs import Layers
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import layers_per_stage
from stagewright.planning.search import plan as search
from stagewright.planning.search_result import SearchResult
from stagewright.planning.space import Space
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import ModelReference, resolve

Key = tuple[float, ...]

_ALL = 10**6
"""More than any search finds."""


@dataclass(frozen=True)
class Strategy:
    """One system: what it tries, and `key`, of which it prefers the least.

    The last entry of a key are the seconds that the system itself predicts.
    """

    name: str
    space: Space
    key: Callable[[Configuration, Account], Key]


def _amp(configuration: Configuration, account: Account) -> Key:
    """Source: `amp_seconds`. Ignores: the order in which AMP numbers devices, and its own layers per stage."""
    costs, num = account.plain, account.plain.num_layers + 2  # embedding and head are layers of its profiles
    profiled = ProfiledLayers(
        {configuration.tp: costs.seconds / configuration.microbatch},
        np.full(num, costs.boundary_bytes / configuration.microbatch / 2),
        account.parameters * configuration.tp,
        np.zeros(num),
    )
    cuts = [1 + count for count in accumulate(configuration.layers_per_stage or (num - 2,))]
    given = Widths(
        configuration.tp, configuration.dp, configuration.pp, configuration.microbatch, (0, *cuts[:-1], num)
    )
    nodes = tuple(
        NodeRates(
            group.inter_node.bandwidth * group.num_nics, group.intra_node.bandwidth, group.devices_per_node
        )
        for group in account.cluster.nodes
        for _ in range(group.count)
    )
    samples = configuration.dp * configuration.microbatch * configuration.num_microbatches
    return (amp_seconds(profiled, given, nodes, samples),)


def _pipette(configuration: Configuration, account: Account) -> Key:
    """Source: `pipette_seconds`."""
    times = PipetteTimes(
        float(account.forward_s.max()),
        float(account.backward_s.max()),
        configuration.pp,
        configuration.num_microbatches,
        2 * (configuration.pp - 1) * account.transfer_s,
        outer_reduce=account.reduce_s,
    )
    return (pipette_seconds(times),)


def _varuna(configuration: Configuration, account: Account) -> Key:
    """Source: `varuna_seconds`. Ignores: Varuna's own choice of one microbatch for all numbers of stages."""
    passes = zip(account.forward_s, account.plain_backward_s, strict=True)
    stages = [VarunaStage(float(forward), float(backward), 0, 0, 0) for forward, backward in passes]
    return (varuna_seconds(stages, 1, configuration.num_microbatches, account.transfer_s, account.reduce_s),)


def _megatron(configuration: Configuration, account: Account) -> Key:
    """The fewest devices that hold the model, of these the widest tensor parallelism; then the fastest microbatch.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), takeaways 1 to 3 and equation 1 for the microbatch.
    """
    passes = float((account.forward_s + account.backward_s).max())
    return (
        configuration.tp * configuration.pp,
        -configuration.tp,
        (configuration.num_microbatches + configuration.pp - 1) * passes,
    )


_PLAIN = Space(largest_cp=1, largest_ep=1, chunks=(1,), zero=(0,))
STRATEGIES = {
    one.name: one
    for one in (
        Strategy("amp", _PLAIN, _amp),
        Strategy("megatron", replace(_PLAIN, recompute=("full",)), _megatron),
        Strategy("pipette", _PLAIN, _pipette),
        Strategy("varuna", replace(_PLAIN, largest_tp=1, recompute=("full",)), _varuna),
    )
}


def find_strategy(name: str) -> Strategy:
    """The strategy called `name`.

    Raises:
        InputError: there is none; names the nearest.
    """
    if name not in STRATEGIES:
        raise InputError(
            f"no strategy '{name}'{nearest(name, STRATEGIES)}: use one of {', '.join(STRATEGIES)}"
        )
    return STRATEGIES[name]


def chosen(
    strategy: Strategy,
    model: str | ModelReference,
    cluster: Cluster,
    job: Job,
    *,
    space: Space | None = None,
    keep: int = 10,
    report: Callable[[str], None] = lambda stage: None,
) -> SearchResult:
    """What the strategy prefers of all that fits, best first by its own account; timed as we predict.

    Args:
        space: widths that are given; the strategy has its own of the others.

    Raises:
        InputError: a width that the strategy does not know.
        PlanError: nothing fits.
    """
    has, asked = strategy.space, space or Space()
    for option, width, largest in (
        ("--tp", asked.tp, has.largest_tp), ("--cp", asked.cp, has.largest_cp), ("--ep", asked.ep, has.largest_ep),
    ):  # fmt: skip
        if width is not None and largest == 1 < width:
            raise InputError(f"strategy '{strategy.name}' knows no {option} {width}: leave it out")
    given = replace(has, tp=asked.tp, pp=asked.pp, microbatch=asked.microbatch)
    found = search(model, cluster, job, given, keep=_ALL, report=report)
    layers: dict[Configuration, Layers] = {}
    liked = sorted(found.plans, key=lambda plan: strategy.key(*_told(plan, cluster, layers)))
    return replace(found, plans=liked[:keep])


def own_seconds(strategy: Strategy, plan: Plan, cluster: Cluster) -> float:
    """What the system itself predicts of a plan."""
    return strategy.key(*_told(plan, cluster, {}))[-1]


def _told(plan: Plan, cluster: Cluster, layers: dict[Configuration, Layers]) -> tuple[Configuration, Account]:
    """What a system is told of a plan; `layers` keeps what several plans have in common."""
    sizes = Configuration(tp=plan.tp, cp=plan.cp, ep=plan.ep, microbatch=plan.microbatch_size)
    if sizes not in layers:
        reference = resolve(plan.model.text, plan.model.overrides)
        graph = trace(reference, plan.microbatch_size, **plan.traced(), expand=False)
        layers[sizes] = Layers(graph, cluster, plan.job)
    configuration = Configuration(
        plan.dp, plan.pp, plan.microbatch_size, plan.num_microbatches, plan.schedule,
        recompute="full" if "layers" in plan.memory_policy else "selective" if "selective" in plan.memory_policy else "none",
        tp=plan.tp,
        sequence_parallel=plan.sequence_parallel, layers_per_stage=layers_per_stage(plan),
    )  # fmt: skip
    device = cluster.nodes[0].device
    costs, plain = (layers[sizes].costs(device, how) for how in (configuration.recomputed_alike, "none"))
    return configuration, Account(configuration, costs, plain, cluster, plan.job)
