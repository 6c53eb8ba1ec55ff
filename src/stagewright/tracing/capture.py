"""Capture: a model and example inputs -> one flat list of functional operator calls, by `torch.export`.

Blocks of a repeated kind are exported once and copied; the rest of the model is exported around them. Nothing is
computed: the model's tensors are fake.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from stagewright.errors import StagewrightError, TraceError
from stagewright.graph import Origin, Ref, TensorMeta
from stagewright.tracing.arguments import encode, meta_of
from stagewright.tracing.blocks import BlockBody, Blocks, Kind, empty_outputs, find_blocks, rehearsing, stubbed
from stagewright.tracing.private import FakeTensor, FakeTensorMode

_GETITEM = "<built-in function getitem>"
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


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor the model starts from."""

    number: int
    origin: Origin
    name: str
    meta: TensorMeta
    needs_grad: bool = False


@dataclass
class Captured:
    """Calls in order; values are numbered from zero, sources and outputs of calls alike."""

    calls: list[CapturedCall] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    loss: int = -1
    mutations: list[tuple[str, int]] = field(default_factory=list)  # buffer name -> its value after the forward
    aliases: dict[str, str] = field(default_factory=dict)  # every parameter name -> the first name of that parameter
    constants: dict[str, torch.Tensor] = field(default_factory=dict)


def capture(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    mode: FakeTensorMode,
    report: Callable[[str], None] = lambda stage: None,
) -> Captured:
    """Trace ``model(**inputs) -> scalar loss``; model and inputs must be fake under `mode` (see `fake_twin`).

    Raises:
        TraceError: the model cannot be exported; the message names the module and the line.
    """
    blocks = find_blocks(model)
    report("rehearsing the model on fake tensors")
    with _tracing_errors(model), mode, rehearsing(model, blocks):
        loss = model(**inputs)
    _require_scalar(loss)
    report("exporting the model")
    with _tracing_errors(model), mode, stubbed(model, blocks):
        outer = _export(model, (), inputs)
    flattener = _Flattener(model, blocks, mode, report)
    return flattener.run(outer)


