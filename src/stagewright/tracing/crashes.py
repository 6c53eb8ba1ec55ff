"""Crashes of torch while it captures a model: a process that ends without a word is reported by another.

Where Python itself is torn down (a segmentation fault, an abort, too little memory) nobody can raise an error. So a shell
waits on a pipe until capture is over; if the pipe is closed without a word, it prints what was being done.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator

import torch

_WAIT = 'read -r word; [ "$word" = over ] || { echo; cat "$1"; echo; } >&2; rm -f "$1"'
_WIDTH = 600


@contextlib.contextmanager
def crashes_reported(model: str, report: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Report a crash of this process inside in one sentence on stderr that names `model`, the phase and the module whose
    forward ran last. Yields `report`, to be called with every phase."""
    shell = shutil.which("sh")
    if shell is None:
        yield report
        return
    note, path = tempfile.mkstemp(prefix="stagewright-")
    phase = "capturing it"
    names: dict[int, str] = {}

    def write(module: str = "") -> None:
        place = f", in module '{module}'" if module else ""
        text = (
            f"error: the process died within torch while '{model}' was traced: {phase}{place}. Run that part alone under "
            "'python -X faulthandler' to see where, and write it by other operators"
        )
        os.pwrite(note, text.encode(errors="replace")[:_WIDTH].ljust(_WIDTH), 0)

    def reported(stage: str) -> None:
        nonlocal phase
        phase = stage
        write()
        report(stage)

    def enter(module: torch.nn.Module, args: object) -> None:
        if id(module) not in names:
            names.clear()
            names.update(_names(module, ""))
        write(names[id(module)])

    waiting = subprocess.Popen([shell, "-c", _WAIT, "sh", path], stdin=subprocess.PIPE)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(enter)
    try:
        write()
        yield reported
    finally:
        hook.remove()
        waiting.communicate(b"over\n")
        os.close(note)


def _names(module: torch.nn.Module, path: str) -> Iterator[tuple[int, str]]:
    """Yield identities and paths of a module and its submodules, without `named_modules`, whose use is watched."""
    yield id(module), path
    for name, inner in module.named_children():
        yield from _names(inner, f"{path}.{name}" if path else name)
