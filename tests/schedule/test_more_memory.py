"""More memory hardly slows the best schedule, whoever builds it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedule import build, verify
from stagewright.schedule.automatic import SearchSettings, StageTimes, automatic
from stagewright.schedule.automatic.limits import shortest_possible
from stagewright.schedule.automatic.search import stages_of
from stagewright.schedule.placement import linear, v
from stagewright.simulation import Contention, StageCosts, simulate

FIXED = ("gpipe", "1f1b", "zb-h1", "zb-h2")
HARDLY = 1.03
"""A search leaves out smaller limits that promise nothing: by so much it may miss what it finds there."""


@st.composite
def pipelines(draw):
    """Microbatches, and the times of a pipeline with one stage per rank."""
    num_ranks, rng = draw(st.integers(1, 6)), np.random.default_rng(draw(st.integers(0, 1000)))
    edges = np.full(num_ranks - 1, draw(st.sampled_from([0.0, 0.1, 0.5])))
    ones = np.ones(num_ranks)
    forward, input_grad, weight_grad = rng.uniform(0.25, 2, (3, num_ranks))
    return draw(st.integers(1, 12)), StageTimes(forward, input_grad, weight_grad, edges, ones, ones / 2)


def timed(program, times):
    costs = StageCosts.of(
        times.forward_s,
        times.input_grad_s,
        times.weight_grad_s,
        saved_bytes=times.saved,
        held_bytes=times.held,
    )
    edges = {(s, s + 1): t for s, t in enumerate(times.transfer_s)}
    return simulate(program, costs, edges, contention=Contention.NONE)


def searched(times, num_microbatches, limit, placement=linear):
    num_ranks = len(times.saved) // (2 if placement is v else 1)
    # a hasty search, so that it is not the quality of the search that keeps the promise
    return automatic(
        placement(num_ranks), num_microbatches, times, limit, SearchSettings(num_moves=5, num_patterns=2)
    )


def best_s(times, num_microbatches, limit):
    """The shortest makespan of the fixed schedules that keep within the limit and the searched one."""
    num_ranks = len(times.saved)
    programs = [build(name, num_ranks, num_microbatches) for name in FIXED]
    timelines = [timed(verify(program), times) for program in programs]
    fitting = [t.makespan_s for t in timelines if t.peak_bytes.max() <= limit]
    return min([*fitting, timed(searched(times, num_microbatches, limit), times).makespan_s])


@settings(max_examples=30, deadline=None)
@given(pipelines())
def test_the_best_schedule_is_hardly_slower_under_any_higher_limit(pipeline):
    num_microbatches, times = pipeline
    limits = [*np.arange(1, len(times.saved) + 2, 0.5), 100.0, np.inf]
    found = [best_s(times, num_microbatches, limit) for limit in limits]
    for limit, before, after in zip(limits[1:], np.minimum.accumulate(found), found[1:], strict=False):
        assert after <= HARDLY * before, f"slower under a limit of {limit}"


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.floats(1, 6), st.floats(0, 2))
def test_the_searched_schedule_alone_is_hardly_slower_at_any_higher_limit(pipeline, limit, more):
    # all memory comes in halves of a microbatch, so limits between two halves are those of the half below
    num_microbatches, times = pipeline
    spans = [
        timed(searched(times, num_microbatches, each), times).makespan_s for each in (limit, limit + more)
    ]
    assert spans[1] <= HARDLY * spans[0]


def test_two_stages_per_rank_in_a_v():
    times = StageTimes.uniform(6, 1.0, 1.3, 0.6, 0.1)
    found = [timed(searched(times, 7, limit, v), times).makespan_s for limit in np.arange(2.0, 9.0)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1]


@settings(max_examples=40, deadline=None)
@given(pipelines(), st.sampled_from(FIXED), st.booleans())
def test_no_schedule_undercuts_the_bound_of_its_own_memory(pipeline, name, by_span):
    num_microbatches, times = pipeline
    num_ranks = len(times.saved)
    timeline = timed(build(name, num_ranks, num_microbatches), times)
    stages = stages_of(linear(num_ranks), times, timeline.peak_bytes)
    reached = timeline.span_s.max() if by_span else timeline.makespan_s
    assert shortest_possible(stages, num_microbatches, by_span) <= reached + 1e-9
