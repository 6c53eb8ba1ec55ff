"""Optimizers of `torch.optim` or from a factory, and their state, measured with torch on small parameters."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from stagewright.errors import InputError, nearest
from stagewright.graph.layers import pattern_of
from stagewright.tracing.arguments import DTYPES
from stagewright.tracing.models.build import build
from stagewright.tracing.models.factories import load_function
from stagewright.tracing.models.reference import ModelReference
from stagewright.tracing.models.source import split_factory

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups: ``params``, pairs of name and parameter, and their ``weight_decay``."""

Kept = dict[str, Any]
"""A tensor of the state of a parameter, as `stagewright.estimation.optimizer.KeptTensor` has it."""

Make = Callable[[Groups], list[Optimizer]]

_SIZES = (3, 5, 7, 11, 13)
"""Sizes of the dimensions of a small parameter, all distinct."""
_LARGE = 64
_NOT_TAKEN = {
    "lbfgs": "needs the loss again within a step",
    "sparseadam": "takes sparse gradients only",
}


def optimizer_names() -> dict[str, Callable[..., Optimizer]]:
    """Return the optimizers of torch by their names in lower case.

    >>> optimizer_names()["adamw"]
    <class 'torch.optim.adamw.AdamW'>
    """
    classes = (cls for cls in vars(torch.optim).values() if inspect.isclass(cls))
    return {
        cls.__name__.lower(): cls for cls in classes if issubclass(cls, Optimizer) and cls is not Optimizer
    }


def maker(
    name: str, learning_rate: float, options: Mapping[str, Any], device: torch.device | None = None
) -> Make:
    """Return a function that creates the optimizers of parameter groups: one, or several from a factory for different
    parameters.

    They are fused if the optimizer supports that for parameters on `device` (by default the CPU), else work on all tensors
    of a group at once if they can. ``muon`` takes only matrices: AdamW takes all other parameters.

    Raises:
        InputError: there is no such optimizer, or it has no such option; a factory cannot be loaded.
    """
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    if split_factory(name) is not None:
        return _of_factory(name, learning_rate, given)
    supported = {key: cls for key, cls in optimizer_names().items() if key not in _NOT_TAKEN}
    if name in _NOT_TAKEN:
        raise InputError(f"optimizer '{name}' {_NOT_TAKEN[name]}: use one of {', '.join(supported)}")
    if name not in supported:
        raise InputError(
            f"no optimizer '{name}'{nearest(name, supported)}: use one of {', '.join(supported)}, or package.module:factory"
        )
    kind = supported[name]
    accepted = [
        key for key in inspect.signature(kind).parameters if key not in ("params", "lr", "weight_decay")
    ]
    for key in given:
        if key not in accepted:
            raise InputError(
                f"optimizer '{name}' has no option '{key}'{nearest(key, accepted)}: it has {', '.join(accepted)}; "
                "learning_rate and weight_decay are the job's"
            )
    arguments = {"lr": learning_rate, **given}
    way = {} if "fused" in given or "foreach" in given else _fastest(kind, str(device or "cpu"))
    if name == "muon":
        return lambda groups: _with_muon(kind, arguments, groups)
    has_decay = "weight_decay" in inspect.signature(kind).parameters
    return lambda groups: [kind(_checked(groups, has_decay, name), **arguments, **way)]


def _checked(groups: Groups, has_decay: bool, name: str) -> list[dict[str, Any]]:
    if has_decay:
        return [dict(group) for group in groups]
    if any(group["weight_decay"] for group in groups):
        raise InputError(f"optimizer '{name}' has no weight decay: leave out weight_decay, or set it to 0")
    return [{"params": group["params"]} for group in groups]


