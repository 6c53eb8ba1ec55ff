"""PyTorch's min-cut partitioner on a model, as `torch.compile` uses it: what it recomputes and the memory that takes.

The joint graph is that of AOT Autograd, the same for every budget; `partition_at` divides it
with `torch._functorch.config.activation_memory_budget`, and `peak_bytes` runs both parts operator by operator, freeing each
value at its last use. Gradients are copied into buffers as soon as they are made, as our executor does it, and what lasts
from step to step (parameters, buffers, gradients, inputs) does not count.

Source: Chen, "Min-cut optimal(*) recomputation with AOTAutograd" (dev-discuss.pytorch.org, 2022), and the memory budget
of "Current and New Activation Checkpointing Techniques in PyTorch" (pytorch.org, 2025).
Ignores: fusion by TorchInductor, which the partitioner's default rules expect to make cheap operators free.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from stagewright.execution.metering import StorageMeter
from stagewright.graph import Node, Origin, Part, Ref, Value
from stagewright.tracing.arguments import encode, meta_of
from stagewright.tracing.models.transformers_patches import trace_as_run
from stagewright.tracing.private import storage_key


@dataclass(frozen=True)
class Joint:
    """A joint graph of forward and backward; `arguments` are real tensors for its placeholders but the tangents."""

    module: fx.GraphModule
    fake_inputs: Any
    options: Mapping[str, Any]
    arguments: tuple[Tensor, ...]


@dataclass(frozen=True)
class Partitioned:
    """The two parts under one budget."""

    forward: fx.GraphModule
    backward: fx.GraphModule

    @property
    def recomputed(self) -> list[fx.Node]:
        """Operators of the forward that the backward runs too."""
        forward = {node.name for node in self.forward.graph.nodes if node.op == "call_function"}
        nodes = self.backward.graph.nodes
        return [node for node in nodes if node.op == "call_function" and node.name in forward]

    @property
    def kept(self) -> list[fx.Node]:
        """Operators of the forward whose results the backward is given."""
        given = {node.name for node in self.backward.graph.nodes if node.op == "placeholder"}
        nodes = self.forward.graph.nodes
        return [node for node in nodes if node.op == "call_function" and node.name in given]


class _Exported(nn.Module):
    """An exported program as AOT Autograd takes it: one tuple for a result."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        program = torch.export.export(model, (), dict(inputs), strict=False)
        self.module = program.run_decompositions({}).module()
        self.names = tuple(inputs)

    def forward(self, *given: Tensor) -> tuple[Tensor]:
        return (self.module(**dict(zip(self.names, given, strict=True))),)


def joints_of(model: nn.Module, inputs: Mapping[str, Tensor], *, compiles: bool = True) -> list[Joint]:
    """The joint graphs of ``model(**inputs) -> loss`` as `torch.compile` and `torch.export` give it to the partitioner: the
    two differ in operators of no consequence, and may be divided very differently. Changes the buffers of `model` as a
    forward does. No graph of `torch.export` where a forward writes to buffers, nor of `torch.compile` unless `compiles`."""
    exports = not any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in model.modules())
    with trace_as_run():
        joints = (
            [_spied(lambda options: _of_compile(model, inputs, options))] if compiles or not exports else []
        )
        return [*joints, _spied(lambda options: _of_export(model, inputs, options))] if exports else joints


