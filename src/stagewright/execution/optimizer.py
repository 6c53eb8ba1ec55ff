"""The optimizer step of one rank: reduce, clip by the norm over all stages, AdamW, master weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from stagewright.execution.weights import TiedGroups, Weights
from stagewright.planning.job import Job


class Optimizer:
    """AdamW over the parameters a rank holds.

    Where gradients are added up in another type than the parameters have (bf16 parameters, fp32 gradients), AdamW works
    on master copies of the gradients' type, and parameters are rounded from them after each step.

    Args:
        pipeline: process group of the ranks of one replica; the norm is taken over them.
        replicas: process group of the ranks that hold the same stages; gradients are summed over them. None: one.
    """

    def __init__(
        self,
        weights: Weights,
        job: Job,
        tied: TiedGroups,
        pipeline: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        self.weights = weights
        self.clip_norm = job.clip_norm
        self.tied = tied
        self.pipeline = pipeline
        self.replicas = replicas
        self.masters: dict[int, torch.Tensor] = {}
        trained: list[torch.nn.Parameter] = []
        for value, gradient in weights.gradients.items():
            parameter = weights.parameters[value]
            if gradient.dtype != parameter.dtype:
                self.masters[value] = parameter.to(gradient.dtype)
            target = torch.nn.Parameter(self.masters.get(value, parameter), requires_grad=True)
            target.grad = gradient
            trained.append(target)
        self.adamw = torch.optim.AdamW(
            trained,
            lr=job.learning_rate,
            betas=job.betas,
            eps=job.eps,
            weight_decay=job.weight_decay,
            fused=True,
        ) if trained else None  # fmt: skip

    def reduce(self) -> None:
        """Sum gradients over tied copies and over data-parallel replicas."""
        self.tied.reduce(self.weights.gradients)
        if self.replicas is not None:
            for gradient in self.weights.gradients.values():
                dist.all_reduce(gradient, group=self.replicas)

    def step(self) -> float:
        """Reduce, clip and update; returns the norm of the gradient over all stages before clipping."""
        self.reduce()
        norm = self._norm()
        if self.clip_norm is not None:
            scale = min(1.0, self.clip_norm / (norm + 1e-6))
            if scale < 1.0 and self.weights.gradients:
                torch._foreach_mul_(list(self.weights.gradients.values()), scale)
        if self.adamw is not None:
            self.adamw.step()
        for value, master in self.masters.items():
            self.weights.parameters[value].copy_(master)
        return norm

    def _norm(self) -> float:
        gradients = list(self.tied.counted(self.weights.gradients))
        device = next((gradient.device for gradient in gradients), torch.device("cpu"))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for norm in torch._foreach_norm(gradients) if gradients else ():
            total += norm.double() ** 2
        if dist.is_initialized():
            dist.all_reduce(total, group=self.pipeline)
        return float(total.sqrt())

    def state(self) -> Iterable[torch.Tensor]:
        """Every tensor the optimizer keeps between steps."""
        yield from self.masters.values()
        if self.adamw is not None:
            for state in self.adamw.state.values():
                yield from (item for item in state.values() if isinstance(item, torch.Tensor))
