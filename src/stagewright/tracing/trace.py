"""Tracing of a model with example inputs into the operator graph that everything else works on."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from stagewright.errors import InputError, TraceError
from stagewright.graph import OperatorGraph
from stagewright.graph.repeat import expanded, is_pattern
from stagewright.graph.tensor_parallel import even, verify_parallel
from stagewright.graph.verify import verify_graph
from stagewright.machine import without_collection
from stagewright.tracing.arguments import DTYPES
from stagewright.tracing.attention import attention_of
from stagewright.tracing.autocast import autocast_of
from stagewright.tracing.capture import capture
from stagewright.tracing.context_parallel import check_context_parallel, check_divided
from stagewright.tracing.crashes import crashes_reported
from stagewright.tracing.effects import check_hooks
from stagewright.tracing.experts import group_experts
from stagewright.tracing.joint import build_joint
from stagewright.tracing.models.build import build, fake_twin
from stagewright.tracing.models.losses import LanguageModel, cross_entropy_as_logits
from stagewright.tracing.models.pieces import LATE, evaluate_in_pieces
from stagewright.tracing.models.reference import ModelReference
from stagewright.tracing.private import FakeTensor, FakeTensorMode, converting_in_place
from stagewright.tracing.rules import OperatorRules
from stagewright.tracing.settings import TraceSettings
from stagewright.tracing.tensor_parallel.parallelise import parallelise


def trace_reference(
    reference: ModelReference,
    settings: TraceSettings,
    facts: dict[str, Any],
    report: Callable[[str], None] = lambda stage: None,
) -> OperatorGraph:
    """Return the operator graph of a model reference, which may leave out layers (`stagewright.graph.repeat`); see
    `stagewright.tracing.cache.trace`."""
    with crashes_reported(reference.name, report) as reported:
        return _trace_reference(reference, settings, facts, reported)


@without_collection()
def _trace_reference(
    reference: ModelReference,
    settings: TraceSettings,
    facts: dict[str, Any],
    report: Callable[[str], None],
) -> OperatorGraph:
    report("building the model without weights")
    tp, cp, ep = settings.tp, settings.cp, settings.ep
    sizes = (settings.microbatch_size, settings.sequence_length // cp, settings.dtype)
    built = build(reference, *sizes, fake=True, further_inputs=settings.further_inputs)
    if cp > 1 and reference.kind == "factory" and not isinstance(built.module, LanguageModel):
        raise InputError(
            f"'{reference.text}' makes its own inputs, and how to split their sequence is unknown: leave out --cp"
        )
    if settings.device != "cpu":
        with next(built.module.parameters()).fake_mode, converting_in_place():  # type: ignore[attr-defined]
            built.module.to(settings.device)
            built.inputs = {name: tensor.to(settings.device) for name, tensor in built.inputs.items()}
    built.module.train(settings.training)
    facts = {**facts, "num_tokens": built.num_tokens}
    splits_sequence = settings.splits_sequence and tp > 1
    splits_experts = settings.experts == "split" or not splits_sequence
    if ep > 1 or settings.experts != "traced":
        facts["expert_parallel"] = group_experts(built.module, ep, tp if splits_experts else 1)
    if settings.loss == "as logits" and isinstance(built.module, LanguageModel):
        built.module.cross_entropy = cross_entropy_as_logits
    if tp > 1:
        if splits_sequence:
            even("the sequence length", settings.sequence_length // cp, tp)
        facts["tensor_parallel"] = parallelise(
            built.module, tp, splits_sequence, splits_experts, settings.embedding, settings.head,
            settings.column_inputs == "copied",
        )  # fmt: skip
    if settings.loss_pieces > 1:
        num_tokens = settings.microbatch_size * settings.sequence_length // cp
        evaluate_in_pieces(built.module, settings.loss_pieces, num_tokens)
    if cp > 1:
        check_context_parallel(built.module, cp, settings.sequence_length)
    graph = _traced(built.module, built.inputs, reference.name, facts, report)
    if cp > 1:
        check_divided(graph, settings.sequence_length // cp)
    return graph


@without_collection()
def trace_module(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    name: str = "model",
    facts: dict[str, Any] | None = None,
    report: Callable[[str], None] = lambda stage: None,
) -> OperatorGraph:
    """Trace ``model(**inputs) -> scalar loss`` and its gradients, without computing anything.

    Args:
        model: real or fake; a real model is not changed and its tensors are not copied.
        inputs: tensors of one microbatch by name; only their layouts matter.
        facts: facts that the graph keeps (sequence length, precision). Two of them change how the model is traced:
            ``target`` is the type of device whose autocast rules hold, and ``autocast`` the element type of an autocast
            around the whole model.
        report: called with a short text at each phase.

    Raises:
        TraceError: the model cannot be traced; names the module and line.
        ContractError: the graph breaks an invariant; names operator and module.
    """
    return expanded(_traced(model, inputs, name, facts or {}, report))


def _traced(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    name: str,
    facts: dict[str, Any],
    report: Callable[[str], None],
    whole: bool = False,
) -> OperatorGraph:
    """Trace as `trace_module` does; unless `whole`, the graph may leave out layers."""
    tensors = (*model.parameters(), *inputs.values())
    modes = (tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor))
    mode: Any = next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)
    check_hooks(model)
    twin = fake_twin(model, mode)
    fake_inputs: dict[str, torch.Tensor] = {
        key: tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
        for key, tensor in inputs.items()
    }
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    autocast, target = facts.get("autocast"), facts.get("target", device.type)
    with (
        quiet_capture(device.type),
        attention_of(facts.get("attention", "traced"), facts.get("cp", 1), target),
        autocast_of(target) if device.type == "cpu" else contextlib.nullcontext(),
        without_gpus() if device.type == "cpu" else contextlib.nullcontext(),
    ):
        with torch.autocast(device.type, DTYPES[autocast]) if autocast else contextlib.nullcontext():
            captured = capture(twin, fake_inputs, mode, report, whole)
        report("differentiating operator by operator")
        graph = with_late_loss(build_joint(name, captured, OperatorRules(mode, device, target), facts))
    if captured.repeats and not is_pattern(graph):
        return _traced(model, inputs, name, facts, report, whole=True)
    verify_graph(graph)
    verify_parallel(graph)
    return graph


def with_late_loss(graph: OperatorGraph) -> OperatorGraph:
    """Return `graph` with the position of the first operator of a loss in pieces as a fact; unchanged if there is none.

    Raises:
        TraceError: an operator from there on draws random numbers or updates a buffer, so the pieces differ from the whole.
    """
    late = next(
        (place for place, node in enumerate(graph.forward_ids) if graph.nodes[node].module == LATE), None
    )
    if late is None:
        return graph
    updating = {graph.values[value].node for _, value in graph.mutations}
    for number in graph.forward_ids[late:]:
        node = graph.nodes[number]
        if node.draw >= 0 or number in updating:
            does = "draws random numbers" if node.draw >= 0 else "updates a buffer"
            raise TraceError(
                f"{graph.describe(node)} is part of a loss in pieces and {does}, once per piece: use --loss-pieces 1"
            )
    return replace(graph, facts={**graph.facts, "late": late})


_SILENCED = (
    ("torch._subclasses.fake_tensor", "failed while attempting to run meta"),
    ("transformers.integrations.hub_kernels", "falling back to its reference"),
)
"""Loggers, and the text of their messages that are not wanted."""

_TREESPEC = r".*isinstance\(treespec, LeafSpec\)"


@contextlib.contextmanager
def without_gpus() -> Iterator[None]:
    """Hide GPUs inside from torch and from the model's code.

    An export of a model on a CPU would start CUDA to keep the state of its random numbers, which takes hundreds of
    MiB of the GPU and fails in a forked process; and graphs should be the same with and without a GPU.
    """
    with mock.patch.object(torch.get_device_module("cuda"), "is_available", lambda: False):
        yield


@contextlib.contextmanager
def quiet_capture(device_type: str) -> Iterator[None]:
    """Silence inside

    * torch's `FutureWarning` about its own `LeafSpec`, which `torch.export` itself brings about;
    * the traceback that torch logs of an error on fake tensors, which is raised as well;
    * on a CPU, transformers' notice that a kernel of a GPU library falls back to its reference: there is no
      such kernel to install. Tracing on a GPU does what a run there does, and then the notice is true.

    All other output of a model's code is let through.
    """
    with warnings.catch_warnings(), contextlib.ExitStack() as filters:
        warnings.filterwarnings("ignore", _TREESPEC, FutureWarning)
        for name, text in _SILENCED if device_type == "cpu" else _SILENCED[:1]:
            filters.enter_context(_silenced(logging.getLogger(name), text))
        yield


@contextlib.contextmanager
def _silenced(logger: logging.Logger, text: str) -> Iterator[None]:
    """Drop what is logged inside and contains `text`."""

    def is_heard(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    logger.addFilter(is_heard)
    try:
        yield
    finally:
        logger.removeFilter(is_heard)
