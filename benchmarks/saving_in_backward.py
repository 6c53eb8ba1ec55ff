"""What is kept for a backward and what it recomputes: our choice beside three peers and an optimum.

1. PyTorch's min-cut partitioner with a memory budget, on the CPU, whole models as one stage: its forward and backward are
   run and their peak of live bytes measured; our choice gets that peak as its limit and is run and measured alike. FLOP are
   those of recomputed products, convolutions and attention as `torch.utils.flop_counter` counts them; bytes are those that
   all other recomputed operators move; seconds are predicted for an H100 without fixed costs of its kernels. The last
   column is our least peak in the partitioner's time, over its peak. Bars: at equal peak no more than 2 % more FLOP in any
   case and on average 15 % fewer, or at equal time 10 % less peak.
2. Checkpointing as published: *full* keeps the input of every layer alone, *selective* recomputes the scores of attention
   (their product, mask, softmax and dropout) alone, both carried out by our executor; our choice gets their peak.
3. Checkmate's integer program on small stages, with limits at random between the least possible and what keeping all takes:
   the time that our choice adds over the least. Bar: 3 % on average. On stages of few operators also the best of all sets of
   results kept, each replayed: what recomputing every value once at most can reach.

Sources: Chen 2022 and 2025 (see `min_cut.py`); Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models" (arXiv 2205.05198); Jain et al. 2020 (see `checkmate.py`).

Run: ``python benchmarks/saving_in_backward.py [--quick] [--parts 1 2 3] [--instances N] [--output FILE]``
(half an hour on two cores that others use too).
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch

from checkmate import Optimum, Problem, least_bytes, problem_of, solve
from figures import write
from min_cut import Joint, Partitioned, as_nodes, joints_of, partition_at, peak_bytes
from one_stage import OneStage, Recomputed, Saved, repeated
from small_stages import small_stage
from stagewright.estimation.operators import short_name, work
from stagewright.graph import Node, Part
from stagewright.graph.policy import Policy
from stagewright.graph.views import Lookup
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import BuiltModel
from stagewright.tracing.models.build import build as build_model
from stagewright.tracing.models.reference import resolve
from stagewright.units import format_bytes

PLAIN = str(Path(__file__).with_name("plain_networks.py"))
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.1)
MOST_FLOP, MEAN_FLOP, LESS_PEAK, MOST_GAP = 1.02, 0.85, 0.9, 0.03
"""The bars."""


@dataclass(frozen=True)
class Setting:
    text: str
    microbatch_size: int
    sequence_length: int
    overrides: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "Llama": Setting("tiny-llama", 4, 256, {"num_hidden_layers": 4}),
    "GPT, explicit scores": Setting(f"{PLAIN}:explicit_gpt", 4, 256),
    "Mixtral": Setting("tiny-mixtral", 4, 256),
    "ViT": Setting("tiny-vit", 8, 1, {"image_size": 128}),
    "BERT": Setting("tiny-bert", 8, 256, {"dropout": 0.0}),
    "ResNet": Setting(f"{PLAIN}:resnet", 16, 1),
}
PUBLISHED = {
    **MODELS,
    "GPT-2, dropout": Setting("tiny-gpt2", 4, 256),
    "BERT, dropout": Setting("tiny-bert", 4, 256),
}
"""Models to checkpoint; with dropout PyTorch computes explicit scores on a CPU."""

QUICK = {"Llama": Setting("tiny-llama", 2, 64, {"num_hidden_layers": 2})}


class Model:
    """A model with real weights, and its graph as one stage."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.reference = resolve(setting.text, setting.overrides)
        graph = trace(self.reference, setting.microbatch_size, setting.sequence_length)
        self.whole = OneStage(graph)

    @cached_property
    def built(self) -> BuiltModel:
        return build_model(self.reference, self.setting.microbatch_size, self.setting.sequence_length)

    @cached_property
    def forward_flop(self) -> float:
        stage = self.whole.kept.stage
        return sum(work(node, stage.value).flop for node in stage.forward.nodes)

    def least_peak_in(self, seconds: float, below: int, rounds: int = 8) -> int:
        """The least peak found, down from `below`, that adds no more than `seconds`."""
        low, high = 0, below
        for _ in range(rounds):
            middle = (low + high) // 2
            saved = self.whole.within(middle)
            if saved is not None and saved.added_seconds <= seconds * (1 + 1e-9):
                high = min(middle, saved.peak_bytes)
            else:
                low = middle
        return high


