"""Folders of one run alone, held by a lock that the system takes from a process that ends, however it ends: those it
writes to, and a private one in which its ranks on this machine find each other, gone when the run is.

A private folder whose launcher was killed is removed by the ranks that find themselves without it, or by the next run.
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
"""Folders this process holds, with the thread that does."""


@contextmanager
def in_use(path: str | Path | None, option: str) -> Iterator[None]:
    """Inside, folder `path` is this run's alone; it is made if there is none, and removed again if nothing was written
    there. Under a launcher the first rank holds it.
    Raises `InputError` where another process has it, whose number, host and start are named, or nothing can be written
    there; `option` is where another folder is given."""
    if path is None:
        yield
        return
    folder = Path(path)
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    make_writable(folder, option)
    held = (threading.get_ident(), folder.resolve())
    is_first = os.environ.get("RANK", "0") == "0"
    if held in _held or not is_first:  # held already where one folder is for two kinds of files
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
        with suppress(OSError):  # until one is not empty
            for one in made:
                one.rmdir()


def _locked(folder: Path, option: str) -> int:
    """An open file that is locked until it is closed, with who has it."""
    while True:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), (folder / LOCK).stat()):
                    break  # and its holder has not just removed it
        except BlockingIOError:
            holder = _holder(handle)
            os.close(handle)
            raise InputError(
                f"folder '{folder}' is in use by {holder}: wait until that has ended, or give another folder with {option}"
            ) from None
        except OSError as error:  # a file system without locks
            say(f"warning: '{folder}' cannot be locked ({error}): see that no other run writes there")
            return handle
        os.close(handle)
    said = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with suppress(OSError):  # on a full disk it is held without a word
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(said).encode())
    return handle


def _holder(handle: int) -> str:
    try:
        said = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(said['pid'])} on host {said['host']} since {said['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written that yet
        return "another process"


_PREFIX = "stagewright-run-"
_LAUNCHER = "launcher"


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new one for the run that this process starts. Raises `InputError` where there is no place for it."""
    for other in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_abandoned(other):
            shutil.rmtree(other, ignore_errors=True)
    try:
        folder = private_folder(tempfile.mkdtemp(prefix=_PREFIX))
        lock = _marked(folder)
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


def _marked(folder: Path) -> int:
    """An open file whose lock ends with this process; it gets its name once it is locked."""
    lock = os.open(folder / f"{_LAUNCHER}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks, where nobody will take it for abandoned either
        return lock
    os.rename(folder / f"{_LAUNCHER}.new", folder / _LAUNCHER)
    return lock


def _is_abandoned(folder: Path) -> bool:
    """Whether it is of a run of this user whose launcher has ended."""
    try:
        lock = os.open(folder / _LAUNCHER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # it is somebody else's, or about to be locked
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(lock).st_uid == os.geteuid()
    except OSError:
        return False
    finally:
        os.close(lock)
