"""The comparison of a model with its traced graph before its first run: at which size, and how the result is kept.

Compared is the model as it is where that takes little memory and few seconds. Otherwise its samples are shortened, and of a
model from a configuration the width: every layer and every switch of it is kept. What cannot be reduced is not compared,
and that is said.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from stagewright.errors import ContractError, InputError, StagewrightError, TraceError
from stagewright.estimation.operators import work
from stagewright.execution.model_comparison import (
    ROUNDING,
    TOLERANCES,
    Refusal,
    differences,
)
from stagewright.files import write_whole
from stagewright.graph import OperatorGraph
from stagewright.graph.split import split_graph
from stagewright.machine import free_bytes
from stagewright.planning.plan import Plan
from stagewright.text import say
from stagewright.tracing.cache import compared_file, trace
from stagewright.tracing.models.build import BuiltModel, build
from stagewright.tracing.models.overrides import narrow
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.units import format_bytes

MOST_FLOP = 1e11
"""Of a microbatch of what is compared, forward and backward: some seconds on a core. It is run four times."""
MOST_BYTES = 2**31
"""Of its weights, gradients and activations, of the model and of the graph."""
UNCOMPARED = "warning:"
MOST_SECONDS = 600.0
_SHORT, _FEW = 64, 2
"""Tokens and samples of a microbatch of a model that is made smaller."""
_FEWEST_LAYERS = 2

Report = Callable[[str], None]


def compare_once(plan: Plan, report: Report = lambda stage: None, apart: bool = True) -> None:
    """Compare the model of `plan` with its graph, unless that was done before, and say so.

    With `apart` a child of this process does it, which leaves nothing in the memory that this one is judged by, and whose
    death is reported.

    Raises:
        TraceError: the graph is not the model; names what differs, and the cause where it is found.
    """
    reference, asked = plan.model.resolved(), plan.traced_whole()
    kept = compared_file(reference, asked)
    if kept is not None and kept.is_file():
        return
    report("comparing the graph with the model")
    if reference.kind == "config":
        import stagewright.tracing.models.from_config  # noqa: F401 once, for the child and for what comes after
    work = partial(compare, reference, asked, plan.job.seed)
    said = _apart(work, reference.name) if apart else work()
    say(said)
    if kept is not None and not said.startswith(UNCOMPARED):
        with suppress(InputError):
            write_whole(kept, said.encode())


def _apart(work: Callable[[], str], name: str) -> str:
    """What `work` returns in a child of this process; raises what it raises, and `TraceError` where the child dies."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forks beside threads, of which the child uses none
        child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(work, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        if not select.select([answers], [], [], MOST_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if answer:
        kind, text = json.loads(answer)
        if kind is None:
            return text
        raise {one.__name__: one for one in (InputError, ContractError)}.get(kind, TraceError)(text)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return f"{UNCOMPARED} '{name}' and its graph are not compared: it took too long, or too much memory"
    ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "without a word"
    raise TraceError(
        f"PyTorch ended the process ({ended}) that ran '{name}' and its graph on one microbatch: find the operator with a "
        "plain loop of its forward and backward; --no-compare does without"
    )


def _answer(work: Callable[[], str], writer: int) -> NoReturn:
    """In the child: write what `work` returns or raises, as JSON, and end."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        gc.freeze()  # what the parent no longer uses may wait, when it ends, for threads that are not here
        torch.set_num_threads(1)  # nor are those that compute
        answer: tuple[str | None, str] = (None, work())
    except Exception as error:
        is_own = isinstance(error, StagewrightError)
        answer = type(error).__name__, str(error) if is_own else f"{type(error).__name__}: {error}"
    try:
        with os.fdopen(writer, "wb") as answers:
            answers.write(json.dumps(answer).encode())
    finally:
        os._exit(0)


def compare(reference: ModelReference, asked: Mapping[str, Any], seed: int = 0) -> str:
    """Compare a model with the graph that is `asked` of `trace`, at a size that fits; returns what was compared, in a line.

    Raises:
        TraceError: as `compare_once`.
    """
    too_large: set[str] = set()
    needed = float("inf")
    for size in _sizes(reference, asked):
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
        f"{UNCOMPARED} '{reference.name}' and its graph are not compared, as the first run of a model does: it needs "
        f"{format_bytes(needed)} and more than some seconds, and {format_bytes(free_bytes())} are free; a smaller model of "
        "the same code can be, with --set"
    )


def weight_bytes(graph: OperatorGraph) -> float:
    """What weights and gradients of the model and of its graph take of the memory, as numbers of eight bytes."""
    values = (graph.values[value].meta for value in set(graph.parameters.values()))
    return 4.0 * 8.0 * sum(meta.num_elements for meta in values)


def bytes_of(graph: OperatorGraph) -> float:
    """And its activations."""
    (stage,) = split_graph(graph, [])
    return weight_bytes(graph) + 2.0 * stage.held_bytes(stage.saved)


def flop_of(graph: OperatorGraph) -> float:
    """Floating-point operations of a microbatch, forward and backward."""
    return sum(work(node, graph.values.__getitem__).flop for node in graph.nodes)


@dataclass(frozen=True)
class _ComparedModel:
    """A model, made smaller or not, and how its graph is asked for."""

    reference: ModelReference
    asked: Mapping[str, Any]
    what: str

    def graph(self, dtype: str | None = None) -> OperatorGraph:
        """Its graph in the type that is asked for, or in float32 where the model has no float64 kernels."""
        try:
            return trace(self.reference, **{**self.asked, "dtype": dtype or self.asked["dtype"]})
        except InputError:
            if dtype is not None or self.asked["dtype"] != "float64":
                raise
            return trace(self.reference, **{**self.asked, "dtype": "float32"})

    def built(self, dtype: str, seed: int) -> BuiltModel:
        sizes = (self.asked["microbatch_size"], self.asked["sequence_length"])
        further = self.asked.get("further_inputs", ())
        return build(self.reference, *sizes, dtype, seed=seed, further_inputs=further)

    def text(self) -> str:
        sizes = f"microbatch {self.asked['microbatch_size']}, {self.asked['sequence_length']} tokens a sample"
        return f"{self.what}, {sizes}"


def _sizes(reference: ModelReference, asked: Mapping[str, Any]) -> Iterator[_ComparedModel]:
    """The model as it is, with a small microbatch, narrow, narrow but for its heads, and with few layers."""
    yield _ComparedModel(reference, asked, "as it is")
    few = {**asked, "microbatch_size": min(asked["microbatch_size"], _FEW)}
    if reference.config is None:
        if few != asked:
            yield _ComparedModel(reference, few, "as it is")
        return
    short = {**few, "sequence_length": min(asked["sequence_length"], _SHORT)}
    if asked["dtype"] not in TOLERANCES:
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
    """Compare the model with `graph`, where rounding may explain what differs in more precise numbers; returns their type.
    Raises `TraceError` where they differ, or the model cannot be run."""
    asked, failure = size.asked["dtype"], None
    tries = {dtype: TOLERANCES[dtype] for dtype in (asked, "float64") if dtype in TOLERANCES}
    refusal: Refusal | None = None
    for dtype, tolerance in [*tries.items(), ("float32", ROUNDING)]:
        make = partial(size.built, dtype, seed)
        try:
            own = graph if graph.facts["dtype"] == dtype else size.graph(dtype)
            differing = differences(make, own, seed, tolerance)
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
