"""The optimizer step of a rank: reduce gradients, clip by the norm over all stages, update parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from stagewright.execution.accelerator import accelerator_of
from stagewright.execution.shards import Shards
from stagewright.execution.weights import TiedGroups, Weights
from stagewright.planning.job import Job
from stagewright.tracing.optimizers import maker, state_of

GROWTH = 2.0
"""Factor between loss scales; a power of two, which changes no digit of a gradient."""


@dataclass
class LossScale:
    """The factor on the loss, and so on every gradient: halved at an overflow, doubled after `window` steps without one.

    It is the same on all ranks: the norm over all of them shows whether a step overflowed.
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
    """Number of steps without an overflow since the value last changed."""

    def update(self, overflowed: bool) -> None:
        """Adapt the scale after a step, given whether its gradients overflowed, so that it changed no parameter."""
        self.num_good = 0 if overflowed else self.num_good + 1
        if overflowed:
            self.value /= GROWTH
        elif self.num_good == self.window:
            self.value *= GROWTH
            self.num_good = 0


Tensors = Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Span:
    """A range of a tensor's elements (all where `part` is None) that all have weight decay, or none of them."""

    is_decayed: bool
    part: slice | None = None


@dataclass(frozen=True)
class Target:
    """A parameter of torch's optimizer: a span of the tensor that belongs to `value`."""

    value: int
    span: Span
    parameter: torch.nn.Parameter

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of this span in another tensor that belongs to the same value."""
        return tensor if self.span.part is None else tensor[self.span.part]


class Updater:
    """The job's optimizer over `parameters`, by value id, on their device.

    Where gradients are accumulated in another dtype than the parameters have (bf16 parameters, fp32 gradients), it updates
    master copies in the gradients' dtype, and parameters are rounded from them after each step.

    Args:
        wide: dtype in which gradients are accumulated; None is that of each parameter.
        spans: spans of parameters that have weight decay only in part; others decay by their dimensions.
        names: names of the parameters, for factories.
        streamed: parameters that are in host memory, where their gradients arrive too.
    """

    def __init__(
        self,
        parameters: Tensors,
        job: Job,
        wide: torch.dtype | None,
        spans: Mapping[int, Sequence[Span]] | None = None,
        names: Mapping[int, str] | None = None,
        streamed: Container[int] = (),
    ) -> None:
        self.job = job
        self.streamed = streamed
        self.parameters = parameters
        device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        self.accelerator = accelerator_of(device)
        self.masters: dict[int, torch.Tensor] = {}
        self.reserve(wide)
        for value, parameter in parameters.items():
            if (master := self._master(parameter, wide or parameter.dtype)) is not None:
                self.masters[value] = master
        self.targets: list[Target] = []
        for value, parameter in parameters.items():
            whole = self.masters.get(value, parameter)
            alone = Span(whole.dim() >= job.least_decayed_dims)
            for span in (spans or {}).get(value, (alone,)):
                part = whole if span.part is None else whole[span.part]
                self.targets.append(Target(value, span, torch.nn.Parameter(part, requires_grad=True)))
        self.names = names or {}
        self.make = maker(job.optimizer, job.learning_rate, job.optimizer_arguments, self._device)
        groups = [self._group(is_decayed) for is_decayed in (True, False)]
        groups = [group for group in groups if group["params"]]
        self.optimizers = self.make(groups) if groups else []
        # A factory may give some parameters another learning rate, which follows the schedule too.
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self._numbers: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self.prepare()

    def reserve(self, wide: torch.dtype | None) -> None:
        """Reserve memory for state in the gradients' dtype; a hook for subclasses."""

    def prepare(self) -> None:
        """Finish the construction; a hook for subclasses."""

    def _group(self, is_decayed: bool, targets: Iterable[Target] | None = None) -> dict[str, Any]:
        selected = self.targets if targets is None else targets
        named = [
            (self._name(target), target.parameter)
            for target in selected
            if target.span.is_decayed == is_decayed
        ]
        return {"params": named, "weight_decay": self.job.weight_decay if is_decayed else 0.0}

    def _name(self, target: Target) -> str:
        name = self.names.get(target.value, str(target.value))
        return name if target.span.part is None else f"{name} and those after it"

    @property
    def _device(self) -> torch.device:
        """Device on which steps run."""
        return self.accelerator.device

    def receive(self, gradients: Tensors) -> None:
        """Begin to move gradients to the device of `update`, which may not follow."""

    def update(self, gradients: Tensors, learning_rate: float) -> None:
        """Take a step with received gradients, which are held until `release`; parameters without a gradient stay."""
        self.begin()
        for target in self.targets:
            gradient = gradients.get(target.value)
            target.parameter.grad = None if gradient is None else target.within(gradient)
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                is_jobs = rate == self.job.learning_rate
                group["lr"] = learning_rate if is_jobs else rate * (learning_rate / self.job.learning_rate)
            optimizer.step()
        self.round()

    def begin(self) -> None:
        """Create the state that AdamW's first step would create; spans of a tensor share state tensors. Other optimizers
        create their state themselves."""
        if not self.job.is_plain_adamw or not self.optimizers or self.optimizers[0].state:
            return
        for value, parts in groupby(self.targets, key=lambda target: target.value):
            targets = list(parts)
            like = self.masters.get(value, self.parameters[value])
            steps = [torch.zeros((), dtype=torch.float32, device=like.device) for _ in targets]
            first, second = torch.zeros_like(like), torch.zeros_like(like)
            for target, step in zip(targets, steps, strict=True):
                self.optimizers[0].state[target.parameter] = {
                    "step": step,
                    "exp_avg": target.within(first),
                    "exp_avg_sq": target.within(second),
                }

    def _state_of(self, target: Target, is_read: bool) -> dict[str, Any]:
        """Return the state of a target; if it `is_read` from a checkpoint before the first step, the state that a step with
        a zero gradient would create, to be filled."""
        self.begin()
        state = state_of(self.optimizers, target.parameter)
        if state or not is_read:
            return state
        alone = torch.nn.Parameter(target.parameter.detach().clone())
        alone.grad = torch.zeros_like(alone)
        group = {**self._group(target.span.is_decayed, [target]), "params": [(self._name(target), alone)]}
        for optimizer in self.make([group]):
            optimizer.step()
            if alone in optimizer.state:
                owner = next(candidate for candidate in self.optimizers if _has(candidate, target.parameter))
                owner.state[target.parameter] = optimizer.state[alone]
        return state_of(self.optimizers, target.parameter)

    def states(
        self, is_read: Callable[[int], bool] = lambda value: False
    ) -> Iterator[tuple[Target, dict[str, torch.Tensor]]]:
        """Yield, for each target, all tensors that a step changes, by name, except those rounded from them. Before the first
        step, which creates the state of most optimizers, state of parameters that `is_read` selects is created to be filled
        from a checkpoint. Filled values take effect with `restored`."""
        self._numbers = []
        for target in self.targets:
            tensors = {"weight": target.parameter.detach()}
            state = self._state_of(target, is_read(target.value))
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[key] = value
                elif value is not None:
                    tensors[key] = torch.tensor(float(value), dtype=torch.float64)
                    self._numbers.append((state, key, tensors[key]))
            yield target, tensors

    def restored(self) -> None:
        """Apply the values filled into the tensors of `states`."""
        for state, key, number in self._numbers:
            state[key] = type(state[key])(number.item())
        self._numbers = []
        self.round()

    def release(self, values: Container[int]) -> None:
        """Release the gradients of `values`."""
        for target in self.targets:
            if target.value in values:
                target.parameter.grad = None

    def state(self) -> Iterable[torch.Tensor]:
        """Yield all state on the device that is kept between steps."""
        yield from self.masters.values()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (item for item in state.values() if isinstance(item, torch.Tensor))

    def host_state(self) -> Iterable[torch.Tensor]:
        """Yield all state in host memory that is kept between steps."""
        return ()

    def _master(self, parameter: torch.Tensor, wide: torch.dtype) -> torch.Tensor | None:
        return parameter.to(wide) if wide != parameter.dtype else None

    def round(self) -> None:
        """Round parameters from their master copies."""
        for value, master in self.masters.items():
            self.parameters[value].copy_(master)


