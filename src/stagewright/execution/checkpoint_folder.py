"""The folder of a run's checkpoints: which of them are whole, and whether a plan may go on from one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stagewright.cluster.strict import StrictModel
from stagewright.errors import InputError
from stagewright.files import make_writable
from stagewright.planning.plan import Plan

MANIFEST = "checkpoint.json"
_STEP = re.compile(r"step-(\d{6,})")
_SHOWN_LENGTH = 60

# Neither what a run computes nor where its state lies depends on these.
_FREE = {"stagewright": True, "cluster": True, "devices": True, "predictions": True, "shorter_lengths": True}
_FREE_OF_MODEL = {"text": True}
_FREE_OF_JOB = {"num_steps": True, "memory_limit": True}


class Manifest(StrictModel):
    """``checkpoint.json``: what the files of a checkpoint are."""

    version: Literal[1] = 1
    stagewright: str
    step: int
    """Steps that were done."""
    plan_digest: str
    plan: dict[str, Any]
    """What state and results depend on."""
    loss_scale: float | None = None
    num_good: int = 0
    """Steps since the loss scale last changed."""
    files: dict[str, int]
    """Bytes of every other file."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    manifest: Manifest


def folder_name(step: int) -> str:
    """Of the checkpoint after `step` steps.

    >>> folder_name(20)
    'step-000020'
    """
    return f"step-{step:06d}"


def identity(plan: Plan) -> dict[str, Any]:
    """What of a plan must be the same for a run to go on as if it had never stopped."""
    left_out = {**_FREE, "model": _FREE_OF_MODEL, "job": _FREE_OF_JOB}
    found = json.loads(plan.model_dump_json(exclude=left_out))
    return {**found, "program": digest(found["program"])[:12]}  # thousands of actions


def digest(content: object) -> str:
    """SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def newest(folder: Path) -> Checkpoint | None:
    """The whole checkpoint after the most steps; None where there is none."""
    for path in sorted(_folders(folder), key=_step_of, reverse=True):
        if (found := _whole(path)) is not None:
            return found
    return None


def check_start(
    checkpoints: str | Path | None, plan: Plan, num_steps: int, every: int | None, is_resumed: bool
) -> None:
    """Before any process is started; `checkpoints` is the folder, None if none are written, `every` how many steps apart.

    Raises:
        InputError: the options do not go together; there is nothing to go on from, or it is of another plan, or of as many
            steps as are asked for; or a run that starts afresh would mix its checkpoints with those of another.
    """
    if checkpoints is None:
        if every is not None or is_resumed:
            option = "--resume" if is_resumed else "--checkpoint-every"
            raise InputError(f"{option} needs --checkpoint FOLDER, where the checkpoints are")
        return
    if every is not None and every < 1:
        raise InputError(f"checkpoints every {every} steps: give a whole number of at least 1")
    folder = Path(checkpoints)
    make_writable(folder, "--checkpoint")
    found = newest(folder)
    if not is_resumed:
        if found is not None:
            raise InputError(
                f"folder '{folder}' holds the checkpoints of a run (the newest is {found.path.name}): go on from it with "
                "--resume, or give another folder"
            )
        return
    if found is None:
        raise InputError(
            f"there is no whole checkpoint in '{folder}', so nothing to resume: check the path, or start without --resume"
        )
    found_differences = list(differences(found.manifest.plan, identity(plan)))
    if found_differences:
        raise InputError(
            f"checkpoint '{found.path}' is of another plan ({'; '.join(found_differences)}): resume with the plan it was "
            "written under, or start from its model files with another folder"
        )
    if found.manifest.step >= num_steps:
        raise InputError(
            f"checkpoint '{found.path}' is of {found.manifest.step} steps, and {num_steps} are asked for: steps are counted "
            f"from the start of the first run; give --steps more than {found.manifest.step}"
        )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What differs, in words.

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


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _whole(path: Path) -> Checkpoint | None:
    """The checkpoint in a folder, if all its files are there with the bytes that were written."""
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_text(encoding="utf-8"))
        is_whole = all((path / name).stat().st_size == size for name, size in manifest.files.items())
    except (OSError, ValueError):  # pydantic's errors are ValueErrors
        return None
    return Checkpoint(path, manifest) if is_whole else None
