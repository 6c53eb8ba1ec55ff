"""The private folder in which the ranks of a run on this machine find each other, gone when the run is.

The process that starts a run holds a lock in it, and removes it at the end. What one left that was killed is removed by
the ranks that find themselves without it, and what they could not by the next run.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagewright.errors import InputError
from stagewright.files import private_folder

_PREFIX = "stagewright-run-"
_LOCK = "launcher"


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new one for the run that this process starts.

    Raises:
        InputError: there is no place for it.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    try:
        folder = private_folder(tempfile.mkdtemp(prefix=_PREFIX))
        lock = _held(folder)
    except OSError as error:
        raise InputError(
            f"no folder for temporary files can be made ({error.strerror or error}): make room in "
            f"'{tempfile.gettempdir()}', or set TMPDIR"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _held(folder: Path) -> int:
    """An open file whose lock ends with this process; it gets its name once it is locked."""
    lock = os.open(folder / f"{_LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks, where nobody will take it for abandoned either
        return lock
    os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Folders of this user's runs whose launcher has ended."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # it is somebody else's, or about to be locked
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(lock).st_uid == os.geteuid()
    except OSError:
        return False
    finally:
        os.close(lock)