def _with_muon(
    kind: Callable[..., Optimizer], arguments: Mapping[str, Any], groups: Groups
) -> list[Optimizer]:
    parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for group in groups:
        for is_matrix in (True, False):
            params = [
                (name, parameter)
                for name, parameter in group["params"]
                if (parameter.dim() == 2) == is_matrix
            ]
            if params:
                parts[is_matrix].append({**group, "params": params})
    optimizers: list[Optimizer] = []
    if parts[True]:
        optimizers.append(kind(parts[True], **arguments))
    if parts[False]:
        optimizers.append(torch.optim.AdamW(parts[False], lr=arguments["lr"], betas=(0.9, 0.95), fused=True))
    return optimizers


def _of_factory(name: str, learning_rate: float, options: Mapping[str, Any]) -> Make:
    text = split_factory(name)
    assert text is not None
    function = load_function(text, name)

    def make(groups: Groups) -> list[Optimizer]:
        try:
            result = function([dict(group) for group in groups], lr=learning_rate, **options)
        except TypeError as error:
            raise InputError(
                f"optimizer factory '{name}' failed: {error}; it is called with parameter groups of pairs of name and "
                "parameter, lr and the job's optimizer_options"
            ) from error
        optimizers = list(result) if isinstance(result, list | tuple) else [result]
        if not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
            raise InputError(f"'{name}' must return a torch.optim.Optimizer, or a list of them")
        return optimizers

    return make


@cache
def _fastest(kind: Callable[..., Optimizer], device: str) -> dict[str, bool]:
    taken = inspect.signature(kind).parameters
    for way in ({"fused": True}, {"foreach": True}):
        if not set(way) <= set(taken):
            continue
        parameter = torch.nn.Parameter(torch.ones(2, 2, device=device))
        parameter.grad = torch.ones_like(parameter)
        try:
            kind([parameter], **way).step()
        except (RuntimeError, ValueError, NotImplementedError):
            continue
        return way
    return {}


# -- measuring ----------------------------------------------------------------------------------------------------------


