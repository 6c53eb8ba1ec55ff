"""Random numbers keyed by (seed, step, microbatch, operator): any schedule draws what the plain run draws."""

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
    """Ready the random state of host and device for one operator."""
    seed_generators(key(seed, step, microbatch, draw))


@contextmanager
def keyed(seed: int, step: int, microbatch: int) -> Iterator[Keyed]:
    """Inside, the random operators of a plain model draw the numbers their keys say, in the order of the model. Yields what
    counts them."""
    with _keyed_from((seed, step, microbatch), 0) as mode:
        yield mode


@contextmanager
def _keyed_from(place: tuple[int, int, int], draws: int) -> Iterator[Keyed]:
    """`keyed` behind so many draws. What `torch.utils.checkpoint` runs again, it runs under the keys of the first time."""
    mode = Keyed(place, draws)

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        start = mode.draws

        def run(*args: Any, **kwargs: Any) -> Any:
            with _keyed_from(place, start):
                return function(*args, **kwargs)

        return run

    with mode, checkpoints_recomputed_by(again):
        yield mode


class Keyed(TorchDispatchMode):
    """While it is open, each random operator draws the numbers of its place among them; `draws` counts them."""

    def __init__(self, place: tuple[int, int, int], draws: int) -> None:
        super().__init__()
        self.place = place
        self.draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            reseed(*self.place, self.draws)
            self.draws += 1
        return func(*args, **(kwargs or {}))
