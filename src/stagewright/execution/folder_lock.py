"""Locks on folders that one run uses exclusively: its output folders, and a private folder in which its ranks on this
machine find each other and which is removed when the run ends.

The operating system releases a lock when its process ends, however it ends. A private folder whose launcher was killed is
removed by the ranks that notice its death, or by the next run.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stagewright.errors import InputError
from stagewright.files import make_writable, private_folder
from stagewright.text import say

LOCK = ".in-use"
_held: set[tuple[int, Path]] = set()
"""Folders that this process holds, each with the thread that holds it."""


@contextmanager
def in_use(path: str | Path | None, option: str) -> Iterator[None]:
    """Lock folder `path` for this run during the context; it is created if missing, and removed again if nothing was
    written there. Under a launcher the first rank holds the lock.
    Raises `InputError`, with the remedy to use another folder by `option`, where nothing can be written there or another
    process holds it; names that process's number, host and start."""
    if path is None:
        yield
        return
    folder = Path(path)
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    make_writable(folder, option)
    held = (threading.get_ident(), folder.resolve())
    is_first = os.environ.get("RANK", "0") == "0"
    if held in _held or not is_first:  # already held where one folder is for two kinds of files
        yield
        return
    handle = _locked(folder, option)
    _held.add(held)
    try:
        yield
    finally:
        _held.discard(held)
        with suppress(OSError):
            (folder / LOCK).unlink()
        os.close(handle)
        with suppress(OSError):  # until a folder is not empty
            for parent in missing:
                parent.rmdir()


def _locked(folder: Path, option: str) -> int:
    """Return an open file that is locked until it is closed, with its owner as content."""
    while True:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), (folder / LOCK).stat()):
                    break  # the previous holder has not just removed it
        except BlockingIOError:
            holder = _holder(handle)
            os.close(handle)
            raise InputError(
                f"folder '{folder}' is in use by {holder}: wait until that has ended, or give another folder with {option}"
            ) from None
        except OSError as error:  # a file system without locks
            say(f"warning: '{folder}' cannot be locked ({error}): make sure that no other run writes there")
            return handle
        os.close(handle)
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with suppress(OSError):  # on a full disk it is held without an owner's name
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(owner).encode())
    return handle


def _holder(handle: int) -> str:
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(owner['pid'])} on host {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # the owner has not written it yet
        return "another process"


_PREFIX = "stagewright-run-"
_LAUNCHER = "launcher"


@contextmanager
def run_folder() -> Iterator[Path]:
    """Create a private folder for the run that this process starts. Raises `InputError` where it cannot be created."""
    for other in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_abandoned(other):
            shutil.rmtree(other, ignore_errors=True)
    try:
        folder = private_folder(tempfile.mkdtemp(prefix=_PREFIX))
        lock = _marked(folder)
    except OSError as error:
        raise InputError(
            f"cannot create a folder for temporary files ({error.strerror or error}): make room in "
            f"'{tempfile.gettempdir()}', or set TMPDIR"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _marked(folder: Path) -> int:
    """Return an open file whose lock ends with this process; it gets its name once it is locked."""
    lock = os.open(folder / f"{_LAUNCHER}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks, where nobody will take it for abandoned either
        return lock
    os.rename(folder / f"{_LAUNCHER}.new", folder / _LAUNCHER)
    return lock


def _is_abandoned(folder: Path) -> bool:
    """Return whether `folder` belongs to a run of this user whose launcher has ended."""
    try:
        lock = os.open(folder / _LAUNCHER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # it is another user's, or about to be locked
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(lock).st_uid == os.geteuid()
    except OSError:
        return False
    finally:
        os.close(lock)
