"""Capture: a model and example inputs -> one flat list of functional operator calls, by `torch.export`.

Blocks of a repeated kind are exported once and copied; the rest of the model is exported around them. Nothing is
computed: the model's tensors are fake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from stagewright.errors import TraceError
from stagewright.graph import Origin, Ref, TensorMeta
from stagewright.graph.repeat import Repeat
from stagewright.graph.tensor_parallel import COLLECTIVES, ENTER
from stagewright.tracing.arguments import empty, encode, encode_keywords, meta_of
from stagewright.tracing.autograd_functions import FUNCTION, FunctionCall, FunctionCalls
from stagewright.tracing.blocks import (
    BLOCK,
    BlockBody,
    BlockKind,
    CalledDifferently,
    RepeatedBlocks,
    dry_running,
    find_blocks,
    stubbed,
)
from stagewright.tracing.depth import left_out
from stagewright.tracing.effects import (
    HOOK,
    TensorHook,
    TensorHooks,
    plain_execution,
    restored_attributes,
    without_effects,
    written_buffers,
)
from stagewright.tracing.model_errors import source_line, tracing_errors
from stagewright.tracing.models.losses import as_run
from stagewright.tracing.private import FakeTensor, FakeTensorMode, light_exports, storage_key
from stagewright.tracing.regions import BEGIN, END, Keeps, Regions, without_regions

_GETITEM = "<built-in function getitem>"
_CAST = "aten._to_copy.default"
_CASTING_METHODS = ("to", "type", "type_as", "float", "half", "bfloat16", "double")
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")


@dataclass(frozen=True, slots=True)
class CapturedCall:
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]
    module: str
    where: str
    no_grad: bool
    region: int = -1  # of `torch.utils.checkpoint`: the outermost around it, numbered as they are entered
    keeps: tuple[Keeps, ...] = ()  # what the regions around it keep
    function: FunctionCall | None = None  # the custom function whose call it is


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor the model starts from."""

    number: int
    origin: Origin
    name: str
    meta: TensorMeta
    needs_grad: bool = False


@dataclass(frozen=True)
class Captured:
    """Captured calls in order; values, both sources and outputs of calls, are numbered from zero."""

    calls: tuple[CapturedCall, ...]
    sources: tuple[Source, ...]
    loss: int
    mutations: tuple[tuple[str, int], ...]  # buffer name -> its value after the forward
    aliases: dict[str, str]  # every parameter name -> the first name of that parameter
    constants: dict[str, torch.Tensor]
    repeats: tuple[Repeat, ...] = ()  # layers that are left out
    hooks: dict[int, tuple[TensorHook, ...]] = field(default_factory=dict)  # hooks of values, in order


def capture(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    mode: FakeTensorMode,
    report: Callable[[str], None] = lambda stage: None,
    whole: bool = False,
) -> Captured:
    """Trace ``model(**inputs) -> scalar loss``; model and inputs must be fake under `mode` (see `fake_twin`).

    Of many equal layers in a row only a few are captured, unless `whole`.

    Raises:
        TraceError: the model cannot be exported; the message names the module and the line.
    """
    report("dry run of the model on fake tensors")
    blocks = _dry_run(model, inputs, mode)
    try:
        return _captured(model, inputs, mode, blocks, report, whole)
    except CalledDifferently:
        return _captured(model, inputs, mode, RepeatedBlocks(()), report, whole)


def _captured(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    mode: FakeTensorMode,
    blocks: RepeatedBlocks,
    report: Callable[[str], None],
    whole: bool,
) -> Captured:
    report("exporting the model")
    marks = _Marks(Regions(), FunctionCalls(mode), TensorHooks())
    with (
        restored_attributes(model),
        tracing_errors(model),
        mode,
        as_run(packed=True),
        stubbed(model, blocks),
        marks.placed(),
    ):
        outer = _export(model, (), inputs)
    repeats, skipped = ((), {}) if whole else left_out(model, blocks, outer, _surroundings, _is_check)
    flattener = _Flattener(model, _Bodies(model, blocks, mode, marks, report), marks, skipped)
    return replace(flattener.run(outer), repeats=repeats)


def _dry_run(model: torch.nn.Module, inputs: dict[str, torch.Tensor], mode: FakeTensorMode) -> RepeatedBlocks:
    def run(blocks: RepeatedBlocks) -> RepeatedBlocks:
        with (
            tracing_errors(model),
            mode,
            as_run(packed=True),
            plain_execution(),
            written_buffers(
                model
            ),  # which goes through the modules, as only the model's own code may in a dry run
            dry_running(model, blocks),
            without_regions(),
        ):
            loss = model(**inputs)
        _require_scalar(loss)
        return blocks

    with without_effects(model, lambda: run(RepeatedBlocks(()))):
        return run(find_blocks(model))