# -- 1: the min-cut partitioner -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """A peer's choice on a model, and ours at its peak."""

    model: str
    name: str
    peak: int
    theirs: Recomputed
    ours: Saved | None
    own_peak: int
    least_peak: int
    differences: tuple[str, ...] = ()

    @property
    def flop_ratio(self) -> float | None:
        """Ours over theirs; None where neither recomputes any."""
        own = math.inf if self.ours is None else self.ours.recomputed.flop
        return (
            None if own == self.theirs.flop == 0 else own / self.theirs.flop if self.theirs.flop else math.inf
        )

    @property
    def peak_ratio(self) -> float:
        """At their time, or at their peak where nothing less is found."""
        return self.least_peak / self.peak

    @property
    def is_lost(self) -> bool:
        ratio = self.flop_ratio
        return self.ours is None or (ratio is not None and ratio > MOST_FLOP and self.peak_ratio > LESS_PEAK)


def min_cut_cases(
    name: str, setting: Setting, budgets: Sequence[float], *, compiles: bool = True
) -> Iterator[Beside]:
    model = Model(setting)
    joints = joints_of(model.built.module, model.built.inputs, compiles=compiles)
    for budget in budgets:
        tried = [_measured(joint, budget) for joint in joints]
        parts, peak = min(tried, key=lambda pair: pair[1])
        nodes, values = as_nodes(parts.backward.graph)
        again = [nodes[node.name] for node in parts.recomputed if node.name in nodes]
        costing = model.whole.costs.costing
        theirs = repeated(again, values.__getitem__, costing.seconds(again, values.__getitem__))
        ours = model.whole.within(peak)
        yield Beside(
            name, f"{budget:g}", peak, theirs, ours,
            model.whole.measured_peak(ours, model.built) if ours else 0,
            model.least_peak_in(theirs.seconds, peak),
            tuple(_differences(again, values.__getitem__, ours)),
        )  # fmt: skip


def _measured(joint: Joint, budget: float) -> tuple[Partitioned, int]:
    parts = partition_at(joint, budget)
    return parts, peak_bytes(joint, parts)


def _differences(theirs: Iterable[Node], value_of: Lookup, ours: Saved | None) -> Iterator[str]:
    """Operators that one recomputes more often than the other, by FLOP and then by bytes moved."""
    if ours is None:
        return
    counts: Counter[str] = Counter()
    weights: dict[str, tuple[float, float]] = {}
    for nodes, value, sign in ((theirs, value_of, -1), (ours.again, ours.stage.value, 1)):
        for node in nodes:
            outputs = [value(output).meta for output in node.outputs if output is not None]
            asked = work(node, value)
            if outputs and (asked.flop or asked.bytes_moved):
                key = f"{short_name(node.op)} {list(outputs[0].shape)}"
                counts[key] += sign
                weights[key] = asked.flop, asked.bytes_moved
    uneven = [key for key, count in counts.items() if count]
    for key in sorted(uneven, key=lambda one: weights[one], reverse=True)[:8]:
        yield f"{key}: {counts[key]:+d}"


def min_cut_table(cases: Sequence[Beside]) -> Iterator[str]:
    yield (
        "| model | budget | peak: theirs | ours | GFLOP again: theirs | ours | ratio | MiB moved: theirs | ours "
        "| predicted us: theirs | ours | our peak in their time |"
    )
    yield "| --- | ---: |" + " ---: |" * 10
    for one in cases:
        yield f"| {one.model} | {one.name} | {_row(one)} | {one.peak_ratio:.2f} |"


