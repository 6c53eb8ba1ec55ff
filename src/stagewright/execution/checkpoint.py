"""Checkpoints: what a run needs to go on as if it had never stopped, and its model's weights, in a folder per step.

Beside the model files (`stagewright.execution.model_files`) and ``checkpoint.json``, a folder has one
``rank-00003.safetensors`` for each rank that holds something no rank before it holds: weights as the optimizer updates
them with AdamW's moments, whole or in shards, parameters that are not trained, and buffers that the forward changes.
Random numbers and data are keyed by the step, so they have no state. Of a model with adapters, what is frozen is left out.

A folder is there whole or not at all: it gets its name when every rank has written its files.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from stagewright.errors import InputError, RunError, StagewrightError, StagewrightWarning
from stagewright.execution import checkpoint_folder as folders
from stagewright.execution.accelerator import accelerator_of
from stagewright.execution.checkpoint_folder import Kept
from stagewright.execution.collectives import exchange
from stagewright.execution.manifest import Checkpoint, FileRecord, Manifest, check_contents, write_manifest
from stagewright.execution.model_files import write_documents
from stagewright.execution.pinned import pinned_bytes
from stagewright.execution.session import Session
from stagewright.execution.state import Held, held, resumed
from stagewright.execution.tensor_files import Sources, Stored, rank_file, write_tensors
from stagewright.files import UNFINISHED
from stagewright.version import __version__


class Saver:
    """Writes checkpoints of a session to `folder` while it goes on training: a step waits until its state is copied, not
    until it is on the disk.

    Args:
        kept: which of the whole checkpoints are not removed when another is whole; None removes none.
    """

    def __init__(self, session: Session, folder: Path, kept: Kept | None = None) -> None:
        self.session = session
        self.folder = folder
        self.kept = kept
        self._room: dict[str, dict[str, torch.Tensor]] = {}
        self._pending: _PendingCheckpoint | None = None

    @property
    def is_open(self) -> bool:
        """Whether a checkpoint is being written; all ranks say the same."""
        return self._pending is not None

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self._pending is None or self._pending.is_done

    def start(self, step: int) -> None:
        """Begin to write the state after `step` steps; ends the one before first. Every rank must call this. Raises as
        `finish`."""
        self.finish()
        self.session.watch(f"copying the state of step {step} for its checkpoint")
        scratch = self.folder / f".{folders.folder_name(step)}{UNFINISHED}"
        if self.session.mesh.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was ended in the middle
        dist.barrier()
        self._pending = _PendingCheckpoint(scratch, _described(self.session, step), self._copied())

    def finish(self) -> None:
        """Wait until the checkpoint is whole, if one is being written. Every rank must call this.

        Raises:
            RunError: a rank cannot write its files, or ranks do not share the folder. Nothing of this checkpoint is left
                then, and the ones before are as they were.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        step, is_first = pending.manifest.step, self.session.mesh.rank == 0
        self.session.watch(f"writing the checkpoint of step {step}")
        written, fault = pending.result()
        told = exchange(
            {"files": {name: record.model_dump() for name, record in written.items()}, "fault": fault}
        )
        faults = [f"rank {rank}: {one['fault']}" for rank, one in enumerate(told) if one["fault"] is not None]
        if is_first and not faults:
            files = {name: FileRecord(**record) for one in told for name, record in one["files"].items()}
            try:
                _complete(pending, self.session.model_files.documents, files)
                pending.scratch.rename(self.folder / folders.folder_name(step))
                _sync(self.folder)
            except (OSError, StagewrightError) as error:
                faults = [f"rank 0: {error}"]
        if faults := exchange(faults)[0] or faults:
            if is_first:
                shutil.rmtree(pending.scratch, ignore_errors=True)
            raise _not_written(self.folder, step, faults[0])
        if is_first and self.kept is not None:
            try:
                self.kept.prune(self.folder)
            except OSError as error:
                warnings.warn(
                    f"older checkpoints stay in '{self.folder}': {error.strerror or error}",
                    StagewrightWarning,
                    stacklevel=2,
                )

    def _copied(self) -> dict[str, dict[str, torch.Tensor]]:
        """What this rank writes, by file, as it is now, in memory of the host that the next checkpoint uses again."""
        rank, files = self.session.mesh.rank, self.session.model_files
        now = {
            rank_file(rank): {one.key: one.tensor for one in held(self.session) if one.writer == rank},
            **files.written(self.session),
        }
        accelerator = accelerator_of(self.session.device)
        if accelerator.is_asynchronous:
            fresh = [
                tensor
                for file, tensors in now.items()
                for key, tensor in tensors.items()
                if key not in self._room.get(file, {})
            ]
            accelerator.arena.reserve(pinned_bytes(tensor.nbytes for tensor in fresh))
        for file, tensors in now.items():
            room = self._room.setdefault(file, {})
            for key, tensor in tensors.items():
                if key not in room:
                    room[key] = accelerator.lasting_on_host(tensor.shape, tensor.dtype, self)
                room[key].copy_(tensor, non_blocking=True)
        accelerator.synchronize()
        return {file: room for file, room in self._room.items() if room}


