"""The folder of a run's checkpoints: finding, verifying and pruning them, and checks before resuming from one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.cluster.schema import validated
from stagewright.errors import InputError, StagewrightWarning
from stagewright.execution.base_model import BaseModelIdentity
from stagewright.execution.data_identity import DataIdentity, identity_of
from stagewright.execution.manifest import MANIFEST, Checkpoint, check_contents, read_checkpoint
from stagewright.execution.weight_files import base_model_of
from stagewright.files import UNFINISHED, make_writable
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan

if TYPE_CHECKING:
    from stagewright.execution.options import RunOptions

_STEP = re.compile(r"step-(\d{6,})")
_SHOWN_LENGTH = 60

_OF_STATE = ("dtype", "optimizer")
"""Fields of a job that determine its state; a run cannot resume with others."""
_OF_SAMPLES = ("global_batch", "sequence_length", "sequence_lengths", "documents_apart", "seed")
"""Fields of a job that determine which samples come in which step."""

# What a run computes does not depend on these.
_FREE = {"stagewright": True, "cluster": True, "devices": True, "predictions": True, "shorter_lengths": True}
_FREE_OF_MODEL: dict[str, Any] = {"text": True, "lora": {"folder": True}}
_FREE_OF_JOB = {"num_steps": True, "memory_limit": True, "memory_to_spare": True, "optimizer_state": True}


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` steps.

    >>> folder_name(20)
    'step-000020'
    """
    return f"step-{step:06d}"


def identity(plan: Plan) -> dict[str, Any]:
    """Return the part of a plan that must be the same for a run to resume exactly, to the last bit."""
    left_out = {**_FREE, "model": _FREE_OF_MODEL, "job": _FREE_OF_JOB}
    document = json.loads(plan.model_dump_json(exclude=left_out))
    return {**document, "program": digest(document["program"])[:12]}  # thousands of actions


def digest(content: object) -> str:
    """Return the SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def steps_of(folder: Path) -> list[Path]:
    """Return the folders of checkpoints in `folder`, complete or not, the newest first."""
    folders = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest(folder: Path) -> Checkpoint | None:
    """Return the checkpoint after the most steps, or None where there is none. Raises `InputError` where files of it are
    missing or it is of another version; the error names the newest complete one before it."""
    folders = steps_of(folder)
    if not folders:
        return None
    try:
        return read_checkpoint(folders[0])
    except InputError as error:
        raise InputError(f"{error}; {instead_of(folders[0])}") from None


def newest_in(folder: Path) -> Checkpoint:
    """Return the checkpoint of `newest`. Raises `InputError` also where there is none."""
    checkpoint = newest(folder)
    if checkpoint is None:
        raise InputError(f"there is no checkpoint in '{folder}': name the folder that --checkpoint was given")
    return checkpoint


def instead_of(path: Path) -> str:
    """Return the remedy for a damaged checkpoint: the newest complete one before it and how to resume from that."""
    folders = steps_of(path.parent)
    for other in folders[folders.index(path) + 1 :]:
        with contextlib.suppress(InputError):
            older = read_checkpoint(other).path.name
            return f"the newest complete checkpoint before it is {older}: move '{path}' away to resume from {older}"
    return f"no checkpoint before it is complete: start afresh without --resume, in another folder than '{path.parent}'"


@dataclass(frozen=True)
class Verified:
    """A checkpoint all of whose files were read: `fault` says what is damaged; None if nothing is."""

    path: Path
    fault: str | None
    num_files: int = 0
    num_bytes: int = 0

    @classmethod
    def of(cls, path: Path) -> Verified:
        """Read and verify the checkpoint in folder `path`."""
        try:
            checkpoint = read_checkpoint(path)
            check_contents(path, checkpoint.manifest, checkpoint.manifest.files)
        except InputError as error:
            return cls(path, str(error))
        files = checkpoint.manifest.files.values()
        return cls(path, None, len(files), sum(record.bytes for record in files))


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the folders of all checkpoints of a run, the oldest first, or `folder` itself if it is a checkpoint. Raises
    `InputError` where there is none."""
    is_checkpoint = (folder / MANIFEST).exists() or _STEP.fullmatch(folder.name)
    folders = [folder] if is_checkpoint else steps_of(folder)[::-1]
    if not folders or not folder.is_dir():
        raise InputError(f"there is no checkpoint in '{folder}': name the folder that --checkpoint was given")
    return folders


