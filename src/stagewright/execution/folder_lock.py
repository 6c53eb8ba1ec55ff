"""Folders that one run at a time writes to: a lock that the system takes from a process that ends, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stagewright.errors import InputError
from stagewright.files import make_writable
from stagewright.text import say

LOCK = ".in-use"
_held: set[tuple[int, Path]] = set()
"""Folders this process holds, with the thread that does."""


@contextmanager
def in_use(path: str | Path | None, option: str) -> Iterator[None]:
    """Inside, folder `path` is this run's alone; it is made if there is none. Under a launcher the first rank holds it.

    Raises:
        InputError: another process has it, whose number, host and start are named, or nothing can be written there; `option`
            is where another folder is given.
    """
    if path is None:
        yield
        return
    folder = Path(path)
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


def _locked(folder: Path, option: str) -> int:
    """An open file that is locked until it is closed, with who has it."""
    while True:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(handle, folder / LOCK):  # not one that its holder has just removed
                break
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


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    try:
        said = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(said['pid'])} on host {said['host']} since {said['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written that yet
        return "another process"
