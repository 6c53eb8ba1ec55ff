"""Files that are there whole or not at all, folders that are known to take them, and folders of this user alone."""

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

_ROOM_BYTES = 2**16
"""What a folder must still take for files to be written there later."""


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes `content` (text as UTF-8) beside `path` and moves it there; makes the folder if there is none. A file that is
    there keeps who may read it.

    Raises:
        InputError: the file cannot be written, or `path` is no file; whatever was there is still there.
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
"""How the name of a folder ends that is not whole yet."""


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` for its files, which gets that name at the end, and goes where the end is not reached. One
    that was left by a program that was killed is removed first. Raises `OSError` where that cannot be."""
    scratch = folder.parent / f".{folder.name}{UNFINISHED}"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_target(path: Path) -> None:
    """Raises `InputError` where `path` is a symbolic link, a folder, a pipe or a device: what a link leads to is not
    overwritten without its name having been given, and nothing is put in the place of a device."""
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):
        return  # not there, or not to be known: writing says why
    if stat.S_ISLNK(mode):
        raise InputError(
            f"cannot write '{path}': it is a symbolic link to '{os.readlink(path)}'; name that file, or another one"
        )
    if stat.S_ISDIR(mode):
        raise InputError(f"cannot write '{path}': it is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise InputError(f"cannot write '{path}': it is a pipe or a device; name a file")


def check_regular(path: Path, what: str) -> None:
    """Raises `InputError` where there is no regular file at `path`: a pipe or a device may have no end. `what` it should be
    is for the message."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} '{path}' cannot be read ({reason}): check the path") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise InputError(f"{what} '{path}' is {kind}: give a file, into which its content is copied")


def through_no_link(path: str, flags: int) -> int:
    """Opens a file for `open`, but none that a symbolic link at `path` leads to; raises `OSError` then."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def make_writable(folder: Path, option: str) -> None:
    """Makes `folder` if there is none, and finds out now what would stop files from being written there later.

    Raises:
        InputError: nothing can be written there; `option` is where another one is given.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
    except OSError as error:
        raise InputError(
            f"nothing can be written to folder '{folder}' ({error.strerror or error}): give another one with {option}"
        ) from None


def inside(folder: Path, name: str, root: Path | None = None) -> Path:
    """``folder / name``, if neither its name nor a link leads out of `root`, which is `folder` if none is given.

    Raises:
        InputError: it lies elsewhere.
    """
    path, within = folder / name, (root or folder).resolve()
    try:
        leaves = os.path.isabs(name) or ".." in Path(name).parts or not path.resolve().is_relative_to(within)
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, names that no file can have
        raise InputError(f"'{name}' in '{folder}' names no file: {error}") from None
    if leaves:
        raise InputError(
            f"'{name}' lies outside of '{folder}', where it must be: copy the file there and name it so"
        )
    return path


def digest_of(path: str | Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal. Raises `OSError` where it cannot be read."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def private_folder(path: str | Path) -> Path:
    """Makes folder `path`, which only this user may enter; an existing one of this user is closed to all others.

    Raises:
        InputError: it cannot be made, or is somebody else's, or a symbolic link.
    """
    folder = Path(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise InputError(f"'{folder}' is no folder but a link or a file: remove it")
        if found.st_uid != os.geteuid():
            raise InputError(f"folder '{folder}' belongs to another user: remove it, or name another one")
        if found.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise InputError(
            f"folder '{folder}' cannot be made ({error.strerror or error}): allow it, or name another one"
        ) from None
    return folder


def cache_folder(name: str) -> Path:
    """The private folder `name` of this user's cache: under STAGEWRIGHT_CACHE, XDG_CACHE_HOME or the home directory, and in
    the folder for temporary files where there is none of them.

    Raises:
        InputError: it cannot be made, or is not this user's.
    """
    base = os.environ.get("STAGEWRIGHT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    if base is None:
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # a user without a home
            base = temporary_home()
    return private_folder(Path(base) / "stagewright" / name)


def temporary_home() -> Path:
    """The private folder of a user without a home, in the one for temporary files.

    Raises:
        InputError: it cannot be made, or is not this user's.
    """
    return private_folder(Path(tempfile.gettempdir()) / f"stagewright-{os.geteuid()}")
