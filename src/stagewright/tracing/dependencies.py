"""Dependencies of a factory's graph: the modules and files that its code uses, and the environment variables it reads.

They are noted while the model is built and traced, and compared when its graph is taken from the cache, so that neither
imports torch nor runs the factory's code.

Ignores: files that compiled code opens by itself, whether a file exists where it is not opened, the clock, and random
numbers without a seed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import stat
import sys
import sysconfig
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from types import FrameType, ModuleType
from typing import Any

from stagewright.files import digest_of
from stagewright.tracing.models.source import searching_last

FACT = "dependencies"
"""Among the facts of a graph of a factory, its `Dependencies`."""
_LIBRARIES = frozenset({
    "accelerate", "certifi", "filelock", "fsspec", "functorch", "huggingface_hub", "jinja2", "mpmath", "networkx", "numba",
    "numpy", "packaging", "peft", "psutil", "pydantic", "regex", "safetensors", "scipy", "sympy", "tokenizers", "torch",
    "torchgen", "tqdm", "triton", "typing_extensions", "yaml",
})  # fmt: skip
"""Packages whose version says what they do, so that their files and what they read of the environment are not noted."""
_PACKAGES = ("site-packages", "dist-packages")
_STANDARD = tuple({os.path.realpath(path) for path in map(sysconfig.get_path, ("stdlib", "platstdlib"))})
_OWN = str(Path(__file__).resolve().parents[1])
_OF_IMPORTS = tuple(os.path.join(folder, "importlib", "metadata") for folder in _STANDARD)
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_MOST_BYTES = 2**26
"""Maximum bytes of a file whose contents are compared; larger ones are compared by size and times."""


@dataclass(frozen=True)
class Dependencies:
    """Dependencies of a graph besides its request.

    `files` has the state of a file by absolute path, or the names in a folder if the path ends in a slash; `imports` has the
    file by module name; `variables` has digests of the values of environment variables. An empty text stands for what is
    missing. `unchecked` names what cannot be compared later, so that the graph is not cached.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    imports: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    unchecked: str = ""

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Dependencies:
        """Return the dependencies of the graph with these `facts`, empty if they have none."""
        return cls(**facts.get(FACT, {}))

    def contents_relative_to(self, factory: Path) -> dict[str, str]:
        """Return the contents of the user's other files, by their paths relative to the folder of the `factory`'s file."""
        return {
            os.path.relpath(path, factory.parent): state.rpartition(" ")[2]
            for path, state in self.files.items()
            if state.rpartition(" ")[2]
            and not path.endswith("/")
            and path != str(factory)
            and _package(path) == _package(str(factory))
        }

    @property
    def fact(self) -> dict[str, Any]:
        """Return the dependencies as a fact of a graph."""
        return {name: value if name == "unchecked" else dict(value) for name, value in vars(self).items()}

    def change(self, folder: Path) -> str:
        """Return a description of the first change, or an empty text. Modules are looked up in `folder` too."""
        for path, before in self.files.items():
            is_hidden = path.endswith(".py") and os.path.exists(os.path.join(path[:-3], "__init__.py"))
            if is_hidden or not is_as_before(path, before):
                return f"'{path}' has changed"
        with searching_last(str(folder)):
            for name, before in self.imports.items():
                if _origin(name) != before:
                    return f"module '{name}' is imported from another file"
        for name, before in self.variables.items():
            if _value(name) != before:
                return f"the environment variable {name} has changed"
        return ""


def is_as_before(path: str, before: str) -> bool:
    """Return whether a file or folder has the state `before` of `state_of`; touching or copying changes nothing."""
    now = _status(path)
    if not now or not before:
        return now == before
    times, _, contents = before.rpartition(" ")
    return now == times != "folder" or (bool(contents) and contents == _contents(path))


def other_contents(factory: Path, contents: Mapping[str, str]) -> str:
    """Return the first file that lacks the `contents` from `Dependencies.contents_relative_to`, or an empty text. Missing
    files outside the folder of `factory`, which may now be on another machine, are skipped."""
    for name, before in contents.items():
        path = os.path.normpath(factory.parent / name)
        now = _contents(path) if _status(path) else ""
        if now != before and (now or not name.startswith("..")):
            return path
    return ""


