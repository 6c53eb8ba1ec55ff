"""Comparison of a model with its traced graph before its first run: at a suitable size, with the result cached.

The model is compared as it is where that takes little memory and few seconds. Otherwise its samples are shortened, and a
model from a configuration is made narrower, with every layer and every switch kept. A model that cannot be reduced is not
compared, and a warning says so.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import torch

from stagewright.errors import ContractError, InputError, StagewrightError, TraceError
from stagewright.estimation.operators import work
from stagewright.execution.model_comparison import (
    ROUNDING,
    TOLERANCES,
    Refusal,
    differences,
    tolerance_of,
)
from stagewright.files import write_whole
from stagewright.graph import OperatorGraph
from stagewright.graph.split import split_graph
from stagewright.machine import forked, free_bytes
from stagewright.planning.plan import Plan
from stagewright.text import say
from stagewright.tracing.cache import compared_file, trace
from stagewright.tracing.models.build import BuiltModel, build
from stagewright.tracing.models.overrides import narrow
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.units import format_bytes

MOST_FLOP = 1e11
"""Maximum FLOP of a compared microbatch, forward and backward: some seconds on a core. It is run four times."""
MOST_BYTES = 2**31
"""Maximum bytes of weights, gradients and activations of model and graph together."""
UNCOMPARED = "warning:"
MOST_SECONDS = 600.0
_SHORT, _FEW = 64, 2
"""Tokens per sample and samples per microbatch of a reduced model."""
_FEWEST_LAYERS = 2

Report = Callable[[str], None]


def compare_once(plan: Plan, report: Report = lambda stage: None, apart: bool = True) -> None:
    """Compare the model of `plan` with its graph, unless that was done before, and print the result.

    With `apart`, a child process does it, so that this process's measured memory is unaffected and a crash is reported.

    Raises:
        TraceError: the graph differs from the model; names the differences, and the cause where it is found.
    """
    reference, trace_options = plan.model.resolved(), plan.traced_whole()
    kept = compared_file(reference, trace_options)
    if kept is not None and kept.is_file():
        return
    report("comparing the graph with the model")
    if reference.kind == "config":
        import stagewright.tracing.models.from_config  # noqa: F401 once, for the child and for what comes after
    work = partial(compare, reference, trace_options, plan.job.seed)
    message = _apart(work, reference.name) if apart else work()
    say(message)
    if kept is not None and not message.startswith(UNCOMPARED):
        with suppress(InputError):
            write_whole(kept, message.encode())


def _apart(work: Callable[[], str], name: str) -> str:
    """Run `work` in a child process, or in this one where a child could run no backward; return what it returns, raise what
    it raises, and `TraceError` if the child dies."""
    child, reader = forked(partial(_answer, work))
    with os.fdopen(reader, "rb") as answers:
        if not select.select([answers], [], [], MOST_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if answer:
        kind, text = json.loads(answer)
        if kind is None:
            return work() if text is None else text
        raise {error.__name__: error for error in (InputError, ContractError)}.get(kind, TraceError)(text)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return f"{UNCOMPARED} '{name}' and its graph are not compared: it took too long, or too much memory"
    ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "without a message"
    raise TraceError(
        f"PyTorch ended the process ({ended}) that ran '{name}' and its graph on one microbatch: find the operator with a "
        "plain loop of its forward and backward; --no-compare skips the comparison"
    )


def _runs_backwards() -> bool:
    """Whether backwards can run here: not in the child of a process in which autograd has started threads, which it does for
    every GPU and for backwards that are nested deeply."""
    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:
        return False
    return True


def _answer(work: Callable[[], str], answers: BinaryIO) -> None:
    """Write what `work` returns or raises, as JSON; null if no backward can run here."""
    try:
        torch.set_num_threads(1)  # the threads that compute do not exist in a child process
        answer: tuple[str | None, str | None] = (None, work() if _runs_backwards() else None)
    except Exception as error:
        is_own = isinstance(error, StagewrightError)
        answer = type(error).__name__, str(error) if is_own else f"{type(error).__name__}: {error}"
    answers.write(json.dumps(answer).encode())


def compare(reference: ModelReference, trace_options: Mapping[str, Any], seed: int = 0) -> str:
    """Compare a model with its graph, traced with `trace_options`, at a size that fits; return what was compared, in a line.

    Raises:
        TraceError: as `compare_once`.
    """
    too_large: set[str] = set()
    needed = float("inf")
    for size in _sizes(reference, trace_options):
        if size.reference.digest in too_large:
            continue
        try:
            graph = size.graph()
        except StagewrightError:
            if size.reference == reference:
                raise
            continue  # such as a width that the model's code does not expect
        num_bytes = bytes_of(graph)
        if num_bytes > min(MOST_BYTES, free_bytes() / 2) or flop_of(graph) > MOST_FLOP:
            needed = min(needed, num_bytes)
            if weight_bytes(graph) > MOST_BYTES:
                too_large.add(size.reference.digest)
            continue
        dtype = _verdict(size, graph, seed, reference.name)
        return (
            f"compared '{reference.name}' with its graph ({size.text()}, {dtype}): loss, gradients, buffers and random "
            "draws are equal"
        )
    return (
        f"{UNCOMPARED} '{reference.name}' and its graph are not compared, as they usually are before the first run: that "
        f"needs {format_bytes(needed)} and more than some seconds, and {format_bytes(free_bytes())} are free; compare a "
        "smaller model of the same code with --set"
    )


def weight_bytes(graph: OperatorGraph) -> float:
    """Return the bytes of weights and gradients of the model and of its graph, at eight bytes per number."""
    values = (graph.values[value].meta for value in set(graph.parameters.values()))
    return 4.0 * 8.0 * sum(meta.num_elements for meta in values)


def bytes_of(graph: OperatorGraph) -> float:
    """Return the bytes of `weight_bytes` and of the activations."""
    (stage,) = split_graph(graph, [])
    return weight_bytes(graph) + 2.0 * stage.held_bytes(stage.saved)


def flop_of(graph: OperatorGraph) -> float:
    """Return the floating-point operations of a microbatch, forward and backward."""
    return sum(work(node, graph.values.__getitem__).flop for node in graph.nodes)


@dataclass(frozen=True)
class _ComparedModel:
    """A model, reduced or not, and the options with which its graph is traced."""

    reference: ModelReference
    trace_options: Mapping[str, Any]
    what: str

    def graph(self, dtype: str | None = None) -> OperatorGraph:
        """Trace its graph in `dtype` or the type of its options, or in float32 where the model has no float64 kernels."""
        try:
            return trace(
                self.reference, **{**self.trace_options, "dtype": dtype or self.trace_options["dtype"]}
            )
        except InputError:
            if dtype is not None or self.trace_options["dtype"] != "float64":
                raise
            return trace(self.reference, **{**self.trace_options, "dtype": "float32"})

    def built(self, dtype: str, seed: int) -> BuiltModel:
        sizes = (self.trace_options["microbatch_size"], self.trace_options["sequence_length"])
        further = self.trace_options.get("further_inputs", ())
        return build(self.reference, *sizes, dtype, seed=seed, further_inputs=further)

    def text(self) -> str:
        options = self.trace_options
        length = options["sequence_length"]
        of_tokens = f", {length} tokens a sample" if length > 1 else ""
        return f"{self.what}, microbatch {options['microbatch_size']}{of_tokens}"


def _sizes(reference: ModelReference, trace_options: Mapping[str, Any]) -> Iterator[_ComparedModel]:
    """Yield the model as it is, with a small microbatch, narrow, narrow except for its heads, and with few layers."""
    yield _ComparedModel(reference, trace_options, "as it is")
    few = {**trace_options, "microbatch_size": min(trace_options["microbatch_size"], _FEW)}
    if reference.config is None:
        if few != trace_options:
            yield _ComparedModel(reference, few, "as it is")
        return
    short = {**few, "sequence_length": min(trace_options["sequence_length"], _SHORT)}
    if trace_options["dtype"] not in TOLERANCES:
        short["dtype"] = "float64"
    yield _ComparedModel(reference, short, "as it is")
    for keeps_heads in (False, True):
        overrides = {**reference.overrides, **narrow(reference.config, keeps_heads)}
        with suppress(StagewrightError):
            yield _ComparedModel(_changed(reference, overrides), short, "every layer of it, but narrow")
    layers = {**reference.overrides, "num_hidden_layers": _FEWEST_LAYERS}
    with suppress(StagewrightError):
        yield _ComparedModel(_changed(reference, layers), short, f"{_FEWEST_LAYERS} layers of it")


def _changed(reference: ModelReference, overrides: Mapping[str, Any]) -> ModelReference:
    return resolve(reference.text, overrides).adapted(reference.lora)


def _verdict(size: _ComparedModel, graph: OperatorGraph, seed: int, name: str) -> str:
    """Compare the model with `graph`, and in more precise types where rounding may explain the differences; return the type
    in which they agree. Raises `TraceError` where they differ, or the model cannot be run."""
    traced_dtype, failure = size.trace_options["dtype"], None
    tries = dict.fromkeys(dtype for dtype in (traced_dtype, "float64") if dtype in TOLERANCES)
    refusal: Refusal | None = None
    for dtype, tolerance in [*tries.items(), ("float32", ROUNDING)]:
        make = partial(size.built, dtype, seed)
        try:
            dtype_graph = graph if graph.facts["dtype"] == dtype else size.graph(dtype)
            differing = differences(make, dtype_graph, seed, tolerance or tolerance_of(dtype_graph))
        except (StagewrightError, RuntimeError) as error:  # such as no kernel for this type
            failure = error
            continue
        if not differing:
            return dtype
        refusal = Refusal(name, differing, make, seed)
        if dtype == "float64":
            break
    if refusal is not None:
        raise refusal.error()
    assert failure is not None, "one of the types is tried last"
    raise TraceError(
        f"'{name}' cannot be compared with its graph, because plain PyTorch fails on one of them: {failure}; --no-compare "
        "trains the graph as it is"
    ) from failure