class _PendingCheckpoint:
    """A checkpoint whose files a thread of this rank is writing to the folder `scratch`."""

    def __init__(
        self, scratch: Path, manifest: Manifest, files: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> None:
        self.scratch = scratch
        self.manifest = manifest
        self._files = files
        self._written: dict[str, FileRecord] = {}
        self._fault: str | None = None
        self._thread = Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> tuple[dict[str, FileRecord], str | None]:
        """This rank's files, once they are there, and what kept it from writing them."""
        self._thread.join()
        return self._written, self._fault

    def _write(self) -> None:
        try:
            self.scratch.mkdir(parents=True, exist_ok=True)
            self._written = {
                name: write_tensors(self.scratch / name, held) for name, held in self._files.items()
            }
        except Exception as error:  # of whatever kind: what is not written must not count as whole
            self._fault = getattr(error, "strerror", None) or str(error) or type(error).__name__


def save(session: Session, folder: Path, step: int, kept: Kept | None = None) -> Path:
    """Write the state after `step` steps to ``folder/step-...`` and wait until it is there; every rank must call this.
    Raises as `Saver.finish`."""
    saver = Saver(session, folder, kept)
    saver.start(step)
    saver.finish()
    return folder / folders.folder_name(step)


def restore(session: Session, folder: Path) -> int:
    """Put a session where the newest checkpoint of its plan was; returns the number of steps that were done.

    Every rank must call this. All files are compared with their digests before anything is used: by each rank those that it
    reads, and a share of the others.

    Raises:
        InputError: the checkpoint is damaged, or has adapters for another model than the session's.
        RunError: ranks do not see the same one.
    """
    session.watch("looking for the newest checkpoint")
    found = _agreed(folder)
    _check_base(session, found)
    session.watch(f"reading checkpoint {found.path.name}")
    own, stored, sources = _agreed_sources(session, found)
    _verify(session, found, {file for files in sources for file, _ in files})
    for one, files in zip(own, sources, strict=True):
        stored.read(one, files)
    scale = found.manifest.loss_scale
    resumed(session, None if scale is None else (scale, found.manifest.num_good))
    session.passed_over = found.manifest.passed_over
    return found.manifest.step


def _check_base(session: Session, found: Checkpoint) -> None:
    """That adapters are for this model, as the first rank sees it; every rank must call this."""
    fault = None
    if session.mesh.rank == 0 and found.manifest.base is not None:
        try:
            folders.check_base(found, session.base_model)
        except InputError as error:
            fault = str(error)
    if (fault := exchange(fault)[0]) is not None:
        raise InputError(fault)


def _agreed_sources(session: Session, found: Checkpoint) -> tuple[list[Held], Stored, list[Sources]]:
    """What this rank has, what a checkpoint holds, and where in it everything of the first is; every rank must call this,
    and all raise `InputError` where one does not find something."""
    own, stored, sources, fault = [], None, [], None
    try:
        stored = Stored(found)
        own = list(held(session, stored.index))
        sources = [stored.sources(one.name, one.region) for one in own]
    except InputError as error:
        fault = str(error)
    _raise_together(fault, found)
    assert stored is not None
    return own, stored, sources


def _raise_together(fault: str | None, found: Checkpoint) -> None:
    """Raises `InputError` on all ranks where one found a fault in a checkpoint; every rank must call this."""
    if faults := [told for told in exchange(fault) if told is not None]:
        raise InputError(f"{faults[0]}; {folders.instead_of(found.path)}")


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
    others = sorted(
        found.manifest.files.keys() - {name for names in exchange(sorted(read)) for name in names}
    )
    share = others[session.mesh.rank :: session.mesh.size]
    fault = None
    try:
        check_contents(found.path, found.manifest, (*sorted(read), *share))
    except InputError as error:
        fault = str(error)
    _raise_together(fault, found)


def _described(session: Session, step: int) -> Manifest:
    """A checkpoint of the session as it is now, but for its files."""
    scale, plan = session.loss_scale, folders.identity(session.plan)
    return Manifest(
        stagewright=__version__,
        step=step,
        plan=plan,
        data=session.data,
        base=session.base_model if session.mesh.rank == 0 else None,
        loss_scale=None if scale is None else scale.value,
        num_good=0 if scale is None else scale.num_good,
        passed_over=session.passed_over,
        files={},
    )


def _complete(
    pending: _PendingCheckpoint, documents: Mapping[str, Mapping[str, Any]], files: Mapping[str, FileRecord]
) -> None:
    """The files that describe the others, once all of these are there."""
    scratch = pending.scratch
    for name, record in files.items():
        if not (scratch / name).is_file() or (scratch / name).stat().st_size != record.bytes:
            raise RunError(
                f"file '{name}' that another rank wrote is not there: all ranks must share the file system"
            )
    described = write_documents(scratch, documents)
    records = {**files, **{path.name: FileRecord.of(path) for path in described}}
    manifest = pending.manifest.model_copy(update={"files": records})
    for path in (*described, *write_manifest(scratch, manifest), scratch):
        _sync(path)


def _not_written(folder: Path, step: int, fault: str) -> RunError:
    before = [path.name for path in folders.steps_of(folder)]
    kept = f"; {before[0]} is whole: go on from it with --resume" if before else ""
    return RunError(
        f"the checkpoint of step {step} cannot be written to '{folder}' ({fault}): make room there, or give another folder "
        f"with --checkpoint{kept}"
    )


def _sync(path: Path) -> None:
    """What was written to a file or folder survives a power failure from now on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