def fake_twin(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """A copy of `model` whose parameters and buffers are fake; the memory of the original is not copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if isinstance(parameter, FakeTensor):
            return model
        memo[id(parameter)] = torch.nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer)
    return copy.deepcopy(model, memo)


def _export(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    return torch.export.export(model, args, kwargs, strict=False).run_decompositions({})


def _require_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = meta_of(loss) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TraceError(
            f"the model returns {got}, but the loss is part of the traced model: return one scalar loss from forward, or "
            "let the factory return (module, inputs, loss_fn)"
        )


class _Flattener:
    def __init__(
        self, model: torch.nn.Module, blocks: Blocks, mode: FakeTensorMode, report: Callable[[str], None]
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.mode = mode
        self.report = report
        self.found = Captured()
        self.following = 0
        self.numbers: dict[tuple[Origin, str], int] = {}
        self.bodies: dict[str, torch.export.ExportedProgram] = {}
        self.kinds: dict[str, Kind] = {kind.key: kind for kind in blocks.kinds.values()}
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.found.aliases[name] = first.setdefault(id(parameter), name)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))

    def run(self, outer: torch.export.ExportedProgram) -> Captured:
        self._check_numbering()
        bound = {}
        for spec in outer.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT and not isinstance(spec.arg, ConstantArgument):
                bound[spec.arg.name] = None  # numbered as sources below
        results = self._graph(outer, "", {}, lambda path: path)
        losses = [number for kind, _, number in results if kind is OutputKind.USER_OUTPUT]
        self.found.loss = losses[0]
        self.found.mutations = [
            (name, self.numbers[Origin.BUFFER, name])
            for name in dict.fromkeys(self._mutated)
        ]
        return self.found

    _mutated: list[str]

    def _source(self, origin: Origin, name: str, tensor: torch.Tensor) -> int:
        number = self.numbers.get((origin, name))
        if number is None:
            number = self._fresh()
            self.numbers[origin, name] = number
            needs_grad = origin is Origin.PARAMETER and tensor.requires_grad
            self.found.sources.append(Source(number, origin, name, meta_of(tensor), needs_grad))
            if origin is Origin.CONSTANT:
                self.found.constants[name] = tensor
        return number

    def _fresh(self) -> int:
        self.following += 1
        return self.following - 1

    def _graph(
        self,
        program: torch.export.ExportedProgram,
        prefix: str,
        user_inputs: dict[str, int],
        rename: Callable[[str], str],
    ) -> list[tuple[OutputKind, str | None, int]]:
        """Append one exported program; `rename` maps its module paths into the model. Returns its outputs."""
        if not hasattr(self, "_mutated"):
            self._mutated = []
        env: dict[torch.fx.Node, int] = {}
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
        module = rename("")
        for node in program.graph.nodes:
            if node.op == "placeholder":
                spec = specs.get(node.name)
                number = self._placeholder(node, spec, program, prefix, user_inputs, rename)
                if number is not None:
                    env[node] = number
            elif node.op == "call_function":
                module = _module_of(node, rename) or module
                self._call(node, env, module)
        results = []
        output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
        for spec, argument in zip(program.graph_signature.output_specs, output.args[0], strict=True):
            if not isinstance(argument, torch.fx.Node):
                continue
            number = env[argument]
            if spec.kind is OutputKind.BUFFER_MUTATION:
                name = rename(spec.target or "")
                self.numbers[Origin.BUFFER, name] = number
                self._mutated.append(name)
            elif spec.kind is OutputKind.USER_OUTPUT:
                results.append((spec.kind, spec.target, number))
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                raise TraceError(f"the model writes to its input '{spec.target}': clone it first")
        return results

    def _placeholder(
        self,
        node: torch.fx.Node,
        spec: Any,
        program: torch.export.ExportedProgram,
        prefix: str,
        user_inputs: dict[str, int],
        rename: Callable[[str], str],
    ) -> int | None:
        value = node.meta.get("val")
        if spec is None or not isinstance(value, torch.Tensor):
            return None
        if spec.kind is InputKind.PARAMETER:
            name = self.found.aliases[rename(spec.target)]
            return self._source(Origin.PARAMETER, name, self.parameters[name])
        if spec.kind is InputKind.BUFFER:
            name = rename(spec.target)
            return self._source(Origin.BUFFER, name, self.buffers[name])
        if spec.kind is InputKind.CONSTANT_TENSOR:
            return self._source(Origin.CONSTANT, prefix + spec.target, program.constants[spec.target])
        if spec.kind is InputKind.USER_INPUT:
            if node.name in user_inputs:
                return user_inputs[node.name]
            return self._source(Origin.INPUT, node.name, value)
        raise TraceError(f"the model has an input of kind {spec.kind}, which is not supported")

    def _call(self, node: torch.fx.Node, env: dict[torch.fx.Node, int], module: str) -> None:
        name = str(node.target)
        if name == _GETITEM:
            return
        if any(check in name for check in _CHECKS):
            return
        if name == "stagewright.block.default":
            self._block(node, env)
            return
        items = [user for user in node.users if str(user.target) == _GETITEM]
        if isinstance(node.meta.get("val"), list | tuple):
            outputs: list[int | None] = [None] * len(node.meta["val"])
            for item in items:
                index = item.args[1]
                if outputs[index] is None:
                    outputs[index] = self._fresh()
                env[item] = outputs[index]  # type: ignore[assignment]
        else:
            outputs = [self._fresh()]
            env[node] = outputs[0]  # type: ignore[assignment]
        where = _where(node)
        try:
            args = encode(node.args, lambda ref: Ref(env[ref]))
            kwargs = tuple(
                (key, encode(value, lambda ref: Ref(env[ref])))
                for key, value in node.kwargs.items()
                if key != "pin_memory" and value is not None
            )
        except TraceError as error:
            raise TraceError(f"module '{module or '(model)'}' at {where}: {error}") from None
        no_grad = "set_grad_enabled" in str((node.meta.get("torch_fn") or ("",))[0])
        self.found.calls.append(CapturedCall(name, args, kwargs, tuple(outputs), module, where, no_grad))

    def _block(self, node: torch.fx.Node, env: dict[torch.fx.Node, int]) -> None:
        key, path = str(node.args[0]).split("@", 1)
        tensors = [env[item] for item in node.args[1]]  # type: ignore[union-attr]
        body = self._body(key)
        names = [
            spec.arg.name
            for spec in body.graph_signature.input_specs
            if spec.kind is InputKind.USER_INPUT and hasattr(spec.arg, "name")
        ]
        inputs = dict(zip(names, tensors, strict=True))
        results = self._graph(body, f"{key}.", inputs, lambda inner: _within(path, inner))
        for item in node.users:
            env[item] = results[item.args[1]][2]  # type: ignore[index]

    def _body(self, key: str) -> torch.export.ExportedProgram:
        if key not in self.bodies:
            self.bodies[key] = self._export_block(key, self.blocks.members[key][0])
        return self.bodies[key]

    def _export_block(self, key: str, path: str) -> torch.export.ExportedProgram:
        self.report(f"tracing {path} ({len(self.blocks.members[key])} layers of its kind)")
        kind = self.kinds[key]
        with _tracing_errors(self.model), self.mode, _as_run():
            device = next(iter(self.parameters.values())).device
            tensors = [
                empty_like_leaf(meta, device)
                for meta in self._input_metas(key)
            ]
            return _export(BlockBody(self.model.get_submodule(path), kind), (tensors,), {})

    def _input_metas(self, key: str) -> list[tuple[TensorMeta, bool]]:
        signature = next(signature for signature, kind in self.blocks.kinds.items() if kind.key == key)
        return [(item[1], item[2]) for item in signature[2] if item[0] == "tensor"]

    def _check_numbering(self) -> None:
        """Layers that differ in a number must still be the same computation; otherwise each is a kind of its own."""
        for kind in self.blocks.kinds.values():
            paths = self.blocks.members[kind.key]
            if len(paths) < 2 or kind.key not in self.blocks.numbered:
                continue
            first = self._listing(self._body(kind.key))
            for path in {paths[1], paths[-1]}:
                if self._listing(self._export_block(kind.key, path)) != first:
                    raise _Unequal(path)

    @staticmethod
    def _listing(program: torch.export.ExportedProgram) -> list[Any]:
        order: dict[torch.fx.Node, int] = {}
        listing = []
        for node in program.graph.nodes:
            order[node] = len(order)
            if node.op == "call_function":
                listing.append((str(node.target), str(torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{order[n]}"))))
        return listing


def _as_run() -> contextlib.AbstractContextManager[None]:
    """A block of a transformers model on its own must be traced under the patches its model would enter."""
    if "transformers" not in sys.modules:
        return contextlib.nullcontext()
    from stagewright.tracing.models.transformers_patches import trace_as_run

    return trace_as_run()


class _Unequal(Exception):
    """Blocks thought equal compute different things."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def empty_like_leaf(described: tuple[TensorMeta, bool], device: torch.device) -> torch.Tensor:
    meta, needs_grad = described
    return torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype), device=device).requires_grad_(
        needs_grad
    )


