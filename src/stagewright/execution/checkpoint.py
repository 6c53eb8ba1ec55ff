"""Checkpoints: the model's weights and all state that a run needs to resume exactly, in a folder per step.

Besides the model files (`stagewright.execution.model_files`) and ``checkpoint.json``, a folder has one
``rank-00003.safetensors`` for each rank that holds something no rank before it holds: weights as the optimizer updates
them with AdamW's moments, whole or in shards, parameters that are not trained, and buffers that the forward changes.
Random numbers and data are keyed by the step, so they have no state. For a model with adapters, frozen weights are left
out.

A folder is complete or absent: it gets its name when every rank has written its files.
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
    """A writer of a session's checkpoints to `folder` during training: a step waits until its state is copied, not until
    it is on the disk.

    Args:
        kept: which complete checkpoints to keep when another is complete; None keeps all.
    """

    def __init__(self, session: Session, folder: Path, kept: Kept | None = None) -> None:
        self.session = session
        self.folder = folder
        self.kept = kept
        self._buffers: dict[str, dict[str, torch.Tensor]] = {}
        self._pending: _PendingCheckpoint | None = None

    @property
    def is_open(self) -> bool:
        """Whether a checkpoint is being written; the same on all ranks."""
        return self._pending is not None

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self._pending is None or self._pending.is_done

    def start(self, step: int) -> None:
        """Begin to write the state after `step` steps, once the previous checkpoint is finished. Every rank must call this.
        Raises as `finish`."""
        self.finish()
        self.session.watch(f"copying the state of step {step} for its checkpoint")
        scratch = self.folder / f".{folders.folder_name(step)}{UNFINISHED}"
        if self.session.mesh.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was ended in the middle
        dist.barrier()
        self._pending = _PendingCheckpoint(scratch, _described(self.session, step), self._copied())

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete. Every rank must call this.

        Raises:
            RunError: a rank cannot write its files, or ranks do not share the folder. This checkpoint is then removed, and
                earlier ones are unchanged.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        step, is_first = pending.manifest.step, self.session.mesh.rank == 0
        self.session.watch(f"writing the checkpoint of step {step}")
        written, fault = pending.result()
        reports = exchange(
            {"files": {name: record.model_dump() for name, record in written.items()}, "fault": fault}
        )
        faults = [
            f"rank {rank}: {report['fault']}"
            for rank, report in enumerate(reports)
            if report["fault"] is not None
        ]
        if is_first and not faults:
            files = {
                name: FileRecord(**record) for report in reports for name, record in report["files"].items()
            }
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
        """Return copies of this rank's present state, by file, in host memory that the next checkpoint reuses."""
        rank, files = self.session.mesh.rank, self.session.model_files
        now = {
            rank_file(rank): {
                state.key: state.tensor for state in held(self.session) if state.writer == rank
            },
            **files.written(self.session),
        }
        accelerator = accelerator_of(self.session.device)
        if accelerator.is_asynchronous:
            fresh = [
                tensor
                for file, tensors in now.items()
                for key, tensor in tensors.items()
                if key not in self._buffers.get(file, {})
            ]
            accelerator.arena.reserve(pinned_bytes(tensor.nbytes for tensor in fresh))
        for file, tensors in now.items():
            buffers = self._buffers.setdefault(file, {})
            for key, tensor in tensors.items():
                if key not in buffers:
                    buffers[key] = accelerator.lasting_on_host(tensor.shape, tensor.dtype, self)
                buffers[key].copy_(tensor, non_blocking=True)
        accelerator.synchronize()
        return {file: buffers for file, buffers in self._buffers.items() if buffers}


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
        """Wait for this rank's files; return them and the fault that prevented writing, if any."""
        self._thread.join()
        return self._written, self._fault

    def _write(self) -> None:
        try:
            self.scratch.mkdir(parents=True, exist_ok=True)
            self._written = {
                name: write_tensors(self.scratch / name, held) for name, held in self._files.items()
            }
        except Exception as error:  # of whatever kind: an unwritten checkpoint must not count as complete
            self._fault = getattr(error, "strerror", None) or str(error) or type(error).__name__


def save(session: Session, folder: Path, step: int, kept: Kept | None = None) -> Path:
    """Write the state after `step` steps to ``folder/step-...`` and wait until it is there; every rank must call this.
    Raises as `Saver.finish`."""
    saver = Saver(session, folder, kept)
    saver.start(step)
    saver.finish()
    return folder / folders.folder_name(step)


