"""`stagewright trace`: summary of a model's operator graph."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from stagewright.cli import options
from stagewright.cli.groups import explains, grouped
from stagewright.cli.model import ModelOptions
from stagewright.cli.output import check_writable, print_document, show
from stagewright.cli.progress import Progress
from stagewright.cli.refuse import refuse_unshared
from stagewright.files import write_whole


# fmt: off
@dataclass(frozen=True)
class ShapeOptions:
    """Shapes and precision."""

    microbatch: options.MicrobatchSize = 1
    sequence_length: options.SequenceLength = 1024
    dtype: Annotated[str, typer.Option(help="Precision of parameters and activations.")] = "bf16"


@dataclass(frozen=True)
class RankOptions:
    """Parallelism and runtime: the graph of one rank."""

    tp: options.TensorDegree = None
    sequence_parallel: options.SequenceParallel = False
    cp: options.ContextDegree = None
    ep: options.ExpertDegree = None
    runtime: options.RuntimeName = None
# fmt: on


@explains("microbatch", "sequence_length", "dtype", "settings", "output", "tp", "runtime")
@grouped
def trace(
    model: options.Model,
    shape: ShapeOptions,
    rank: RankOptions,
    model_options: ModelOptions,
    output: options.Output = None,
    use_cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use the cache of traces.")] = True,
    as_json: options.Json = False,
) -> None:
    """Trace a model into its operator graph.

    Prints parameters, layers, operators by part, and where the model can be cut: for one rank if --tp, --cp or --ep is
    given, and with the kernels of another runtime if --runtime names one.

    Example:
        stagewright trace path/to/net.py:build --sequence-length 256
    """
    from stagewright.estimation.runtime import STAGEWRIGHT, load_runtime
    from stagewright.planning.configuration import Configuration
    from stagewright.report.graphs import graph_document, graph_summary, listing
    from stagewright.tracing import cache

    check_writable(output)
    refuse_unshared(is_one_replica=False, is_tp_one=(rank.tp or 1) == 1)
    begun = time.perf_counter()
    reference = model_options.reference(model)
    element_type = options.torch_dtype(shape.dtype)
    profile = load_runtime(rank.runtime or STAGEWRIGHT)
    degrees = Configuration.of(tp=rank.tp, sequence_parallel=rank.sequence_parallel, cp=rank.cp, ep=rank.ep)
    with Progress(f"tracing {model}") as progress:
        graph = cache.trace(
            reference, shape.microbatch, shape.sequence_length, element_type, report=progress, use_cache=use_cache,
            **profile.traced, **degrees.trace_arguments,
        )  # fmt: skip
        graph = profile.rewrite(graph)
    document = graph_document(graph, time.perf_counter() - begun)
    if output is not None:
        write_whole(output, json.dumps(listing(graph)))
    if as_json:
        print_document(document)
    else:
        show(graph_summary(document))
