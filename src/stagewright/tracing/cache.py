"""`trace`: the operator graph of a model reference, traced once and kept in the user's cache directory.

Importing this module does not import torch, and neither does a trace found in the cache: planning a model that was
traced before starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, TypeVar

from stagewright.errors import InputError, TraceError, UnevenDegreeError
from stagewright.files import cache_folder, write_whole
from stagewright.graph import OperatorGraph, TensorMeta
from stagewright.graph.document import FORMAT, DamagedGraph, graph_from_bytes, graph_to_bytes
from stagewright.graph.repeat import expanded
from stagewright.graph.resize import SizeChange, Unlike, on_line, with_changes
from stagewright.text import say, silent
from stagewright.tracing.dependencies import FACT, Dependencies, FileWatch
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.tracing.models.source import factory_file, split_factory
from stagewright.tracing.settings import TraceSettings
from stagewright.version import __version__

_T = TypeVar("_T")


def trace(
    model: str | Path | ModelReference,
    microbatch_size: int,
    sequence_length: int,
    dtype: str = "float32",
    overrides: Mapping[str, Any] | None = None,
    *,
    report: Callable[[str], None] | None = None,
    use_cache: bool = True,
    only_kept: bool = False,
    expand: bool = True,
    **settings: Any,
) -> OperatorGraph:
    """Return the operator graph of one microbatch of `model`, with loss and gradients; no weights are created.

    Args:
        model: a bundled name, ``config.json``, directory, hub id or ``package.module:factory``.
        microbatch_size: samples per microbatch.
        sequence_length: tokens per sample.
        dtype: element type of parameters and activations.
        overrides: configuration keys to change.
        report: called with a short text at each phase of a trace that is not in the cache.
        use_cache: whether to read and write the cache of traces.
        only_kept: whether to trace nothing, but to raise `LookupError` for a graph that the cache does not have.
        expand: whether the graph has all layers; otherwise it may leave out some of many equal ones, as in
            `stagewright.graph.repeat`.
        settings: parallel degrees, target device and the like: the other fields of `TraceSettings`.

    Raises:
        InputError: the reference cannot be resolved or built, or not split over its ranks, or there is no such setting.
        TraceError: the model cannot be traced; names module and line.
    """
    report = report or silent
    sizes = {"microbatch_size": microbatch_size, "sequence_length": sequence_length, "dtype": dtype}
    reference = model if isinstance(model, ModelReference) else resolve(model, overrides)
    wanted = TraceSettings.of(sizes | settings)
    if reference.lora is not None:
        reference.lora.check_degrees(wanted.tp, wanted.ep)
    facts = _facts(reference, wanted)
    path, graph, stamp = None, None, ""
    if use_cache:
        stamp = _stamp()
        path = _entry(facts, stamp)
        graph = _cached(facts, stamp, reference.kind != "factory")
    if graph is None and path is not None and (reason := _reason_refused(path)):
        raise UnevenDegreeError(reason)
    if graph is None and only_kept:
        raise LookupError(f"there is no graph of '{reference.text}' in the cache for {wanted}")
    if graph is None and path is not None and reference.kind != "factory":
        graph = _from_stand_in(reference, wanted, stamp, report)
    if graph is None:
        graph = _new(reference, wanted, path, stamp, report)
    return expanded(graph) if expand else graph


def _new(
    reference: ModelReference,
    wanted: TraceSettings,
    path: Path | None,
    stamp: str,
    report: Callable[[str], None],
) -> OperatorGraph:
    """Return a graph that was not in the cache at `path`, where it is kept."""
    facts = _facts(reference, wanted)
    with _only_process(path, report):
        graph = None if path is None else _cached(facts, stamp, False)  # by now
        if graph is not None:
            return graph
        try:
            graph, is_kept = _traced(reference, wanted, facts, report)
        except UnevenDegreeError as error:
            if reference.kind != "factory":
                _note_refused(path, str(error))
            raise
        if path is not None and is_kept:
            _store(path, graph)
    return graph


def _from_stand_in(
    reference: ModelReference, wanted: TraceSettings, stamp: str, report: Callable[[str], None]
) -> OperatorGraph | None:
    """Return a graph that follows once the graph of smaller sizes is traced, from which others follow, too; or None."""
    facts = _facts(reference, wanted)
    for source in _sources(facts, partial(_is_own, stamp=stamp)):
        if (neighbour := _only_missing(source, stamp)) is not None:
            sizes = {axis: neighbour.get(axis, 1) for axis in _AXES}
            with contextlib.suppress(InputError, TraceError):
                _new(reference, replace(wanted, **sizes), _entry(neighbour, stamp), stamp, report)
                return _cached(facts, stamp, follows=True)
    return None


def _only_missing(source: _Source, stamp: str) -> dict[str, Any] | None:
    """Return the facts of the only graph that is missing for another one to follow; None if there are several, or the others
    differ in more than sizes."""
    graphs = [_cached(neighbour, stamp, follows=True) for neighbour in source.neighbours]
    if graphs.count(None) != 1 or not source.changes:
        return None
    base, *changed = graphs
    present = [
        (change, graph) for change, graph in zip(source.changes, changed, strict=True) if graph is not None
    ]
    try:
        if base is not None:
            with_changes([change for change, _ in present], base, *(graph for _, graph in present))
    except Unlike:
        return None
    return source.neighbours[graphs.index(None)]


def _traced(
    reference: ModelReference, wanted: TraceSettings, facts: dict[str, Any], report: Callable[[str], None]
) -> tuple[OperatorGraph, bool]:
    """Return a new graph, and whether it may be kept."""
    report("importing torch")
    from stagewright.tracing.trace import trace_reference

    if reference.kind == "factory":
        return _watched(reference, lambda: trace_reference(reference, wanted, facts, report))
    return trace_reference(reference, wanted, facts, report), True


@contextlib.contextmanager
def _only_process(path: Path | None, report: Callable[[str], None]) -> Iterator[None]:
    """While this is open, other processes that open it for the same cached graph wait; where files cannot be locked, and for
    None, they do not."""
    locks = None if path is None else _locks(path.parent)
    place = 0 if path is None else int(path.stem[:7], 16)  # a byte that need not exist
    if locks is not None:
        try:
            try:
                fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except (BlockingIOError, PermissionError):  # which of them depends on the system
                report("waiting for another process that traces the same graph")
                fcntl.lockf(locks, fcntl.LOCK_EX, 1, place)
        except OSError:  # such as on a network file system without locks
            locks = None
    try:
        yield
    finally:
        if locks is not None:
            fcntl.lockf(locks, fcntl.LOCK_UN, 1, place)


@functools.cache  # to close the file would end all locks of this process
def _locks(folder: Path) -> int | None:
    """Return the descriptor of the file whose bytes stand for the graphs in `folder`, or None if there can be none."""
    try:
        return os.open(folder / "locks", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _watched(reference: ModelReference, trace_it: Callable[[], OperatorGraph]) -> tuple[OperatorGraph, bool]:
    """Return the graph of a factory with its dependencies as a fact, and whether these can be compared later."""
    from stagewright.tracing.models.factories import load_module

    with FileWatch().noting() as watch:
        graph = trace_it()
    name = split_factory(reference.text)
    assert name is not None
    dependencies = watch.dependencies(load_module(name, reference.text), _neighbours(reference.text))
    return replace(graph, facts=graph.facts | {FACT: dependencies.fact}), not dependencies.unchecked


def _neighbours(text: str) -> Path:
    """Return the folder in which modules of the factory `text` are looked up after all others."""
    name, file = split_factory(text), factory_file(text)
    return file.parent if name is not None and name.is_file and file is not None else Path.cwd()


def to_trace(model: ModelReference, settings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the `settings` of `trace`, smaller sizes first, whose graphs are neither cached nor follow from cached ones or
    from earlier ones in the list; the latter is assumed until they exist."""
    stamp, missing = _stamp(), dict[Path, Mapping[str, Any]]()

    def is_cached(facts: dict[str, Any]) -> bool:
        path = _entry(facts, stamp)
        if path is None or path in missing or path.exists() or path.with_suffix(_REFUSED).exists():
            return True
        return model.kind != "factory" and follows(facts)

    def follows(facts: dict[str, Any]) -> bool:
        for source in _sources(facts, is_own):
            if all(map(is_cached, source.neighbours)):
                return source.is_likely or is_alike(facts, source.neighbours)
        return False

    def is_own(facts: dict[str, Any]) -> bool:
        return _entry(facts, stamp) in missing or _is_own(facts, stamp)

    def is_alike(facts: dict[str, Any], neighbours: list[dict[str, Any]]) -> bool:
        """Return whether larger sizes follow; tried once for all microbatches, and believed until it can be tried."""
        if not all(path.exists() for neighbour in neighbours if (path := _entry(neighbour, stamp))):
            return True
        path = _entry({**facts, _SAMPLES: 0}, stamp)
        if path not in _ALIKE:
            _ALIKE[path] = _cached(facts, stamp, follows=True) is not None
        return _ALIKE[path]

    for setting in settings:
        facts = _facts_of(model, setting)
        if not is_cached(facts) and (path := _entry(facts, stamp)) is not None:
            missing[path] = setting
    return list(missing.values())


