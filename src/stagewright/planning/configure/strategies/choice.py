"""What other systems would choose: their own accounts of a configuration, with our times of its parts.

Each says in what order a system tries configurations; the first that fits is its choice. Their profiles are stood in for by
`Run`, their memory by the estimator: AMP has none, Pipette's fitted network was never published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from stagewright.cluster import Cluster
from stagewright.errors import InputError, named
from stagewright.estimation.megatron import Shape
from stagewright.estimation.megatron.fusion import timed_stack
from stagewright.estimation.megatron.layer import Layers
from stagewright.planning.configure.configuration import Configuration
from stagewright.planning.configure.iteration import Run
from stagewright.planning.configure.search import Configured, first_that_fit
from stagewright.planning.configure.space import Bounds
from stagewright.planning.configure.strategies.amp import amp_seconds
from stagewright.planning.configure.strategies.pipette import PipetteTimes, pipette_seconds
from stagewright.planning.configure.strategies.profiled import NodeRates, ProfiledLayers, Widths
from stagewright.planning.configure.strategies.varuna import VarunaStage, varuna_seconds
from stagewright.planning.job import Job
from stagewright.schedule.placement import linear

Key = tuple[float, ...]
_ENDS = 2
"""Embedding and head, which profiles have as layers."""


@dataclass(frozen=True)
class Strategy:
    """One system: what it tries, and `key`, by which it prefers the least.

    The last entry of a key are the seconds that the system itself predicts.
    """

    name: str
    bounds: Bounds
    key: Callable[[Run], Key]


def _amp(run: Run) -> Key:
    """Source: `amp_seconds`. Ignores: the order in which AMP numbers devices, and its own layers per stage."""
    layout, shape = run.layout, run.shape
    clock = replace(run, layout=replace(layout, microbatch_size=1), known={}).clock
    layer = sum(part.seconds for part in clock.layer(shape.num_layers - 1))
    ends = [
        sum(part.seconds for part in clock.passes(one)) for one in (clock.body.embedding(), clock.body.head())
    ]
    layers, num = Layers(shape, layout, run.stack), shape.num_layers + _ENDS
    inner = [float(sum(layers.parameters(index)) * layout.tp) for index in range(shape.num_layers)]
    first, last = (
        float(layers.edge_parameters(*which) * layout.tp) for which in ((True, False), (False, True))
    )
    profiled = ProfiledLayers(
        {layout.tp: np.array([ends[0], *[layer] * shape.num_layers, ends[1]])},
        np.full(num, float(layout.sequence_length * shape.hidden)),
        np.array([first, *inner, last]),
        np.zeros(num),
    )
    cuts = [1 + count for count in accumulate(layout.layers(shape.num_layers))]
    given = Widths(layout.tp, layout.dp, layout.pp, layout.microbatch_size, (0, *cuts[:-1], num))
    nodes = tuple(
        NodeRates(
            group.inter_node.bandwidth * group.num_nics, group.intra_node.bandwidth, group.devices_per_node
        )
        for group in run.cluster.nodes
        for _ in range(group.count)
    )
    samples = layout.dp * layout.microbatch_size * layout.num_microbatches
    return (amp_seconds(profiled, given, nodes, samples),)


def _pipette(run: Run) -> Key:
    """Source: `pipette_seconds`."""
    layout = run.layout
    times = PipetteTimes(
        max(stage.forward.seconds for stage in run.stages),
        max(stage.backward.seconds for stage in run.stages),
        layout.pp,
        layout.num_microbatches,
        sum(map(sum, _edges(run))),
        outer_reduce=_reduce_seconds(run),
    )
    return (pipette_seconds(times),)


def _varuna(run: Run) -> Key:
    """Source: `varuna_seconds`. Ignores: Varuna's own choice of one microbatch for all numbers of stages."""
    stages = [
        VarunaStage(one.forward.seconds, (one.input_grad + one.weight_grad).seconds, 0, 0, 0) for one in run.stages
    ]  # fmt: skip
    transfer = max(map(max, _edges(run)), default=0.0)
    return (varuna_seconds(stages, 1, run.layout.num_microbatches, transfer, _reduce_seconds(run)),)


def _edges(run: Run) -> list[tuple[float, float]]:
    """Seconds of one microbatch between neighbouring stages, there and back."""
    return run.transfers(linear(run.layout.pp))


def _reduce_seconds(run: Run) -> float:
    """Of the rank with most parameters."""
    return sum(run.reduce_seconds(*max(run.parameters_of_ranks(), key=sum)))


def _megatron(run: Run) -> Key:
    """The fewest devices that hold the model, of these the widest tensor parallelism; then the fastest microbatch.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), takeaways 1 to 3 and equation 1 for the microbatch.
    """
    layout = run.layout
    passes = max((stage.forward + stage.backward).seconds for stage in run.stages)
    return layout.tp * layout.pp, -layout.tp, (layout.num_microbatches + layout.pp - 1) * passes


_PLAIN = Bounds(largest_cp=1, largest_ep=1, chunks=(1,), shards_optimizer=(False,))
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
    return named("strategy", name, STRATEGIES)


def chosen(
    strategy: Strategy,
    shape: Shape,
    cluster: Cluster,
    job: Job,
    *,
    stack: str,
    bounds: Bounds,
    keep: int = 10,
) -> Configured:
    """What the strategy prefers of what fits, best first by its own account; timed as we predict.

    Args:
        bounds: widths that are given; the strategy has its own of the others.

    Raises:
        InputError: a width that the strategy does not know.
        PlanError: nothing fits.
    """
    has = strategy.bounds
    for option, width, largest in (
        ("--tp", bounds.tp, has.largest_tp), ("--cp", bounds.cp, has.largest_cp), ("--ep", bounds.ep, has.largest_ep),
    ):  # fmt: skip
        if width is not None and largest == 1 < width:
            raise InputError(f"strategy '{strategy.name}' knows no {option} {width}: leave it out")
    given = replace(has, tp=bounds.tp, pp=bounds.pp, microbatch=bounds.microbatch)
    return first_that_fit(shape, cluster, job, strategy.key, stack=stack, bounds=given, keep=keep)


def own_seconds(strategy: Strategy, shape: Shape, one: Configuration, stack: str) -> float:
    """What the system itself predicts of a configuration."""
    return strategy.key(Run(shape, one.layout, *timed_stack(stack), one.numbered))[-1]
