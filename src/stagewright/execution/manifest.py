"""``checkpoint.json``: the manifest of a checkpoint's files, with digests that reveal damage.

The digest of the manifest itself is stored next to it, in the form that ``sha256sum --check`` reads. Nothing here imports
torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from stagewright.cluster.schema import StrictModel, validated
from stagewright.documents import parse_json, read_text
from stagewright.errors import InputError
from stagewright.execution.base_model import BaseModelIdentity
from stagewright.execution.data_identity import DataIdentity
from stagewright.files import digest_of, inside, write_whole

MANIFEST = "checkpoint.json"
SEAL = "checkpoint.json.sha256"
VERSION = 3
_SEAL_BYTES = 1024


class FileRecord(StrictModel):
    """The size and digest of a file as it was written."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Return the record of an existing file."""
        return cls(bytes=path.stat().st_size, sha256=digest_of(path))


class Manifest(StrictModel):
    """The content of ``checkpoint.json``."""

    version: Literal[3] = VERSION
    stagewright: str
    step: int = Field(ge=0)
    """Number of steps done."""
    plan: dict[str, Any]
    """Part of the plan on which results depend to the last bit."""
    data: DataIdentity
    """Training data of the run."""
    base: BaseModelIdentity | None = None
    """Base model of adapters."""
    loss_scale: float | None = None
    num_good: int = 0
    """Steps since the loss scale last changed."""
    passed_over: int = Field(default=0, ge=0)
    """Number of batches that were skipped without a step when the run went back to a checkpoint."""
    has_optimizer_state: bool = True
    """Whether there is optimizer state; without it, the optimizer starts anew, since the weights came from elsewhere."""
    files: dict[str, FileRecord]
    """Records of all other files, by name."""

    @field_validator("files")
    @classmethod
    def _are_in_the_folder(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        for name in files:
            if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
                raise ValueError(f"'{name}' is not the name of a file in the checkpoint's folder")
        return files


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is unchanged and whose files exist."""

    path: Path
    manifest: Manifest


def write_manifest(folder: Path, manifest: Manifest) -> list[Path]:
    """Write the manifest and its digest; return the paths of both."""
    content = f"{manifest.model_dump_json(indent=1)}\n"
    write_whole(folder / MANIFEST, content)
    write_whole(folder / SEAL, _seal(content))
    return [folder / MANIFEST, folder / SEAL]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`, verified by its digest. Raises `InputError` where it is missing,
    damaged, or of another version."""
    try:
        content, seal = (
            read_text(folder / MANIFEST, "manifest", "the checkpoint is unusable without it"),
            None,
        )
        if (folder / SEAL).exists():
            seal = read_text(folder / SEAL, "digest", most_bytes=_SEAL_BYTES)
    except InputError as error:
        raise damaged(folder, str(error)) from None
    if seal is None and _version(content) == 1:
        raise InputError(
            f"checkpoint '{folder}' was written by an earlier version of stagewright, without digests: resume with that "
            f"version, or remove its '{MANIFEST}' to start from its model files"
        )
    if seal != _seal(content):
        raise damaged(folder, f"'{MANIFEST}' does not match the digest in '{SEAL}'")
    if (version := _version(content)) != VERSION:
        is_old = isinstance(version, int) and version < VERSION
        fix = (
            "resume with the stagewright that wrote it, or start from its model files"
            if is_old
            else "update it"
        )
        raise InputError(
            f"checkpoint '{folder}' has version {version}, and this stagewright reads version {VERSION}: {fix}"
        )
    return validated(Manifest, parse_json(content, f"'{folder / MANIFEST}'"), f"'{folder / MANIFEST}'")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint in `folder` and check that all its files have the sizes that were written; contents are not read.
    Raises `InputError` where it is damaged or of another version."""
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        try:
            path = inside(folder, name)
            size = path.stat().st_size if path.is_file() else None
        except (OSError, InputError) as error:
            raise damaged(folder, str(error)) from None
        if size is None:
            raise damaged(folder, f"file '{name}' is missing")
        if size != record.bytes:
            raise damaged(folder, f"file '{name}' has {size} bytes, and {record.bytes} were written")
    return Checkpoint(folder, manifest)


def check_contents(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Check that files of a checkpoint are unchanged, by their digests. Raises `InputError` where one is changed or cannot
    be read."""
    for name in names:
        try:
            digest = digest_of(inside(folder, name))
        except OSError as error:
            raise damaged(folder, f"file '{name}' cannot be read ({error.strerror or error})") from None
        if name not in manifest.files or digest != manifest.files[name].sha256:
            raise damaged(folder, f"file '{name}' does not have the SHA-256 that it was written with")


def damaged(folder: Path, fault: str) -> InputError:
    return InputError(f"checkpoint '{folder}' is damaged: {fault}")


def _seal(content: str) -> str:
    return f"{hashlib.sha256(content.encode()).hexdigest()}  {MANIFEST}\n"


def _version(content: str) -> Any:
    with contextlib.suppress(InputError):
        document = parse_json(content, MANIFEST)
        return document.get("version") if isinstance(document, dict) else None