def verified(folder: Path, report: Callable[[str], None] = lambda text: None) -> list[Verified]:
    """Verify all checkpoints in a run's folder, the oldest first, or `folder` itself if it is a checkpoint. Raises
    `InputError` where there is none."""
    checked = []
    paths = checkpoints_in(folder)
    for number, path in enumerate(paths):
        report(f"reading {path.name}, {number} of {len(paths)} done")
        checked.append(Verified.of(path))
    return checked


@dataclass(frozen=True)
class Kept:
    """The rule of which checkpoints to keep: the newest `last`, and besides those after every `every` steps."""

    last: int
    every: int | None = None

    def stay(self, steps: Iterable[int]) -> set[int]:
        """Return those of `steps` whose checkpoints are kept.

        >>> sorted(Kept(last=2, every=100).stay([50, 100, 150, 200, 250, 300]))
        [100, 200, 250, 300]
        """
        ordered = sorted(steps)
        return {step for step in ordered if self.every and step % self.every == 0} | set(
            ordered[-self.last :]
        )

    def prune(self, folder: Path) -> None:
        """Remove the others from `folder`."""
        paths = {_step_of(path): path for path in steps_of(folder)}
        for step in paths.keys() - self.stay(paths):
            # Renamed first, so that a partly removed folder does not count as a checkpoint.
            leaving = folder / f".{paths[step].name}{UNFINISHED}"
            paths[step].rename(leaving)
            shutil.rmtree(leaving, ignore_errors=True)


def check_start(options: RunOptions, plan: Plan, data: DataIdentity | str | Path | None = None) -> None:
    """Check the folder for checkpoints before any process is started.

    Raises:
        InputError: there is no checkpoint to resume from, or it is damaged, of another model or data, or already after the
            plan's last step; or a new run would mix its checkpoints with those of another.
    """
    folder = options.checkpoint_folder
    if folder is None:
        return
    make_writable(folder, "--checkpoint")
    for unfinished in folder.glob(f".step-*{UNFINISHED}"):  # left by a run that was interrupted
        shutil.rmtree(unfinished, ignore_errors=True)
    if not options.resume:
        if steps := steps_of(folder):
            raise InputError(
                f"folder '{folder}' holds the checkpoints of a run (the newest is {steps[0].name}): continue it with "
                "--resume, or give another folder"
            )
        return
    checkpoint = newest(folder)
    if checkpoint is None:
        raise InputError(
            f"there is no checkpoint in '{folder}', so nothing to resume: check the path, or start without --resume"
        )
    _check_plan(checkpoint, plan, options.other_data)
    check_base(checkpoint, base_model_of(plan.model.resolved(), plan.job.seed, options.random_weights))
    was = checkpoint.manifest.data
    is_known = was.kind != "elsewhere"
    if is_known and not options.other_data and not was.is_same(now := identity_of(data)):
        raise InputError(
            f"checkpoint '{checkpoint.path}' is of a run on other data: it was {was}, and this is {now}: give the same "
            "data, or resume on this data with --other-data"
        )


def check_base(checkpoint: Checkpoint, now: BaseModelIdentity | None) -> None:
    """Raise `InputError` where a checkpoint has adapters for another model than `now`."""
    was = checkpoint.manifest.base
    if was is not None and now is not None and not was.is_same(now):
        raise InputError(
            f"checkpoint '{checkpoint.path}' has adapters for {was}, and this plan's model starts from {now}, which has "
            "other weights: plan for the weights that the adapters were trained with"
        )