def _row(one: Beside) -> str:
    """Peaks, FLOP and their ratio, bytes, seconds."""
    ours = None if one.ours is None else one.ours.recomputed
    pairs = [
        (format_bytes(peak), flop / 1e9, moved / 2**20, seconds * 1e6)
        for peak, flop, moved, seconds in (
            (one.peak, one.theirs.flop, one.theirs.moved_bytes, one.theirs.seconds),
            *([(one.own_peak, ours.flop, ours.moved_bytes, ours.seconds)] if ours else []),
        )
    ]
    (peak, flop, moved, seconds), own = pairs[0], pairs[-1]
    ratio = "-" if one.flop_ratio is None else f"{one.flop_ratio:.2f}"
    if ours is None:
        return f"{peak} | none | {flop:.2f} | - | - | {moved:.0f} | - | {seconds:.1f} | -"
    return (
        f"{peak} | {own[0]} | {flop:.2f} | {own[1]:.2f} | {ratio} "
        f"| {moved:.0f} | {own[2]:.0f} | {seconds:.1f} | {own[3]:.1f}"
    )


def min_cut_summary(cases: Sequence[Beside]) -> Iterator[str]:
    found = [(one, one.ours) for one in cases if one.ours is not None]
    over = sum(one.own_peak > one.peak for one, _ in found)
    yield f"* Limits that ours does not meet: {len(cases) - len(found)} of {len(cases)}; measured above the limit: {over}."
    ratios = [one.flop_ratio for one, _ in found if one.flop_ratio is not None]
    finite = [ratio for ratio in ratios if math.isfinite(ratio)]
    if finite:
        together = sum(ours.recomputed.flop for _, ours in found) / sum(one.theirs.flop for one, _ in found)
        yield (
            f"* FLOP recomputed at equal peak, ours over theirs: {np.mean(finite):.3f} on average over {len(finite)} cases "
            f"in which theirs recomputes any (bar {MEAN_FLOP}), worst {max(finite):.3f} (bar {MOST_FLOP}); of all together "
            f"{together:.3f}. Cases in which only ours recomputes any: {len(ratios) - len(finite)}; neither: "
            f"{len(found) - len(ratios)}. Limits that ours does not meet are in none of these figures."
        )
    seconds = [ours.added_seconds / one.theirs.seconds for one, ours in found if one.theirs.seconds]
    if seconds:
        yield f"* Predicted time at equal peak, ours over theirs: {_mean_and_worst(seconds)}."
    yield f"* Peak at equal time, ours over theirs: {_mean_and_worst([one.peak_ratio for one in cases])} (bar {LESS_PEAK})."
    lost = [one for one in cases if one.is_lost]
    yield f"* Cases lost by both bars: {len(lost)}{':' if lost else '.'}"
    for one in lost:
        yield f"  * {one.model} at {one.name}; ours recomputes more (+) or less often: {'; '.join(one.differences) or '-'}"


def _mean_and_worst(ratios: Sequence[float]) -> str:
    return f"{np.mean(ratios):.3f} on average, worst {max(ratios):.3f}"


# -- 2: checkpointing as published ----------------------------------------------------------------------------------------

_LAYER = re.compile(r"^.*?\.(?:layers?|h|block|blocks)\.\d+(?=\.|$)")


def full_policy(saved: Saved) -> Policy:
    """Keeps the input of every layer, with all else that its operator makes (statistics of a norm)."""
    stage = saved.stage
    together = _made_together(saved)
    layer: dict[int, str] = {}
    enters: set[int] = set()
    for node in stage.forward.nodes:
        found = _LAYER.match(node.module) if node.part is Part.FORWARD else None
        here = found.group() if found else ""
        for value in node.inputs:
            root = stage.value(value).storage
            if root in layer and layer[root] != here:
                enters |= together[root]
        for value in node.outputs:
            if value is not None:
                layer.setdefault(stage.value(value).storage, here)
    inside = {root for root, path in layer.items() if path}
    return Policy(recompute=frozenset(inside - enters), checkpoints=frozenset(enters))


