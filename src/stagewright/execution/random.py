"""Random numbers keyed by (seed, step, microbatch, operator): every schedule draws the same numbers as the plain run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.execution.accelerator import seed_generators
from stagewright.tracing.arguments import draws
from stagewright.tracing.keys import key
from stagewright.tracing.private import checkpoints_recomputed_by


def reseed(seed: int, step: int, microbatch: int, draw: int) -> None:
    """Set the random state of host and device for an operator."""
    seed_generators(key(seed, step, microbatch, draw))


@contextmanager
def keyed(seed: int, step: int, microbatch: int) -> Iterator[Keyed]:
    """Let the random operators of a plain model draw the numbers of their keys, in the order of the model. Yields the
    mode, which counts them."""
    with _keyed_from((seed, step, microbatch), 0) as mode:
        yield mode


@contextmanager
def _keyed_from(place: tuple[int, int, int], draws: int) -> Iterator[Keyed]:
    """Open `keyed` after `draws` draws. Recomputation by `torch.utils.checkpoint` uses the keys of the first time."""
    mode = Keyed(place, draws)

    def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
        start = mode.draws

        def run(*args: Any, **kwargs: Any) -> Any:
            with _keyed_from(place, start):
                return function(*args, **kwargs)

        return run

    with mode, checkpoints_recomputed_by(recomputed):
        yield mode


class Keyed(TorchDispatchMode):
    """A dispatch mode in which each random operator draws the numbers of its place among them; `draws` counts them."""

    def __init__(self, place: tuple[int, int, int], draws: int) -> None:
        super().__init__()
        self.place = place
        self.draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            reseed(*self.place, self.draws)
            self.draws += 1
        return func(*args, **(kwargs or {}))