def _within(path: str, inner: str) -> str:
    inner = inner.removeprefix("block").removeprefix(".")
    return f"{path}.{inner}" if inner else path


def _module_of(node: torch.fx.Node, rename: Callable[[str], str]) -> str | None:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    return rename(list(stack.values())[-1][0])


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _where(node: torch.fx.Node) -> str:
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith("<")]
    return _short(*frames[-1]) if frames else ""


def _short(file: str, line: str | int) -> str:
    return f"{re.split(r'site-packages/', file)[-1]}:{line}"


@contextmanager
def _tracing_errors(model: torch.nn.Module) -> Iterator[None]:
    """Turn whatever goes wrong while the model's code runs into one error naming module and line."""
    names = {id(module): path for path, module in model.named_modules()}
    entered: list[str] = []
    failed: list[str] = []

    def enter(module: torch.nn.Module, args: Any) -> None:
        entered.append(names.get(id(module), ""))

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        if entered:
            entered.pop()

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        yield
    except StagewrightError:
        raise
    except Exception as error:
        failed.extend(entered)
        module = next((path for path in reversed(failed) if path), "") or "(model)"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_model_code(frame.filename)]
        where = f" at {_short(frames[-1].filename, frames[-1].lineno or 0)}: {frames[-1].line}" if frames else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TraceError(
            f"the model cannot be traced: module '{module}'{where}\n  {type(error).__name__}: {reason}\n"
            "  Shapes and control flow must not depend on tensor values: replace .item(), nonzero, boolean indexing and "
            "'if tensor:' by masked operators of fixed shape."
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _is_model_code(filename: str) -> bool:
    return not any(part in filename for part in ("/torch/", "stagewright/tracing/", "<", "/contextlib.py"))
