"""Nemotron-Nano-v2-9B in ticks of 0.01 ms: makespans and bubbles that the simulator of AdaPtis gives.

Source: profile, partitions and results of github.com/guojihu-hana/SimPipe (README and configuration).
"""

import numpy as np
import pytest

from stagewright.schedule import Placement, build, verify
from stagewright.schedule.automatic import StageTimes
from stagewright.simulation import StageCosts, simulate

PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
MILLISECONDS = {
    "E": (0.7589, 2.8654, 0.0),
    "M": (2.6768, 4.2984, 1.7599),
    "-": (1.8477, 1.909, 1.6866),
    "*": (1.9254, 2.4534, 0.6547),
    "L": (14.2155, 15.7056, 0.0595),
}
TICKS = {layer: [round(100 * ms) for ms in times] for layer, times in MILLISECONDS.items()}
PARTITION = [2, 2, 2, 2, 2, 2, 2, 3, 2, 3, 2, 3, 2, 3, 3, 2, 3, 3, 2, 2, 2, 3, 3, 1]
PLACEMENT = [[0, 4, 8, 12, 16, 19, 20], [1, 5, 9, 13, 17, 21], [2, 6, 10, 14, 18, 22], [3, 7, 11, 15, 23]]


def stage_ticks(partition):
    """Forward, input-gradient and weight-gradient ticks of every stage."""
    ends = [sum(partition[: i + 1]) for i in range(len(partition))]
    stages = [PATTERN[end - size : end] for end, size in zip(ends, partition, strict=True)]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return [[sum(TICKS[layer][k] for layer in stage) for stage in stages] for k in range(3)]


def test_1f1b_on_four_even_stages():
    ticks = stage_ticks([14, 14, 14, 14])
    assert next(zip(*ticks, strict=True)) == (3330, 4873, 2422)
    timeline = simulate(build("1f1b", 4, 8), StageCosts.of(*ticks))
    assert timeline.makespan_s == 133121
    assert timeline.busy_s.tolist() == [85000, 76160, 76160, 103456]
    assert timeline.idle_s.tolist() == [48121, 56961, 56961, 29665]
    assert simulate(build("1f1b", 4, 8, split_backward=True), StageCosts.of(*ticks)).makespan_s == 126300


@pytest.mark.parametrize("delays_unhidden", [True, False])
def test_the_greedy_scheduler_on_24_stages(delays_unhidden):
    ticks = stage_ticks(PARTITION)
    rank_of_stage = [next(rank for rank, held in enumerate(PLACEMENT) if s in held) for s in range(24)]
    placement = Placement(tuple(rank_of_stage))
    times = StageTimes(*np.array(ticks), np.zeros(23), *np.zeros((2, 24)))
    program = build("greedy", 4, 8, placement=placement, times=times, delays_unhidden=delays_unhidden)
    timeline = simulate(verify(program), StageCosts.of(*ticks))
    assert timeline.makespan_s == 89870
    assert timeline.busy_s.tolist() == [86392, 84880, 84728, 84776]
    assert timeline.idle_s.tolist() == [3478, 4990, 5142, 5094]


def test_homogeneous_fractions():
    def bubble(name, num_ranks, num_microbatches, **options):
        program = build(name, num_ranks, num_microbatches, **options)
        return simulate(program, StageCosts.uniform(program.num_stages)).bubble_fraction

    assert [bubble("1f1b", *size) for size in ((4, 16), (8, 32), (4, 8))] == pytest.approx(
        [0.15789, 0.17949, 0.27273], abs=5e-6
    )
    assert bubble("interleaved-1f1b", 4, 16, num_chunks=4) == pytest.approx(0.04478, abs=5e-6)
    assert bubble("interleaved-1f1b", 8, 32, num_chunks=8) == pytest.approx(0.02662, abs=5e-6)
    split = [bubble("1f1b", *size, split_backward=True) for size in ((4, 16), (8, 32))]
    assert split == pytest.approx([0.1111, 0.1273], abs=5e-5)