def note_refused(model: ModelReference, settings: Mapping[str, Any]) -> None:
    """Record that these settings cannot be traced, so that `to_trace` leaves them out."""
    path = _entry(_facts_of(model, settings), _stamp())
    if path is not None and not _reason_refused(path):
        _note_refused(path, "")


def _note_refused(path: Path | None, reason: str) -> None:
    """Record that a graph cannot be traced; with a `reason` that holds as long as the key of the graph does, nobody tries
    again."""
    if path is not None:
        with contextlib.suppress(InputError):
            write_whole(path.with_suffix(_REFUSED), reason.encode())


def _reason_refused(path: Path) -> str:
    """Return the reason for which a graph cannot be traced, or an empty text."""
    try:
        return path.with_suffix(_REFUSED).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


_REFUSED, _COMPARED = ".refused", ".compared"


def compared_file(model: ModelReference, settings: Mapping[str, Any]) -> Path | None:
    """Return the file that records that the graph of these settings was compared with its model; None without a cache."""
    path = _entry(_facts_of(model, settings), _stamp())
    return None if path is None else path.with_suffix(_COMPARED)


def is_compared(model: ModelReference, settings: Mapping[str, Any]) -> bool:
    """Return whether the graph of these settings was compared with its model and equals it."""
    path = compared_file(model, settings)
    return path is not None and path.is_file()


