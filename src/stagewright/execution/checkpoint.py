"""Checkpoints: what a run needs to go on as if it had never stopped, and its model's weights, in a folder per step.

Beside the model files (`stagewright.execution.model_files`) and ``checkpoint.json``, a folder has one
``rank-00003.safetensors`` for each rank that holds something no rank before it holds: weights as the optimizer updates
them with AdamW's moments, whole or in shards, parameters that are not trained, and buffers that the forward changes.
Random numbers and data are keyed by the step, so they have no state.

A folder is there whole or not at all: it gets its name when every rank has written its files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stagewright.errors import RunError
from stagewright.execution.checkpoint_folder import (
    MANIFEST,
    Checkpoint,
    Manifest,
    digest,
    folder_name,
    identity,
    newest,
)
from stagewright.execution.model_files import write_index
from stagewright.execution.session import Session
from stagewright.files import write_whole
from stagewright.version import __version__


@dataclass(frozen=True)
class _Held:
    """Something that training changes: its name, the rank that writes it (this one or another with the same), and where
    this rank has it."""

    name: str
    writer: int
    tensor: torch.Tensor


def is_due(step: int, num_steps: int, every: int | None) -> bool:
    """Whether a checkpoint is written after `step` steps.

    >>> [step for step in range(1, 6) if is_due(step, 5, 2)], [step for step in range(1, 6) if is_due(step, 5, None)]
    ([2, 4, 5], [5])
    """
    return step == num_steps or (every is not None and step % every == 0)


def save(session: Session, folder: Path, step: int) -> Path:
    """Write the state after `step` steps to ``folder/step-...``; every rank must call this.

    Raises:
        RunError: a file cannot be written, or ranks do not share the folder.
    """
    session.watch(f"writing the checkpoint of step {step}")
    final = folder / folder_name(step)
    scratch = folder / f".{final.name}.writing"
    is_first = session.mesh.rank == 0
    if is_first:
        shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was ended in the middle
    dist.barrier()
    scratch.mkdir(parents=True, exist_ok=True)
    own = {held.name: held.tensor for held in _held(session) if held.writer == session.mesh.rank}
    files = [
        _write(scratch / _rank_file(session.mesh.rank), own),
        _write(scratch / session.model_files.name, session.model_files.tensors(session)),
    ]
    sizes = [dict[str, int]() for _ in range(session.mesh.size)]
    dist.all_gather_object(sizes, {file.name: file.stat().st_size for file in files if file is not None})
    if is_first:
        _complete(session, scratch, step, {name: size for one in sizes for name, size in one.items()})
        shutil.rmtree(final, ignore_errors=True)  # one that is not whole
        scratch.rename(final)
        _sync(folder)
    return final


def restore(session: Session, folder: Path) -> int:
    """Put a session where the newest whole checkpoint of its plan was; returns the number of steps that were done.

    Every rank must call this.

    Raises:
        RunError: a file of the checkpoint cannot be read here.
    """
    found = _agreed(folder)
    session.watch(f"reading checkpoint {found.path.name}")
    try:
        with ExitStack() as stack:
            readers: dict[int, safe_open] = {}
            for held in _held(session):
                if held.writer not in readers:
                    file = found.path / _rank_file(held.writer)
                    readers[held.writer] = stack.enter_context(safe_open(str(file), framework="pt"))
                held.tensor.copy_(_of_shape(readers[held.writer].get_tensor(held.name), held))
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"checkpoint '{found.path}' cannot be read: {error}: remove it to go on from the one before"
        ) from None
    session.optimizer.adamw.round()
    session.shards.spread()
    if session.loss_scale is not None and found.manifest.loss_scale is not None:
        session.loss_scale.value = found.manifest.loss_scale
        session.loss_scale.num_good = found.manifest.num_good
        session.lengths.scale_loss(session.cotangent)
    session.runner.rest()  # what was computed from parameters that have changed
    session.runner.wake()
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
    for value, tensor in session.shards.frozen().items():
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
    """The newest whole checkpoint that the first rank sees; every rank must call this."""
    found = newest(folder)
    steps: list[int | None] = [None if found is None else found.manifest.step]
    dist.broadcast_object_list(steps, src=0)
    if found is None or found.manifest.step != steps[0]:
        seen = "no whole checkpoint" if found is None else found.path.name
        wanted = "none" if steps[0] is None else folder_name(steps[0])
        raise RunError(
            f"this rank sees {seen} in '{folder}' and the first rank {wanted}: the folder must be on a file system that "
            "all ranks share"
        )
    return found


def _complete(session: Session, scratch: Path, step: int, files: Mapping[str, int]) -> None:
    """The files that describe the others, once all of these are there."""
    for name, size in files.items():
        if not (scratch / name).is_file() or (scratch / name).stat().st_size != size:
            raise RunError(
                f"file '{name}' that another rank wrote is not in '{scratch}': the folder of --checkpoint must be on a file "
                "system that all ranks share"
            )
    described = write_index(scratch, session.reference.config)
    scale, plan = session.loss_scale, identity(session.plan)
    manifest = Manifest(
        stagewright=__version__,
        step=step,
        plan_digest=digest(plan),
        plan=plan,
        loss_scale=None if scale is None else scale.value,
        num_good=0 if scale is None else scale.num_good,
        files={**files, **{path.name: path.stat().st_size for path in described}},
    )
    write_whole(scratch / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    for path in (*described, scratch / MANIFEST, scratch):
        _sync(path)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path | None:
    """A file of `tensors`, on the disk when this returns; none where there are none."""
    if not tensors:
        return None
    here = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    try:
        save_file(here, path, metadata={"format": "pt"})
        _sync(path)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"checkpoint file '{path}' cannot be written ({error}): make room, or give another folder with --checkpoint"
        ) from None
    return path


def _sync(path: Path) -> None:
    """What was written to a file or folder survives a power failure from now on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
