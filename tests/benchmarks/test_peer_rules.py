"""Published rules, on cases small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from peers.widths import (
    NodeRates,
    PipetteTimes,
    ProfiledLayers,
    VarunaStage,
    Widths,
    amp_seconds,
    gpipe_like_seconds,
    megatron_rule,
    pipette_seconds,
    varuna_microbatch,
    varuna_seconds,
)
from stagewright.errors import InputError, PlanError

FOUR = ProfiledLayers(
    {1: np.array([1.0, 2.0, 3.0, 2.0])}, np.full(4, 10.0), np.full(4, 100.0), np.array([7.0, 0, 0, 7.0])
)


def test_amp_adds_passes_cuts_and_the_slowest_all_reduce() -> None:
    nodes = (NodeRates(40.0, 80.0, 2), NodeRates(20.0, 80.0, 2))
    widths = Widths(1, 2, 2, 1, (0, 2, 4))
    passes = (2 - 1) * 5 + 8
    cut = 10 * 4 / 20
    reduce = 2 * 1 / 2 * 207 * 4 / 80
    assert amp_seconds(FOUR, widths, nodes, 4) == pytest.approx(passes + cut + reduce)


def test_amp_judges_a_ring_by_its_closing_edge() -> None:
    slow_in_between = (NodeRates(1e-3, 80.0, 2), NodeRates(1e-3, 80.0, 1), NodeRates(50.0, 80.0, 1))
    all_four = amp_seconds(FOUR, Widths(1, 4, 1, 1, (0, 4)), slow_in_between, 4)
    closing = 2 * 3 / 4 * 407 * 4 / 1e-3
    assert all_four == pytest.approx(8 + closing)


def test_layers_share_an_embedding_once_per_stage() -> None:
    assert FOUR.stage_parameters(Widths(1, 1, 1, 1, (0, 4))).tolist() == [407]
    assert FOUR.stage_parameters(Widths(1, 1, 2, 1, (0, 2, 4))).tolist() == [207, 207]


def test_widths_without_a_profile_and_wrong_boundaries_are_named() -> None:
    with pytest.raises(InputError, match="tp 2"):
        FOUR.stage_seconds(Widths(2, 1, 1, 1, (0, 4)))
    with pytest.raises(InputError, match="rising"):
        Widths(1, 1, 2, 1, (0, 3, 3))


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_pipette_keeps_the_pipeline_when_microbatches_are_few(num_microbatches: int) -> None:
    times = PipetteTimes(1.0, 2.0, 4, num_microbatches, 0.5, 0.25, 0.25)
    assert pipette_seconds(times) == gpipe_like_seconds(times) == 4 * 3 + 1 + 3 * (num_microbatches - 1)


def test_varuna_recomputes_everywhere_but_on_the_last_stage() -> None:
    stages = [VarunaStage(1.0, 2.0, 10.0, 5.0, 1.0)] * 2
    assert varuna_microbatch(stages, 100.0, 64) == 12
    assert varuna_seconds(stages, 1, 1, 0.0, 0.5) == 1 + 1 + 2 + 2 + 0.5  # recomputed while waiting
    with pytest.raises(PlanError, match="no microbatch"):
        varuna_microbatch(stages, 12.0, 64)


def test_the_rule_of_thumb_fills_a_node_before_it_adds_stages() -> None:
    assert megatron_rule(64, 8, 32, lambda tp, pp: tp * pp >= 4) == (4, 1, 16)
    assert megatron_rule(64, 8, 36, lambda tp, pp: tp * pp >= 24) == (8, 4, 2)
    with pytest.raises(PlanError, match="no widths fit"):
        megatron_rule(8, 8, 32, lambda tp, pp: False)
