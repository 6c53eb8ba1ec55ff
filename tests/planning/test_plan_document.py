"""The job and the plan as documents: what is read back is what was written, and errors name the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster import Cluster, load_cluster
from stagewright.documents import CHECKSUM
from stagewright.errors import InputError
from stagewright.planning.job import Job, load_job
from stagewright.planning.plan import ClusterSection, Plan, load_plan
from stagewright.planning.plan_stages import stage_program

DOCUMENT: dict[str, Any] = {
    "version": 1,
    "stagewright": "0.1.0",
    "model": {"text": "tiny-llama", "digest": "0", "name": "tiny-llama"},
    "job": {"global_batch": 4, "sequence_length": 32, "dtype": "fp32"},
    "cluster": {"name": "local", "num_devices": 2, "device": "cpu"},
    "dp": 1,
    "pp": 2,
    "num_stages": 2,
    "microbatch_size": 2,
    "num_microbatches": 2,
    "cuts": ["model.layers.1:0"],
    "placement": [0, 1],
    "schedule": "1f1b",
    "program": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
    "memory_policy": ["keep", "keep"],
    "predictions": {
        "step_seconds": 1.0,
        "lower_bound_seconds": 0.5,
        "tokens_per_second": 128.0,
        "mfu": 0.5,
        "bubble_fraction": 0.1,
        "ranks": [],
        "stages": [],
    },
}

ONE_RANK = {
    "rank": 0, "busy_seconds": 0.5, "allocated_peak_bytes": 1, "reserved_peak_bytes": 1, "categories": {},
}  # fmt: skip
PREDICTED_ONE_OF_TWO = {**DOCUMENT["predictions"], "ranks": [ONE_RANK]}


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**DOCUMENT, **changes}))
    return path


def test_a_plan_survives_the_disk(tmp_path: Path) -> None:
    plan = Plan.model_validate(DOCUMENT)
    plan.save(tmp_path / "new" / "plan.json")
    assert load_plan(tmp_path / "new" / "plan.json") == plan
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["plan.json"]
    assert stage_program(plan).lines() == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def test_a_plan_keeps_its_cluster_whatever_becomes_of_the_catalog(tmp_path: Path) -> None:
    changed = load_cluster("2x4x-a100-40", {"device.memory_bytes": "17GiB", "name": "ours"})
    plan = Plan.model_validate({**DOCUMENT, "cluster": ClusterSection.of(changed)})
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan
    kept = again.cluster.load()
    assert (kept.name, kept.num_devices, kept.device.memory_bytes) == ("ours", 8, 17 * 2**30)
    assert kept.point_to_point_seconds(1e6, 0, 7) == changed.point_to_point_seconds(1e6, 0, 7)
    assert "sources" not in (tmp_path / "plan.json").read_text()


def test_a_plan_that_describes_no_cluster_goes_by_its_name() -> None:
    named = ClusterSection(name="8x-h100", num_devices=8, device="H100")
    assert named.load() == load_cluster("8x-h100")
    with pytest.raises(InputError, match=r"'local', which it does not describe.*--cluster"):
        Plan.model_validate(DOCUMENT).cluster.load()


def test_measured_links_are_kept(tmp_path: Path) -> None:
    matrix = [[0.0, 1e9], [2e9, 0.0]]
    base = load_cluster("2x-h100").model_dump(exclude_none=True)
    cluster = Cluster.model_validate({**base, "measured": {"between": "ranks", "bandwidth": matrix}})
    kept = ClusterSection.model_validate_json(ClusterSection.of(cluster).model_dump_json()).load()
    assert [kept.link_between(*ends).bandwidth for ends in ((0, 1), (1, 0))] == [1e9, 2e9]


def test_the_schema_lists_every_field() -> None:
    schema = Plan.json_schema()
    assert set(schema["properties"]) == {*Plan.model_fields, CHECKSUM}
    assert "predictions" in schema["required"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 2}, "version 2"),
        ({"cutz": []}, "did you mean 'cuts'"),
        ({"dp": 0}, "dp = 0"),
        ({"cuts": []}, "cuts has 0 entries where 1 belong"),
        ({"predictions": PREDICTED_ONE_OF_TWO}, "ranks has 1 entries where 2 belong"),
        ({"num_microbatches": 3}, "global_batch of 4"),
        ({"job": {"global_batch": 4, "sequence_length": 32, "dtype": "fp7"}}, "job.dtype = 'fp7'"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(tmp_path: Path, changes: dict[str, object], text: str) -> None:
    with pytest.raises(InputError, match=text):
        load_plan(write(tmp_path / "plan.json", **changes))


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(InputError, match="stagewright plan"):
        load_plan(tmp_path / "plan.json")


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        load_plan(tmp_path / "nowhere.json")


def test_a_job_file_and_its_overrides(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('global_batch = 8\nsequence_length = 64\nmemory_limit = "2GiB"\n')
    job = load_job(path, {"global_batch": 16, "clip_norm": None})
    assert (job.global_batch, job.sequence_length, job.memory_limit, job.clip_norm) == (16, 64, 2**31, None)
    device = load_cluster("8x-h100").device
    assert job.usable_bytes(device) == 2**31
    assert load_job(path, {"memory_limit": None}).usable_bytes(device) == device.usable_bytes
    more = load_job(path, {"memory_limit": "1TiB"})
    assert more.usable_bytes(device) == more.usable_bytes(device, load_cluster("8x-h100")) == 2**40
    assert more.usable_bytes(device, load_cluster("8x-h100+8x-t4")) == device.usable_bytes


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"global_bach": 8}, "did you mean 'global_batch'"),
        ({"sequence_length": 8}, "global_batch is missing"),
        ({"global_batch": 8, "sequence_length": 8, "memory_limit": "much"}, "memory_limit = 'much'"),
        ({"global_batch": 8, "sequence_length": 8, "dtype": "bf61"}, "'bf16'"),
    ],
)
def test_a_wrong_job_is_refused_by_name(overrides: dict[str, object], text: str) -> None:
    with pytest.raises(InputError, match=text):
        load_job(None, overrides)


def test_jobs_compare_by_value() -> None:
    assert Job(global_batch=8, sequence_length=8) == load_job(None, {"global_batch": 8, "sequence_length": 8})