@dataclass(frozen=True)
class _Marks:
    """Actions of a model's code besides operators during export, marked by our own operators."""

    regions: Regions
    functions: FunctionCalls
    hooks: TensorHooks

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Place marks in what is exported inside."""
        with self.regions.marked(), self.functions.kept(), self.hooks.marked(), plain_execution():
            yield


def _export(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    with light_exports(), written_buffers(model):
        return torch.export.export(model, args, kwargs, strict=False).run_decompositions({})


def _require_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = meta_of(loss) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TraceError(
            f"the model returns {got}, but the loss is part of the traced model: return one scalar loss from "
            "forward, or let the factory return (module, inputs, loss_fn)"
        )


class _Bodies:
    """The exported programs of repeated blocks: one per kind, made when the first block of the kind is met."""

    def __init__(
        self,
        model: torch.nn.Module,
        blocks: RepeatedBlocks,
        mode: FakeTensorMode,
        marks: _Marks,
        report: Callable[[str], None],
    ) -> None:
        self.model = model
        self.mode = mode
        self.marks = marks
        self.report = report
        self.members = blocks.members
        self.kinds = {kind.key: kind for kind in blocks.kinds.values()}
        self.exported: dict[str, ExportedProgram] = {}

    def __getitem__(self, key: str) -> ExportedProgram:
        if key not in self.exported:
            self.exported[key] = self._export(self.kinds[key], self.members[key])
        return self.exported[key]

    def _export(self, kind: BlockKind, paths: list[str]) -> ExportedProgram:
        self.report(f"tracing {paths[0]} ({len(paths)} layers of its kind)")
        device = next(self.model.parameters()).device
        # A block of a transformers model on its own must be traced under the patches its model would enter.
        with tracing_errors(self.model), self.mode, as_run(), self.marks.placed():
            tensors = [empty(meta, device).requires_grad_(needs_grad) for meta, needs_grad in kind.inputs]
            with restored_attributes(self.model):
                return _export(BlockBody(self.model.get_submodule(paths[0]), kind), (tensors,), {})


@dataclass(frozen=True)
class _Place:
    """The position of a program in the model: the whole model, or one of its repeated blocks.

    `inputs` numbers the user inputs of a block in order; those of the whole model are sources. `no_grad` and `region`
    (of autocast) are those of the block's call.
    """

    prefix: str = ""
    path: str = ""
    inputs: tuple[int, ...] | None = None
    no_grad: bool = False
    region: str = ""

    def name(self, inner: str) -> str:
        """Return the model's name for a module, parameter or buffer of this program."""
        if self.inputs is None:
            return inner
        inner = inner.removeprefix("block").removeprefix(".")
        return f"{self.path}.{inner}" if inner else self.path