def _check_plan(checkpoint: Checkpoint, plan: Plan, is_other_data: bool) -> None:
    was, now = checkpoint.manifest.plan, identity(plan)
    was_job, now_job = was.get("job", {}), now["job"]
    if changed := [
        *differences({"model": was.get("model")}, {"model": now["model"]}),
        *differences(_of(was_job, _OF_STATE), _of(now_job, _OF_STATE), "job."),
    ]:
        raise InputError(
            f"checkpoint '{checkpoint.path}' is of another model or type ({'; '.join(changed)}): resume with a plan for the "
            "checkpoint's, or start from its model files with another folder"
        )
    _check_options(checkpoint, was_job, now_job)
    moved = list(differences(_of(was_job, _OF_SAMPLES), _of(now_job, _OF_SAMPLES), "job."))
    if moved and not is_other_data:
        raise InputError(
            f"checkpoint '{checkpoint.path}' is of a run that takes other samples in each step ({'; '.join(moved)}): plan "
            "for the same, or resume with these with --other-data"
        )
    if checkpoint.manifest.step >= (num_steps := plan.job.num_steps):
        raise InputError(
            f"checkpoint '{checkpoint.path}' is after {checkpoint.manifest.step} steps, and the plan has {num_steps}: steps "
            f"are counted from the start of the first run; give --steps more than {checkpoint.manifest.step}"
        )
    free = set(was_job) - {*_OF_STATE, *_OF_SAMPLES}
    if changed := [*moved, *differences(_of(was_job, free), _of(now_job, free), "job.")]:
        warnings.warn(f"resuming with another job: {'; '.join(changed)}", StagewrightWarning, stacklevel=3)


def _check_options(checkpoint: Checkpoint, was_job: Mapping[str, Any], now_job: Mapping[str, Any]) -> None:
    """Raise `InputError` where the optimizer is the same but its options make it keep other state."""
    options = "optimizer_options"
    was, now = was_job.get(options, {}), now_job.get(options, {})
    if was == now:
        return
    kept = [
        validated(Job, {**now_job, options: given}, "the job").with_state().kept.by_dims
        for given in (was, now)
    ]
    if kept[0] != kept[1]:
        raise InputError(
            f"checkpoint '{checkpoint.path}' has the state of '{now_job['optimizer']}' with {options} {json.dumps(was)}, "
            f"which is not the state that it keeps with {json.dumps(now)}: plan with the checkpoint's options, or start "
            "from its model files with another folder"
        )


def has_same_stages(before: Plan, after: Plan) -> bool:
    """Return whether two plans differ only in the order of actions and in predictions."""
    was, now = identity(before), identity(after)
    return {**was, "program": None, "schedule": None} == {**now, "program": None, "schedule": None}


def changed_state(before: Plan, after: Plan) -> Iterator[str]:
    """Yield, in words, what prevents a run under plan `before` from continuing under `after`."""
    was, now = identity(before), identity(after)
    yield from differences({"model": was["model"]}, {"model": now["model"]})
    yield from differences(
        _of(was["job"], (*_OF_STATE, *_OF_SAMPLES)), _of(now["job"], (*_OF_STATE, *_OF_SAMPLES)), "job."
    )
    if before.num_ranks != after.num_ranks:
        yield f"it is for {after.num_ranks} ranks, and the run has {before.num_ranks}"


def _of(document: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: document[key] for key in keys if key in document}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the differences between two documents, in words.

    >>> list(differences({"dp": 2, "job": {"dtype": "fp32"}}, {"dp": 2, "job": {"dtype": "bf16"}}))
    ['job.dtype was "fp32", is "bf16"']
    """
    for key in sorted(saved.keys() | now.keys()):
        before, after = saved.get(key), now.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} was {_shown(before)}, is {_shown(after)}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."