def _has(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> bool:
    return any(parameter is other for group in optimizer.param_groups for other in group["params"])


class HostUpdater(Updater):
    """An `Updater` with its state in host memory, whose step runs on the host's processors.

    Gradients are copied to the host and updated parameters back; nothing is kept on the device. For a rank that computes on
    the CPU itself, it is the same memory, but not counted as the rank's.
    """

    def reserve(self, wide: torch.dtype | None) -> None:
        if self.accelerator.is_asynchronous:
            sizes = {
                value: parameter.numel() * (wide or parameter.dtype).itemsize
                for value, parameter in self.parameters.items()
            }
            arriving = (size for value, size in sizes.items() if value not in self.streamed)
            self.accelerator.arena.reserve_lasting([*sizes.values(), *arriving])  # masters, then gradients

    def prepare(self) -> None:
        self.received = {
            value: self.accelerator.lasting_on_host(master.shape, master.dtype, self)
            for value, master in self.masters.items()
            if value not in self.streamed
        }
        self.begin()

    def receive(self, gradients: Tensors) -> None:
        for value, gradient in gradients.items():
            if value in self.streamed:
                self.received[value] = gradient
            else:
                self.received[value].copy_(gradient, non_blocking=True)

    def update(self, gradients: Tensors, learning_rate: float) -> None:
        self.accelerator.current_stream().synchronize()
        super().update({value: self.received[value] for value in gradients}, learning_rate)

    def state(self) -> Iterable[torch.Tensor]:
        return ()

    def host_state(self) -> Iterable[torch.Tensor]:
        yield from super().state()
        yield from self.received.values()

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _master(self, parameter: torch.Tensor, wide: torch.dtype) -> torch.Tensor | None:
        return self.accelerator.lasting_on_host(parameter.shape, wide, self).copy_(parameter)

    def round(self) -> None:
        """Round on the host, in the memory of gradients that are no longer needed, so that the device needs none for it."""
        for value, master in self.masters.items():
            parameter = self.parameters[value]
            if value in self.streamed:
                parameter.copy_(master)
                continue
            buffer = self.received[value].view(-1).view(parameter.dtype)[: parameter.numel()]
            rounded = buffer.view(parameter.shape).copy_(master)
            parameter.copy_(rounded, non_blocking=True)


class Optimizer:
    """The job's optimizer over a rank's parameters, or over its shards of them.

    Gradients of a scaled loss are unscaled first; if any of them has overflowed, on any rank, nothing is updated.

    Args:
        pipeline: process group of the ranks of one replica; the norm is taken over them.
        shards: the state that is sharded over replicas, with gradients already summed.
        loss_scale: factor on all gradients; None is 1.
        on_host: whether the optimizer's state is in host memory.
        skips: whether to skip a step with NaN or Inf gradients also without a scaled loss.
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
        skips: bool = False,
    ) -> None:
        self.loss_scale = loss_scale
        self.skips = skips or loss_scale is not None
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
        spans = {
            value: [Span(is_decayed, part) for is_decayed, part in self.shards.spans(value)]
            for value in parts
        }
        kind = HostUpdater if on_host else Updater
        streamed = self.shards.streamed
        self.updater = kind(parameters, job, weights.accumulate_dtype, spans, weights.names, streamed)

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        """Gradients with which this rank updates its parameters, complete at the end of a batch."""
        return self.whole | self.shards.gradient_parts()

    def reduce(self) -> None:
        """Sum gradients over the copies of tied parameters; sums over replicas are complete at the end of a batch."""
        self.tied.reduce(self.gradients)

    def step(self, learning_rate: float, num_lost: torch.Tensor | None = None) -> tuple[torch.Tensor, bool]:
        """Reduce, clip and update; return the norm of the gradient over all stages before clipping, which an asynchronous
        device may not have computed yet, and whether the update was skipped.

        If this optimizer skips, the update is skipped where the norm is NaN or Inf, which is the same on all ranks, or where
        `num_lost`, the number of ranks whose loss is NaN or Inf, is not zero. Only for this the host waits for the device.
        With a scaled loss, a NaN or Inf norm means that a gradient has overflowed, and the scale is reduced.
        """
        self.reduce()
        scale = 1.0 if self.loss_scale is None else 1.0 / self.loss_scale.value
        norm = self._norm(self.gradients) * scale
        gradients = self.gradients
        if self.clip_norm is not None:
            # `fmin` ignores NaN: the result is the smaller number, or 1 where the norm is NaN.
            clipping = torch.fmin(self.clip_norm / (norm + 1e-6), torch.ones_like(norm))
            self._scale(gradients, clipping * scale)
        elif scale != 1.0:
            self._scale(gradients, scale)
        self.updater.receive(gradients)
        if self.skips and self._is_skipped(norm, num_lost):
            self.shards.drop_gradients()
            return norm, True
        self.updater.update(gradients, learning_rate)
        self.updater.release(self.sharded)
        gradients.clear()
        self.shards.drop_gradients()
        self.shards.spread()
        return norm, False

    def _scale(self, gradients: Tensors, factor: torch.Tensor | float) -> None:
        """Multiply gradients in place; for those that are on the host it waits until the device has the factor."""
        streamed = self.shards.streamed
        _multiply((gradient for value, gradient in gradients.items() if value not in streamed), factor)
        if not streamed.isdisjoint(gradients):
            _multiply((gradients[value] for value in streamed), float(factor))

    def _is_skipped(self, norm: torch.Tensor, num_lost: torch.Tensor | None) -> bool:
        """Return whether to skip the present step, and adapt the loss scale."""
        norm_value, lost = torch.stack(
            [norm, torch.zeros_like(norm) if num_lost is None else num_lost]
        ).tolist()
        overflowed = not math.isfinite(norm_value)
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed)
        return overflowed or lost > 0

    def _norm(self, gradients: Mapping[int, torch.Tensor]) -> torch.Tensor:
        whole = {value: gradient for value, gradient in gradients.items() if value not in self.sharded}
        squared = self._squared_norm(self.tied.counted(whole))
        if self.sharded:
            parts = self.shards.counted_gradients(self.tied.is_counted)
            squared += self.shards.total(self._squared_norm(parts))
        if dist.is_initialized():
            dist.all_reduce(squared, group=self.pipeline)
        return squared.sqrt()

    def _squared_norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the squares of all elements, in float64."""
        held = list(gradients)
        if not held:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(torch._foreach_norm(held)).double().square().sum().to(self.device)


def _multiply(tensors: Iterable[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply tensors in place by a number on their device, or by one that the host knows."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, same in by_dtype.items():
        torch._foreach_mul_(same, factor.to(dtype) if isinstance(factor, torch.Tensor) else factor)