class _Flattener:
    """Numbers the values of the outer program and of the blocks within it in one sequence."""

    def __init__(
        self,
        model: torch.nn.Module,
        bodies: _Bodies,
        marks: _Marks,
        skipped: dict[torch.fx.Node, torch.fx.Node],
    ) -> None:
        self.bodies = bodies
        self.marks = marks
        self.skipped = skipped  # nodes of the outer program, each with the call of the block that replaces it
        self.results: dict[torch.fx.Node, tuple[int, ...]] = {}  # results of calls of blocks
        self.num_regions = 0  # the outermost, so far
        self.entered: list[Keeps | None] = []  # the regions around the next call
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        first: dict[int, str] = {}
        self.aliases = {name: first.setdefault(id(tensor), name) for name, tensor in self.parameters.items()}
        self.calls: list[CapturedCall] = []
        self.sources: list[Source] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.following = 0
        self.numbers: dict[tuple[Origin, str], int] = {}  # a buffer's changes as the forward writes to it
        self.written: dict[str, None] = {}  # names of changed buffers, in order
        self.parameter_numbers: set[int] = set()
        self.casts: dict[Any, int] = {}  # casts of parameters by autocast, once per region
        self.hooks: dict[int, list[TensorHook]] = {}
        self.collectives: dict[Any, int] = {}  # a value is sent only once
        device = next((parameter.device.type for parameter in self.parameters.values()), "cpu")
        self.around = "model" if torch.is_autocast_enabled(device) else ""

    def run(self, outer: ExportedProgram) -> Captured:
        (loss,) = self._program(outer, _Place())
        return Captured(
            calls=tuple(self.calls),
            sources=tuple(self.sources),
            loss=loss,
            mutations=tuple((name, self.numbers[Origin.BUFFER, name]) for name in self.written),
            aliases=self.aliases,
            constants=self.constants,
            hooks={number: tuple(hooks) for number, hooks in self.hooks.items()},
        )

    def _fresh(self) -> int:
        self.following += 1
        return self.following - 1

    # -- programs ---------------------------------------------------------------------------------------------------

    def _program(self, program: ExportedProgram, place: _Place) -> tuple[int, ...]:
        """Append one exported program. Returns the numbers of its outputs."""
        env: dict[torch.fx.Node, int] = {}
        specs = {
            spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")
        }
        given = iter(place.inputs or ())
        module = place.name("")
        for node in program.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                spec = specs[node.name]
                if spec.kind is InputKind.USER_INPUT and place.inputs is not None:
                    env[node] = next(given)
                else:
                    env[node] = self._source_of(spec, node, program, place)
            elif node.op == "call_function":
                module = _module_of(node, place) or module
                self._call(node, env, module, place)
        return self._outputs(program, env, place)

    def _outputs(
        self, program: ExportedProgram, env: dict[torch.fx.Node, int], place: _Place
    ) -> tuple[int, ...]:
        results: list[int] = []
        output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
        for spec, argument in zip(program.graph_signature.output_specs, output.args[0], strict=True):
            if not isinstance(argument, torch.fx.Node):
                continue
            if spec.kind is OutputKind.BUFFER_MUTATION:
                name = place.name(spec.target or "")
                self.numbers[Origin.BUFFER, name] = env[argument]
                self.written[name] = None
            elif spec.kind is OutputKind.USER_OUTPUT:
                results.append(env[argument])
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                raise TraceError(f"the model writes to its input '{spec.target}': clone it first")
            elif spec.kind is OutputKind.PARAMETER_MUTATION:
                name = place.name(spec.target or "")
                raise TraceError(
                    f"the model writes to parameter '{name}' in forward, which a graph does not: register it as a buffer"
                )
        return tuple(results)

    def _source_of(
        self, spec: InputSpec, node: torch.fx.Node, program: ExportedProgram, place: _Place
    ) -> int:
        match spec.kind:
            case InputKind.PARAMETER:
                name = self.aliases[place.name(spec.target or "")]
                return self._source(Origin.PARAMETER, name, self.parameters[name])
            case InputKind.BUFFER:
                name = place.name(spec.target or "")
                return self._source(Origin.BUFFER, name, self.buffers[name])
            case InputKind.CONSTANT_TENSOR:
                name = spec.target or ""
                constant = program.constants[name]
                assert isinstance(constant, torch.Tensor)
                if isinstance(constant, FakeTensor) and constant.constant is None:
                    raise self._no_contents(name, constant, node)
                return self._source(Origin.CONSTANT, place.prefix + name, constant)
            case InputKind.USER_INPUT:
                return self._source(Origin.INPUT, node.name, node.meta["val"])
        raise TraceError(f"the model has an input of kind {spec.kind}, which is not supported")

    def _no_contents(self, name: str, constant: torch.Tensor, node: torch.fx.Node) -> TraceError:
        """Return the error for a tensor without contents that the model's code created with the model."""
        named = (*self.parameters.values(), *self.buffers.values())
        if storage_key(constant) in map(storage_key, named):
            rule = (
                f"reads '{name}', a tensor that is a view of a parameter or buffer: make the view in forward"
            )
        else:
            rule = "reads a tensor that the model has in a list, a dict or an object: register it as a buffer"
        where = next(filter(None, map(source_line, node.users)), "")
        return TraceError(f"the model cannot be traced: forward {rule}" + (f", at {where}" if where else ""))

    def _source(self, origin: Origin, name: str, tensor: torch.Tensor) -> int:
        number = self.numbers.get((origin, name))
        if number is None:
            number = self.numbers[origin, name] = self._fresh()
            needs_grad = origin is Origin.PARAMETER and tensor.requires_grad
            self.sources.append(Source(number, origin, name, meta_of(tensor), needs_grad))
            if origin is Origin.CONSTANT:
                self.constants[name] = tensor
            if origin is Origin.PARAMETER:
                self.parameter_numbers.add(number)
        return number

    # -- calls ------------------------------------------------------------------------------------------------------

    def _call(self, node: torch.fx.Node, env: dict[torch.fx.Node, int], module: str, place: _Place) -> None:
        name = str(node.target)
        if name == _GETITEM or _is_check(node):
            return
        if node in self.skipped:
            self._name_results(node, env, self.results[self.skipped[node]])
            return
        if name == HOOK:
            self._hook(self.marks.hooks[int(node.args[0])], env[node.args[1]])  # type: ignore[arg-type,index]
            return
        if name == BEGIN:
            self.num_regions += not self.entered
            self.entered.append(self.marks.regions.keeps(int(node.args[0])))  # type: ignore[arg-type]
            return
        if name == END:
            self.entered.pop()
            return
        no_grad = place.no_grad or "set_grad_enabled" in _entered(node)
        region = place.region or _autocast_region(node) or self.around
        if name == BLOCK:
            self._block(node, env, no_grad, region)
            return
        try:
            args = encode(node.args, lambda ref: Ref(env[ref]))
            kwargs = encode_keywords(node.kwargs, lambda ref: Ref(env[ref]))
        except TraceError as error:
            raise TraceError(f"module '{module or '(model)'}' at {source_line(node)}: {error}") from None
        function = self.marks.functions[args[0]] if name == FUNCTION else None
        cast = (region, args, kwargs, no_grad)
        if region and name == _CAST and _is_implicit(node):
            if cast in self.casts:
                env[node] = self.casts[cast]
                return
            if args[0].value in self.parameter_numbers:
                self.casts[cast] = self.following
        if name in COLLECTIVES or name == ENTER:
            key = (name, args, no_grad)
            if key in self.collectives:
                env[node] = self.collectives[key]
                return
            self.collectives[key] = self.following
        outputs = self._name_outputs(node, env)
        here = self.num_regions - 1 if self.entered else -1
        keeps = tuple(keep for keep in self.entered if keep is not None)
        self.calls.append(
            CapturedCall(
                name, args, kwargs, outputs, module, source_line(node), no_grad, here, keeps, function
            )
        )

    def _hook(self, hook: TensorHook, number: int) -> None:
        parameter = next(
            (source for source in self.sources if source.number == number and source.needs_grad), None
        )
        if parameter is not None:
            raise TraceError(
                f"parameter '{parameter.name}' gets a hook in forward, at {hook.where}: change its gradient by a "
                "torch.autograd.Function around it, whose backward is kept"
            )
        self.hooks.setdefault(number, []).append(hook)

    def _name_outputs(self, node: torch.fx.Node, env: dict[torch.fx.Node, int]) -> tuple[int | None, ...]:
        """Return the numbers of the results of `node`: one, or one per used item of several."""
        if not isinstance(node.meta.get("val"), list | tuple):
            env[node] = self._fresh()
            return (env[node],)
        numbers: dict[int, int] = {}
        for item in node.users:
            if str(item.target) == _GETITEM:
                index = int(item.args[1])  # type: ignore[arg-type]
                if index not in numbers:
                    numbers[index] = self._fresh()
                env[item] = numbers[index]
        return tuple(numbers.get(index) for index in range(len(node.meta["val"])))

    def _block(self, node: torch.fx.Node, env: dict[torch.fx.Node, int], no_grad: bool, region: str) -> None:
        key, path = str(node.args[0]).split("@", 1)
        inputs = tuple(env[item] for item in node.args[1])  # type: ignore[union-attr]
        results = self._program(self.bodies[key], _Place(f"{key}.", path, inputs, no_grad, region))
        self.results[node] = results
        self._name_results(node, env, results)

    def _name_results(
        self, node: torch.fx.Node, env: dict[torch.fx.Node, int], results: tuple[int, ...]
    ) -> None:
        for item in node.users:
            env[item] = results[int(item.args[1])]  # type: ignore[arg-type]