def restore(session: Session, folder: Path) -> int:
    """Restore a session from the newest checkpoint of its plan and return the number of steps done.

    Every rank must call this. All files are compared with their digests before anything is used: each rank compares those
    that it reads and a share of the others.

    Raises:
        InputError: the checkpoint is damaged, or has adapters for another model than the session's.
        RunError: ranks do not see the same checkpoint.
    """
    session.watch("looking for the newest checkpoint")
    checkpoint = _agreed(folder)
    _check_base(session, checkpoint)
    session.watch(f"reading checkpoint {checkpoint.path.name}")
    wanted, stored, sources = _agreed_sources(session, checkpoint)
    _verify(session, checkpoint, {file for files in sources for file, _ in files})
    for state, files in zip(wanted, sources, strict=True):
        stored.read(state, files)
    scale = checkpoint.manifest.loss_scale
    resumed(session, None if scale is None else (scale, checkpoint.manifest.num_good))
    session.passed_over = checkpoint.manifest.passed_over
    return checkpoint.manifest.step


def _check_base(session: Session, checkpoint: Checkpoint) -> None:
    """Check on the first rank that adapters are for this model; every rank must call this."""
    fault = None
    if session.mesh.rank == 0 and checkpoint.manifest.base is not None:
        try:
            folders.check_base(checkpoint, session.base_model)
        except InputError as error:
            fault = str(error)
    if (fault := exchange(fault)[0]) is not None:
        raise InputError(fault)


def _agreed_sources(session: Session, checkpoint: Checkpoint) -> tuple[list[Held], Stored, list[Sources]]:
    """Return this rank's state, the contents of a checkpoint, and where in it the state is stored. Every rank must call
    this, and all raise `InputError` where one misses something."""
    wanted, stored, sources, fault = [], None, [], None
    try:
        stored = Stored(checkpoint)
        wanted = list(held(session, stored.index))
        sources = [stored.sources(state.name, state.region) for state in wanted]
    except InputError as error:
        fault = str(error)
    _raise_together(fault, checkpoint)
    assert stored is not None
    return wanted, stored, sources


def _raise_together(fault: str | None, checkpoint: Checkpoint) -> None:
    """Raise `InputError` on all ranks if any of them reports a fault in a checkpoint; every rank must call this."""
    if faults := [text for text in exchange(fault) if text is not None]:
        raise InputError(f"{faults[0]}; {folders.instead_of(checkpoint.path)}")


def _agreed(folder: Path) -> Checkpoint:
    """Return the newest checkpoint, which must be the same on all ranks; every rank must call this."""
    checkpoint, fault = None, None
    try:
        checkpoint = folders.newest(folder)
    except InputError as error:
        fault = str(error)
    seen = (
        None
        if checkpoint is None
        else [checkpoint.manifest.step, folders.digest(checkpoint.manifest.model_dump(mode="json"))]
    )
    reports = exchange({"seen": seen, "fault": fault})
    if faults := [report["fault"] for report in reports if report["fault"] is not None]:
        raise InputError(faults[0])
    if checkpoint is None or any(report["seen"] != seen for report in reports):
        names = [
            "none" if report["seen"] is None else folders.folder_name(report["seen"][0]) for report in reports
        ]
        other = next((rank for rank, report in enumerate(reports) if report["seen"] != reports[0]["seen"]), 0)
        raise RunError(
            f"rank 0 sees checkpoint {names[0]} in '{folder}', rank {other} {names[other]}: the folder must be on a file "
            "system that all ranks share"
        )
    return checkpoint


def _verify(session: Session, checkpoint: Checkpoint, read: set[str]) -> None:
    """Check that every file of a checkpoint is unchanged. Every rank must call this with the files that it will read."""
    unread = sorted(
        checkpoint.manifest.files.keys() - {name for names in exchange(sorted(read)) for name in names}
    )
    share = unread[session.mesh.rank :: session.mesh.size]
    fault = None
    try:
        check_contents(checkpoint.path, checkpoint.manifest, (*sorted(read), *share))
    except InputError as error:
        fault = str(error)
    _raise_together(fault, checkpoint)


def _described(session: Session, step: int) -> Manifest:
    """Return the manifest of a checkpoint of the session's present state, without its files."""
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
    """Check that all `files` are there, and write the files that describe them."""
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
    kept = f"; {before[0]} is complete: continue from it with --resume" if before else ""
    return RunError(
        f"the checkpoint of step {step} cannot be written to '{folder}' ({fault}): make room there, or give another "
        f"folder with --checkpoint{kept}"
    )


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk, so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
