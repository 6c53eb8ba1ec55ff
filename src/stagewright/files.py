"""Files that are there whole or not at all, and folders that are known to take them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from stagewright.errors import InputError


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes `content` (text as UTF-8) beside `path` and moves it there; makes the folder if there is none.

    Raises:
        InputError: the file cannot be written; whatever was at `path` is still there.
    """
    target = Path(path)
    scratch = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(scratch, 0o644)
        os.replace(scratch, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"cannot write '{path}': {reason}; make room there, allow writing, or name another file"
        ) from None
    finally:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)


def make_writable(folder: Path, option: str) -> None:
    """Makes `folder` if there is none, and finds out now what would stop files from being written there later.

    Raises:
        InputError: nothing can be written there; `option` is where another one is given.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"nothing can be written to folder '{folder}' ({error.strerror or error}): give another one with {option}"
        ) from None
