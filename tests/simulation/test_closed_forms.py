"""Results that theory knows, over random sizes."""

import numpy as np
import pytest

from stagewright.schedule import Kind, build, insert_reductions
from stagewright.schedule.builders.asynchronous import weight_versions
from stagewright.simulation import StageCosts, simulate

RNG = np.random.default_rng(20)
SIZES = [(int(RNG.integers(1, 9)), int(RNG.integers(1, 33)), int(RNG.integers(1, 6))) for _ in range(200)]
TIMES = [(float(f), float(b)) for f, b in RNG.uniform(0.1, 4.0, (200, 2))]


def makespan(name, num_ranks, num_microbatches, num_chunks, costs, **options):
    return simulate(build(name, num_ranks, num_microbatches, num_chunks, **options), costs).makespan_s


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_per_rank(name):
    for (p, m, _), (f, b) in zip(SIZES, TIMES, strict=True):
        timeline = simulate(build(name, p, m), StageCosts.uniform(p, f, b, 0.0, saved_bytes=1))
        assert timeline.makespan_s == pytest.approx((m + p - 1) * (f + b), rel=1e-9)
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), rel=1e-9, abs=1e-12)
        held = [m] * p if name == "gpipe" else [min(m, p - rank) for rank in range(p)]
        assert timeline.peak_bytes.tolist() == held


@pytest.mark.parametrize("name", ["breadth-first", "interleaved-1f1b"])
def test_looped_stages_for_any_number_of_microbatches(name):
    for (p, m, v), (f, b) in zip(SIZES, TIMES, strict=True):
        got = makespan(name, p, m, v, StageCosts.uniform(p * v, f, b, 0.0))
        assert got == pytest.approx(((v - 1) * max(m, p) + m + p - 1) * (f + b), rel=1e-9)


def test_longer_rounds_take_no_longer_and_hide_the_transfers_around_the_ranks():
    for (p, m, v), (f, b) in zip(SIZES, TIMES, strict=True):
        costs = StageCosts.uniform(p * v, f, b, 0.0)
        ideal = ((v - 1) * max(m, p) + m + p - 1) * (f + b)
        assert makespan("interleaved-1f1b", p, m, v, costs, round_size=p + 2) == pytest.approx(ideal)
    costs = StageCosts.uniform(24, saved_bytes=1)
    default, longer = (
        simulate(build("interleaved-1f1b", 8, 64, 3, round_size=size), costs, 0.1) for size in (None, 9)
    )
    assert default.makespan_s == pytest.approx((3 * 64 + 7) * 3 + (6 * 8 - 2) * 0.1)
    assert longer.makespan_s == pytest.approx((3 * 64 + 7) * 3 + (2 * 8 - 2) * 0.1)
    assert longer.peak_bytes.max() == default.peak_bytes.max() + 4  # 64 microbatches make rounds of 10 and 9


def test_listed_breadth_first_makespans():
    listed = {
        (4, 8, 1): 33, (4, 8, 2): 57, (4, 8, 4): 105, (4, 16, 4): 201, (8, 32, 8): 789,
        (4, 6, 4): 81, (4, 10, 4): 129, (8, 12, 4): 165, (4, 3, 4): 54, (4, 2, 4): 51,
    }  # fmt: skip
    for (p, m, v), expected in listed.items():
        assert makespan("breadth-first", p, m, v, StageCosts.uniform(p * v)) == expected


def test_peaks_of_looped_schedules():
    for p, m, v in SIZES:
        costs = StageCosts.uniform(p * v, saved_bytes=1)
        assert simulate(build("breadth-first", p, m, v), costs).peak_bytes.tolist() == [m * v] * p
        if m % p == 0 and m > p:
            peaks = simulate(build("interleaved-1f1b", p, m, v), costs).peak_bytes.tolist()
            assert peaks == [min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]
    depth_first = simulate(build("interleaved-1f1b", 4, 8, 4), StageCosts.uniform(16, saved_bytes=1))
    assert depth_first.peak_bytes.tolist() == [19, 17, 15, 13]


@pytest.mark.parametrize(
    ("name", "listed"), [("breadth-first", [48, 32, 16, 0]), ("interleaved-1f1b", [24, 16, 8, 0])]
)
def test_windows_that_hide_the_gradient_reductions(name, listed):
    timeline = simulate(insert_reductions(build(name, 4, 8, 4)), StageCosts.uniform(16))
    for rank in range(4):
        events = [event for event in timeline.events(rank) if str(event.action).endswith("REDUCE")]
        assert [timeline.end_s[timeline.encoded.rank_slice(rank)].max() - e.start_s for e in events] == listed


def test_windows_of_looped_schedules_for_any_size():
    for (p, m, v), (f, b) in zip(SIZES, TIMES, strict=True):
        rest = np.arange(v - 1, -1, -1) * b
        assert windows("breadth-first", p, m, v, f, b) == pytest.approx(np.tile(rest * max(m, p), (p, 1)))
        groups = p * (1 + m % 4)
        assert windows("interleaved-1f1b", p, groups, v, f, b) == pytest.approx(np.tile(rest * p, (p, 1)))


def windows(name, p, m, v, f, b):
    """Seconds from each reduction to the end of its rank's work, [rank, stage of the rank in order]."""
    costs = StageCosts.uniform(p * v, f, b, 0.0)
    timeline = simulate(insert_reductions(build(name, p, m, v)), costs)
    starts = [[e.start_s for e in timeline.events(r) if e.action.kind is Kind.REDUCE] for r in range(p)]
    ends = [timeline.end_s[timeline.encoded.rank_slice(r)].max() for r in range(p)]
    return np.array(ends)[:, None] - np.array(starts)


