"""Comparison of the traced graph with the model itself, in one process, before training.

The module runs as in plain PyTorch (hooks, custom functions and training mode included), forward and backward, and so does
its graph, from the same weights, on the same inputs, with the same random numbers. The loss, the gradient of every
parameter, every buffer, the parameters themselves and the number of random draws are compared, in several steps: state
that a model carries from one step to the next shows in the second.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from stagewright.errors import StagewrightError, TraceError
from stagewright.execution.loading import constants_of
from stagewright.execution.random import keyed
from stagewright.execution.stage_runner import StageOptions, StageRunner
from stagewright.execution.weights import Weights
from stagewright.graph import OperatorGraph
from stagewright.graph.split import split_graph
from stagewright.tracing.effects import states_outside
from stagewright.tracing.models.build import BuiltModel, seeded
from stagewright.tracing.private import functions_behind, hooks_of

NUM_STEPS = 2
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
"""Tolerated difference, relative to the largest element, by dtype. The graph runs the operators of the model in the order
of autograd, so that most models are equal to the last bit."""
ROUNDING = 1e-4
"""Relative difference in float32 that rounding explains."""
_SMALLEST = {"float64": 1e-4, "float32": 1e-2}
"""Fraction of the largest gradient below which gradients are compared relative to that fraction: some (of a key's bias)
are rounding errors only."""
_UPDATE = 0.01
"""Largest change of a parameter between the steps, relative to the largest parameter."""
_SPREAD = 0.02
"""Standard deviation of the noise added to parameters whose elements are all equal: after a zero, gradients vanish."""
_NUM_TRIES = 8
"""Number of runs to find whether random numbers of Python change the loss."""


@dataclass
class ComparedStep:
    """The results of a microbatch, by description: "the loss", "buffer 'norm.mean'"."""

    tensors: dict[str, Tensor | None]
    num_draws: int
    owners: dict[str, str] = field(default_factory=dict)
    """Name of the parameter of each gradient, by the gradient's description."""


@dataclass(frozen=True)
class ModelDifference:
    """A result in which the graph differs from the model, by `share` of the largest element."""

    what: str
    share: float
    parameter: str | None = None

    def __str__(self) -> str:
        if math.isinf(self.share):
            return f"{self.what} differs from the model's"
        if math.isnan(self.share):
            return f"{self.what} is NaN in one of them"
        return f"{self.what} is off by {self.share:.2g} of its largest element"


def tolerance_of(graph: OperatorGraph) -> float:
    """Return the difference that rounding explains: of a graph in float64 that computes anything in float32, as norms do,
    that of float32, because orders of addition may differ there too."""
    dtype = graph.facts["dtype"]
    mixes = any(value.node >= 0 and value.meta.dtype == "float32" for value in graph.values)
    return TOLERANCES["float32" if mixes else dtype]


def differences(
    make: Callable[[], BuiltModel], graph: OperatorGraph, seed: int = 0, tolerance: float = 1e-9
) -> list[ModelDifference]:
    """Return the differences between the graph and the model that `make` builds, largest first, in the first step that has
    any; empty where they are equal. Raises `TraceError` where one of them cannot be run."""
    built = make()
    spread_constants(built.module, seed)
    try:
        graphs = GraphSteps(graph, built.module, seed)
        model = ModelSteps(built.module, seed)
        for step in range(NUM_STEPS):
            inputs = _rolled(built.inputs, step)
            wanted = model.run(step, inputs)
            if differing := compared(graphs.run(step, inputs), wanted, tolerance):
                return differing
            graphs.update(update_of(built.module))
        if model.draws_outside and draws_outside(make, seed):
            return [ModelDifference("the loss under other random numbers of Python or numpy", math.inf)]
    except StagewrightError:
        raise
    except Exception as error:  # the model's code may raise anything
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise TraceError(f"the model or its graph fails when they are compared: {text}") from error
    return []


@dataclass(frozen=True)
class Refusal:
    """A graph that differs from its model."""

    name: str
    differing: list[ModelDifference]
    make: Callable[[], BuiltModel]
    seed: int

    def error(self) -> TraceError:
        """Return an error with the largest difference, and the cause where it is found."""
        num_further = len(self.differing) - 1
        more = f" (and {num_further} more)" if num_further else ""
        return TraceError(
            f"the graph traced from '{self.name}' is not the model: {self.differing[0]}{more}. "
            f"{cause_of(self.make, self.differing, self.seed)}; --no-compare trains the graph as it is"
        )


# -- the two runs -------------------------------------------------------------------------------------------------------


class ModelSteps:
    """A module that runs under autograd as in a plain loop, which changes it."""

    def __init__(self, module: nn.Module, seed: int) -> None:
        self.module = module
        self.seed = seed
        self.draws_outside = False
        """Whether a forward drew random numbers from a generator outside torch."""

    def run(self, step: int, inputs: Mapping[str, Tensor]) -> ComparedStep:
        self.module.zero_grad(set_to_none=True)
        states = states_outside()
        with keyed(self.seed, step, 0) as draws:
            loss = self.module(**{name: tensor.clone() for name, tensor in inputs.items()})
        self.draws_outside |= states_outside() != states
        if loss.requires_grad:
            loss.backward()
        named = dict(self.module.named_parameters())
        tensors: dict[str, Tensor | None] = {"the loss": loss.detach()}
        owners = {_gradient(name): name for name in named}
        tensors |= {_gradient(name): parameter.grad for name, parameter in named.items()}
        tensors |= {f"parameter '{name}'": parameter.detach() for name, parameter in named.items()}
        tensors |= {f"buffer '{name}'": buffer for name, buffer in self.module.named_buffers()}
        copies = {
            what: None if tensor is None else tensor.to_dense().detach().clone()
            for what, tensor in tensors.items()
        }
        return ComparedStep(copies, draws.draws, owners)


class GraphSteps:
    """A graph that runs as one stage, from the tensors of a module by name."""

    def __init__(self, graph: OperatorGraph, module: nn.Module, seed: int) -> None:
        (self.stage,) = split_graph(graph, [])
        self.graph = graph
        self.names = {name: _all_names(module, name) for name, _ in module.named_parameters()}
        self.buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self.parameters = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
        whole = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        tensors = {name: tensor.detach().clone() for name, tensor in whole.items()}
        self.weights = Weights([self.stage], tensors | constants_of([self.stage]), torch.device("cpu"))
        self.runner = StageRunner(self.stage, self.weights, torch.device("cpu"), StageOptions(1.0, seed))

    def run(self, step: int, inputs: Mapping[str, Tensor]) -> ComparedStep:
        self.weights.begin_step()
        self.runner.begin_step(step)
        copies = {name: tensor.clone() for name, tensor in inputs.items()}
        loss = self.runner.forward(0, {}, copies)[self.graph.loss]
        self.runner.backward(0, {})
        tensors: dict[str, Tensor | None] = {"the loss": loss.detach()}
        for name in self.names:
            value = self._value(name)
            tensors[_gradient(name)] = None if value is None else self.weights.gradients.get(value)
            tensors[f"parameter '{name}'"] = self._parameter(name)
        for name, buffer in self.buffers.items():
            value = self.graph.buffers.get(name)
            tensors[f"buffer '{name}'"] = buffer if value is None else self.runner.resident.get(value, buffer)
        return ComparedStep(tensors, self.graph.num_draws)

    def update(self, changes: Mapping[str, Tensor]) -> None:
        """Add to the parameters the changes made to those of the model."""
        for name, change in changes.items():
            self._parameter(name).add_(change)

    def _value(self, name: str) -> int | None:
        """Return the value of the module's parameter `name`, or None if the graph does not use it."""
        values = (self.graph.parameters.get(other) for other in self.names[name])
        return next((value for value in values if value is not None), None)

    def _parameter(self, name: str) -> Tensor:
        value = self._value(name)
        return (
            self.parameters[name]
            if value is None
            else self.weights.parameters.get(value, self.parameters[name])
        )


def update_of(module: nn.Module, share: float = _UPDATE) -> dict[str, Tensor]:
    """Change the parameters by a step down the gradient; return the changes by name."""
    named = {name: p for name, p in module.named_parameters() if p.grad is not None}
    steepest = max(
        (float(p.grad.abs().max()) for p in named.values() if p.grad is not None and p.numel()), default=0.0
    )
    largest = max((float(p.detach().abs().max()) for p in named.values() if p.numel()), default=0.0)
    if not steepest or not math.isfinite(steepest):
        return {}
    changes = {}
    with torch.no_grad():
        for name, parameter in named.items():
            assert parameter.grad is not None, "those without were left out"
            changes[name] = parameter.grad.to_dense() * (-share * max(largest, _UPDATE) / steepest)
            parameter.add_(changes[name])
    return changes


def spread_constants(module: nn.Module, seed: int) -> None:
    """Add small random numbers to trained parameters whose elements are all equal, such as gates and adapters that start at
    zero: factors of zeros would have no gradient to compare."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            trained = parameter.requires_grad and parameter.is_floating_point() and parameter.numel() > 0
            if trained and bool((parameter == parameter.flatten()[0]).all()):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.dtype) * _SPREAD)


def _rolled(inputs: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """Return the samples of a microbatch in another order."""
    return {name: tensor.roll(step, 0) if tensor.dim() else tensor for name, tensor in inputs.items()}


def _all_names(module: nn.Module, name: str) -> list[str]:
    """Return all names of a parameter."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [other for other, parameter in parameters.items() if parameter is parameters[name]]


def _gradient(name: str) -> str:
    return f"the gradient of '{name}'"


# -- differences --------------------------------------------------------------------------------------------------------


def compared(graph: ComparedStep, model: ComparedStep, tolerance: float = 1e-9) -> list[ModelDifference]:
    """Return the differences between a step of the graph and a step of the model, largest first."""
    loss = model.tensors["the loss"]
    dtype = "float64" if loss is not None and loss.dtype == torch.float64 else "float32"
    gradients = [
        t for what, t in model.tensors.items() if what in model.owners and t is not None and t.numel()
    ]
    largest = max((float(t.abs().max()) for t in gradients), default=0.0)
    least = largest * _SMALLEST[dtype] if math.isfinite(largest) else 0.0
    differing = []
    for what in dict.fromkeys(chain(model.tensors, graph.tensors)):
        share = _share(
            graph.tensors.get(what), model.tensors.get(what), least if what in model.owners else 0.0
        )
        if not share <= tolerance:
            differing.append(ModelDifference(what, share, model.owners.get(what)))
    if graph.num_draws != model.num_draws:
        counts = (
            f"the model draws random numbers {model.num_draws} times and its graph {graph.num_draws} times"
        )
        differing.append(ModelDifference(f"the number of draws ({counts})", math.inf))
    return sorted(
        differing, key=lambda difference: -math.inf if math.isnan(difference.share) else -difference.share
    )


def _share(graph: Tensor | None, model: Tensor | None, least: float) -> float:
    """Return the largest difference of an element, relative to the model's largest; a missing gradient counts as zeros."""
    if graph is None or model is None:
        there = model if graph is None else graph
        return 0.0 if there is None or not there.numel() or float(there.abs().max()) == 0.0 else math.inf
    if graph.shape != model.shape:
        return math.inf
    if torch.equal(graph, model) or not model.numel():
        return 0.0
    graph, model = _wide(graph), _wide(model)
    if torch.allclose(graph, model, rtol=0.0, atol=0.0, equal_nan=True):
        return 0.0
    scale = max(float(model.abs().max()), least, 1e-300)
    return float((graph - model).abs().max()) / scale


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_complex() else tensor.double()


# -- causes -------------------------------------------------------------------------------------------------------------

_PYTHON_RANDOM = (
    "its forward draws random numbers of Python or numpy, which a graph cannot contain: draw them with torch.rand, or in "
    "the data"
)


def draws_outside(make: Callable[[], BuiltModel], seed: int) -> bool:
    """Return whether the loss depends on random numbers from outside torch."""
    losses = set[float]()
    for number in range(_NUM_TRIES):
        built = make()
        with seeded(seed), torch.no_grad(), keyed(seed, 0, 0):
            random.seed(number)
            numpy.random.seed(number)
            states = states_outside()
            losses.add(float(built.module(**built.inputs)))
            if states_outside() == states:
                return False
    return len(losses) > 1


def cause_of(make: Callable[[], BuiltModel], differing: list[ModelDifference], seed: int) -> str:
    """Return the cause of the differences, as far as the model shows it, and a remedy."""
    if draws_outside(make, seed):
        return f"The cause: {_PYTHON_RANDOM}"
    built = make()
    spread_constants(built.module, seed)
    first = ModelSteps(built.module, seed).run(0, built.inputs)
    if compared(ModelSteps(_rebuilt(make, seed), seed).run(0, built.inputs), first):
        return (
            "The cause: the model itself gives another result when it is built and run again on the same inputs with the "
            "same random numbers of torch; remove every dependence on other state or random draws of this process"
        )
    hooks = list(hooks_of(built.module))
    differs = {difference.parameter for difference in differing}
    for hook in hooks:
        if hook.parameter in differs and hook.parameter is not None:
            return (
                f"The cause: {hook}, which is not part of a graph; do what it does in forward, or remove it"
            )
    with keyed(seed, 0, 0):
        loss = built.module(**built.inputs)
    if names := functions_behind(loss):
        return (
            f"The likely cause: the model has a custom backward in {names[0]}, which its graph lacks; write it with "
            "operators of torch"
        )
    if hooks:
        return f"The likely cause: {hooks[0]}, which is not part of a graph; do what it does in forward"
    if changing := changed_attribute(make(), seed):
        return (
            f"The likely cause: forward changes {changing}, which is constant in the graph; keep it in a buffer, or compute "
            "it from the inputs"
        )
    return "The cause was not found: please report it with the model's code"


def _rebuilt(make: Callable[[], BuiltModel], seed: int) -> nn.Module:
    module = make().module
    spread_constants(module, seed)
    return module


def changed_attribute(built: BuiltModel, seed: int) -> str | None:
    """Return an attribute of a module that its forward changes, such as a counter, or None."""

    def numbers() -> dict[str, Any]:
        plain = int | float | bool | str | None
        return {
            f"'{name}' of module '{path}'": value
            for path, module in built.module.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, plain)
        }

    before = numbers()
    with torch.no_grad(), keyed(seed, 0, 0):
        built.module(**built.inputs)
    after = numbers()
    return next((name for name, value in after.items() if before.get(name) != value), None)
