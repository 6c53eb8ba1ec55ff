"""The campaign for one device, small on the CPU: rows of every part, its share of the time, what fails, and the file of
results."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.cluster import load_cluster
from stagewright.tracing.models.reference import resolve

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import campaign
import stages
import training
from budget import Case, Part, Row, Section, TimeUp, measured, time_limit

DESCRIBED = load_cluster("1x-rtx3090", {"device.kind": "cpu"})
MODEL = "tiny-llama"
SETTING = campaign.setting_of(torch.device("cpu"), [DESCRIBED, DESCRIBED], "fp32")
REFERENCE = resolve(MODEL, {"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def found() -> dict[str, Section]:
    """Of all parts but those that compile, or start processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(campaign.MEASURES, "passes", [("eager", stages.apart, (False,))])
        only = [name for name in campaign.SHARES if name != "processes"]
        return {one.name: one for one in measured(campaign.parts_of(SETTING, only), 600.0)}


def rows_of(section: Section) -> dict[str, tuple[list[float], float]]:
    assert not section.errors and not section.left_out
    return {what: (predicted, seen) for what, predicted, seen in section.rows}


def test_every_part_has_rows_of_every_description(found: dict[str, Section]) -> None:
    sizes = {name: len(rows_of(one)) for name, one in found.items()}
    # F and B of both stages and the peak; F, I and W; four policies; two figures for both stages, three times
    assert sizes == {
        "products": 2,
        "attention": 2,
        "stages": 5,
        "passes": 6,
        "saving": 4,
        "overlap": 12,
        "checkpoint": 3,
    }
    for name, section in found.items():
        for what, predicted, seen in section.rows:
            assert seen > 0 or what.endswith("waiting")
            assert not predicted if name == "checkpoint" else predicted[0] == predicted[1] > 0


def test_gradients_are_autograds_and_those_of_i_and_w_are_those_of_b(found: dict[str, Section]) -> None:
    (whole,), (apart,) = found["stages"].notes, found["passes"].notes
    assert "loss and gradients: largest difference" in whole and ": within" in whole
    assert "gradients of I and W beside B's: largest difference 0.00e+00: within" in apart


def test_peaks_of_stages_that_recompute_or_offload_are_those_predicted(found: dict[str, Section]) -> None:
    rows = rows_of(found["saving"]) | rows_of(found["stages"])
    seen = {}
    for policy in ("keep", "recompute", "offload 1", "offload 4"):
        predicted, seen[policy] = rows[f"{MODEL}, {policy}: peak bytes"]
        assert predicted == [seen[policy]] * 2
    assert seen["offload 1"] < seen["offload 4"] < seen["keep"] == rows[f"{MODEL}: peak bytes"][1]
    assert seen["recompute"] < seen["keep"]


def test_what_is_moved_to_the_host_makes_passes_longer_than_is_predicted_of_less(
    found: dict[str, Section],
) -> None:
    rows = rows_of(found["overlap"])
    for stage in (0, 1):
        least, few, every = (
            rows[f"{MODEL}, 1 of {count} offloaded: stage {stage}: longer by s, predicted as waiting"][0]
            for count in (16, 4, 1)
        )
        assert 0 < least[0] < few[0] < every[0]


def test_a_resumed_run_goes_on_with_the_same_losses(found: dict[str, Section]) -> None:
    first, others = found["checkpoint"].notes
    assert first.endswith("without: equal") and others.endswith("0.00e+00: within 0.0")
    size = rows_of(found["checkpoint"])[f"{MODEL}: bytes of the checkpoint"][1]
    (rank,) = training.plan_of(SETTING, DESCRIBED, REFERENCE, 1).predictions.ranks
    state = rank.categories["parameters"] + rank.categories["optimizer"]
    assert size > state  # and the model's files beside the state


def test_what_a_model_drops_out_is_the_same_beside_autograd() -> None:
    staged = stages.Staged(SETTING, resolve("tiny-gpt2", {"num_hidden_layers": 2}))
    assert staged.difference(staged.runner(staged.whole)) <= SETTING.tolerance


@pytest.mark.multiprocess
def test_two_processes_on_the_device_train_as_one() -> None:
    setting = campaign.setting_of(SETTING.device, [DESCRIBED], SETTING.dtype)
    (section,) = measured(campaign.parts_of(setting, ["processes"]), 120.0)
    rows = rows_of(section)
    assert section.notes == [
        f"{MODEL}, losses of two processes beside one's: largest difference 0.00e+00: within 1e-05"
    ]
    for what, (predicted, seen) in rows.items():
        assert "step s" in what or predicted == [pytest.approx(seen, rel=1e-3)]
    assert len(rows) == 5


