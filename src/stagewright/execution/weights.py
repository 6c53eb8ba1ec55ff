"""Weights: the parameters of a rank, their gradient buffers, and tied parameters that several ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from stagewright.errors import RunError
from stagewright.execution.collectives import ProcessGroups
from stagewright.graph import Origin
from stagewright.graph.flat_buffers import OPTIMIZER, FlatLayout
from stagewright.graph.stage import Stage
from stagewright.graph.tensor import TensorMeta


class Weights:
    """Parameters, buffers and constants of all stages of one rank, by value id.

    A parameter that two stages of the rank share is one tensor with one gradient buffer.

    Args:
        tensors: tensors by name, each read once; moved to `device` without a copy if they are already there.
        accumulate_dtype: dtype of the gradient buffers; default that of the parameter.
        flats: flat buffers with the gradients of all their parameters and, where they are sharded, the parameters too, which
            are not read from `tensors`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        accumulate_dtype: torch.dtype | None = None,
        flats: Iterable[FlatLayout] = (),
    ) -> None:
        self.device = device
        self.accumulate_dtype = accumulate_dtype
        self.names: dict[int, str] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        flats = tuple(flats)
        sharded = {value for flat in flats if flat.level >= OPTIMIZER for value in flat.values}
        for stage in stages:
            for value in (*stage.parameters, *stage.buffers, *stage.constants):
                if value in self.names:
                    continue
                described = stage.value(value)
                self.names[value] = described.name
                if value not in sharded:
                    tensor = starting_tensor(tensors, described.name, described.meta, described.origin)
                    self.tensors[value] = tensor.to(device)
        self.parameters = {
            value: tensor
            for value, tensor in self.tensors.items()
            if stages[0].graph.values[value].origin is Origin.PARAMETER
        }
        self.trained = tuple(dict.fromkeys(value for stage in stages for value, _ in stage.gradients))
        in_flats = {value for flat in flats if flat.is_trained for value in flat.values}
        self.gradients = {
            value: torch.zeros_like(self.parameters[value], dtype=accumulate_dtype)
            for value in self.trained
            if value not in in_flats
        }
        self._untouched = set(self.trained)

    def put(self, parameter: int, tensor: torch.Tensor) -> None:
        """Store a parameter in `tensor` from now on."""
        self.tensors[parameter] = self.parameters[parameter] = tensor

    def accumulate_into(self, buffers: Mapping[int, torch.Tensor]) -> None:
        """Accumulate the gradients of some parameters in new buffers."""
        self.gradients.update(buffers)
        self._untouched.update(buffers)

    def close(self, parameters: Iterable[int]) -> None:
        """Release the gradient buffers of some parameters."""
        for parameter in parameters:
            del self.gradients[parameter]

    def begin_step(self) -> None:
        """Let the next gradient of each parameter replace the contents of its buffer."""
        self._untouched = set(self.trained)

    def accumulate(self, parameter: int, gradient: torch.Tensor) -> None:
        buffer = self.gradients[parameter]
        if parameter in self._untouched:
            self._untouched.remove(parameter)
            buffer.copy_(gradient)
        else:
            buffer.add_(gradient)


def starting_tensor(
    tensors: Mapping[str, torch.Tensor], name: str, meta: TensorMeta, origin: Origin = Origin.PARAMETER
) -> torch.Tensor:
    """Return tensor `name` of `tensors`. Raises `RunError` where it is missing or does not have the layout `meta`."""
    if name not in tensors:
        raise RunError(f"{origin} '{name}' was not given: trace the model again")
    tensor = tensors[name].detach()
    if tuple(tensor.shape) != meta.shape or str(tensor.dtype) != f"torch.{meta.dtype}":
        raise RunError(
            f"{origin} '{name}' is {tensor.dtype}{list(tensor.shape)}, but the plan was made for {meta}: plan again for "
            "this model"
        )
    return tensor


class TiedGroups:
    """Parameters that several pipeline ranks hold, with a process group for each set of holders.

    Every rank must construct this with the same arguments, because creating process groups is collective.

    Args:
        stages: all stages of the pipeline.
        replicas: for each data-parallel replica, the global rank of each pipeline rank.
        process_groups: the process groups of the run, to which the new groups are added.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        rank_of_stage: Sequence[int],
        rank: int,
        replicas: Sequence[Sequence[int]],
        process_groups: ProcessGroups,
    ) -> None:
        holders: dict[int, set[int]] = {}
        for stage in stages:
            for value, _ in stage.gradients:
                holders.setdefault(value, set()).add(rank_of_stage[stage.index])
        shared = {value: tuple(sorted(ranks)) for value, ranks in holders.items() if len(ranks) > 1}
        groups = {
            members: process_groups.new([[replica[member] for member in members] for replica in replicas])
            for members in sorted(set(shared.values()))
        }
        self._shared = [(value, groups[ranks]) for value, ranks in sorted(shared.items()) if rank in ranks]
        self._owned_elsewhere = {v for v, ranks in shared.items() if rank in ranks and rank != ranks[0]}

    def count_elsewhere(self, parameters: Iterable[int]) -> None:
        """Exclude `parameters` from this rank's share of a norm: another rank has the same gradients."""
        self._owned_elsewhere.update(parameters)

    def reduce(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Sum the gradients of tied parameters over the ranks that hold them."""
        for value, group in self._shared:
            if value in gradients:  # of those in one flat buffer, the first stands for all
                dist.all_reduce(gradients[value], group=group)

    def counted(self, gradients: Mapping[int, torch.Tensor]) -> Iterable[torch.Tensor]:
        """Return the gradients that this rank counts in a norm over the whole model: each tied parameter on one rank."""
        return [gradient for value, gradient in gradients.items() if self.is_counted(value)]

    def is_counted(self, parameter: int) -> bool:
        """Return whether this rank counts `parameter` in a norm over the whole model."""
        return parameter not in self._owned_elsewhere
