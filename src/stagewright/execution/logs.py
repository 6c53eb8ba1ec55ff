"""Logs of the steps of a run: stderr, ``steps.jsonl``, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagewright.errors import InputError, StagewrightWarning
from stagewright.execution.record import finite
from stagewright.files import through_no_link
from stagewright.text import plural
from stagewright.units import GIB, format_bytes, format_seconds

STEPS = "steps.jsonl"


@dataclass(frozen=True)
class TrainingStep:
    """The figures of a step that all ranks have finished."""

    number: int
    """Number of the step, from 1."""
    num_steps: int
    """Number of steps at the end of the run."""
    loss: float
    gradient_norm: float
    """Norm of all gradients, before clipping."""
    learning_rate: float
    is_skipped: bool
    """Whether it changed no parameter because the loss or a gradient was NaN or Inf."""
    seconds: float
    tokens_per_second: float
    mfu: float
    """Model FLOP, as the plan counts them, as a fraction of the FLOP that the devices could have computed."""
    memory_bytes: int
    """Bytes reserved on its device by the rank that has reserved most; on a CPU, of its whole process."""
    seconds_left: float
    """Estimated remaining seconds, at the speed of the last steps."""
    unit: str = "tokens"
    """What `tokens_per_second` counts; ``samples`` where they are not made of tokens."""
    memory_kind: str = "reserved"
    """What `memory_bytes` are."""
    memory_by_rank: tuple[tuple[int, int], ...] = ()
    """Bytes that every rank has reserved, and its predicted peak; empty on CPUs and without a prediction."""

    @property
    def figures(self) -> dict[str, float | int | None]:
        """Logged figures by name; None in place of NaN and Inf."""
        return {
            "loss": finite(self.loss), "gradient_norm": finite(self.gradient_norm),
            "learning_rate": self.learning_rate, "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second, "mfu": self.mfu, "memory_bytes": self.memory_bytes,
        }  # fmt: skip

    def __str__(self) -> str:
        parts = [
            f"step {self.number}/{self.num_steps}", f"loss {self.loss:.4f}", f"gradient norm {self.gradient_norm:.3f}",
            f"{self.seconds:.3f} s", f"{self.tokens_per_second:,.0f} {self.unit}/s", f"MFU {self.mfu:.1%}",
            self._memory(),
        ]  # fmt: skip
        if self.number < self.num_steps:
            parts.append(f"{format_seconds(self.seconds_left)} left")
        return "  ".join(parts)

    def _memory(self) -> str:
        """Return the memory of every rank next to its prediction, if they are few; else of the one that has most."""
        if not 0 < len(self.memory_by_rank) <= _FEW_RANKS:
            return f"{self.memory_kind} {format_bytes(self.memory_bytes)}"
        pairs = (f"{reserved / GIB:.1f}/{peak / GIB:.1f}" for reserved, peak in self.memory_by_rank)
        return f"{self.memory_kind}/predicted {' '.join(pairs)} GiB"


_FEW_RANKS = 8


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss per token, of losses above 700 that of 700."""
    return math.exp(min(loss, 700.0))


Callback = Callable[[TrainingStep], object]


class StepLog:
    """A log with a line per step in ``steps.jsonl`` and on stderr, there at most one a second when steps are many.

    Args:
        folder: folder of the file, next to ``record.json``.
        first: number of steps done before; if not 0, lines are appended to the existing file.
    """

    def __init__(self, folder: Path, first: int) -> None:
        self.printed = 0.0
        self.is_incomplete = False
        self.path = folder / STEPS
        if not first:
            self.path.unlink(missing_ok=True)

    def __call__(self, step: TrainingStep) -> None:
        skipped = {"skipped": True} if step.is_skipped else {}
        self._keep({"step": step.number, **step.figures, **skipped})
        now = time.monotonic()
        if 1 < step.number < step.num_steps and step.num_steps > 50 and now - self.printed < 1.0:
            return
        self.printed = now
        print(step, file=sys.stderr, flush=True)

    def evaluated(self, number: int, loss: float, num_tokens: int) -> None:
        """Log the held-out loss after step `number`, counted from 1, or before the first (0); `num_tokens` is 0 where the
        loss is not per token."""
        self._keep({"step": number, "held_out_loss": finite(loss), "held_out_tokens": num_tokens})
        over = (
            f" over {plural(num_tokens, 'token')} (perplexity {perplexity(loss):,.4g})" if num_tokens else ""
        )
        when = f"after step {number}" if number else "before training"
        print(f"held-out loss {when}: {loss:.4f}{over}", file=sys.stderr, flush=True)

    def _keep(self, line: Mapping[str, Any]) -> None:
        """Append a line to the file. A failure does not end training: it is reported once, and later steps try again."""
        try:
            with open(self.path, "a", encoding="utf-8", opener=through_no_link) as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            if not self.is_incomplete:
                self.is_incomplete = True
                warnings.warn(
                    f"steps from {line['step']} on are missing in '{self.path}' ({error.strerror or error}); the run "
                    "continues: make room there, or its record cannot be written either",
                    StagewrightWarning,
                    stacklevel=2,
                )


class TensorBoardLog:
    """A log of all figures of every step for TensorBoard. Raises `InputError` where the package is not installed."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
        self._writer: Any = SummaryWriter(str(folder))

    def __call__(self, step: TrainingStep) -> None:
        for name, figure in step.figures.items():
            if figure is not None:
                self._writer.add_scalar(f"train/{name}", figure, step.number)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLog:
    """A log of all figures of every step for Weights & Biases. Raises `InputError` where the package is not installed."""

    def __init__(self, project: str, name: str, folder: Path) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise InputError("--wandb needs the package wandb: pip install wandb") from None
        self._run: Any = wandb.init(project=project, name=name, dir=str(folder))

    def __call__(self, step: TrainingStep) -> None:
        figures = {f"train/{name}": figure for name, figure in step.figures.items() if figure is not None}
        self._run.log(figures, step=step.number)

    def close(self) -> None:
        self._run.finish()


@contextmanager
def figures_sent(tensorboard: str | Path | None, wandb: str | None, out: Path) -> Iterator[list[Callback]]:
    """Open the requested logs: to a folder for TensorBoard, and to a project of Weights & Biases; `out` is the folder of the
    run."""
    with ExitStack() as stack:
        logs: list[TensorBoardLog | WandbLog] = []
        if tensorboard is not None:
            logs.append(TensorBoardLog(Path(tensorboard)))
            stack.callback(logs[-1].close)
        if wandb is not None:
            logs.append(WandbLog(wandb, out.name, out))
            stack.callback(logs[-1].close)
        yield [*logs]