def state_fields(
    name: str,
    learning_rate: float,
    options: Mapping[str, Any],
    dtype_name: str,
    takes_decay: bool = False,
    named: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state for parameters of a type and the traffic of a step, measured in steps on small parameters:
    the fields of `stagewright.estimation.optimizer.OptimizerState`.

    With `takes_decay` weights decay, except those of one dimension. `named` has the dimensions of a model's parameters by
    name, for factories that depend on them; the traffic of a step is then that of parameters with other names.

    Ignores: differences between devices; matrices as small as the product of two others.

    Raises:
        InputError: as `maker`; or its state is neither a tensor nor a number, or it accepts no kind of parameter.
    """
    make_all, dtype = maker(name, learning_rate, options), DTYPES[dtype_name]
    decay = 0.1 if takes_decay else 0.0

    def make(groups: Groups) -> list[Optimizer]:
        return make_all([{**group, "weight_decay": decay} for group in groups])

    try:
        make(_parameters([_SIZES[:2]], dtype)[1])
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"optimizer '{name}' refuses its options: {error}") from error
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        is_elementwise = _is_elementwise(make)
        kept: dict[int, list[Kept]] = {}
        fault: Exception | None = None
        for dims in (1,) if is_elementwise else range(len(_SIZES) + 1):
            try:
                kept[dims] = _kept(make, _SIZES[:dims], dtype, name)
            except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError) as error:
                fault = error
        if not kept:
            raise InputError(f"optimizer '{name}' takes no parameters: {fault}")
        shape = (4 * _LARGE, _LARGE) if 2 in kept else (4 * _LARGE * _LARGE,)
        single, double, fourfold = (_Step.of(make, [shape] * count, dtype) for count in (1, 2, 4))
        of_all = max(0.0, (fourfold.transient - double.transient) / 2)
        state = {
            "is_elementwise": is_elementwise,
            "of_dims": kept,
            "passes": single.passes,
            "calls": single.calls,
            "transient": of_all,
            "transient_of_largest": max(0.0, single.transient - of_all),
            "products": _products(make, dtype) if 2 in kept else (0.0, 0.0),
        }
        return _with_names(state, make_all, named, dtype, decay) if named else state


def dims_of_parameters(reference: ModelReference, sequence_length: int, dtype_name: str) -> dict[str, int]:
    """Return the number of dimensions of every trained parameter of a model, by name."""
    module = build(reference, 1, sequence_length, dtype_name, fake=True).module
    return {name: parameter.dim() for name, parameter in module.named_parameters() if parameter.requires_grad}


def _with_names(
    state: dict[str, Any], make: Make, named: Mapping[str, int], dtype: torch.dtype, decay: float
) -> dict[str, Any]:
    """Return `state` with the exceptions for some parameters. If parameters are treated differently by name or dimensions,
    they cannot be ranges of flat buffers, which have neither."""
    parameters = {
        name: torch.nn.Parameter(torch.randn(_SIZES[:dims], dtype=dtype)) for name, dims in named.items()
    }
    groups = [
        {
            "params": [
                (name, parameter)
                for name, parameter in parameters.items()
                if (parameter.dim() >= 2) == is_decayed
            ],
            "weight_decay": decay if is_decayed else 0.0,
        }
        for is_decayed in (True, False)
    ]
    optimizers = make([group for group in groups if group["params"]])
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.step()
    ways = {
        (index, str({key: value for key, value in group.items() if key not in _OF_GROUP}))
        for index, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
    }
    decays = {
        (parameter.dim() >= 2, group.get("weight_decay", 0.0))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    by_itself = bool(state["is_elementwise"])
    of_dims = state["of_dims"]
    if by_itself:
        of_dims = {dims: _of_any_shape(of_dims[1], dims) for dims in range(len(_SIZES) + 1)}
    of_names: dict[str, list[Kept]] = {}
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        kept = _kept_of(state_of(optimizers, parameter), shape, dtype, name)
        if _sizes(kept, shape) != _sizes(of_dims.get(len(shape), []), shape):
            of_names[pattern_of(name)] = kept
    if by_itself and (len(ways) > 1 or len(decays) > 2):
        return state | {"is_elementwise": False, "of_dims": of_dims, "of_names": of_names}
    return state | {"of_names": of_names}


_OF_GROUP = ("params", "param_names", "weight_decay")


def _sizes(kept: Iterable[Kept], shape: Sequence[int]) -> list[tuple[int, str | None]]:
    return [
        (buffer["factor"] * math.prod(shape[dim] for dim in buffer["dims"]), buffer["dtype"])
        for buffer in kept
    ]


def _of_any_shape(kept: Iterable[Kept], dims: int) -> list[Kept]:
    """Return the state of an element-wise optimizer for a parameter of `dims` dimensions."""
    whole = tuple(range(dims))
    return [{**buffer, "dims": whole} if buffer["dims"] else buffer for buffer in kept]


def _parameters(
    shapes: Iterable[Sequence[int]], dtype: torch.dtype
) -> tuple[list[torch.nn.Parameter], Groups]:
    weights = [torch.nn.Parameter(torch.randn(tuple(shape), dtype=dtype)) for shape in shapes]
    named = [(f"weight_{index}", weight) for index, weight in enumerate(weights)]
    return weights, [{"params": named, "weight_decay": 0.0}]


def _stepped(
    make: Make, shapes: Iterable[Sequence[int]], dtype: torch.dtype, num_steps: int = 2
) -> tuple[list[torch.nn.Parameter], list[Optimizer]]:
    parameters, groups = _parameters(shapes, dtype)
    optimizers = make(groups)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return parameters, optimizers


def state_of(optimizers: Iterable[Optimizer], parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Return the state of `parameter` in the one of `optimizers` that has it."""
    for optimizer in optimizers:
        if parameter in optimizer.state:
            return optimizer.state[parameter]
    return {}


def _kept(make: Make, shape: Sequence[int], dtype: torch.dtype, name: str) -> list[Kept]:
    (parameter,), optimizers = _stepped(make, [shape], dtype)
    return _kept_of(state_of(optimizers, parameter), shape, dtype, name)


def _kept_of(state: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype, name: str) -> list[Kept]:
    tensors = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors.append(_described(value, shape, dtype))
        elif value is not None and not isinstance(value, bool | int | float):
            raise InputError(
                f"optimizer '{name}' keeps '{key}', a {type(value).__name__}: only tensors and numbers can be planned and "
                "stored"
            )
    return tensors


def _described(tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> Kept:
    dims, factor = [], 1
    for size in tensor.shape:
        if size in shape:
            dims.append(shape.index(size))
        else:
            factor *= size
    element_type = str(tensor.dtype).removeprefix("torch.")
    is_wide = tensor.dtype == dtype and len(dims) > 0
    return {"dims": tuple(dims), "factor": factor, "dtype": None if is_wide else element_type}


def _is_elementwise(make: Make) -> bool:
    """Return whether a matrix and two ranges of its elements are updated alike."""
    torch.manual_seed(1)
    try:
        (whole, first, second), groups = _parameters([(6, 4), (9,), (15,)], torch.float64)
        optimizers = make(groups)
        with torch.no_grad():
            first.copy_(whole.flatten()[:9])
            second.copy_(whole.flatten()[9:])
        for _ in range(3):
            whole.grad = torch.randn_like(whole)
            first.grad, second.grad = whole.grad.flatten().clone().split([9, 15])
            for optimizer in optimizers:
                optimizer.step()
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
        return False
    sizes = [
        value.numel() for value in state_of(optimizers, whole).values() if isinstance(value, torch.Tensor)
    ]
    together = torch.cat([first, second])
    return set(sizes) <= {1, whole.numel()} and torch.allclose(whole.flatten(), together, rtol=1e-9, atol=0)


class _Step(TorchDispatchMode):
    """A mode that counts the reads and writes of a step and its peak of additional memory, in units of the bytes of one of
    the parameters, all of which are alike."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.num_parameters, self.num_bytes = len(parameters), parameters[0].nbytes
        self.calls = 0.0
        self._moved = self._most = 0
        self._alive: dict[int, tuple[weakref.ReferenceType[torch.UntypedStorage], int]] = {}

    @classmethod
    def of(cls, make: Make, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> _Step:
        """Return the counts of the third step on parameters of `shapes`."""
        parameters, optimizers = _stepped(make, shapes, dtype)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        with cls(parameters) as counted:
            for optimizer in optimizers:
                optimizer.step()
        return counted

    @property
    def passes(self) -> float:
        return round(self._moved / self.num_bytes / self.num_parameters, 2)

    @property
    def transient(self) -> float:
        return round(self._most / self.num_bytes, 2)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        aliases = [output.alias_info for output in schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return result  # a view
        given = dict(zip((parameter.name for parameter in schema.arguments), args, strict=False)) | (
            kwargs or {}
        )
        moved: list[int] = []
        for argument in schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            times = 2 if is_written and argument.name != "grads" else 1
            moved += times * [tensor.nbytes for tensor in _tensors(given.get(argument.name))]
        if not any(aliases):
            outputs = _tensors(result)
            moved += [tensor.nbytes for tensor in outputs]
            for storage in (tensor.untyped_storage() for tensor in outputs):
                self._alive[id(storage)] = weakref.ref(storage), storage.nbytes()
        self._moved += sum(moved)
        self.calls += bool(moved) and max(moved) >= self.num_bytes
        self._alive = {key: entry for key, entry in self._alive.items() if entry[0]() is not None}
        self._most = max(self._most, sum(size for _, size in self._alive.values()))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]


def _products(make: Make, dtype: torch.dtype) -> tuple[float, float]:
    """Return the factors of s s l and of s s s in the FLOP of a step, from those of two matrices."""
    flop = []
    for shape in ((_LARGE, _LARGE), (_LARGE, 2 * _LARGE)):
        with FlopCounterMode(display=False) as counter:
            _stepped(make, [shape], dtype, num_steps=1)
        flop.append(counter.get_total_flops() / _LARGE**3)
    along = flop[1] - flop[0]
    return along, max(0.0, flop[0] - along)
