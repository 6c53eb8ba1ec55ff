"""The automatic scheduler on random pipelines."""

import numpy as np
import pytest

from stagewright.errors import ScheduleError
from stagewright.planning.joint.layout import Layout
from stagewright.planning.joint.moves import improve_order
from stagewright.planning.joint.plan import encode_order
from stagewright.schedule import Placement, build, insert_communication, verify
from stagewright.schedule.automatic import SearchSettings, StageTimes, automatic
from stagewright.schedule.automatic.search import stages_of
from stagewright.schedule.list_scheduler.kernels import list_schedule
from stagewright.schedule.list_scheduler.priorities import UNLIMITED, deadlines_of, window_of
from stagewright.schedule.list_scheduler.terms import Rule
from stagewright.schedule.placement import linear, loop, wave
from stagewright.simulation import Contention, StageCosts, simulate


def random_problem(seed):
    rng = np.random.default_rng(seed)
    num_ranks, num_chunks = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    placement = [linear(num_ranks), loop(num_ranks, num_chunks), wave(num_ranks, num_chunks)][seed % 3]
    num_stages = placement.num_stages
    saved = rng.uniform(0.5, 2, num_stages)
    times = StageTimes(
        *rng.uniform(0.2, 2, (3, num_stages)), rng.uniform(0, 0.3, num_stages - 1), saved, saved / 3
    )
    whole = np.bincount(placement.rank_of_stage, weights=saved)
    return placement, int(rng.integers(1, 9)), times, whole * rng.uniform(1.0, num_ranks + 1)


def timed(program, times: StageTimes):
    costs = StageCosts.of(
        times.forward_s,
        times.input_grad_s,
        times.weight_grad_s,
        saved_bytes=times.saved,
        held_bytes=times.held,
    )
    edges = {(s, s + 1): seconds for s, seconds in enumerate(times.transfer_s)}
    return simulate(program, costs, edges, contention=Contention.NONE)


HASTY = SearchSettings(num_moves=200, num_patterns=40)


@pytest.mark.parametrize("seed", range(30))
def test_schedules_are_valid_and_keep_within_the_memory(seed):
    placement, num_microbatches, times, limit = random_problem(seed)
    program = automatic(placement, num_microbatches, times, limit, HASTY)
    verify(insert_communication(verify(program)))
    assert (timed(program, times).peak_bytes <= limit + 1e-9).all()


@pytest.mark.parametrize("seed", range(30))
def test_the_compiled_times_are_those_of_the_event_engine(seed):
    placement, num_microbatches, times, limit = random_problem(seed)
    stages = stages_of(placement, times, limit)
    rule = Rule(1, False, False, 1.0, 0.5, UNLIMITED, False, 0.0)
    deadlines = deadlines_of(stages, rule, np.zeros((4, placement.num_stages)))
    window = window_of(stages, np.inf)
    listed_s, listed = list_schedule(stages, num_microbatches, rule, window, deadlines, np.inf)
    improved_s, improved = improve_order(stages, num_microbatches, listed, 200, 0.001, 0.0, seed)
    layout = Layout(tuple(range(1, placement.num_stages + 1)), placement.rank_of_stage)
    for seconds, order in ((listed_s, listed), (improved_s, improved)):
        program = encode_order("order", layout, stages, order)
        assert timed(program, times).makespan_s == pytest.approx(seconds, rel=1e-12)
    assert improved_s <= listed_s


@pytest.mark.parametrize("seed", range(8))
def test_no_longer_than_the_handmade_schedules(seed):
    rng = np.random.default_rng(seed)
    times = StageTimes(*rng.uniform(0.5, 1.5, (3, 4)), np.full(3, 0.1), np.ones(4), np.full(4, 0.4))
    # memory of ZB-H2, of which every handmade schedule needs less
    program = automatic(linear(4), 8, times, 7.0, HASTY)
    handmade = [timed(build(name, 4, 8), times).makespan_s for name in ("zb-h1", "zb-h2")]
    assert timed(program, times).makespan_s <= min(handmade) + 1e-9


def test_one_seed_one_schedule():
    placement, num_microbatches, times, limit = random_problem(5)
    programs = [
        automatic(placement, num_microbatches, times, limit, SearchSettings(num_moves=300)) for _ in range(2)
    ]
    assert programs[0] == programs[1]


def test_what_does_not_fit_says_how_much_it_needs():
    with pytest.raises(ScheduleError, match=r"one microbatch alone needs 2\.0"):
        automatic(Placement((0, 1, 1, 0)), 4, StageTimes.uniform(4), 1.5)
