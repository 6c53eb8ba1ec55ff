"""Readable locations in the model's own code, for errors."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stagewright.errors import StagewrightError, TraceError


class CannotTrace(Exception):
    """The reason why something in the model's code cannot be traced, and what to do instead; `tracing_errors` adds the
    location, unless `line` has it."""

    def __init__(self, reason: str, line: str = "") -> None:
        super().__init__(reason)
        self.line = line


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_NOT_MODEL_CODE = ("/torch/", "stagewright/tracing/", "<", "/contextlib.py")


def source_line(node: torch.fx.Node) -> str:
    """Return file and line of the model's code behind an exported node; empty if unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith("<")]
    return _short(*frames[-1]) if frames else ""


@contextmanager
def tracing_errors(model: torch.nn.Module) -> Iterator[None]:
    """Turn any error in the model's code inside into one that names module and line."""
    names = {id(module): path for path, module in model.named_modules()}
    entered: list[str] = []

    def enter(module: torch.nn.Module, args: Any) -> None:
        entered.append(names.get(id(module), ""))

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        if entered:
            entered.pop()

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        yield
    except StagewrightError:
        raise
    except Exception as error:
        module = next((path for path in reversed(entered) if path), "") or "(model)"
        reason = str(error)
        if not isinstance(error, CannotTrace):
            reason = (
                f"{type(error).__name__}: {first_line(error)}\n"
                "  Shapes and control flow must not depend on tensor values: replace .item(), nonzero, boolean "
                "indexing and 'if tensor:' by masked operators of fixed shape."
            )
        raise TraceError(
            f"the model cannot be traced: module '{module}'{_place(error)}\n  {reason}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def code_line(frame: Any = None) -> str:
    """Return file and line of the model's code in `frame`, by default in the innermost such frame; empty for other code."""
    frames = [frame] if frame is not None else [item for item, _ in traceback.walk_stack(None)]
    model_frames = (item for item in frames if _is_model_code(item.f_code.co_filename))
    innermost = next(model_frames, None)
    return "" if innermost is None else _short(innermost.f_code.co_filename, innermost.f_lineno)


def _place(error: Exception) -> str:
    if isinstance(error, CannotTrace) and error.line:
        return f" at {error.line}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_model_code(frame.filename)]
    if not frames:
        return ""
    return f" at {_short(frames[-1].filename, frames[-1].lineno or 0)}: {frames[-1].line}"


def _is_model_code(filename: str) -> bool:
    return not any(part in filename for part in _NOT_MODEL_CODE)


def is_own_code(filename: str) -> bool:
    """Return whether a file is the user's, not that of an installed library or of Python."""
    return _is_model_code(filename) and not filename.startswith(_LIBRARIES)


def _short(file: str, line: str | int) -> str:
    return f"{re.split(r'site-packages/', file)[-1]}:{line}"