def test_stages_are_compiled_and_say_which_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(call: Callable[..., Any], **_: object) -> Callable[..., Any]:
        if "weight_grad" in call.__name__ and "stage1" in call.__name__:
            return broken
        return call

    def broken(*_: object) -> None:
        raise ValueError("no compiler")

    monkeypatch.setattr(torch, "compile", compiled)
    *notes, last = [one for one in stages.apart(SETTING, REFERENCE, True) if isinstance(one, str)]
    assert notes == [f"{MODEL}, compiled: stage1_weight_grad is not compiled: no compiler"]
    assert "0.00e+00: within 0.001" in last


def test_of_a_gpu_what_its_allocator_reserves_is_predicted_too() -> None:
    """The device that is described need not be the one at hand."""
    setting = campaign.setting_of(torch.device("cpu"), [load_cluster("1x-h100")], "fp32")
    staged = stages.Staged(setting, REFERENCE)
    ((active, reserved),) = map(stages._predicted_peaks, staged.lines(staged.whole))
    assert active < reserved < active + 2**28


# -- time and failures ------------------------------------------------------------------------------------------


def case(name: str, seconds: float = 0.0, error: str = "") -> Case:
    def measure() -> Iterator[Row | str]:
        yield name, [2.0], 1.0
        time.sleep(seconds)
        if error:
            raise ValueError(error)
        yield f"{name} is done"

    return Case(name, measure)


def test_a_part_that_fails_is_told_and_the_others_go_on() -> None:
    parts = [
        Part("first", 1, [case("bad", error="no such kernel"), case("good")]),
        Part("second", 1, [case("next")]),
    ]
    kept: list[int] = []
    first, second = measured(
        parts, 60.0, keep=lambda sections: kept.append(sum(len(one.rows) for one in sections))
    )
    assert first.errors == ["bad: ValueError: no such kernel"]
    assert first.notes == ["good is done"] and len(first.rows) == 2
    assert second.notes == ["next is done"] and not second.errors
    assert kept == [2, 3]


def test_a_model_that_is_not_there_fails_in_its_part_alone() -> None:
    parts = campaign.parts_of(SETTING, ["products", "checkpoint"], [("no-such-model", {})])
    products, section = measured(parts, 60.0)
    assert len(products.rows) == 2 and not products.errors
    assert len(section.errors) == 1 and "no-such-model" in section.errors[0]


def test_a_part_keeps_to_its_share_and_says_what_it_left_out() -> None:
    slow = [case("long", 0.3), case("too long", 30.0), case("never")]
    begun = time.monotonic()
    first, second = measured([Part("slow", 1, slow), Part("quick", 1, [case("quick", 0.2)])], 2.0)
    assert time.monotonic() - begun < 3.0
    assert second.notes == ["quick is done"]  # within its half, which the first did not take
    assert first.notes == ["long is done", "never is done"]  # the last in what the second left
    (ended,) = first.left_out
    assert ended.startswith("too long (ended after") and ended.endswith("for want of time, 1 rows)")


def test_nothing_is_begun_without_time() -> None:
    (section,) = measured([Part("late", 1, [case("one"), case("two")])], 0.0)
    assert section.left_out == ["one", "two"] and not section.rows
    (section,) = measured([Part("slow", 1, [case("one", 0.5), case("two")])], 0.7)
    assert section.left_out == ["two"]  # which may take as long


def test_time_is_up_also_for_what_catches_every_exception() -> None:
    def stubborn() -> None:
        while True:
            try:
                time.sleep(10.0)
            except Exception:
                continue

    with pytest.raises(TimeUp), time_limit(0.05):
        stubborn()


def test_results_tell_errors_and_what_was_left_out() -> None:
    sections = [
        Section("saving", rows=[("peak bytes", [4.0, 2.0], 4.0), ("seconds", [], 1.0)], notes=["a note"]),
        Section("overlap", errors=["gpt2: ValueError: none"], left_out=["bert-large"]),
    ]
    text = "\n".join(campaign.report(sections, ["probed", "h100"], ["# One device"]))
    assert "| what | measured | probed | h100 |" in text
    assert "| peak bytes | 4 | 4 (+0.0%) | 2 (-50.0%) |" in text and "| seconds | 1 |  |  |" in text
    assert "FAILED: gpt2: ValueError: none" in text and "Left out for want of time: bert-large" in text


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_writes_one_file(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A probe that fails is told, and leaves the catalog's description."""

    def probe(*_: object, **__: object) -> None:
        raise ValueError("no clock")

    output = tmp_path / "results.md"
    monkeypatch.setattr(campaign, "probe", probe)
    given = [
        "--only",
        "products",
        "--minutes",
        "1",
        "--output",
        str(output),
        *(["--json"] if as_json else []),
    ]
    monkeypatch.setattr(sys, "argv", ["campaign.py", *given])
    campaign.main()
    text = output.read_text()
    assert "FAILED: ValueError: no clock" in text and "--only products" in text and "| h100 |" in text
    assert "| 256 x 256 x 256 |" in text and "## stages" not in text
    printed = capsys.readouterr()
    assert "products: all shapes: 2 rows" in printed.err
    assert ('"sections"' if as_json else "Wrote") in printed.out
