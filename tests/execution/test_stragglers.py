"""Ranks that compute slower than planned: named while a run goes on, recorded, and planned for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.cluster import Cluster, load_cluster, with_slower_devices
from stagewright.errors import InputError
from stagewright.execution.launch import run
from stagewright.execution.record import Record, load_record
from stagewright.execution.stragglers import StragglerWatch
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.search import plan

MODEL = "tiny-llama"


def test_a_rank_that_stays_slow_is_named_once_and_when_it_is_fast_again() -> None:
    watch = StragglerWatch()
    said: list[tuple[int, str]] = []
    for step in range(30):
        slow = 1.0 if step == 3 or step >= 20 else 2.0  # a good step starts the count anew
        said += [(step, message) for message in watch.after(step, (1.0, slow, 1.1), 1.0)]
    assert [step for step, _ in said] == [8, 24]
    assert said[0][1].startswith("rank 1 takes 1.8 times as long") and "since step 5," in said[0][1]
    assert said[1][1] == "rank 1 is as fast as the others again since step 21"


def test_short_steps_must_be_slow_for_longer() -> None:
    watch = StragglerWatch()
    said = [step for step in range(100) for _ in watch.after(step, (1.0, 2.0, 1.1), 0.1)]
    assert said == [29]


def test_a_machine_that_is_slow_as_a_whole_names_nobody_and_metered_steps_do_not_count() -> None:
    watch = StragglerWatch()
    assert not any(watch.after(step, (3.0, 3.1), 1.0) for step in range(10))
    assert not any(watch.after(step, (1.0, 2.0) if step % 3 else (0.0, 0.0), 1.0) for step in range(5))


def test_steps_are_as_long_as_the_pace_says() -> None:
    job = Job(global_batch=8, sequence_length=64, dtype="fp32")
    cluster = load_cluster("2x-rtx3090", {"device.host_overhead_s": 0.0})
    plain = estimate(MODEL, cluster, job, pp=2).predictions
    slow = estimate(MODEL, with_slower_devices(cluster, {0: 2.0, 1: 2.0}), job, pp=2).predictions
    assert [stage.forward_seconds for stage in slow.stages] == pytest.approx(
        [2 * stage.forward_seconds for stage in plain.stages]
    )
    assert slow.costs is not None and plain.costs is not None
    assert slow.costs.transfers == plain.costs.transfers
    assert slow.mfu == pytest.approx(plain.mfu * plain.step_seconds / slow.step_seconds)


def test_a_slow_rank_gets_less_of_the_model() -> None:
    job = Job(global_batch=8, sequence_length=64, dtype="fp32")
    cluster = with_slower_devices(load_cluster("2x-rtx3090"), {0: 1.02, 1: 2.0})
    found = plan(MODEL, cluster, job, pp=2, dp=1, schedules=["1f1b"]).plans[0].predictions
    shares = [stage.stop - stage.start for stage in found.stages]
    assert shares[0] > 1.5 * shares[1]


def names(cluster: Cluster) -> list[float | None]:
    return [cluster.device_of(rank).pace for rank in range(cluster.num_devices)]


def test_devices_of_a_node_keep_its_links_and_nodes_their_slowest_pace() -> None:
    one = load_cluster("4x-h100")
    divided = with_slower_devices(one, {0: 1.0, 1: 1.04, 2: 1.5, 3: 1.0})
    assert names(divided) == [1.0, 1.0, 1.5, 1.0]
    assert divided.link_between(0, 2).seconds(1e9) == pytest.approx(one.link_between(0, 2).seconds(1e9))
    assert names(with_slower_devices(load_cluster("2x2x-h100"), {0: 1.0, 3: 1.5})) == [1.25, 1.25, 1.5, 1.5]
    alike = with_slower_devices(one, dict.fromkeys(range(4), 1.2))
    assert alike.is_homogeneous and alike.num_nodes == 1


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    folder = tmp_path_factory.mktemp("run")
    job = Job(global_batch=2, sequence_length=16, dtype="fp32", num_steps=4)
    cluster = load_cluster("2x-rtx3090", {"device.kind": "cpu"})
    plan(MODEL, cluster, job, pp=2).plans[0].save(folder / "plan.json")
    run(folder / "plan.json", out=folder, device="cpu", timeout=60)
    return folder, load_record(folder / "record.json")


@pytest.mark.multiprocess
def test_a_run_records_how_fast_every_device_was_and_the_next_plan_knows(ran: tuple[Path, Record]) -> None:
    folder, record = ran
    assert set(record.device_slowdowns) == {0, 1} and all(
        pace > 1 for pace in record.device_slowdowns.values()
    )  # of a GPU's times
    slow = record.ranks[1].model_copy(update={"pace": 3 * (record.ranks[0].pace or 0.0)})
    record.model_copy(update={"ranks": (record.ranks[0], slow)}).save(folder / "slow.json")
    words = ["estimate", str(folder / "plan.json"), "--json"]
    plain, slowed = (
        json.loads(CliRunner().invoke(app, [*words, *more]).stdout)["step_seconds"]
        for more in ([], ["--record", str(folder / "slow.json")])
    )
    assert slowed > 2 * plain
    told = CliRunner().invoke(app, ["compare", str(folder / "plan.json"), str(folder / "slow.json")])
    assert "rank 1 computes 3.0 times as long as the fastest" in told.stdout


@pytest.mark.multiprocess
def test_a_record_of_another_cluster_or_of_too_few_steps_is_refused(ran: tuple[Path, Record]) -> None:
    folder, record = ran
    job = ["--global-batch", "2", "--sequence-length", "16", "--dtype", "fp32", "--record"]
    done = CliRunner().invoke(app, ["estimate", MODEL, "-c", "1x-rtx3090", *job, str(folder / "record.json")])
    assert done.exit_code == 2 and "2 devices or more" in done.stderr
    short = record.model_copy(
        update={"ranks": tuple(rank.model_copy(update={"pace": None}) for rank in record.ranks)}
    )
    short.save(folder / "short.json")
    done = CliRunner().invoke(app, ["estimate", MODEL, "-c", "2x-rtx3090", *job, str(folder / "short.json")])
    assert done.exit_code == 2 and "3 steps or more" in done.stderr


def test_a_pace_that_nothing_has_is_refused() -> None:
    with pytest.raises(InputError, match="pace"):
        load_cluster("2x-h100", {"device.pace": 0.0})