def state_of(path: str) -> str:
    """Return size, times and SHA-256 of a file, or the SHA-256 of the names in a folder; empty if missing."""
    status = _status(path)
    return f"{status} {_contents(path)}" if status else ""


def _status(path: str) -> str:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ""
    if path.endswith("/"):
        return "folder"
    return (
        f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}" if stat.S_ISREG(status.st_mode) else ""
    )


def _contents(path: str) -> str:
    try:
        if path.endswith("/"):
            names = sorted(set(os.listdir(path)) - {"__pycache__"})
            return hashlib.sha256("\0".join(names).encode(errors="replace")).hexdigest()
        return digest_of(path) if os.stat(path).st_size <= _MOST_BYTES else ""
    except OSError:
        return ""


def _value(name: str) -> str:
    if name == _EVERY:
        return hashlib.sha256(repr(sorted(os.environ.items())).encode()).hexdigest()
    value = os.environ.get(name)
    return "" if value is None else hashlib.sha256(value.encode(errors="replace")).hexdigest()


_EVERY = "*"
"""Stands for all variables, for code that reads the whole environment."""


def _origin(name: str) -> str:
    """Return the file of a module outside any package, or an empty text."""
    for finder in sys.meta_path:
        spec = None
        with contextlib.suppress(ImportError, ValueError, AttributeError, OSError):
            spec = finder.find_spec(name, None)
        if spec is not None:
            return os.path.realpath(spec.origin) if spec.has_location and spec.origin else ""
    return ""


# -- what is noted ------------------------------------------------------------------------------------------------------


def _is_noted(path: str) -> bool:
    """Return whether a file is the user's, not one of Python, a versioned library, or this package."""
    if path.startswith((*_SYSTEM, _OWN + os.sep)) or path.endswith(".pyc"):
        return False
    if (package := _package(path)) is not None:
        return package not in _LIBRARIES and not package.endswith("-info")
    return not path.startswith(tuple(folder + os.sep for folder in _STANDARD))


def _package(path: str) -> str | None:
    """Return the installed package that a file belongs to."""
    parts = path.split(os.sep)
    places = [place for place, part in enumerate(parts[:-1]) if part in _PACKAGES]
    return parts[places[-1] + 1].removesuffix(".py") if places else None


@dataclass(eq=False)
class FileWatch:
    """Files, modules and variables that a factory's code uses while this is open, on the thread that opened it."""

    read: dict[str, str] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    variables: dict[str, str] = field(default_factory=dict)
    unchecked: str = ""

    def __post_init__(self) -> None:
        self.began_ns, self.modules = time.time_ns(), frozenset(sys.modules)
        self._thread, self._is_busy = get_ident(), False

    @contextlib.contextmanager
    def noting(self) -> Iterator[FileWatch]:
        """Note uses inside here, and nowhere else."""
        _install_hook()
        _WATCHES.append(self)
        try:
            with _noting_environment():
                yield self
        finally:
            _WATCHES.remove(self)

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        """Note an event of Python's audit hooks, or ``environ`` with the name of a variable."""
        if self._is_busy or get_ident() != self._thread:
            return
        self._is_busy = True
        try:
            self._note(event, args)
        finally:
            self._is_busy = False

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if (caller := _caller()) is None:
            return
        if event == "environ":
            if (caller.f_globals.get("__name__") or "").partition(".")[0] not in {
                *_LIBRARIES,
                "transformers",
                "stagewright",
            }:
                self.variables.setdefault(args[0], _value(args[0]))
        elif event in _OUTSIDE:
            if not caller.f_code.co_filename.startswith(_OWN + os.sep):
                self.unchecked = self.unchecked or _OUTSIDE[event]
        elif event == "open":
            self._note_opened(*args)
        elif isinstance(name := args[0], str | bytes | os.PathLike | None):
            self._note_path(os.fsdecode(name or "."), "" if event == "ctypes.dlopen" else "/")

    def _note_opened(self, path: Any, mode: str | None, flags: int) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        writes = set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes:
            self.written.add(os.path.abspath(os.fsdecode(path)))
        else:
            self._note_path(os.fsdecode(path), "")

    def _note_path(self, path: str, ending: str) -> None:
        path = os.path.abspath(path)
        if path not in self.written and _is_noted(path):
            self.read.setdefault(path + ending, state_of(path + ending))

    def dependencies(self, module: ModuleType, folder: Path) -> Dependencies:
        """Return the observed dependencies of the factory in `module`, whose modules are looked up in `folder` too."""
        names, imported = _used_by(module)
        names |= sys.modules.keys() - self.modules
        importing = LOADED.watches.get(module.__name__, self)
        unchecked = importing.unchecked or self.unchecked
        files = {**self.read, **importing.read}
        for path in files.keys() & (importing.written | self.written):
            del files[path]
        for name in sorted(names - {"__main__"}):
            path = _file_of(sys.modules.get(name))
            if path is None or not _is_noted(path):
                continue
            files[path], is_known = LOADED.state(name, path, self.modules, self.began_ns)
            if not is_known:
                unchecked = unchecked or f"'{path}' was written after it was imported"
        with searching_last(str(folder)):
            imports = {name: _origin(name) for name in sorted(imported)}
        return Dependencies(files, imports, {**importing.variables, **self.variables}, unchecked)


