"""The runner of a stage: its tensors, its functions and the values saved for each microbatch in flight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from stagewright.execution.accelerator import accelerator_of
from stagewright.execution.compiled import compiled
from stagewright.execution.offload import HostCopies
from stagewright.execution.random import reseed
from stagewright.execution.weights import Weights
from stagewright.graph import Node
from stagewright.graph.stage import Function, Stage, Transfer
from stagewright.graph.tensor_parallel import GROUP, local_draws
from stagewright.schedule.action import Kind
from stagewright.tracing.arguments import DTYPES
from stagewright.tracing.keys import key
from stagewright.tracing.runnable import Runnable, compile_function
from stagewright.tracing.tensor_parallel.operators import rank_in

Tensors = dict[int, torch.Tensor]
_FUNCTIONS = {
    Kind.F: "forward", Kind.R: "rebuild", Kind.I: "input_grad", Kind.W: "weight_grad", Kind.B: "backward",
}  # fmt: skip
"""Functions of a stage by the kind of action that runs them, in an order in which inputs come from earlier ones."""

_SMALL = 0.1
"""Standard deviation of random stand-ins for activations and parameters."""

_BACKWARD = ("input_grad", "weight_grad", "backward")


@dataclass(frozen=True)
class StageOptions:
    """Options of the computation of a rank's stages."""

    loss_scale: float
    """Cotangent of each microbatch's loss."""
    seed: int = 0
    """Seed of the random numbers that stages draw."""
    first_microbatch: int = 0
    """Number of this replica's first microbatch in the whole batch, for random numbers."""
    is_compiled: bool = False
    """Whether to compile the functions of each microbatch with TorchInductor."""