def _made_together(saved: Saved) -> dict[int, frozenset[int]]:
    """Storage -> all storages that its operator makes."""
    stage, found = saved.stage, dict[int, frozenset[int]]()
    for node in stage.forward.nodes:
        made = frozenset(v for v in node.outputs if v is not None and stage.value(v).storage == v)
        found |= dict.fromkeys(made, made)
    return found


def selective_policy(saved: Saved) -> Policy | None:
    """Recomputes what lies between the product of queries and keys and that with the values; None if there are no scores."""
    stage = saved.stage
    nodes = [node for node in stage.forward.nodes if node.part is Part.FORWARD]
    names = [short_name(node.op) for node in nodes]
    inside: set[int] = set()
    for place, name in enumerate(names):
        if "softmax" in name and "log" not in name:
            first = next((i for i in range(place, -1, -1) if names[i] == "bmm"), None)
            last = next((i for i in range(place, len(names)) if names[i] == "bmm"), None)
            if first is not None and last is not None and last - first < 24:
                made = [output for node in nodes[first:last] for output in node.outputs if output is not None]
                own = {
                    stage.value(output).storage
                    for node in nodes[first:last]
                    for output in node.outputs
                    if output is not None
                }
                inside |= own & set(made)
    return Policy(recompute=frozenset(inside)) if inside else None


def published_cases(name: str, setting: Setting) -> Iterator[Beside]:
    model = Model(setting)
    kept = model.whole.kept
    for kind, policy in (("full", full_policy(kept)), ("selective", selective_policy(kept))):
        if policy is None:
            continue
        theirs = model.whole.under(policy)
        ours = model.whole.within(theirs.peak_bytes)
        yield Beside(
            name, kind, theirs.peak_bytes, theirs.recomputed, ours, ours.peak_bytes if ours else 0,
            model.least_peak_in(theirs.added_seconds, theirs.peak_bytes),
            tuple(_differences(theirs.again, theirs.stage.value, ours)),
        )  # fmt: skip


# -- 3: the optimum -------------------------------------------------------------------------------------------------------

_FEW_RESULTS = 10
_LIMITS_PER_STAGE = 5


@dataclass(frozen=True)
class Instance:
    seed: int
    limit: int
    """Of what the small stage has alive beside what lasts."""
    optimum: Optimum
    ours: Saved | None
    best_once: float | None
    """Seconds of the best set of results to keep, each other recomputed once; infinite if no set fits, None if not tried."""
    scale: float
    """Seconds that are as good as nothing: a hundredth of the forward."""

    @property
    def gap(self) -> float | None:
        """Added time over the least, as a part of that; None where ours meets no limit."""
        if self.ours is None:
            return None
        return (self.ours.added_seconds - self.optimum.seconds) / max(self.optimum.seconds, self.scale)

    @property
    def once_gap(self) -> float | None:
        if self.best_once is None or math.isinf(self.best_once):
            return None
        return (self.best_once - self.optimum.seconds) / max(self.optimum.seconds, self.scale)


