"""The optimizer step of one rank: reduce, clip by the norm over all stages, AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from stagewright.execution.adamw import AdamW, HostAdamW
from stagewright.execution.loss_scale import LossScale
from stagewright.execution.shards import Shards
from stagewright.execution.weights import TiedGroups, Weights
from stagewright.planning.job import Job


class Optimizer:
    """AdamW over the parameters a rank holds, or over its shards of them.

    Gradients of a scaled loss are scaled back first; if one of them has overflowed, on whatever rank, nothing is updated.

    Args:
        pipeline: process group of the ranks of one replica; the norm is taken over them.
        shards: what replicas share out, their gradients summed already.
        loss_scale: the factor on all gradients; None is 1.
        on_host: whether AdamW's state is in the memory of the host.
    """

    def __init__(
        self,
        weights: Weights,
        job: Job,
        tied: TiedGroups,
        pipeline: dist.ProcessGroup | None,
        shards: Shards | None = None,
        loss_scale: LossScale | None = None,
        on_host: bool = False,
    ) -> None:
        self.loss_scale = loss_scale
        self.device = weights.device
        self.clip_norm = job.clip_norm
        self.tied = tied
        self.pipeline = pipeline
        self.shards = shards or Shards()
        self.whole = {
            value: gradient
            for value, gradient in weights.gradients.items()
            if not self.shards.is_sharded(value)
        }
        parts = self.shards.parts()
        self.sharded = frozenset(parts)
        parameters = {value: weights.parameters[value] for value in self.whole} | parts
        self.adamw = (HostAdamW if on_host else AdamW)(parameters, job, weights.accumulate_dtype)

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        """What this rank updates its parameters by, once a batch has summed it."""
        return self.whole | self.shards.gradient_parts()

    def reduce(self) -> None:
        """Sum gradients over the copies of tied parameters; replicas' sums are in place when a batch ends."""
        self.tied.reduce(self.gradients)

    def step(self) -> float:
        """Reduce, clip and update; returns the norm of the gradient over all stages before clipping.

        A norm that is not finite means that a gradient overflowed: with a scaled loss the step is left out, and the scale
        is smaller from the next on.
        """
        self.reduce()
        factor = 1.0 if self.loss_scale is None else 1.0 / self.loss_scale.value
        norm = self._norm(self.gradients) * factor
        if self.loss_scale is not None:
            overflowed = not math.isfinite(norm)
            self.loss_scale.update(overflowed)
            if overflowed:
                self.shards.drop_gradients()
                return norm
        if self.clip_norm is not None:
            factor *= min(1.0, self.clip_norm / (norm + 1e-6))
        self._update(factor)
        return norm

    def _update(self, factor: float) -> None:
        """AdamW by `factor` times the gradients."""
        gradients = self.gradients
        if factor != 1.0 and gradients:
            torch._foreach_mul_(list(gradients.values()), factor)
        self.adamw.update(gradients)
        self.adamw.release(self.sharded)
        gradients.clear()
        self.shards.drop_gradients()
        self.shards.spread()

    def _norm(self, gradients: Mapping[int, torch.Tensor]) -> float:
        whole = {value: gradient for value, gradient in gradients.items() if value not in self.sharded}
        squared = self._squared_norm(self.tied.counted(whole))
        if self.sharded:
            parts = self.shards.counted_gradients(self.tied.is_counted)
            squared += self.shards.total(self._squared_norm(parts))
        if dist.is_initialized():
            dist.all_reduce(squared, group=self.pipeline)
        return float(squared.sqrt())

    def _squared_norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """The sum of the squares of all elements, in float64."""
        found = list(gradients)
        if not found:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(torch._foreach_norm(found)).double().square().sum()

    def state(self) -> Iterable[torch.Tensor]:
        """Every tensor the optimizer keeps on the device between steps."""
        return self.adamw.tensors()

    def host_state(self) -> Iterable[torch.Tensor]:
        """Every tensor it keeps in the memory of the host."""
        return self.adamw.elsewhere()
