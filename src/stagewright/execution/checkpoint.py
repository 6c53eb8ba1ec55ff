"""Checkpoints: what a run needs to go on as if it had never stopped, and its model's weights, in a folder per step.

Beside the model files (`stagewright.execution.model_files`) and ``checkpoint.json``, a folder has one
``rank-00003.safetensors`` for each rank that holds something no rank before it holds: weights as the optimizer updates
them with AdamW's moments, whole or in shards, parameters that are not trained, and buffers that the forward changes.
Random numbers and data are keyed by the step, so they have no state.

A folder is there whole or not at all: it gets its name when every rank has written its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from stagewright.errors import InputError, RunError, StagewrightError
from stagewright.execution import checkpoint_folder as folders
from stagewright.execution.collectives import exchange
from stagewright.execution.manifest import Checkpoint, FileRecord, Manifest, check_contents, write_manifest
from stagewright.execution.model_files import write_index
from stagewright.execution.session import Session
from stagewright.version import __version__

_RANK = "rank-"


@dataclass(frozen=True)
class _Held:
    """Something that training changes: its name, the rank that writes it (this one or another with the same), and where
    this rank has it."""

    name: str
    writer: int
    tensor: torch.Tensor


def save(session: Session, folder: Path, step: int) -> Path:
    """Write the state after `step` steps to ``folder/step-...``; every rank must call this. Raises `RunError` where a rank
    cannot write its files, or ranks do not share the folder. Nothing of this checkpoint is left then, and the ones before
    are as they were."""
    session.watch(f"writing the checkpoint of step {step}")
    final = folder / folders.folder_name(step)
    scratch = folder / f".{final.name}{folders.UNFINISHED}"
    is_first = session.mesh.rank == 0
    if is_first:
        shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was ended in the middle
    dist.barrier()
    written, fault = _write_own(session, scratch)
    told = exchange(
        {"files": {name: record.model_dump() for name, record in written.items()}, "fault": fault}
    )
    faults = [f"rank {rank}: {one['fault']}" for rank, one in enumerate(told) if one["fault"] is not None]
    if is_first and not faults:
        files = {name: FileRecord(**record) for one in told for name, record in one["files"].items()}
        try:
            _complete(session, scratch, step, files)
            scratch.rename(final)
            _sync(folder)
        except (OSError, StagewrightError) as error:
            faults = [f"rank 0: {error}"]
    if faults:
        if is_first:
            shutil.rmtree(scratch, ignore_errors=True)
        raise _not_written(folder, step, faults[0])
    return final


def restore(session: Session, folder: Path) -> int:
    """Put a session where the newest checkpoint of its plan was; returns the number of steps that were done.

    Every rank must call this. All files are compared with their digests before anything is used: by each rank those that it
    reads, and a share of the others.

    Raises:
        InputError: the checkpoint is damaged.
        RunError: ranks do not see the same one.
    """
    session.watch("looking for the newest checkpoint")
    found = _agreed(folder)
    session.watch(f"reading checkpoint {found.path.name}")
    held = list(_held(session))
    _verify(session, found, {_rank_file(one.writer) for one in held})
    readers: dict[int, safe_open] = {}
    try:
        for one in held:
            if one.writer not in readers:
                readers[one.writer] = safe_open(str(found.path / _rank_file(one.writer)), framework="pt")
            one.tensor.copy_(_of_shape(readers[one.writer].get_tensor(one.name), one))
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"checkpoint '{found.path}' cannot be read: {error}; {folders.instead_of(found.path)}"
        ) from None
    session.optimizer.adamw.round()
    session.shards.spread()
    if session.loss_scale is not None and found.manifest.loss_scale is not None:
        session.loss_scale.value = found.manifest.loss_scale
        session.loss_scale.num_good = found.manifest.num_good
        session.lengths.scale_loss(session.cotangent)
    session.runner.release()  # what was computed from parameters that have changed
    session.runner.restore()
    return found.manifest.step


def _held(session: Session) -> Iterator[_Held]:
    """All that training changes and that this rank has."""
    mesh, weights, names = session.mesh, session.weights, session.weights.names

    def rank_of(replica: int) -> int:
        return mesh.global_rank(mesh.pipeline_rank, replica, mesh.tensor_rank)

    trained = set(weights.trained)
    first, sharer = rank_of(0), rank_of(mesh.replica % mesh.num_shards)
    for value, state in session.optimizer.adamw.states():
        writer = sharer if value in session.optimizer.sharded else first
        for part, tensor in state.items():
            yield _Held(f"{names[value]}:{part}", writer, tensor)
    for value, tensor in weights.parameters.items():
        if value not in trained:
            yield _Held(names[value], first, tensor)
    for value, tensor in session.shards.parts(are_trained=False).items():
        yield _Held(names[value], sharer, tensor)
    for value in dict.fromkeys(buffer for stage in session.own for buffer, _ in stage.mutations):
        yield _Held(names[value], mesh.rank, weights.tensors[value])


def _of_shape(read: torch.Tensor, held: _Held) -> torch.Tensor:
    if read.shape != held.tensor.shape or read.dtype != held.tensor.dtype:
        raise RunError(
            f"the checkpoint has '{held.name}' as {read.dtype}{list(read.shape)}, this run as "
            f"{held.tensor.dtype}{list(held.tensor.shape)}: resume with the version of stagewright that wrote it"
        )
    return read


def _agreed(folder: Path) -> Checkpoint:
    """The newest checkpoint, which all ranks see alike; every rank must call this."""
    found, fault = None, None
    try:
        found = folders.newest(folder)
    except InputError as error:
        fault = str(error)
    seen = (
        None
        if found is None
        else [found.manifest.step, folders.digest(found.manifest.model_dump(mode="json"))]
    )
    told = exchange({"seen": seen, "fault": fault})
    if faults := [one["fault"] for one in told if one["fault"] is not None]:
        raise InputError(faults[0])
    if found is None or any(one["seen"] != seen for one in told):
        names = ["none" if one["seen"] is None else folders.folder_name(one["seen"][0]) for one in told]
        other = next((rank for rank, one in enumerate(told) if one["seen"] != told[0]["seen"]), 0)
        raise RunError(
            f"rank 0 sees checkpoint {names[0]} in '{folder}', rank {other} {names[other]}: the folder must be on a file "
            "system that all ranks share"
        )
    return found


def _verify(session: Session, found: Checkpoint, read: set[str]) -> None:
    """Every file of a checkpoint is as it was written; every rank must call this, with what it will read."""
    rest = sorted(name for name in found.manifest.files if not name.startswith(_RANK))
    share = rest[session.mesh.rank :: session.mesh.size]
    fault = None
    try:
        check_contents(found.path, found.manifest, (*sorted(read), *share))
    except InputError as error:
        fault = str(error)
    if faults := [told for told in exchange(fault) if told is not None]:
        raise InputError(f"{faults[0]}; {folders.instead_of(found.path)}")


def _write_own(session: Session, scratch: Path) -> tuple[dict[str, FileRecord], str | None]:
    """This rank's files, and what kept it from writing them; every rank must call this."""
    own = {held.name: held.tensor for held in _held(session) if held.writer == session.mesh.rank}
    # Together with other ranks, also if this one cannot write.
    of_model = session.model_files.tensors(session)
    files = {_rank_file(session.mesh.rank): own, session.model_files.name: of_model}
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        written = {name: write_tensors(scratch / name, held) for name, held in files.items() if held}
        return written, None
    except (OSError, RunError) as error:
        return {}, getattr(error, "strerror", None) or str(error)