def _of_compile(model: nn.Module, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
    from torch._dynamo.backends.common import aot_autograd  # takes seconds to import

    torch._dynamo.reset()
    torch.compile(model, backend=aot_autograd(**options), fullgraph=True)(**inputs).backward()


def _of_export(model: nn.Module, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
    given = tuple(inputs.values())
    aot_module_simplified(_Exported(model, inputs), given, **options)(*given)  # type: ignore[arg-type]


def _spied(make: Callable[[Mapping[str, Any]], None]) -> Joint:
    """What AOT Autograd has in hand when it asks for a partition, and the tensors it then runs on."""
    found: dict[str, Any] = {}

    def keep(joint: fx.GraphModule, fake_inputs: Any, **options: Any) -> Any:
        found.update(module=copy.deepcopy(joint), fake_inputs=fake_inputs, options=options)
        return default_partition(joint, fake_inputs, **options)

    def running(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*given: Tensor) -> Any:
            found.setdefault("arguments", given)
            return module(*given)

        return run

    make({"fw_compiler": running, "bw_compiler": running, "partition_fn": keep})
    return Joint(**found)


def partition_at(joint: Joint, budget: float) -> Partitioned:
    """Divided with an activation memory budget: 1 recomputes what fusion makes free, 0 everything."""
    with functorch_config.patch(activation_memory_budget=budget):
        parts = min_cut_rematerialization_partition(
            copy.deepcopy(joint.module), joint.fake_inputs, **joint.options
        )
    return Partitioned(*parts)


def peak_bytes(joint: Joint, parts: Partitioned) -> int:
    """Most bytes alive while the forward and then the backward run, above what lasts from step to step."""
    named = _placeholders(joint.module.graph)
    arguments = dict(zip(named, joint.arguments, strict=False))
    gradients = [torch.zeros_like(tensor) for tensor in joint.arguments]
    num_outputs = joint.options["num_fwd_outputs"]
    cotangent = torch.ones(())
    with torch.no_grad(), StorageMeter(elsewhere=[*joint.arguments, *gradients, cotangent]) as meter:
        results = _run(parts.forward.graph, dict(arguments), {})
        outputs = _outputs(parts.forward.graph)
        loss = results[_only_scalar(outputs[:num_outputs]).name]  # alive to the end of the batch
        saved = {node.name: results[node.name] for node in outputs[num_outputs:] if node is not None}
        results.clear()
        given = {
            name: saved.pop(name) if name in saved else arguments.get(name, cotangent)
            for name in _placeholders(parts.backward.graph)
        }
        saved.clear()
        into = _gradient_buffers(_outputs(parts.backward.graph), gradients)
        _run(parts.backward.graph, given, into)
        del loss
    return meter.peak_bytes


def _only_scalar(outputs: Sequence[fx.Node | None]) -> fx.Node:
    (loss,) = [node for node in outputs if node is not None and node.meta["val"].ndim == 0
               and node.meta["val"].is_floating_point()]  # fmt: skip
    return loss


def _gradient_buffers(
    outputs: Sequence[fx.Node | None], gradients: Sequence[Tensor]
) -> dict[str, list[Tensor]]:
    """Result of the backward -> the buffers it is copied to."""
    found: dict[str, list[Tensor]] = {}
    for node, buffer in zip(outputs, gradients, strict=False):
        if node is not None:
            found.setdefault(node.name, []).append(buffer)
    return found


def _placeholders(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "placeholder"]


def _outputs(graph: fx.Graph) -> list[fx.Node | None]:
    (output,) = [node for node in graph.nodes if node.op == "output"]
    return list(output.args[0])


def _run(
    graph: fx.Graph, given: dict[str, Tensor], into: Mapping[str, Sequence[Tensor]]
) -> dict[str, Tensor]:
    """Results by name, but for those copied `into` buffers; empties `given` and frees every value at its last use."""
    returned = {node.name for node in _outputs(graph) if node is not None and node.name not in into}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for used in node.all_input_nodes:
            if node.op != "output":
                last[used] = node
    env: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node.name] = given.pop(node.name)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: env[used.name])
            env[node.name] = node.target(*args, **kwargs)
            args = kwargs = None
        for buffer in into.get(node.name, ()):
            buffer.copy_(env[node.name])
        for used in (*node.all_input_nodes, node):
            if last[used] is node and used.name not in returned and node.op != "output":
                env.pop(used.name, None)
    return env


def as_nodes(graph: fx.Graph) -> tuple[dict[str, Node], list[Value]]:
    """The operators of a graph of torch, by name, in the form in which ours are costed, and their values."""
    values: list[Value] = []
    numbers: dict[tuple[str, int | None], int] = {}
    roots: dict[int, int] = {}
    nodes: dict[str, Node] = {}

    def add(name: str, place: int | None, tensor: Any) -> int | None:
        if not isinstance(tensor, Tensor):
            return None
        number = len(values)
        root = roots.setdefault(storage_key(tensor), number)
        values.append(Value(number, meta_of(tensor), root, Origin.NODE))
        numbers[name, place] = number
        return number

    def ref(used: fx.Node) -> Ref:
        return Ref(numbers[used.name, None])

    for node in graph.nodes:
        made = node.meta.get("val")
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = (
                encode(node.args, ref),
                tuple((key, encode(v, ref)) for key, v in node.kwargs.items()),
            )
            inputs = tuple(numbers[used.name, None] for used in node.all_input_nodes)
            several = isinstance(made, list | tuple)
            outputs = tuple(add(node.name, place, item) for place, item in enumerate(made)) if several else (
                add(node.name, None, made),)  # fmt: skip
            nodes[node.name] = Node(len(nodes), str(node.target), args, kwargs, inputs, outputs,
                                    Part.FORWARD, -1, "", 0, -1)  # fmt: skip
        elif node.op == "call_function":
            source, place = node.args
            numbers[node.name, None] = numbers[source.name, place]
        elif node.op == "placeholder":
            add(node.name, None, made)
    return nodes, values
