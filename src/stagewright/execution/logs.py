"""What is said and kept of every step while a run goes on."""

from __future__ import annotations

import json
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
from stagewright.units import format_bytes, format_seconds

STEPS = "steps.jsonl"


@dataclass(frozen=True)
class TrainingStep:
    """A step that all ranks are through with."""

    number: int
    """From 1."""
    num_steps: int
    """There will be."""
    loss: float
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    is_skipped: bool
    """Whether it changed no parameter, because the loss or a gradient was no finite number."""
    seconds: float
    tokens_per_second: float
    mfu: float
    """Of the model's own FLOP, as the plan counts them, part of what its devices could have computed."""
    memory_bytes: int
    """Taken from its device by the rank that has taken most; on a CPU of its whole process."""
    seconds_left: float
    """At the pace of the last steps."""

    @property
    def figures(self) -> dict[str, float | int | None]:
        """What is kept of it, by name; None for what is no finite number."""
        return {
            "loss": finite(self.loss), "gradient_norm": finite(self.gradient_norm),
            "learning_rate": self.learning_rate, "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second, "mfu": self.mfu, "memory_bytes": self.memory_bytes,
        }  # fmt: skip

    def __str__(self) -> str:
        parts = [
            f"step {self.number}/{self.num_steps}", f"loss {self.loss:.4f}", f"gradient norm {self.gradient_norm:.3f}",
            f"{self.seconds:.3f} s", f"{self.tokens_per_second:,.0f} tokens/s", f"MFU {self.mfu:.1%}",
            format_bytes(self.memory_bytes),
        ]  # fmt: skip
        if self.number < self.num_steps:
            parts.append(f"{format_seconds(self.seconds_left)} left")
        return "  ".join(parts)


Callback = Callable[[TrainingStep], object]


class StepLog:
    """One line per step in ``steps.jsonl``, and one on stderr, there at most one a second when steps are many.

    Args:
        folder: where the file goes, beside ``record.json``.
        first: steps done before; a run that goes on from some adds its lines to those that are there.
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
        """What held-out data came to behind step `number`, counted from 1; no tokens where the loss is not one of tokens."""
        self._keep({"step": number, "held_out_loss": finite(loss), "held_out_tokens": num_tokens})
        over = f" over {num_tokens:,} tokens" if num_tokens else ""
        print(f"held-out loss after step {number}: {loss:.4f}{over}", file=sys.stderr, flush=True)

    def _keep(self, line: Mapping[str, Any]) -> None:
        """A file that takes no more ends no training: that is said once, and tried again with every step."""
        try:
            with open(self.path, "a", encoding="utf-8", opener=through_no_link) as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            if not self.is_incomplete:
                self.is_incomplete = True
                warnings.warn(
                    f"steps from {line['step']} on are missing in '{self.path}' ({error.strerror or error}); the run goes on"
                    ": make room there, or its record cannot be written either",
                    StagewrightWarning,
                    stacklevel=2,
                )


class TensorBoardLog:
    """Every figure of every step, for TensorBoard. Raises `InputError` where the package is not installed."""

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
    """Every figure of every step, for Weights & Biases. Raises `InputError` where the package is not installed."""

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
    """What sends figures of steps to a folder for TensorBoard and to a project of Weights & Biases, as far as they are
    asked for; `out` is the folder of the run."""
    with ExitStack() as stack:
        found: list[TensorBoardLog | WandbLog] = []
        if tensorboard is not None:
            found.append(TensorBoardLog(Path(tensorboard)))
            stack.callback(found[-1].close)
        if wandb is not None:
            found.append(WandbLog(wandb, out.name, out))
            stack.callback(found[-1].close)
        yield [*found]