def _complete(session: Session, scratch: Path, step: int, files: Mapping[str, FileRecord]) -> None:
    """The files that describe the others, once all of these are there."""
    for name, record in files.items():
        if not (scratch / name).is_file() or (scratch / name).stat().st_size != record.bytes:
            raise RunError(
                f"file '{name}' that another rank wrote is not there: all ranks must share the file system"
            )
    described = write_index(scratch, session.reference.config)
    scale, plan = session.loss_scale, folders.identity(session.plan)
    manifest = Manifest(
        stagewright=__version__,
        step=step,
        plan_digest=folders.digest(plan),
        plan=plan,
        data=session.data,
        loss_scale=None if scale is None else scale.value,
        num_good=0 if scale is None else scale.num_good,
        files={**files, **{path.name: FileRecord.of(path) for path in described}},
    )
    for path in (*described, *write_manifest(scratch, manifest), scratch):
        _sync(path)


def _not_written(folder: Path, step: int, fault: str) -> RunError:
    before = [path.name for path in folders.steps_of(folder)]
    kept = f"; {before[0]} is whole: go on from it with --resume" if before else ""
    return RunError(
        f"the checkpoint of step {step} cannot be written to '{folder}' ({fault}): make room there, or give another folder "
        f"with --checkpoint{kept}"
    )


def _rank_file(rank: int) -> str:
    return f"{_RANK}{rank:05d}.safetensors"


def _sync(path: Path) -> None:
    """What was written to a file or folder survives a power failure from now on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """A file of `tensors`, which may lie on any device; on the disk when this returns.

    Raises:
        OSError: it cannot be written.
        RunError: a tensor is of a type that such files do not have.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in _pieces(tensors):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    # So that all are aligned.
    offset, order = 0, sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _TYPES:
            raise RunError(f"tensor '{name}' is of type {tensor.dtype}, which safetensors files do not have")
        end = offset + tensor.numel() * tensor.element_size()
        shape, dtype = list(tensor.shape), _TYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        flat = tensors[name].detach().reshape(-1).cpu().contiguous()
        yield flat.view(torch.uint8).numpy().data
