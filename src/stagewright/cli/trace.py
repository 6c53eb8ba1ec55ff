"""`stagewright trace`: summary of a model's operator graph."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from stagewright.cli import options
from stagewright.cli.groups import explains, grouped
from stagewright.cli.lora import LoraOptions
from stagewright.cli.output import check_writable, print_document, show
from stagewright.cli.progress import Progress
from stagewright.cli.refuse import refuse_unshared
from stagewright.files import write_whole


@explains("microbatch", "sequence_length", "dtype", "settings", "output", "tp", "runtime")
@grouped
def trace(
    context: typer.Context,
    model: options.Model,
    microbatch: options.MicrobatchSize = 1,
    sequence_length: options.SequenceLength = 1024,
    dtype: Annotated[str, typer.Option(help="Precision of parameters and activations.")] = "bf16",
    tp: options.TensorDegree = None,
    sequence_parallel: options.SequenceParallel = False,
    cp: options.ContextDegree = None,
    ep: options.ExpertDegree = None,
    runtime: options.RuntimeName = None,
    settings: options.Settings = None,
    output: options.Output = None,
    use_cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use the cache of traces.")] = True,
    as_json: options.Json = False,
    *,
    tuning: LoraOptions,
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
    from stagewright.tracing.models.reference import resolve

    check_writable(output)
    refuse_unshared(context, is_one_replica=False, is_tp_one=(tp or 1) == 1)
    begun = time.perf_counter()
    reference = tuning.adapted(context, resolve(model, options.parse_settings(settings)))
    element_type = options.torch_dtype(dtype)
    profile = load_runtime(runtime or STAGEWRIGHT)
    degrees = Configuration.of(tp=tp, sequence_parallel=sequence_parallel, cp=cp, ep=ep).trace_arguments
    with Progress(f"tracing {model}") as progress:
        graph = cache.trace(
            reference, microbatch, sequence_length, element_type, report=progress, use_cache=use_cache,
            **profile.traced, **degrees,
        )  # fmt: skip
        graph = profile.rewrite(graph)
    document = graph_document(graph, time.perf_counter() - begun)
    if output is not None:
        write_whole(output, json.dumps(listing(graph)))
    if as_json:
        print_document(document)
    else:
        show(graph_summary(document))
