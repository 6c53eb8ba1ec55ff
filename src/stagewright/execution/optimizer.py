"""The optimizer step of one rank: reduce, clip by the norm over all stages, AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stagewright.execution.shards import Shards
from stagewright.execution.weights import TiedGroups, Weights
from stagewright.planning.job import Job

GROWTH = 2.0
"""A power of two changes no digit of a gradient."""


@dataclass
class LossScale:
    """The factor on the loss, and so on every gradient: halved when one overflows, doubled after `window` steps without.

    Every rank has the same: whether a step overflowed is told from the norm over all of them.
    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2 (arXiv 1710.03740); the rule and its
    constants as in `torch.amp.GradScaler`.

    >>> scale = LossScale(8.0, window=2)
    >>> for overflowed in (True, False, False):
    ...     scale.update(overflowed)
    ...     print(scale.value)
    4.0
    4.0
    8.0
    """

    value: float
    window: int
    num_good: int = 0
    """Steps without an overflow since the value last changed."""

    def update(self, overflowed: bool) -> None:
        """After each step: did its gradients overflow, so that it changed no parameter?"""
        self.num_good = 0 if overflowed else self.num_good + 1
        if overflowed:
            self.value /= GROWTH
        elif self.num_good == self.window:
            self.value *= GROWTH
            self.num_good = 0


Tensors = Mapping[int, torch.Tensor]


class AdamW:
    """Updates `parameters`, by value id, where they are.

    Where gradients are added up in another type than the parameters have (bf16 parameters, fp32 gradients), it works on
    master copies of the gradients' type, and parameters are rounded from them after each step.

    Args:
        wide: type in which gradients are added up; None is that of each parameter.
    """

    def __init__(self, parameters: Tensors, job: Job, wide: torch.dtype | None) -> None:
        self.parameters = parameters
        self.masters: dict[int, torch.Tensor] = {}
        for value, parameter in parameters.items():
            if (master := self._master(parameter, wide or parameter.dtype)) is not None:
                self.masters[value] = master
        self.targets = {
            value: torch.nn.Parameter(self.masters.get(value, parameter), requires_grad=True)
            for value, parameter in parameters.items()
        }
        self.adamw = torch.optim.AdamW(
            list(self.targets.values()),
            lr=job.learning_rate,
            betas=job.betas,
            eps=job.eps,
            weight_decay=job.weight_decay,
            fused=True,
        ) if self.targets else None  # fmt: skip

    def update(self, gradients: Tensors) -> None:
        """One step; parameters without a gradient stay as they are. The gradients are held until `release`."""
        for value, target in self.targets.items():
            target.grad = gradients.get(value)
        if self.adamw is not None:
            self.adamw.step()
        self.round()

    def begin(self) -> None:
        """Make the state that the first step would make."""
        for target in self.targets.values():
            if self.adamw is not None and not self.adamw.state.get(target):
                self.adamw.state[target] = {
                    "step": torch.zeros((), dtype=torch.float32, device=target.device),
                    "exp_avg": torch.zeros_like(target),
                    "exp_avg_sq": torch.zeros_like(target),
                }

    def states(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """For each parameter, by name, all that a step changes, but for what is rounded from it."""
        self.begin()
        for value, target in self.targets.items():
            kept = self.adamw.state[target] if self.adamw is not None else {}
            yield value, {"weight": target.detach(), **kept}

    def release(self, values: Iterable[int]) -> None:
        """Hold the gradients of `values` no longer."""
        for value in values:
            self.targets[value].grad = None

    def state(self) -> Iterable[torch.Tensor]:
        """Everything kept between steps, of what is on the device."""
        yield from self.masters.values()
        for state in self.adamw.state.values() if self.adamw is not None else ():
            yield from (item for item in state.values() if isinstance(item, torch.Tensor))

    def host_state(self) -> Iterable[torch.Tensor]:
        """Everything kept between steps in the memory of the host."""
        return ()

    def _master(self, parameter: torch.Tensor, wide: torch.dtype) -> torch.Tensor | None:
        return parameter.to(wide) if wide != parameter.dtype else None

    def round(self) -> None:
        """Parameters from their masters."""
        for value, master in self.masters.items():
            self.parameters[value].copy_(master)


class HostAdamW(AdamW):
    """As `AdamW` with its state in the memory of the host, where the step runs on the host's processors.

    Gradients are copied there and updated parameters back; nothing is kept on the device. For a rank that computes on the
    host's processors itself, it is the same memory under another name: not counted as the rank's.
    """

    def __init__(self, parameters: Tensors, job: Job, wide: torch.dtype | None) -> None:
        super().__init__(parameters, job, wide)
        self.received = {value: _host_like(target, target.dtype) for value, target in self.targets.items()}
        self.begin()

    def update(self, gradients: Tensors) -> None:
        here = {value: self.received[value] for value in gradients}
        for value, gradient in gradients.items():
            here[value].copy_(gradient, non_blocking=True)
        if any(parameter.device.type == "cuda" for parameter in self.parameters.values()):
            torch.cuda.current_stream().synchronize()
        super().update(here)

    def state(self) -> Iterable[torch.Tensor]:
        return ()

    def host_state(self) -> Iterable[torch.Tensor]:
        yield from super().state()
        yield from self.received.values()

    def _master(self, parameter: torch.Tensor, wide: torch.dtype) -> torch.Tensor | None:
        return _host_like(parameter, wide).copy_(parameter)

    def round(self) -> None:
        """On the host, in the room of gradients that are used up, so that the device needs none for it."""
        for value, master in self.masters.items():
            parameter = self.parameters[value]
            room = self.received[value].view(-1).view(parameter.dtype)[: parameter.numel()]
            rounded = room.view(parameter.shape).copy_(master)
            parameter.copy_(rounded, non_blocking=True)


def _host_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Room for `tensor` in `dtype` in the memory of the host, where its device can reach it without a copy."""
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=torch.cuda.is_available())


class Optimizer:
    """AdamW over the parameters a rank holds, or over its shards of them.

    Gradients of a scaled loss are scaled back first; if one of them has overflowed, on whatever rank, nothing is updated.

    Args:
        pipeline: process group of the ranks of one replica; the norm is taken over them.
        shards: what is sharded over replicas, their gradients summed already.
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
        gradients = self.gradients
        if factor != 1.0 and gradients:
            torch._foreach_mul_(list(gradients.values()), factor)
        self.adamw.update(gradients)
        self.adamw.release(self.sharded)
        gradients.clear()
        self.shards.drop_gradients()
        self.shards.spread()
        return norm

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