_OUTSIDE = {
    "subprocess.Popen": "it starts a process",
    "os.system": "it starts a process",
    "os.posix_spawn": "it starts a process",
    "os.exec": "it starts a process",
    "socket.connect": "it connects to another process",
    "sqlite3.connect": "it reads a database",
}
_EVENTS = frozenset({"environ", "open", "os.listdir", "os.scandir", "ctypes.dlopen", *_OUTSIDE})
_WATCHES: list[FileWatch] = []


def _note(event: str, args: tuple[Any, ...]) -> None:
    if _WATCHES and event in _EVENTS:
        _WATCHES[-1].note(event, args)


@functools.cache
def _install_hook() -> None:
    """Install the audit hook once per process: it cannot be removed, and does nothing while nobody watches."""
    sys.addaudithook(_note)


@contextlib.contextmanager
def _noting_environment() -> Iterator[None]:
    """Note reads of the environment inside."""
    kind: Any = type(os.environ)
    read, every = kind.__getitem__, kind.__iter__

    def read_noted(environ: Any, name: Any) -> Any:
        if isinstance(name, str):
            _note("environ", (name,))
        return read(environ, name)

    def every_noted(environ: Any) -> Any:
        _note("environ", (_EVERY,))
        return every(environ)

    kind.__getitem__, kind.__iter__ = read_noted, every_noted
    try:
        yield
    finally:
        kind.__getitem__, kind.__iter__ = read, every


