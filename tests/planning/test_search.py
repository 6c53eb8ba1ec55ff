"""The search on small models: what it returns is consistent, within limits, and explains what it left out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.estimation.memory import replay_rank, stage_edges
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.state import resident_bytes
from stagewright.graph.split import split_graph
from stagewright.planning import search
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.plan_stages import stage_cuts, stage_program
from stagewright.planning.prediction.shortening import shortened
from stagewright.planning.ranking import AS_FAST
from stagewright.planning.search_result import SearchResult
from stagewright.schedule import build, insert_communication
from stagewright.tracing.cache import trace
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.reference import resolve
from stagewright.units import MIB

CLUSTER = load_cluster("4x-h100")
WIRES: tuple[Literal["fp32", "bf16"] | None, ...] = (None, "bf16")

plan = partial(search.plan, schedules=("1f1b", "gpipe"), tp=1, zero=(None,), keep=64)


def job(**more: Any) -> Job:
    return Job(global_batch=16, sequence_length=32, dtype="fp32", **more)


@cache
def found() -> SearchResult:
    return plan("tiny-llama", CLUSTER, job())


def test_plans_come_best_first_and_use_every_device() -> None:
    steps = [item.predictions.step_seconds for item in found().plans]
    assert all(step <= (1 + AS_FAST) * min(steps[place:]) for place, step in enumerate(steps))
    assert {(item.dp, item.pp) for item in found().plans} <= {(1, 4), (2, 2), (4, 1)}
    assert len({(i.dp, i.pp, i.microbatch_size, i.schedule) for i in found().plans}) == len(found().plans)


def test_predictions_hang_together() -> None:
    for item in found().plans:
        predictions = item.predictions
        assert predictions.step_seconds >= predictions.lower_bound_seconds > 0
        assert predictions.tokens_per_second == pytest.approx(16 * 32 / predictions.step_seconds)
        assert 0 < predictions.mfu < 1
        assert [rank.rank for rank in predictions.ranks] == list(range(item.pp))
        for rank in predictions.ranks:
            assert sum(rank.categories.values()) == rank.allocated_peak_bytes <= rank.reserved_peak_bytes
        ends = [(stage.start, stage.stop) for stage in predictions.stages]
        assert ends[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(ends))


def test_a_plan_leads_back_to_its_cuts_and_program() -> None:
    item = next(item for item in found().plans if item.pp == 4)
    graph = trace("tiny-llama", item.microbatch_size, 32, "float32")
    assert stage_cuts(item, graph) == [stage.start for stage in item.predictions.stages[1:]]
    assert stage_program(item) == build(item.schedule, 4, item.num_microbatches)
    other = item.model_copy(update={"cuts": ("net.nowhere:3", *item.cuts[1:])})
    with pytest.raises(PlanError, match=r"net\.nowhere:3"):
        stage_cuts(other, graph)


def test_an_estimate_of_a_plan_repeats_its_predictions() -> None:
    item = found().plans[0]
    again = estimate(Plan.model_validate_json(item.model_dump_json()), CLUSTER)
    assert again.predictions == item.predictions
    fresh = estimate(
        "tiny-llama",
        CLUSTER,
        job(),
        dp=item.dp,
        pp=item.pp,
        microbatch=item.microbatch_size,
        schedule=item.schedule,
    )
    assert fresh == item


def test_sums_over_replicas_are_timed_in_their_type_without_zero_too() -> None:
    fixed: dict[str, Any] = {"dp": 4, "pp": 1, "microbatch": 4}
    wide, narrow = (estimate("tiny-llama", CLUSTER, job(), reduce_dtype=dtype, **fixed) for dtype in WIRES)
    assert narrow.predictions.step_seconds < wide.predictions.step_seconds
    assert estimate(narrow, CLUSTER).predictions == narrow.predictions


def test_a_single_device_is_a_plan() -> None:
    item = estimate("tiny-llama", load_cluster("1x-h100"), job(), microbatch=4)
    assert (item.pp, item.num_stages, item.cuts) == (1, 1, ())
    assert item.predictions.bubble_fraction == pytest.approx(0, abs=1e-9)


def test_memory_limits_hold_and_are_explained() -> None:
    free = min(max(r.reserved_peak_bytes for r in item.predictions.ranks) for item in found().plans)
    most = max(max(r.reserved_peak_bytes for r in item.predictions.ranks) for item in found().plans)
    limit = (free + most) // 2
    tight = plan("tiny-llama", CLUSTER, job(memory_limit=limit), host_optimizer="never")
    assert 0 < len(tight.plans) < len(found().plans)
    for item in tight.plans:
        assert all(rank.reserved_peak_bytes <= limit for rank in item.predictions.ranks)
    assert any(item.missing_bytes and "device" in item.reason for item in tight.excluded)


def test_a_limit_above_what_a_device_has_is_taken_at_its_word_with_a_warning() -> None:
    options: dict[str, Any] = {"pp": 4, "microbatch": 4, "schedules": ["1f1b"]}
    above = plan("tiny-llama", CLUSTER, job(memory_limit="200GiB"), **options)
    assert any("200.00 GiB is more than" in text for text in above.warnings)
    assert not plan("tiny-llama", CLUSTER, job(memory_limit="20GiB"), **options).warnings


def test_when_nothing_fits_the_error_says_by_how_much_and_what_would() -> None:
    with pytest.raises(PlanError, match=r"more than the memory limit of 40\.0 MiB.*memory limit of about"):
        plan("tiny-llama", CLUSTER, job(memory_limit=40 * MIB))
    with pytest.raises(PlanError, match="no configuration fits"):
        plan("tiny-llama", CLUSTER, job(memory_limit=MIB))


def test_where_nothing_fits_the_limit_that_is_named_is_about_the_least_that_does() -> None:
    model = resolve("tiny-llama", {"num_hidden_layers": 8})
    asked = {"global_batch": 32, "sequence_length": 256, "dtype": "fp32"}
    options: dict[str, Any] = {"pp": 4, "microbatch": 1, "schedules": ["1f1b"], "host_optimizer": "never"}
    with pytest.raises(PlanError, match=r"recomputed\) needs .* memory limit of about") as refused:
        plan(model, CLUSTER, Job(**asked, memory_limit=30 * MIB), **options)
    assert "devices with" not in str(refused.value)  # these have enough
    (named,) = re.findall(r"memory limit of about ([\d.]+) MiB", str(refused.value))
    limit = int(1.03 * float(named) * MIB)
    fits = plan(model, CLUSTER, Job(**asked, memory_limit=limit), **options)
    assert fits.plans[0].predictions.reserved_peak_bytes <= limit
    with pytest.raises(PlanError):
        plan(model, CLUSTER, Job(**asked, memory_limit=int(0.8 * limit)), **options)


def test_what_fits_with_everything_recomputed_is_found_without_asking_for_that() -> None:
    limited = Job(global_batch=32, sequence_length=512, dtype="fp32", memory_limit=132 * MIB)
    options: dict[str, Any] = {"pp": 2, "microbatch": 1, "schedules": ["1f1b"], "host_optimizer": "never"}
    cluster = load_cluster("2x-h100")
    assert plan("tiny-llama", cluster, limited, recompute="full", **options).plans
    assert plan("tiny-llama", cluster, limited, **options).plans


def test_more_stages_than_the_model_can_be_cut_into() -> None:
    with pytest.raises(InputError, match="use at most"):
        plan("tiny-llama", load_cluster("1024x-h100"), Job(global_batch=1, sequence_length=32, dtype="fp32"))


@pytest.mark.parametrize(
    ("pp", "dp", "text"), [(3, None, "pp = 3"), (None, 8, "dp = 8"), (2, 1, "pp 2 x dp 1 is not the 4")]
)
def test_widths_that_do_not_fit_are_refused(pp: int | None, dp: int | None, text: str) -> None:
    with pytest.raises(InputError, match=text):
        plan("tiny-llama", CLUSTER, job(), pp=pp, dp=dp)


@pytest.mark.parametrize(("pp", "dp"), [(None, 4), (1, None), (1, 4)])
def test_replicas_must_divide_the_batch(pp: int | None, dp: int | None) -> None:
    with pytest.raises(InputError, match="dp = 4 does not divide the global batch of 6"):
        plan("tiny-llama", CLUSTER, Job(global_batch=6, sequence_length=8), pp=pp, dp=dp)


def test_a_fixed_microbatch_must_divide() -> None:
    with pytest.raises(InputError, match="microbatches of 3 do not divide"):
        plan("tiny-llama", CLUSTER, job(), microbatch=3)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    "schedule", ["1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb", "zb-v", "v-min", "pipedream"]
)
def test_a_shortened_program_has_the_same_peaks(schedule: str, num_ranks: int) -> None:
    program = build(schedule, num_ranks, 36)
    graph = trace("tiny-llama", 1, 32, "float32")
    size, count = len(graph.forward_ids), program.num_stages
    stages = split_graph(graph, [size * i // count for i in range(1, count)])
    memories = [StageMemory(stage) for stage in stages]
    short = shortened(program)
    assert short.num_microbatches < 18
    for rank in range(num_ranks):
        of_rank = [memories[stage] for stage in program.placement.stages_of(rank)]
        resident = resident_bytes(of_rank)
        whole, part = (
            replay_rank(
                memories,
                insert_communication(p, stage_edges(stages)),
                rank,
                resident,
                36 - p.num_microbatches,
            )
            for p in (program, short)
        )
        assert (whole.peak_bytes, whole.categories) == (part.peak_bytes, part.categories)


@pytest.mark.parametrize("schedule", ["gpipe", "breadth-first"])
def test_a_program_that_runs_all_forwards_first_is_not_shortened(schedule: str) -> None:
    program = build(schedule, 2, 36)
    assert shortened(program) is program


@pytest.mark.parametrize(
    "number", [lambda m: 15 - m, lambda m: (m + 5) % 16, lambda m: {3: 12, 12: 3}.get(m, m)]
)
def test_a_program_in_another_order_than_its_numbers_is_not_shortened(number: Callable[[int], int]) -> None:
    program = build("1f1b", 2, 16)
    renumbered = program.with_ranks(
        (replace(action, microbatch=number(action.microbatch or 0)) for action in actions)
        for actions in program.ranks
    )
    assert shortened(renumbered) is renumbered


def test_stages_save_less_where_nothing_else_fits() -> None:
    """Only then, and as little as need be; the plan says which stages do, and its program does it."""
    model, cluster = "tiny-llama", load_cluster("2x-h100")
    fixed: dict[str, Any] = {"pp": 2, "microbatch": 2, "schedules": ["gpipe"], "host_optimizer": "never"}
    (kept,) = plan(model, cluster, job(), **fixed).plans
    (full,) = plan(model, cluster, job(), recompute="full", **fixed).plans
    peaks = [max(rank.reserved_peak_bytes for rank in one.predictions.ranks) for one in (kept, full)]
    assert peaks[1] < peaks[0] and full.predictions.step_seconds > kept.predictions.step_seconds
    assert kept.memory_policy == ("keep", "keep") and full.memory_policy == ("layers", "layers")
    (found,) = plan(model, cluster, job(memory_limit=peaks[0] - 1), **fixed).plans
    ways = [policy for policy in found.memory_policy if policy != "keep"]
    assert ways and all(isinstance(one, StagePolicy) for one in ways)
    assert any("0R" in text for text in found.program[0])
    (recomputed,) = plan(model, cluster, job(memory_limit=peaks[0] - 1), offload=False, **fixed).plans
    assert any("0R" in text for text in recomputed.program[0])
    assert found.predictions.step_seconds <= full.predictions.step_seconds
    assert max(rank.reserved_peak_bytes for rank in found.predictions.ranks) < peaks[0]
    with pytest.raises(PlanError):
        plan(model, cluster, job(memory_limit=peaks[0] - 1), recompute="none", **fixed)


@pytest.mark.parametrize("verb", [search.plan, estimate])
def test_a_precision_that_a_device_lacks_is_refused_before_the_model_is_traced(verb: Any) -> None:
    def trace(*_: object, **__: object) -> None:
        pytest.fail("the model was traced")

    asked = Job(global_batch=4, sequence_length=32, dtype="bf16")
    with pytest.raises(InputError, match="'t4' has no peak for bf16: train in one of fp32, fp16"):
        verb("tiny-llama", load_cluster("2x-t4"), asked, trace=trace)


@pytest.mark.parametrize(
    ("lora", "pp", "memory"), [(None, 2, 65 * MIB), (Lora(rank=4, alpha=8), 1, 80 * MIB)]
)
def test_a_search_is_about_as_good_as_its_best_sharding_level(
    lora: Lora | None, pp: int, memory: int
) -> None:
    """Higher levels keep less state but need more buffers, so what they lack says nothing about lower ones."""
    model, cluster = resolve("tiny-llama").adapted(lora), load_cluster("4x-rtx4090")
    tight = Job(global_batch=16, sequence_length=512, memory_limit=memory)

    def fastest(*levels: int) -> float:
        try:
            result = search.plan(
                model,
                cluster,
                tight,
                tp=1,
                pp=pp,
                microbatch=4,
                schedules="1f1b",
                zero=levels,
                is_improved=False,
            )
        except PlanError:
            return math.inf
        return min(item.predictions.step_seconds for item in result.plans)

    assert fastest(0, 1, 2, 3) <= 1.01 * min(fastest(level) for level in range(4)) < math.inf