def _module_of(node: torch.fx.Node, place: _Place) -> str | None:
    stack = node.meta.get("nn_module_stack")
    return place.name(list(stack.values())[-1][0]) if stack else None


def _entered(node: torch.fx.Node) -> str:
    """Return the region of code a node was exported in: export makes an operator of each autocast or gradient mode."""
    return str((node.meta.get("torch_fn") or ("",))[0])


def _autocast_region(node: torch.fx.Node) -> str:
    """Return a name for the outermost ``with torch.autocast`` around a node; empty outside."""
    if "wrap_with_autocast" not in _entered(node):
        return ""
    history = node.meta.get("from_node")
    return str(history[0].name) if history else "autocast"


def _is_check(node: torch.fx.Node) -> bool:
    return any(check in str(node.target) for check in _CHECKS)


def _surroundings(node: torch.fx.Node) -> tuple[bool, str]:
    return "set_grad_enabled" in _entered(node), _autocast_region(node)


def _is_implicit(node: torch.fx.Node) -> bool:
    """Return whether autocast itself, not the model's code, requested this cast."""
    if _entered(node).rpartition("_")[0] in _CASTING_METHODS:
        return False
    last = (node.meta.get("stack_trace") or "").strip().splitlines()[-1:]
    return not any("aten.to." in line or "aten._to_copy." in line for line in last)