def _caller() -> FrameType | None:
    """Return the innermost frame outside Python's own modules and this one; None inside an import."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(("<frozen importlib", *_OF_IMPORTS)):
            return None
        is_standard = file.startswith("<frozen") or (file.startswith(_STANDARD) and _package(file) is None)
        if not is_standard and file != __file__:
            return frame
        frame = frame.f_back
    return None


# -- modules ------------------------------------------------------------------------------------------------------------


class _Loaded:
    """States of the files of modules when this process imported them; `watches` have what factories' modules used then."""

    def __init__(self) -> None:
        self.watches: dict[str, FileWatch] = {}
        self._states: dict[str, tuple[ModuleType, str]] = {}  # with the state of the module's file

    @contextlib.contextmanager
    def importing(self, name: str) -> Iterator[None]:
        """Observe the import of a factory's module inside, if it is not loaded yet."""
        if name in sys.modules:
            yield
            return
        watch = FileWatch()
        with watch.noting():
            yield
        self.watches[name] = watch
        for imported in sys.modules.keys() - watch.modules:
            path = _file_of(sys.modules.get(imported))
            if path is not None and _is_noted(path):
                self.state(imported, path, watch.modules, watch.began_ns)

    def state(self, name: str, path: str, before: Collection[str], began_ns: int) -> tuple[str, bool]:
        """Return the state of the file at `path` when module `name` was imported, and whether it is certain. A module not
        among those `before` has been imported since `began_ns`."""
        module, state = self._states.get(name, (None, ""))
        if module is sys.modules[name]:
            return state, True
        state = state_of(path)
        is_known = _changed_ns(path) < (_started_ns() if name in before else began_ns)
        if is_known:
            self._states[name] = sys.modules[name], state
        return state, is_known

    def forget_changed(self, folder: Path) -> None:
        """Force a new import of the modules in `folder` if one of them has changed since it was imported."""
        here = {name: path for name, path in self._paths() if Path(path).is_relative_to(folder)}
        if not all(is_as_before(path, self._states[name][1]) for name, path in here.items()):
            self._forget(here)

    def forget_namesakes(self, folder: Path) -> None:
        """Force a new import of modules of other factories whose names `folder` has too."""
        tops = {
            name.partition(".")[0] for name, path in self._paths() if not Path(path).is_relative_to(folder)
        }
        here = {
            top for top in tops if (folder / f"{top}.py").exists() or (folder / top / "__init__.py").exists()
        }
        self._forget(name for name, _ in self._paths() if name.partition(".")[0] in here)

    def _paths(self) -> list[tuple[str, str]]:
        """Return the modules whose files are noted and in no installed package, with these files."""
        loaded = [
            (name, module) for name, (module, _) in self._states.items() if sys.modules.get(name) is module
        ]
        paths = [(name, _file_of(module)) for name, module in loaded]
        return [(name, path) for name, path in paths if path is not None and _package(path) is None]

    def _forget(self, names: Iterable[str]) -> None:
        for name in list(names):
            del sys.modules[name], self._states[name]


LOADED = _Loaded()


def _file_of(module: ModuleType | None) -> str | None:
    file = getattr(module, "__file__", None)
    return os.path.realpath(file) if isinstance(file, str) and os.path.isabs(file) else None


def _changed_ns(path: str) -> int:
    try:
        status = os.stat(path)
    except OSError:
        return 0
    return max(status.st_mtime_ns, status.st_ctime_ns)


@functools.cache
def _started_ns() -> int:
    """Return the time when this process started, or a little earlier; 0 if unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    age_s = uptime_s - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int((age_s + 1) * 1e9)


def _used_by(module: ModuleType) -> tuple[set[str], set[str]]:
    """Return the names of the loaded modules that `module` and the user's modules that it uses import, including itself and
    its packages; and names of modules outside packages that they import, or would import if these existed."""
    waiting, used, imported = [module.__name__], set[str](), set[str]()
    while waiting:
        name = waiting.pop()
        loaded = sys.modules.get(name)
        if name in used or loaded is None:
            continue
        used.add(name)
        package, _, _ = name.rpartition(".")
        waiting += [package] if package else []
        path = _file_of(loaded)
        if path is None or not _is_noted(path):
            continue
        if _package(path) is not None and name.partition(".")[0] != module.__name__.partition(".")[0]:
            continue
        named = _imported_by(loaded, path)
        tops = {name.partition(".")[0] for name in named}
        imported |= {top for top in tops if top not in sys.stdlib_module_names and top not in _LIBRARIES}
        waiting += named
        for value in list(vars(loaded).values()):
            origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(origin, str):
                waiting.append(origin)
    return used, imported - {"__main__", "stagewright"}


def _imported_by(module: ModuleType, path: str) -> list[str]:
    """Yield the names of modules imported anywhere in the source of `module`; an imported name may be a module."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return []
    names = []
    package = (getattr(module, "__package__", None) or "").split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join(filter(None, [*base, node.module or ""]))
            names += [source, *(f"{source}.{alias.name}" for alias in node.names)]
    return [name for name in names if name]
