"""Atomically written files and folders, checks of targets, and private folders."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stagewright.errors import InputError

_PROBE_BYTES = 2**16
"""Bytes written to check that a folder is writable."""


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) next to `path` and move it there; create the folder if needed. An existing file keeps
    its permissions.

    Raises:
        InputError: the file cannot be written, or `path` is not a file; an existing file is unchanged.
    """
    target = Path(path)
    scratch = None
    try:
        check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        if target.exists():
            scratch.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(scratch, target)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot write '{path}': {reason}; make room there, allow writing, or name another file"
        ) from None
    finally:
        if scratch is not None:
            with contextlib.suppress(OSError, ValueError):
                scratch.unlink(missing_ok=True)


UNFINISHED = ".writing"
"""Suffix of the name of an unfinished folder."""


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `folder`, which is renamed to it at the end and removed on an error.

    One that a killed program left behind is removed first. Raises `OSError` if that fails.
    """
    scratch = folder.parent / f".{folder.name}{UNFINISHED}"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_target(path: Path) -> None:
    """Raise `InputError` if `path` is a symbolic link, a folder, a pipe or a device: a link's target is overwritten only by
    its own name, and devices are never replaced."""
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):
        return  # missing or inaccessible: writing reports why
    if stat.S_ISLNK(mode):
        raise InputError(
            f"cannot write '{path}': it is a symbolic link to '{os.readlink(path)}'; name that file, or another one"
        )
    if stat.S_ISDIR(mode):
        raise InputError(f"cannot write '{path}': it is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise InputError(f"cannot write '{path}': it is a pipe or a device; name a file")


def check_regular(path: Path, what: str) -> None:
    """Raise `InputError` if `path` is not a regular file: a pipe or a device may have no end. `what` it should be is for the
    message."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} '{path}' cannot be read ({reason}): check the path") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise InputError(f"{what} '{path}' is {kind}: copy its content to a file and give that")


def through_no_link(path: str, flags: int) -> int:
    """Open a file for `open`; raise `OSError` if `path` is a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def make_writable(folder: Path, option: str) -> None:
    """Create `folder` if needed, and check now that files can be written there later.

    Raises:
        InputError: nothing can be written there; `option` is the one to give another folder with.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        raise InputError(
            f"nothing can be written to folder '{folder}' ({error.strerror or error}): give another one with {option}"
        ) from None


def inside(folder: Path, name: str, root: Path | None = None) -> Path:
    """Return ``folder / name`` if neither its name nor a link leads out of `root`, by default `folder`.

    Raises:
        InputError: the path is outside `root`.
    """
    path, within = folder / name, (root or folder).resolve()
    try:
        leaves = os.path.isabs(name) or ".." in Path(name).parts or not path.resolve().is_relative_to(within)
    except (OSError, RuntimeError, ValueError) as error:  # circular links, impossible names
        raise InputError(f"'{name}' in '{folder}' is not a valid file name: {error}") from None
    if leaves:
        raise InputError(f"'{name}' lies outside of '{folder}': copy the file into it and name it there")
    return path


def digest_of(path: str | Path) -> str:
    """Return the SHA-256 of a file's contents in hexadecimal. Raises `OSError` if it cannot be read."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def private_folder(path: str | Path) -> Path:
    """Create folder `path` for this user only; an existing one of this user is closed to all others.

    Raises:
        InputError: it cannot be created, belongs to somebody else, or is a symbolic link.
    """
    folder = Path(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise InputError(f"'{folder}' is a link or a file, not a folder: remove it")
        if status.st_uid != os.geteuid():
            raise InputError(f"folder '{folder}' belongs to another user: remove it, or name another one")
        if status.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise InputError(
            f"folder '{folder}' cannot be created ({error.strerror or error}): allow it, or name another one"
        ) from None
    return folder


def cache_folder(name: str) -> Path:
    """Return the private folder `name` of this user's cache: under STAGEWRIGHT_CACHE, XDG_CACHE_HOME or the home directory,
    or, without any of them, in the folder for temporary files.

    Raises:
        InputError: it cannot be created, or is not this user's.
    """
    base = os.environ.get("STAGEWRIGHT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    if base is None:
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # a user without a home
            base = temporary_home()
    return private_folder(Path(base) / "stagewright" / name)


def temporary_home() -> Path:
    """Return the private folder of a user without a home, in the folder for temporary files.

    Raises:
        InputError: it cannot be created, or is not this user's.
    """
    return private_folder(Path(tempfile.gettempdir()) / f"stagewright-{os.geteuid()}")