class SmallStage:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.whole = OneStage(small_stage(seed))
        kept = self.whole.kept
        self.problem: Problem = problem_of(kept.stage, self.whole.costs.costing)
        self.above = kept.peak_bytes - self.problem.kept_peak
        alive = kept.memory.peak_bytes - kept.staged.resident(0).total - kept.memory.categories["inputs"]
        if alive != self.problem.kept_peak:
            raise ValueError(
                f"small stage {seed}: the program counts {self.problem.kept_peak} bytes, the replay {alive}"
            )

    @cached_property
    def least(self) -> int:
        return least_bytes(self.problem)

    @property
    def is_telling(self) -> bool:
        """Whether there is something to choose: enough operators, and a tenth of the peak or more to save."""
        return len(self.problem.phases) >= 6 and self.least < 0.9 * self.problem.kept_peak

    def instances(self) -> Iterator[Instance]:
        draw = random.Random(self.seed)
        scale = 0.01 * sum(operator.seconds for operator in self.problem.operators)
        sets = self._sets()
        for _ in range(_LIMITS_PER_STAGE):
            limit = int(self.least + draw.uniform(0.02, 0.98) * (self.problem.kept_peak - self.least))
            optimum = solve(self.problem, limit)
            if optimum is None:
                raise ValueError(
                    f"small stage {self.seed}: no way within {limit} bytes, which is above the least"
                )
            ours = self.whole.within(limit + self.above)
            if ours is not None and optimum.is_proved and ours.added_seconds < optimum.seconds * (1 - 1e-4):
                raise ValueError(
                    f"small stage {self.seed}: ours adds less than the optimum within {limit} bytes"
                )
            fitting = [seconds for peak, seconds in sets if peak <= limit + self.above]
            best = min(fitting, default=math.inf) if sets else None
            yield Instance(self.seed, limit, optimum, ours, best, scale)

    def _sets(self) -> list[tuple[int, float]]:
        """Peak and added seconds of every set of results kept; those of less than a thousandth are always kept."""
        kept = self.whole.kept
        results = {roots: kept.stage.held_bytes(roots) for roots in set(_made_together(kept).values())}
        large = [roots for roots, size in results.items() if size > 1e-3 * max(results.values())]
        if len(large) > _FEW_RESULTS:
            return []
        small = frozenset[int]().union(*(roots for roots in results if roots not in large))
        choices = itertools.chain.from_iterable(
            itertools.combinations(large, n) for n in range(len(large) + 1)
        )
        policies = (Policy(everything=True, checkpoints=small.union(*chosen)) for chosen in choices)
        return [(one.peak_bytes, one.added_seconds) for one in map(self.whole.under, policies)]


def oracle_instances(count: int) -> list[Instance]:
    found: list[Instance] = []
    for seed in itertools.count():
        stage = SmallStage(seed)
        if stage.is_telling:
            found += stage.instances()
        if len(found) >= count:
            return found[:count]
    raise AssertionError("unreachable")


def oracle_table(instances: Sequence[Instance]) -> Iterator[str]:
    columns = (
        "stages", "instances", "proved optimal", "limit not met", "though a set fits", "mean gap", "median", "worst",
        "best set kept: mean gap", "none fits", "ours over best set",
    )  # fmt: skip
    yield f"| {' | '.join(columns)} |"
    yield "| --- |" + " ---: |" * (len(columns) - 1)
    kinds = {
        "random operators": lambda seed: seed % 3 != 0,
        "blocks": lambda seed: seed % 3 == 0,
        "**all**": lambda _: True,
    }
    for name, belongs in kinds.items():
        some = [one for one in instances if belongs(one.seed)]
        if some:
            yield f"| {name} | {_oracle_row(some)} |"


def _oracle_row(some: Sequence[Instance]) -> str:
    gaps = [gap for one in some if (gap := one.gap) is not None]
    once = [gap for one in some if (gap := one.once_gap) is not None]
    tried = [one for one in some if one.best_once is not None]
    unfit = sum(math.isinf(one.best_once) for one in tried if one.best_once is not None)
    against = [
        (one.ours.added_seconds - one.best_once) / max(one.best_once, one.scale)
        for one in tried if one.ours is not None and one.best_once is not None and math.isfinite(one.best_once)
    ]  # fmt: skip
    proved = sum(one.optimum.is_proved for one in some)
    missing = [one for one in some if one.ours is None]
    could = sum(one.best_once is not None and math.isfinite(one.best_once) for one in missing)
    shown = f"{np.mean(gaps):.1%} | {np.median(gaps):.1%} | {max(gaps):.0%}" if gaps else "- | - | -"
    best = f"{np.mean(once):.1%} | {unfit} of {len(tried)}" if once else f"- | {unfit} of {len(tried)}"
    beside = f"{np.mean(against):.1%}" if against else "-"
    return f"{len(some)} | {proved} | {len(missing)} | {could} | {shown} | {best} | {beside}"