@pytest.mark.parametrize(("name", "factor"), [("zb-h1", 1), ("zb-h2", 2)])
def test_zero_bubble_with_one_stage_per_rank(name, factor):
    for (p, few, _), (f, i), part in zip(SIZES, TIMES, RNG.uniform(0, 1, 200), strict=True):
        w = part * min(f, i)  # the formulas need weight gradients no longer than the other passes
        m = max(few, factor * (p - 1) + 1)
        timeline = simulate(build(name, p, m), StageCosts.uniform(p, f, i, w, saved_bytes=1))
        length = timeline.makespan_s if name == "zb-h1" else timeline.span_s.max()
        assert length == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - factor * w), rel=1e-9)
        assert timeline.peak_bytes.max() == factor * (p - 1) + 1


def test_equal_passes_in_a_v_leave_no_bubble():
    for (p, few, _), (f, _) in zip(SIZES, TIMES, strict=True):
        m = max(few, 2 * p - 1)
        zb_v = simulate(build("zb-v", p, m), StageCosts.uniform(2 * p, f, f, f, saved_bytes=1))
        assert zb_v.span_s == pytest.approx(np.full(p, 6 * m * f), rel=1e-9)
        assert zb_v.peak_bytes.tolist() == [2 * p] * p


def test_dualpipe_v():
    for (p, few, _), (f, _), part in zip(SIZES, TIMES, RNG.uniform(0, 1, 200), strict=True):
        m, saved_s = max(few, 2 * p), part * f
        costs = StageCosts.uniform(2 * p, f, f, f, overlap_saved_s=saved_s, saved_bytes=1)
        timeline = simulate(build("dualpipe-v", p, m, overlap=True), costs)
        both = 3 * f - saved_s  # a forward overlapped with a backward
        assert timeline.idle_s.max() == pytest.approx((p - 1) * (both + 2 * f - 3 * f), rel=1e-9, abs=1e-9)
        assert timeline.peak_bytes.tolist() == [2 * p + 1] * p


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 7), (4, 8), (5, 12), (8, 16)])
def test_schedules_with_controlled_memory(p, m):
    costs = StageCosts.uniform(2 * p, saved_bytes=1, held_bytes=0.5)
    bubble = (p - 1) * 6.0  # that of 1F1B on stages twice as long
    for name, held, part, beyond in (("v-half", (p + 2) // 2, 1 / 2, 0), ("v-min", (p + 4) // 3, 2 / 3, 6)):
        timeline = simulate(build(name, p, m), costs)
        assert timeline.peak_bytes.max() <= 2 * held
        assert timeline.makespan_s - 6 * m <= part * bubble + beyond


def test_unequal_stages_lie_between_recurrence_and_simple_formula():
    for (p, few, _), seed in zip(SIZES, range(200), strict=True):
        f = np.random.default_rng(seed).uniform(0.7, 1.3, p)
        m = max(few, p)
        exact = makespan("1f1b", p, m, 1, StageCosts.of(f, 2 * f, np.zeros(p)))
        assert _recurrence(f, 2 * f, m) <= exact + 1e-9
        assert exact <= (3 * f).sum() + (m - 1) * (3 * f).max() + 1e-9


def _recurrence(f, b, m):
    """Warm-up, ending and steady time of 1F1B from the last stage up (a lower bound)."""
    p = len(f)
    warm, ending, steady = f[-1], b[-1], f[-1] + b[-1]
    for s in range(p - 2, -1, -1):
        warm, ending = (
            f[s] + max(warm + b[s + 1], (p - s - 1) * f[s]),
            b[s] + max(ending + f[s + 1], (p - s - 1) * b[s]),
        )
        steady = max(steady, f[s] + b[s])
    return warm + ending + (m - p) * steady


def test_asynchronous_throughput_and_weight_versions():
    f, b = np.array([1.0, 2.0, 1.5]), np.array([2.0, 2.5, 1.0])
    costs = StageCosts.of(f, b, np.zeros(3))
    times = [makespan("pipedream", 3, m, 1, costs) for m in (40, 80)]
    assert (times[1] - times[0]) / 40 == pytest.approx(max(f + b))
    for (p, _, _), seed in zip(SIZES, range(200), strict=True):
        f, b = np.random.default_rng(seed).uniform(0.5, 2.0, (2, p))
        f[seed % p] = (f + b).max()  # one stage clearly the slowest, so that the period settles soon
        costs = StageCosts.of(f, b, np.zeros(p))
        few, many = (makespan("pipedream", p, m, 1, costs) for m in (60, 80))
        assert (many - few) / 20 == pytest.approx(max(f + b), rel=1e-9)
    for p in range(1, 9):
        assert weight_versions(build("pipedream", p, 3 * p)) == [p - rank for rank in range(p)]
        assert max(weight_versions(build("pipedream-2bw", p, 5 * p))) == min(2, p)


def test_more_memory_makes_the_automatic_schedule_shorter():
    spans = []
    for limit in (4.0, 5.0, 6.0, 8.0):
        program = build("zb-auto", 4, 12, memory_limit=limit, by_span=True)
        spans.append(simulate(program, StageCosts.uniform(4)).span_s.max())
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] == 36
