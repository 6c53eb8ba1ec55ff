"""`trace`: the operator graph of a model reference, traced once and kept in the user's cache directory.

Importing this module does not import torch, and neither does a trace found in the cache: planning a model that was
traced before starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stagewright.graph import OperatorGraph
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.version import __version__

_FORMAT = 1


def trace(
    model: str | ModelReference,
    microbatch_size: int,
    sequence_length: int,
    dtype: str = "float32",
    overrides: Mapping[str, Any] | None = None,
    device: str = "cpu",
    target: str | None = None,
    autocast: str | None = None,
    report: Callable[[str], None] = lambda stage: None,
    use_cache: bool = True,
    training: bool = True,
    tp: int = 1,
    splits_sequence: bool = False,
) -> OperatorGraph:
    """The operator graph of one microbatch of `model`, loss and gradients included; no weights are made.

    Args:
        model: a bundled name, ``config.json``, directory, hub id or ``package.module:factory``.
        microbatch_size: samples per microbatch.
        sequence_length: tokens per sample.
        dtype: element type of parameters and activations.
        overrides: configuration keys to change.
        device: type of device whose kernels are traced.
        target: type of device the graph is for, ``cpu`` or ``cuda``: its autocast rules hold. None: `device`.
        autocast: element type of an autocast around the whole model; None where the model's own code decides.
        report: called with a short text at each phase of a trace that is not in the cache.
        training: whether the model is in training mode; without, it drops nothing out and updates no statistics.
        tp: number of ranks that share every layer; the graph is that of one of them, with collectives for operators.
        splits_sequence: whether those ranks also split the sequence between the layers' products.

    Raises:
        InputError: the reference cannot be resolved or built, or not split over `tp` ranks.
        TraceError: the model cannot be traced; names module and line.
    """
    reference = model if isinstance(model, ModelReference) else resolve(model, overrides)
    facts = {
        "model": reference.text,
        "digest": reference.digest,
        "microbatch_size": microbatch_size,
        "sequence_length": sequence_length,
        "dtype": dtype,
        "device": device,
        "target": target or device,
        "autocast": autocast,
        "training": training,
        "tp": tp,
        "splits_sequence": splits_sequence and tp > 1,
    }
    path = _cache_directory() / f"{_key(facts)}.graph"
    if use_cache and (graph := _load(path)) is not None:
        return graph
    report("importing torch")
    from stagewright.tracing.trace import trace_reference

    graph = trace_reference(reference, microbatch_size, sequence_length, dtype, device, facts, report)
    if use_cache:
        _store(path, graph)
    return graph


def _key(facts: dict[str, Any]) -> str:
    versions = {name: _version(name) for name in ("torch", "transformers")}
    text = json.dumps([_FORMAT, __version__, _own_source(), versions, facts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _own_source() -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files that make a graph: a changed tracer never reads an old cache."""
    folders = [Path(__file__).parent, Path(__file__).parents[1] / "graph"]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _cache_directory() -> Path:
    base = os.environ.get("STAGEWRIGHT_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stagewright" / "traces"


def _load(path: Path) -> OperatorGraph | None:
    """The cached graph, or None when there is none or it cannot be read."""
    try:
        with path.open("rb") as file:
            return pickle.load(file)
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError):
        return None


def _store(path: Path, graph: OperatorGraph) -> None:
    """Best effort: a cache that cannot be written costs time, not the result."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            pickle.dump(graph, file, protocol=pickle.HIGHEST_PROTOCOL)
        os.replace(file.name, path)
