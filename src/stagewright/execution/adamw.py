"""AdamW's state over the parameters of a rank: on its device, or in the memory of the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from stagewright.planning.job import Job

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

    def tensors(self) -> Iterable[torch.Tensor]:
        """Everything kept between steps, of what is on the device."""
        yield from self._kept()

    def elsewhere(self) -> Iterable[torch.Tensor]:
        """Everything kept between steps in the memory of the host."""
        return ()

    def _master(self, parameter: torch.Tensor, wide: torch.dtype) -> torch.Tensor | None:
        return parameter.to(wide) if wide != parameter.dtype else None

    def round(self) -> None:
        """Parameters from their masters."""
        for value, master in self.masters.items():
            self.parameters[value].copy_(master)

    def _kept(self) -> Iterable[torch.Tensor]:
        yield from self.masters.values()
        if self.adamw is not None:
            for state in self.adamw.state.values():
                yield from (item for item in state.values() if isinstance(item, torch.Tensor))


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
        self._wait()
        super().update(here)

    def tensors(self) -> Iterable[torch.Tensor]:
        return ()

    def elsewhere(self) -> Iterable[torch.Tensor]:
        yield from self._kept()
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

    def _wait(self) -> None:
        """Until all copies from the device have arrived."""
        if any(parameter.device.type == "cuda" for parameter in self.parameters.values()):
            torch.cuda.current_stream().synchronize()


def _host_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Room for `tensor` in `dtype` in the memory of the host, where its device can reach it without a copy."""
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=torch.cuda.is_available())