def worst_instances(instances: Sequence[Instance], count: int = 10) -> Iterator[str]:
    """The instances with the largest gaps, for whoever mends the choice."""
    yield "| seed | limit | least us | ours us | best set us | optimum: operators run again (of how many distinct) |"
    yield "| ---: | ---: | ---: | ---: | ---: | --- |"
    for one in sorted(instances, key=lambda one: math.inf if one.gap is None else one.gap, reverse=True)[
        :count
    ]:
        ours = "none" if one.ours is None else f"{one.ours.added_seconds * 1e6:.1f}"
        best = "-" if one.best_once is None else f"{one.best_once * 1e6:.1f}"
        again = one.optimum.recomputed
        yield (
            f"| {one.seed} | {format_bytes(one.limit)} | {one.optimum.seconds * 1e6:.1f} | {ours} | {best} "
            f"| {len(again)} ({len({o for _, o in again})}) |"
        )


# -- the report -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What to compare: models for the partitioner and for checkpointing, budgets, instances of the integer program; with
    `compiles` the partitioner also gets the graphs of `torch.compile`, which takes seconds to start."""

    models: dict[str, Setting]
    published: dict[str, Setting]
    budgets: Sequence[float]
    num_instances: int
    compiles: bool = True


def told(items: Iterable[Any]) -> Iterator[Any]:
    """`items`, a dot on standard error for each: one may take half a minute."""
    for item in items:
        print(".", end="", file=sys.stderr, flush=True)
        yield item


def report(parts: Sequence[int], asked: Asked) -> Iterator[str]:
    begin = time.perf_counter()
    if 1 in parts:
        cases = [
            case
            for name, setting in asked.models.items()
            for case in told(min_cut_cases(name, setting, asked.budgets, compiles=asked.compiles))
        ]
        yield from [
            "## PyTorch's min-cut partitioner",
            "",
            *min_cut_table(cases),
            "",
            *min_cut_summary(cases),
            "",
        ]
    if 2 in parts:
        cases = [case for pair in asked.published.items() for case in told(published_cases(*pair))]
        head = ["## Checkpointing as published", "", *min_cut_table(cases), ""]
        yield from [*(line.replace("budget", "policy") for line in head), *min_cut_summary(cases), ""]
    if 3 in parts:
        instances = oracle_instances(asked.num_instances)
        yield from ["## Checkmate's integer program", "", *oracle_table(instances), ""]
        yield from ["Furthest from the least:", "", *worst_instances(instances), ""]
    yield f"All of it took {time.perf_counter() - begin:.0f} s."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one model, one budget and five instances")
    parser.add_argument("--parts", type=int, nargs="+", choices=(1, 2, 3), default=(1, 2, 3))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--instances", type=int, default=200, help="of the integer program")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    chosen = {name: MODELS[name] for name in arguments.models}
    others = {name: setting for name, setting in PUBLISHED.items() if name not in MODELS}
    asked = Asked(chosen, chosen | others, BUDGETS, arguments.instances)
    if arguments.quick:
        asked = Asked(QUICK, QUICK, (0.5,), 5, compiles=False)
    parts = f" --parts {' '.join(map(str, arguments.parts))}" if len(arguments.parts) < 3 else ""
    options = (" --quick" if arguments.quick else "") + parts
    lines = [
        f"# What is kept for a backward, {date.today()}",
        "",
        *(__doc__ or "").split("Run:")[0].strip().splitlines(),
        "",
        f"`python benchmarks/saving_in_backward.py{options}` on {platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, scipy {scipy.__version__}.",
        "",
    ]
    try:
        lines += report(arguments.parts, asked)
    finally:  # what is there after half an hour is not lost
        write(lines, arguments.output)


if __name__ == "__main__":
    main()
