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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from stagewright.errors import InputError, RunError, StagewrightError
from stagewright.execution import checkpoint_folder as folders
from stagewright.execution.collectives import exchange
from stagewright.execution.manifest import (
    Checkpoint,
    FileRecord,
    Manifest,
    check_contents,
    damaged,
    write_manifest,
)
from stagewright.execution.model_files import write_index
from stagewright.execution.regions import Region, in_whole, stretches
from stagewright.execution.session import Session
from stagewright.graph.flat import Flat
from stagewright.graph.tensor_parallel import parallelism
from stagewright.version import __version__

_RANK = "rank-"
_OF_REPLICA = "#"
_Sources = list[tuple[str, Region]]  # names of files, and the regions that they have


@dataclass(frozen=True)
class _Held:
    """A region of something that training changes: its name in the whole model, the rank that writes it (this one or another
    with the same), and where this rank has it."""

    name: str
    region: Region
    writer: int
    tensor: torch.Tensor

    @property
    def key(self) -> str:
        """Its name in a file.

        >>> _Held("weight:exp_avg", Region((4, 0), (2, 8)), 0, torch.zeros(2, 8)).key
        'weight:exp_avg@4,0'
        """
        return f"{self.name}@{','.join(map(str, self.region.start))}"


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
    stored, sources = _agreed_sources(found, held)
    _verify(session, found, {file for files in sources for file, _ in files})
    for one, files in zip(held, sources, strict=True):
        stored.read(one, files)
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
    shared = parallelism(session.graph)
    shards = shared.shards if shared else {}
    holders: dict[int, int] = {}
    for stage in session.stages:
        for value in stage.parameters:
            here = session.plan.placement[stage.index]
            holders[value] = min(here, holders.get(value, here))

    def writer(value: int, replica: int) -> int:
        """Of those that hold the same, the first."""
        tensor_rank = mesh.tensor_rank if names[value] in shards else 0
        return mesh.global_rank(holders[value], replica, tensor_rank)

    def placed(value: int, part: str, region: Region, replica: int, tensor: torch.Tensor) -> Iterator[_Held]:
        """A region of what this rank has of a parameter, as those of the whole one."""
        name = names[value]
        pieces = (
            in_whole(region, shards[name], mesh.tp, mesh.tensor_rank)
            if name in shards and region.shape
            else ((region, region),)
        )
        for whole, own in pieces:
            yield _Held(
                f"{name}:{part}",
                whole,
                writer(value, replica),
                tensor[own.within(region)] if own.shape else tensor,
            )

    sharer = mesh.replica % mesh.num_shards
    for value, state in session.optimizer.adamw.states():
        flat = session.shards.flat_of(value) if value in session.optimizer.sharded else None
        for part, tensor in state.items():
            if flat is None:
                yield from placed(value, part, Region.whole(tensor.shape), 0, tensor)
            else:
                for own, region, piece in _of_flat(flat, flat.shard(sharer), tensor):
                    yield from placed(own, part, region, sharer, piece)
    for value, tensor in weights.parameters.items():
        if value not in weights.trained:
            yield from placed(value, "weight", Region.whole(tensor.shape), 0, tensor)
    for value, tensor in session.shards.parts(are_trained=False).items():
        flat = session.shards.flat_of(value)
        for own, region, piece in _of_flat(flat, flat.shard(sharer), tensor):
            yield from placed(own, "weight", region, sharer, piece)
    first = mesh.global_rank(mesh.pipeline_rank, mesh.replica, 0)
    for value in dict.fromkeys(buffer for stage in session.own for buffer, _ in stage.mutations):
        tensor = weights.tensors[value]
        own = f"{names[value]}{_OF_REPLICA}{mesh.replica}.{mesh.pipeline_rank}"
        yield _Held(own, Region.whole(tensor.shape), first, tensor)


def _of_flat(flat: Flat, part: slice, shard: torch.Tensor) -> Iterator[tuple[int, Region, torch.Tensor]]:
    """What `shard`, or a number that belongs to it, is of each parameter of a flat buffer: regions and where they are."""
    for entry in flat.entries:
        if not shard.dim():
            yield entry.value, Region.whole(()), shard
            continue
        first = max(entry.offset, part.start)
        stop = min(entry.offset + entry.meta.num_elements, part.stop)
        for stretch in stretches(entry.meta, first - entry.offset, stop - entry.offset):
            begin = first - part.start + stretch.offset
            rows = shard[begin : begin + stretch.region.num_elements]
            turned = rows.view([stretch.region.shape[dim] for dim in stretch.order])
            inverse = sorted(range(len(stretch.order)), key=stretch.order.__getitem__)
            yield entry.value, stretch.region, turned.permute(inverse)