class StageRunner:
    """A runner of the functions of a stage.

    Args:
        weights: tensors of the rank; parameters and buffers are updated in place.
        is_gathered: whether parameters are missing until `put_parameters` is called.
        mark: called before the first operator of each function and after every operator.
    """

    def __init__(
        self,
        stage: Stage,
        weights: Weights,
        device: torch.device,
        options: StageOptions,
        is_gathered: bool = False,
        mark: Callable[[], None] | None = None,
    ) -> None:
        self.stage = stage
        self._mark = mark
        self.weights = weights
        self.device = device
        self.seed = seed = options.seed
        self.local_draws = local_draws(stage.graph)
        self.local_seed = key(seed, 1 + rank_in(GROUP)) if self.local_draws else seed
        self.step = 0
        self.is_gathered = is_gathered
        self.is_compiled = options.is_compiled
        self.first_microbatch = options.first_microbatch
        sources = (*stage.parameters, *stage.buffers, *stage.constants)
        self.resident: Tensors = {
            value: weights.tensors[value] for value in sources if value in weights.tensors
        }
        meta = stage.value(stage.graph.seed).meta
        cotangent = torch.full(meta.shape, options.loss_scale, dtype=DTYPES[meta.dtype], device=device)
        self.resident[stage.graph.seed] = cotangent
        self._cotangents: Sequence[float] | torch.Tensor | None = None
        self._held: dict[int, Tensors] = {}
        self._microbatch = 0
        self._host_copies = HostCopies(device).operators
        self._compile()

    def _compile(self) -> None:
        stage = self.stage
        functions = {
            name: getattr(stage, name)
            for name in ("forward", "rebuild", "input_grad", "weight_grad", "backward")
        }
        lasting = {output for node in stage.static for output in node.outputs if output is not None}
        derived = {output for node in stage.derived for output in node.outputs if output is not None}
        used = {
            value
            for function in functions.values()
            for value in (*(v for node in function.nodes for v in node.inputs), *function.outputs)
        }
        sources = {*stage.parameters, *stage.buffers, *stage.constants, stage.graph.seed}
        static = Function(stage.static, (), tuple(sorted(lasting & used)))
        self._static = self._runnable(static, sources, "static")
        self._run_resident(self._static)
        seeded = _following(stage.static, stage.graph.seed)
        seeded_values = {output for node in seeded for output in node.outputs if output is not None}
        self._seeded = self._runnable(
            Function(seeded, (), tuple(sorted(seeded_values & used))), sources | lasting, "seeded"
        )
        self._has_seed = not used.isdisjoint({stage.graph.seed, *seeded_values})
        derive = Function(stage.derived, (), tuple(sorted(derived & used)))
        self._derive = self._runnable(derive, sources | lasting, "derived")
        resident = sources | lasting | derived
        self._for_backward = stage.after_rebuild
        self.functions = {
            name: self._runnable(function, resident, name) for name, function in functions.items()
        }

    def _runnable(self, function: Function, resident: set[int], name: str) -> Runnable:
        name = f"stage{self.stage.index}_{name}"

        def make(part: Function, called: str) -> Runnable:
            return compile_function(
                part, resident, self.device, called, self._mark, self._host_copies, self.stage.value
            )

        is_heavy = self.is_compiled and function.nodes and not name.endswith(("static", "seeded", "derived"))
        return compiled(function, resident, self.device, name, make) if is_heavy else make(function, name)

    def _run_resident(self, runnable: Runnable) -> None:
        with torch.no_grad():
            values = runnable.call([], self.resident, self.weights.accumulate, self._reseed)
        self.resident.update(zip(runnable.outputs, values, strict=True))

    def prepare(self, kinds: Collection[Kind]) -> None:
        """Compile the functions of actions of these kinds, and compare them with the operators, on a microbatch of random
        numbers whose results are dropped. Sharded parameters, which are not gathered yet, are random too."""
        if not self.is_compiled:
            return
        generator = torch.Generator(self.device).manual_seed(self.seed)
        names = [name for kind, name in _FUNCTIONS.items() if kind in kinds]
        functions = [getattr(self.stage, name) for name in names]
        used = {number for function in functions for node in function.nodes for number in node.inputs}
        used |= {number for function in functions for number in function.outputs}
        resident = {
            number: self._random(number, generator)
            for number in sorted(used & self.stage.resident - self.resident.keys())
        } | self.resident
        values: Tensors = {}
        for place, name in enumerate(names):
            runnable = self.functions[name]
            later = {number for after in names[place + 1 :] for number in self.functions[after].inputs}
            inputs = [
                values[number] if number in values else self._random(number, generator)
                for number in runnable.inputs
            ]
            values = {number: tensor for number, tensor in values.items() if number in later}
            with torch.no_grad():
                outputs = runnable.call(inputs, resident, _drop, self._reseed)
            values.update((n, t) for n, t in zip(runnable.outputs, outputs, strict=True) if n in later)
            del outputs
        values.clear()
        accelerator_of(self.device).empty_cache()

    def _random(self, value: int, generator: torch.Generator) -> torch.Tensor:
        """Return a tensor of a value's layout: small normal numbers, true, or zeros, which are valid indices."""
        meta = self.stage.value(value).meta
        dtype, size = DTYPES[meta.dtype], (meta.extent,)
        if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
            flat = torch.randn(size, dtype=dtype, device=self.device, generator=generator) * _SMALL
        else:
            flat = torch.full(size, dtype is torch.bool, dtype=dtype, device=self.device)
        return flat.as_strided(meta.shape, meta.stride)

    # -- actions ----------------------------------------------------------------------------------------------------

    def begin_step(self, step: int, cotangents: Sequence[float] | torch.Tensor | None = None) -> None:
        """Prepare for the first action of a batch: parameters may have changed since the last one. `cotangents` are those
        of the loss of each microbatch, where they differ."""
        self.step = step
        self._cotangents = cotangents
        if not self.is_gathered:
            self._run_resident(self._derive)

    def scale_loss(self, cotangent: float) -> None:
        """Set the cotangent of each microbatch's loss from which backwards start."""
        self.resident[self.stage.graph.seed].fill_(cotangent)
        self._run_resident(self._static)

    def release(self) -> None:
        """Release the values computed from constants and parameters."""
        for value in (*self._static.outputs, *self._derive.outputs):
            self.resident.pop(value, None)

    def restore(self) -> None:
        """Recompute the values computed from constants; those computed from parameters follow as each batch begins."""
        self._run_resident(self._static)

    def put_parameters(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use gathered parameters, by name, from now on."""
        named = ((value, self.stage.value(value).name) for value in self.stage.parameters)
        self.resident.update((value, tensors[name]) for value, name in named if name in tensors)
        self._run_resident(self._derive)

    def drop_parameters(self) -> None:
        """Release gathered parameters and all values computed from parameters."""
        for value in (*self.stage.parameters, *self._derive.outputs):
            if value not in self.weights.tensors:
                self.resident.pop(value, None)

    def forward(self, microbatch: int, arrived: Tensors, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        """Run F on values from other stages and the user's inputs; return the values for other stages and the loss (a late
        loss is returned by I and B)."""
        stage = self.stage
        for value in stage.inputs:
            arrived[value] = inputs[stage.value(value).name]
        outputs = self._call("forward", microbatch, arrived)
        for buffer, value in stage.mutations:
            self.resident[buffer].copy_(outputs[value])
        self._held[microbatch] = {value: outputs[value] for value in stage.saved}
        return self._sent(stage.sends, outputs)

    def _sent(self, transfers: Iterable[Transfer], outputs: Tensors) -> Tensors:
        """Return the values for other stages, and the loss where it is among `outputs`."""
        sent = {value: outputs[value] for transfer in transfers for value in transfer.values}
        loss = self.stage.graph.loss
        return sent | ({loss: outputs[loss]} if loss in outputs else {})

    @property
    def held(self) -> Mapping[int, Tensors]:
        """Values saved on the device for the backward of each microbatch."""
        return {
            microbatch: {value: kept for value, kept in held.items() if isinstance(kept, torch.Tensor)}
            for microbatch, held in self._held.items()
        }

    def drop(self) -> None:
        """Drop the saved values of all microbatches."""
        self._held.clear()

    def recompute(self, microbatch: int) -> None:
        """Run R: recompute and fetch values that the backward needs first, and drop values saved for R alone."""
        held = self._held[microbatch]
        given = {value: held[value] for value in self.functions["rebuild"].inputs}
        later = self._for_backward
        self._held[microbatch] = kept = {value: tensor for value, tensor in held.items() if value in later}
        held.clear()
        kept.update(self._call("rebuild", microbatch, given))

    def input_grad(self, microbatch: int, cotangents: Tensors) -> Tensors:
        """Run I on cotangents from later stages; return cotangents for earlier ones, and a late loss."""
        available = self._held.pop(microbatch)
        available.update(cotangents)
        cotangents.clear()
        kept = {value: available[value] for value in self.stage.saved_for_weight_grad if value in available}
        given = {value: available[value] for value in self.functions["input_grad"].inputs}
        available.clear()
        outputs = self._call("input_grad", microbatch, given)
        kept.update((value, outputs[value]) for value in self.stage.saved_for_weight_grad if value in outputs)
        self._held[microbatch] = kept
        return self._sent(self.stage.grad_sends, outputs)

    def weight_grad(self, microbatch: int) -> None:
        """Run W: add the weight gradients of a microbatch to the gradient buffers."""
        self._call("weight_grad", microbatch, self._held.pop(microbatch))

    def backward(self, microbatch: int, cotangents: Tensors) -> Tensors:
        """Run B, which is I and W in one, freeing saved values as it goes; a late loss is among the results."""
        inputs = self._held.pop(microbatch)
        inputs.update(cotangents)
        cotangents.clear()
        return self._call("backward", microbatch, inputs)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _call(self, name: str, microbatch: int, given: Tensors) -> Tensors:
        """Run a function on values taken out of `given`, so that each is freed at its last use."""
        runnable, self._microbatch = self.functions[name], microbatch
        if self._cotangents is not None and self._has_seed and name in _BACKWARD:
            self.resident[self.stage.graph.seed].fill_(self._cotangents[microbatch])
            self._run_resident(self._seeded)
        inputs = [given[value] for value in runnable.inputs]
        given.clear()
        with torch.no_grad():
            outputs = runnable.call(inputs, self.resident, self.weights.accumulate, self._reseed)
        return dict(zip(runnable.outputs, outputs, strict=True))

    def _reseed(self, draw: int) -> None:
        seed = self.local_seed if draw in self.local_draws else self.seed
        reseed(seed, self.step, self.first_microbatch + self._microbatch, draw)


def _drop(parameter: int, gradient: torch.Tensor) -> None:
    """Drop a gradient, in place of accumulating it."""


def _following(nodes: Sequence[Node], value: int) -> tuple[Node, ...]:
    """Return those of `nodes` that depend on a value."""
    reached, dependent = {value}, []
    for node in nodes:
        if not reached.isdisjoint(node.inputs):
            reached.update(output for output in node.outputs if output is not None)
            dependent.append(node)
    return tuple(dependent)
