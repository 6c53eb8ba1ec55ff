"""Checkpoints that are not what was written: every bit is missed, and nothing of them is used."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import SMALL_LLAMA
from plans import make_plan
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import torture
from faults import small_disk
from multiprocess import run_ranks
from stagewright.cli.app import app
from stagewright.errors import InputError, RunError
from stagewright.execution.checkpoint import write_tensors
from stagewright.execution.checkpoint_folder import Verified, check_start, newest
from stagewright.execution.loading import StoredWeights
from stagewright.execution.manifest import MANIFEST, SEAL, FileRecord, read_checkpoint
from stagewright.execution.options import RunOptions
from stagewright.planning.plan import Plan, load_plan
from stagewright.tracing.models.build import DeferredModel
from stagewright.tracing.models.reference import resolve

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a run of two ranks, and its plan beside them."""
    folder = tmp_path_factory.mktemp("written")
    small(folder)
    (folder / "text").write_bytes(bytes(range(64)) * 4)
    run_ranks(save_steps, 2, str(folder), [1, 2], timeout=90)
    return folder


@pytest.fixture
def run_folder(written: Path, tmp_path: Path) -> Path:
    """A copy of them, to damage."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def small(folder: Path) -> Plan:
    return make_plan(
        folder / "plan.json", overrides=dict(SMALL_LLAMA), num_microbatches=2, sequence_length=16
    )


def save_steps(rank: int, num_ranks: int, folder: str, steps: list[int]) -> None:
    """Train and write a checkpoint after each of `steps`."""
    with session_in(folder) as session:
        from stagewright.execution.checkpoint import save

        for step in steps:
            session.train_step(step - 1)
            save(session, Path(folder) / "checkpoints", step)


@contextmanager
def session_in(folder: str) -> Iterator[Any]:
    import torch.distributed as dist

    from stagewright.execution.session import Session

    dist.init_process_group("gloo")
    plan, data = load_plan(f"{folder}/plan.json"), Path(folder) / "text"
    yield Session(plan, torch.device("cpu"), data, random_weights=True)
    dist.destroy_process_group()


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


# -- what is noticed ----------------------------------------------------------------------------------------------------


@pytest.mark.torture
def test_no_flipped_bit_goes_unnoticed(
    run_folder: Path, record_property: Callable[[str, object], None]
) -> None:
    """In a random place of a random file: weights, moments, index, config, manifest and its digest."""
    checkpoint, chance = run_folder / "checkpoints" / "step-000002", torture.chance("checkpoints")
    files = sorted(checkpoint.iterdir())
    assert {file.name for file in files} == {
        "rank-00000.safetensors", "rank-00001.safetensors", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "config.json", MANIFEST, SEAL,
    }  # fmt: skip
    assert Verified.of(checkpoint).fault is None
    for _ in range(torture.FLIPS):
        file = chance.choice(files)
        bit = chance.randrange(8 * file.stat().st_size)
        flip(file, bit)
        fault = Verified.of(checkpoint).fault
        assert fault is not None, f"bit {bit} of {file.name}"
        assert (MANIFEST if file.name == SEAL else file.name) in fault
        flip(file, bit)
    assert Verified.of(checkpoint).fault is None
    record_property("damage", ("bits flipped in checkpoints", torture.FLIPS))


def test_a_damaged_checkpoint_is_not_resumed(run_folder: Path) -> None:
    """All ranks say which file it is and what to do, whoever read it, before anything is used; none takes an older one."""
    checkpoint = run_folder / "checkpoints" / "step-000002"
    for name in ("rank-00001.safetensors", "model-00001-of-00002.safetensors"):
        flip(checkpoint / name, 8 * (checkpoint / name).stat().st_size - 1)
        told = run_ranks(failure_of_restoring, 2, str(run_folder), timeout=60)
        assert told[0] == told[1]
        assert f"step-000002' is damaged: file '{name}' does not have the SHA-256" in told[0]
        assert "resume from step-000001" in told[0]
        flip(checkpoint / name, 8 * (checkpoint / name).stat().st_size - 1)
    assert run_ranks(failure_of_restoring, 2, str(run_folder), timeout=60) == [None, None]


def failure_of_restoring(rank: int, num_ranks: int, folder: str) -> str | None:
    """What kept a session from going on; it is as it was then."""
    with session_in(folder) as session:
        from stagewright.execution.checkpoint import restore

        before = {value: tensor.clone() for value, tensor in session.weights.tensors.items()}
        try:
            restore(session, Path(folder) / "checkpoints")
        except InputError as error:
            assert all(
                torch.equal(before[value], tensor) for value, tensor in session.weights.tensors.items()
            )
            return str(error)
    return None


def test_ranks_that_see_different_checkpoints_say_so(run_folder: Path) -> None:
    told = run_ranks(failure_of_agreeing, 2, str(run_folder), timeout=60)
    assert told[0] == told[1]
    assert "rank 0 sees checkpoint step-000002" in told[0] and "rank 1 step-000001" in told[0]


def failure_of_agreeing(rank: int, num_ranks: int, folder: str) -> str:
    import torch.distributed as dist

    from stagewright.execution.checkpoint import _agreed

    dist.init_process_group("gloo")
    own = Path(folder) / f"seen-by-{rank}"
    shutil.copytree(Path(folder) / "checkpoints", own)
    if rank == 1:
        shutil.rmtree(own / "step-000002")
    with pytest.raises(RunError) as error:
        _agreed(own)
    dist.destroy_process_group()
    return str(error.value).replace(str(own), "")


def test_resuming_names_what_is_missing_and_the_one_before(run_folder: Path) -> None:
    checkpoints, plan = run_folder / "checkpoints", load_plan(run_folder / "plan.json")
    options = RunOptions(checkpoint=checkpoints, resume=True)
    check_start(options, plan, run_folder / "text")
    newer = checkpoints / "step-000002"
    (newer / "rank-00000.safetensors").unlink()
    with pytest.raises(InputError, match=r"'rank-00000.safetensors' is missing; .*resume from step-000001"):
        check_start(options, plan, run_folder / "text")
    shutil.rmtree(checkpoints / "step-000001")
    with pytest.raises(
        InputError,
        match="no checkpoint before it is complete: start afresh without --resume, in another folder",
    ):
        check_start(options, plan, run_folder / "text")


def seal(checkpoint: Path, **changed: Any) -> None:
    """Change the manifest, with the right digest."""
    content = json.dumps(json.loads((checkpoint / MANIFEST).read_text()) | changed).encode()
    (checkpoint / MANIFEST).write_bytes(content)
    (checkpoint / SEAL).write_text(f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n")


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "deep/er", "..", "", "a\0b"])
def test_a_manifest_speaks_of_its_own_folder_alone(name: str, run_folder: Path) -> None:
    checkpoint = run_folder / "checkpoints" / "step-000002"
    seal(checkpoint, files={name: {"bytes": 1, "sha256": "0" * 64}})
    with pytest.raises(InputError, match=r"checkpoint.json.*is not the name of a file"):
        read_checkpoint(checkpoint)


def test_links_out_of_a_checkpoint_are_damage(run_folder: Path) -> None:
    file = run_folder / "checkpoints" / "step-000002" / "rank-00000.safetensors"
    file.rename(run_folder / "elsewhere")
    file.symlink_to(run_folder / "elsewhere")
    with pytest.raises(InputError, match=r"is damaged: 'rank-00000.safetensors' lies outside of"):
        read_checkpoint(file.parent)


def test_other_versions_are_told_from_damage(run_folder: Path) -> None:
    checkpoint = run_folder / "checkpoints" / "step-000002"
    seal(checkpoint, version=4, more="to say")
    with pytest.raises(InputError, match="has version 4, and this stagewright reads version 3: update it"):
        read_checkpoint(checkpoint)
    seal(checkpoint, version=2)
    with pytest.raises(
        InputError, match=r"version 2, .* with the stagewright that wrote it, or start from its model files"
    ):
        read_checkpoint(checkpoint)
    seal(checkpoint, version=1)
    (checkpoint / SEAL).unlink()
    with pytest.raises(
        InputError, match="by an earlier version of stagewright, without digests: resume with that"
    ):
        read_checkpoint(checkpoint)


def test_checkpoints_say_what_they_are_of(run_folder: Path) -> None:
    checkpoints = run_folder / "checkpoints"
    done = CliRunner().invoke(app, ["checkpoint", "show", str(checkpoints), "--json"])
    found = json.loads(done.stdout)["checkpoints"]
    assert [(one["step"], one["model"], one["pp"], one["dtype"]) for one in found] == [
        (1, "tiny-llama", 2, "fp32"), (2, "tiny-llama", 2, "fp32"),
    ]  # fmt: skip
    assert found[1]["bytes"] > 10_000 and "text" in found[1]["data"]
    said = " ".join(
        CliRunner().invoke(app, ["checkpoint", "show", str(checkpoints / "step-000002")]).stdout.split()
    )
    assert said.startswith("step 2: tiny-llama in fp32, pp 2 x dp 1 x tp 1, 1f1b, zero 0, adamw")
    none = CliRunner().invoke(app, ["checkpoint", "show", str(run_folder)])
    assert none.exit_code == 2 and "there is no checkpoint in" in " ".join(none.stderr.split())


def test_the_command_names_what_is_damaged(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # a line each, however long the paths
    checkpoints = run_folder / "checkpoints"
    done = CliRunner().invoke(app, ["checkpoint", "verify", str(checkpoints)])
    assert done.exit_code == 0
    assert [line.split("'")[2][:6] for line in done.stdout.splitlines()] == [" is ok"] * 2
    flip(checkpoints / "step-000001" / "config.json", 70)
    done = CliRunner().invoke(app, ["checkpoint", "verify", str(checkpoints), "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and not found["ok"]
    assert [one["ok"] for one in found["checkpoints"]] == [False, True]
    assert "file 'config.json' does not have the SHA-256" in found["checkpoints"][0]["fault"]
    assert found["checkpoints"][1]["files"] == 6 and found["checkpoints"][1]["bytes"] > 1000
    one = CliRunner().invoke(app, ["checkpoint", "verify", str(checkpoints / "step-000002")])
    assert one.exit_code == 0 and len(one.stdout.splitlines()) == 1
    none = CliRunner().invoke(app, ["checkpoint", "verify", str(run_folder)])
    assert none.exit_code == 2 and none.stdout == ""


def test_the_digest_of_the_manifest_is_read_by_other_tools(written: Path) -> None:
    checkpoint = written / "checkpoints" / "step-000001"
    subprocess.run(
        ["sha256sum", "--check", "--strict", SEAL], cwd=checkpoint, check=True, capture_output=True
    )


def test_model_files_of_a_checkpoint_are_compared_where_a_run_starts_from_them(run_folder: Path) -> None:
    checkpoint = run_folder / "checkpoints" / "step-000002"
    reference = resolve(str(checkpoint))
    module = DeferredModel(reference, 1, 16).module
    first = next(name for name, _ in module.named_parameters())

    def read() -> None:
        StoredWeights(checkpoint, module, reference.config or {}).read(first)

    read()
    (checkpoint / "rank-00000.safetensors").unlink()  # which no such run reads
    read()
    file = checkpoint / "model-00001-of-00002.safetensors"
    for damaged, bit in (
        (file, 8 * file.stat().st_size - 1),
        (checkpoint / "model.safetensors.index.json", 400),
    ):
        flip(damaged, bit)
        with pytest.raises(
            InputError, match=rf"file '{damaged.name}' does not have .* on purpose, remove 'checkpoint.json'"
        ):
            read()
        flip(damaged, bit)


# -- what is written ----------------------------------------------------------------------------------------------------


def test_files_of_tensors_are_read_by_the_library(tmp_path: Path) -> None:
    dtypes = [
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.bfloat16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.complex64,
    ]
    tensors = {f"ä{number}/'\"": (torch.randn(3, 5) * 3).to(dtype).t() for number, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4)}
    record = write_tensors(tmp_path / "file", tensors)
    assert record == FileRecord.of(tmp_path / "file")
    got = load_file(tmp_path / "file")
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        one, other = (item.reshape(-1).contiguous().view(torch.uint8) for item in (got[name], tensor))
        assert torch.equal(one, other), name
    with safe_open(tmp_path / "file", framework="pt") as reader:
        assert reader.metadata() == {"format": "pt"}
    with pytest.raises(
        RunError, match=r"of type torch.float8_e4m3fnuz, which safetensors files do not support"
    ):
        write_tensors(tmp_path / "other", {"a": torch.zeros(2, dtype=torch.float8_e4m3fnuz)})


@pytest.mark.parametrize("full", ["rank-00001.safetensors", "model-00001-of-00002.safetensors", MANIFEST])
def test_a_full_disk_leaves_the_checkpoints_before(full: str, run_folder: Path) -> None:
    checkpoints = run_folder / "checkpoints"
    told = run_ranks(failure_of_saving, 2, str(run_folder), full, timeout=60)
    said = [one for one in told if one is not None]
    assert said and len(set(said)) == 1
    assert f"the checkpoint of step 3 cannot be written to '{checkpoints}'" in said[0]
    assert "No space left on device" in said[0] and "make room there" in said[0]
    assert "step-000002 is complete: continue from it with --resume" in said[0]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000001", "step-000002"]
    assert all(Verified.of(path).fault is None for path in checkpoints.iterdir())


def failure_of_saving(rank: int, num_ranks: int, folder: str, full: str) -> str | None:
    """Where there is no more room for the file `full`."""
    with session_in(folder) as session:
        from stagewright.execution import checkpoint, manifest

        write, describe = checkpoint.write_tensors, manifest.write_whole

        def write_or_fail(path: Path, *content: Any) -> Any:
            if path.name == full:
                path.write_bytes(b"half a fi")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return (describe if path.name in (MANIFEST, SEAL) else write)(path, *content)

        checkpoint.write_tensors = manifest.write_whole = write_or_fail
        try:
            checkpoint.save(session, Path(folder) / "checkpoints", 3)
        except RunError as error:
            return str(error)
    return None


def test_a_disk_that_is_full(run_folder: Path, tmp_path: Path) -> None:
    """A real one, of a few pages more than a checkpoint."""
    size = sum(file.stat().st_size for file in (run_folder / "checkpoints" / "step-000002").iterdir())
    with small_disk(tmp_path / "disk", int(1.5 * size)) as disk:
        shutil.move(run_folder / "checkpoints" / "step-000001", disk / "step-000001")
        shutil.rmtree(run_folder / "checkpoints")
        (run_folder / "checkpoints").symlink_to(disk)
        said = run_ranks(failure_of_saving, 2, str(run_folder), "nothing", timeout=60)
        assert any(one is not None and "No space left on device" in one for one in said)
        assert [path.name for path in disk.iterdir()] == ["step-000001"]
        assert Verified.of(disk / "step-000001").fault is None


def test_what_a_run_left_unfinished_is_removed_by_the_next(run_folder: Path) -> None:
    checkpoints = run_folder / "checkpoints"
    (checkpoints / ".step-000003.writing").mkdir()
    (checkpoints / ".step-000003.writing" / "rank-00000.safetensors").write_bytes(b"half")
    plan = load_plan(run_folder / "plan.json")
    check_start(RunOptions(checkpoint=checkpoints, resume=True), plan, run_folder / "text")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000001", "step-000002"]


# -- data ---------------------------------------------------------------------------------------------------------------


def test_other_data_is_refused_and_taken_when_asked_for(run_folder: Path) -> None:
    checkpoints, plan = run_folder / "checkpoints", load_plan(run_folder / "plan.json")
    options = RunOptions(checkpoint=checkpoints, resume=True)
    found = newest(checkpoints)
    assert found is not None and found.manifest.data.num_tokens == 256 and found.manifest.data.kind == "text"
    same = run_folder / "renamed"
    (run_folder / "text").rename(same)
    check_start(options, plan, same)
    other = run_folder / "other"
    other.write_bytes(bytes(range(63, -1, -1)) * 4)  # as many tokens
    for data, named in ((other, r"'other' \(256 tokens of uint8"), (None, "synthetic")):
        with pytest.raises(
            InputError, match=rf"was 'text' \(256 tokens .*and this is {named}.* with --other-data"
        ):
            check_start(options, plan, data)
        check_start(RunOptions(checkpoint=checkpoints, resume=True, other_data=True), plan, data)
    with pytest.raises(InputError, match="--other-data needs --resume"):
        check_start(RunOptions(checkpoint=checkpoints, other_data=True), plan)
    checkpoint = checkpoints / "step-000002"
    seal(checkpoint, data=found.manifest.data.model_dump() | {"order": 0})
    with pytest.raises(InputError, match=r"was 'text' .*, in order 0\), and this is 'renamed'"):
        check_start(options, plan, same)
    seal(checkpoint, data={"kind": "synthetic"})
    check_start(options, plan, None)


def test_the_command_goes_on_with_other_data_when_told_to(
    run_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(run_folder / "plan.json"), "--device", "cpu", "--steps", "3",
               "--out", str(run_folder / "out"), "--checkpoint", str(run_folder / "checkpoints")]  # fmt: skip
    for options, code, said in (
        (["--resume"], 2, "give the same data, or resume on this data with --other-data"),
        (["--other-data"], 2, "--other-data needs --resume"),
        (["--resume", "--other-data"], 0, "step 3/3"),
    ):
        done = CliRunner().invoke(app, [*command, *options])
        told = done.stderr + capfd.readouterr().err  # the latter by the ranks
        assert done.exit_code == code and said in told, told
    found = newest(run_folder / "checkpoints")
    assert found is not None and found.manifest.step == 3 and found.manifest.data.kind == "synthetic"


def test_hosts_with_different_data_are_refused(tmp_path: Path) -> None:
    told = run_ranks(failure_of_agreeing_on_data, 2, str(tmp_path), timeout=60)
    assert told[0] == told[1]
    assert "rank 1 has other data than rank 0, 'text' (64 tokens of uint8" in told[0]


def failure_of_agreeing_on_data(rank: int, num_ranks: int, folder: str) -> str:
    import torch.distributed as dist

    from stagewright.execution.data_identity import identity_of
    from stagewright.execution.session import _agreed_data

    dist.init_process_group("gloo")
    own = Path(folder) / str(rank)
    own.mkdir()
    (own / "text").write_bytes(bytes([rank]) * 64)
    with pytest.raises(InputError) as error:
        _agreed_data(identity_of(own / "text"))
    dist.destroy_process_group()
    return str(error.value)