class _Stored:
    """What the files of all ranks of a checkpoint hold: regions by the names of tensors.

    Raises:
        InputError: a file is none of ours.
    """

    def __init__(self, found: Checkpoint) -> None:
        self.path = found.path
        self._where: dict[str, dict[Region, str]] = {}
        self._readers: dict[str, safe_open] = {}
        for file in sorted(name for name in found.manifest.files if name.startswith(_RANK)):
            for key, shape in _header(found.path, file).items():
                name, _, start = key.rpartition("@")
                region = Region(tuple(map(int, start.split(","))) if start else (), shape)
                self._where.setdefault(name, {}).setdefault(region, file)

    def sources(self, name: str, wanted: Region) -> _Sources:
        """Which files have which regions of what is `wanted` of a tensor.

        Raises:
            InputError: some of it is in none.
        """
        stored = self._where.get(self._known_as(name), {})
        if wanted in stored:
            return [(stored[wanted], wanted)]
        found = [(file, region) for region, file in stored.items() if wanted.overlap(region) is not None]
        if sum(_overlap(wanted, region).num_elements for _, region in found) != wanted.num_elements:
            raise InputError(
                f"checkpoint '{self.path}' does not have all of '{name}': it is of another model, or was written by "
                "another version of stagewright"
            )
        return found

    def read(self, held: _Held, sources: _Sources) -> None:
        """Fill what a rank holds."""
        name = self._known_as(held.name)
        try:
            for file, region in sources:
                if file not in self._readers:
                    self._readers[file] = safe_open(str(self.path / file), framework="pt")
                both, key = _overlap(held.region, region), _Held(name, region, 0, held.tensor).key
                if not region.shape or both == region:
                    read = self._readers[file].get_tensor(key)
                else:
                    read = self._readers[file].get_slice(key)[both.within(region)]
                if read.dtype != held.tensor.dtype:
                    raise RunError(
                        f"the checkpoint has '{name}' as {read.dtype}, this run as {held.tensor.dtype}: resume with the "
                        "version of stagewright that wrote it"
                    )
                own = held.tensor[both.within(held.region)] if both.shape else held.tensor
                own.copy_(read)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"checkpoint '{self.path}' cannot be read: {error}; {folders.instead_of(self.path)}"
            ) from None

    def _known_as(self, name: str) -> str:
        """Under which name it is stored: of statistics that each replica has of its own, where there were fewer of them, the
        first replica's."""
        if name in self._where or _OF_REPLICA not in name:
            return name
        prefix = name.rpartition(_OF_REPLICA)[0] + _OF_REPLICA
        return min((one for one in self._where if one.startswith(prefix)), default=name)


def _overlap(one: Region, other: Region) -> Region:
    found = one.overlap(other)
    assert found is not None, "regions that were chosen because they overlap"
    return found


def _header(folder: Path, file: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a file. Raises `InputError` where that cannot be read."""
    try:
        with safe_open(str(folder / file), framework="pt") as reader:
            return {key: tuple(reader.get_slice(key).get_shape()) for key in reader.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise damaged(folder, f"file '{file}' cannot be read ({error})") from None


def _agreed_sources(found: Checkpoint, held: Sequence[_Held]) -> tuple[_Stored, list[_Sources]]:
    """What a checkpoint holds, and where in it everything is that this rank has; every rank must call this, and all raise
    `InputError` where one does not find something."""
    stored, sources, fault = None, [], None
    try:
        stored = _Stored(found)
        sources = [stored.sources(one.name, one.region) for one in held]
    except InputError as error:
        fault = str(error)
    if faults := [told for told in exchange(fault) if told is not None]:
        raise InputError(f"{faults[0]}; {folders.instead_of(found.path)}")
    assert stored is not None
    return stored, sources


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
    own = {held.key: held.tensor for held in _held(session) if held.writer == session.mesh.rank}
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