def _facts_of(model: ModelReference, settings: Mapping[str, Any]) -> dict[str, Any]:
    return _facts(model, TraceSettings.of(settings))


def _facts(reference: ModelReference, settings: TraceSettings) -> dict[str, Any]:
    """Return the facts that identify a graph."""
    facts: dict[str, Any] = {"model": reference.text, "digest": reference.digest, **settings.facts}
    if reference.config is not None:
        facts["code"] = _code_of(frozenset(_model_types(reference.config)))
    if settings.device != "cpu":
        facts["kernels"] = _kernels_of(settings.device)
    return facts


def inputs_of(model: ModelReference, settings: Mapping[str, Any]) -> dict[str, TensorMeta]:
    """Return the inputs of the graph of these settings by name: from the cached graph, else from the model."""
    wanted = TraceSettings.of(settings)
    graph = _cached(_facts(model, wanted), _stamp(), model.kind != "factory")
    if graph is not None:
        return {name: graph.values[value].meta for name, value in graph.inputs.items()}
    from stagewright.tracing.arguments import meta_of
    from stagewright.tracing.models.build import build

    sizes = (wanted.microbatch_size, wanted.sequence_length // wanted.cp, wanted.dtype)
    built = build(model, *sizes, fake=True, further_inputs=wanted.further_inputs)
    return {name: meta_of(tensor) for name, tensor in built.inputs.items()}


def _cached(facts: dict[str, Any], stamp: str, follows: bool) -> OperatorGraph | None:
    """Return the graph of these facts if it is cached, or `follows` from cached ones of the same model.

    Code of a factory may ask for sizes, and do what it likes; what is bundled and the classes of transformers are tried out.
    """
    path = _entry(facts, stamp)
    graph = _load(path) if path is not None else None
    if graph is not None and Dependencies.of_facts(graph.facts).change(_neighbours(facts["model"])):
        graph = None
    if graph is not None or path is None or not follows:
        return graph
    with _READING:
        graph = _FOLLOWED.get(path) or _following(facts, stamp)
        return None if graph is None else _remember(_FOLLOWED, path, graph)


def _following(facts: dict[str, Any], stamp: str) -> OperatorGraph | None:
    """Return the graph of these facts that follows from graphs of other sizes."""
    for source in _sources(facts, partial(_is_own, stamp=stamp)):
        graphs = list[OperatorGraph]()
        for neighbour in source.neighbours:
            if (graph := _cached(neighbour, stamp, follows=True)) is None:
                break
            graphs.append(graph)
        else:
            with contextlib.suppress(Unlike):
                return source.follow(*graphs)
    return None


def _is_own(facts: dict[str, Any], stamp: str) -> bool:
    """Return whether the graph of these facts was traced and is in the cache."""
    path = _entry(facts, stamp)
    return path is not None and path.exists()


class _Source(NamedTuple):
    """How a graph may follow from others."""

    neighbours: list[dict[str, Any]]
    """The facts of the others."""
    follow: Callable[..., OperatorGraph]
    """What makes it from them; raises `Unlike`."""
    is_likely: bool = False
    """Whether it need not be tried out to be believed."""
    changes: Sequence[SizeChange] = ()
    """In what all but the first of the others differ from it."""


def _sources(facts: dict[str, Any], is_own: Callable[[dict[str, Any]], bool]) -> Iterator[_Source]:
    """Yield from what the graph of `facts` may follow: two other sizes on one axis, or a graph that was traced (`is_own`)
    and those that differ from it on one axis each."""
    sizes = {axis: facts.get(axis, 1) for axis in _AXES}
    for axis, pairs in _AXES.items():
        for pair in (pair for pair in pairs if max(pair) < sizes[axis]):
            neighbours = [{**facts, axis: size} for size in pair]
            line = partial(on_line, sizes=pair, size=sizes[axis], is_degree=axis != _SAMPLES)
            yield _Source(neighbours, line, axis == _SAMPLES)
    choices = [
        [size, *(number for number in sorted(set(chain(*_AXES[axis]))) if number < size)]
        for axis, size in sizes.items()
    ]
    for base_sizes in product(*choices):
        changed = {axis: base for axis, base in zip(sizes, base_sizes, strict=True) if base != sizes[axis]}
        base = facts | changed
        if len(changed) > 1 and is_own(base):
            changes = [
                SizeChange(axis != _SAMPLES, smaller, sizes[axis]) for axis, smaller in changed.items()
            ]
            neighbours = [base, *({**base, axis: sizes[axis]} for axis in changed)]
            yield _Source(neighbours, partial(with_changes, changes), changes=changes)


_SAMPLES = "microbatch_size"
_AXES = {
    _SAMPLES: ((1, 2), (2, 4)),
    "tp": ((2, 4),),
    "cp": ((2, 4),),
    "ep": ((2, 4),),
}
"""From which sizes larger ones follow; a rank without parallelism says nothing about one of several."""


def _stamp() -> str:
    """Return a digest of what graphs depend on besides their facts, so that a changed tracer never reads an old cache."""
    whole = [FORMAT, __version__, _tracer_files(), tracing_packages(), _installed(), _environment()]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


@functools.cache
def _tracer_files() -> list[tuple[str, int, int]]:
    """Return names, sizes and times of the files of the tracer, as they were when it was first used."""
    folders = [Path(__file__).parent, Path(__file__).parents[1] / "graph"]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


@functools.cache
def tracing_packages() -> dict[str, str]:
    """Return the versions of the packages that determine the traced operators; empty if not installed."""
    return {name: _version(name) for name in ("torch", "transformers")}


@functools.cache
def _installed() -> list[str]:
    """Return names and versions of all packages, some of which models use if installed, and the version of Python."""
    folders = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    names = {path.name for folder in folders for path in folder.glob("*.*-info")}
    return [sys.version, *sorted(names)]


_OF_KERNELS = re.compile(
    r"(ATEN_|PYTORCH_|TORCH|TRANSFORMERS_|USE_)(?!(ELASTIC_|INDUCTOR_|_NCCL_|_LOGS|_CPP_|_SHOW|_FR_|_DISTRIBUTED_|_HOME"
    r"|VERBOSITY|CACHE|OFFLINE|NO_ADVISORY|(CUDA_|HIP_)?ALLOC_CONF)).*"
)


def _environment() -> dict[str, str]:
    """Return the environment variables that affect kernels or behaviour of torch and transformers, except those of
    communication, caches and messages."""
    return {name: value for name, value in sorted(os.environ.items()) if _OF_KERNELS.fullmatch(name)}


def _model_types(config: Any) -> Iterator[str]:
    """Return the kinds of models that a configuration and its parts name."""
    if isinstance(config, Mapping):
        if isinstance(kind := config.get("model_type"), str):
            yield kind
        for part in config.values():
            yield from _model_types(part)


@functools.cache
def _code_of(kinds: frozenset[str]) -> str:
    """Return a digest of the sizes and times of transformers' files for models of these `kinds`: a source installation, or
    one edited in place, changes without its version."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    root = Path(spec.origin).parent
    folders = [root, root / "integrations", root / "utils"]
    folders += [
        root / "models" / name for kind in sorted(kinds) if (name := kind.replace("-", "_")).isidentifier()
    ]
    files = [
        (file.name, (status := file.stat()).st_size, status.st_mtime_ns)
        for folder in folders
        for file in sorted(folder.glob("*.py"))
    ]
    return hashlib.sha256(repr(files).encode()).hexdigest()[:16]


def _kernels_of(device: str) -> str:
    """Return what determines the kernels of a device other than a CPU: its generation, the libraries that torch was built
    with, and the enabled attention kernels."""
    import torch

    module = torch.get_device_module(device)
    generation = getattr(module, "get_device_capability", lambda: ())()
    switches = ("flash", "mem_efficient", "math", "cudnn")
    allowed = [name for name in switches if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    return f"{generation} {torch.__version__} {torch.version.cuda or torch.version.hip} {'+'.join(allowed)}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _entry(facts: Mapping[str, Any], stamp: str) -> Path | None:
    """Return the path of the cached graph of these facts; None without a private folder."""
    try:
        folder = cache_folder("traces")
    except InputError as error:
        _warn(f"graphs are not cached: {error}")
        return None
    key = hashlib.sha256((stamp + json.dumps(facts, sort_keys=True)).encode()).hexdigest()
    return folder / f"{key[:32]}.graph"


def _load(path: Path) -> OperatorGraph | None:
    """Return the graph in a file; None, with a warning unless the file is missing, if it cannot be trusted."""
    try:
        return _own_graph(path)
    except FileNotFoundError:
        return None
    except DamagedGraph as error:
        reason = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
    _warn(f"'{path}' is ignored and the model traced again: {reason}")
    return None


def _own_graph(path: Path) -> OperatorGraph:
    """Return the graph in a file that only this user can have written; it is read again only if it has changed.

    Raises:
        DamagedGraph: it is a link, no file, somebody else's or writable by others, or no graph.
        OSError: it cannot be read.
    """
    # A link is not followed, and a pipe not waited for.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DamagedGraph("it is not a file")
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise DamagedGraph("it belongs to another user, or others may write to it")
        version = status.st_ino, status.st_mtime_ns, status.st_size
        with _READING:
            read = _READ.get(path)
            if read is None or read[0] != version:
                read = version, graph_from_bytes(file.read())
            return _remember(_READ, path, read)[1]


def _remember(memory: dict[Path, _T], path: Path, value: _T) -> _T:
    """Return `value`, put last in `memory`, which drops the least recently used."""
    memory.pop(path, None)
    memory[path] = value
    while len(memory) > _MOST_KNOWN:
        del memory[next(iter(memory))]
    return value


_MOST_KNOWN = 64
"""Maximum number of graphs kept in memory, of each kind."""
_READING = RLock()
_READ: dict[Path, tuple[tuple[int, int, int], OperatorGraph]] = {}
"""Graphs read last, with the versions of their files: estimates of one model need few."""
_ALIKE: dict[Path | None, bool] = {}
"""Whether graphs of some parallel degrees follow from smaller ones, by what stands for all of their sizes."""
_FOLLOWED: dict[Path, OperatorGraph] = {}
"""Graphs last derived from smaller ones."""


def _store(path: Path, graph: OperatorGraph) -> None:
    """Write a graph, if possible: a failure costs time, not the result."""
    with contextlib.suppress(InputError, TypeError):
        write_whole(path, graph_to_bytes(graph))


@functools.cache  # a search traces many graphs: print each message once
def _warn(message: str) -> None:
    say(f"warning: {message}")
