"""The source of a model factory, located without running it."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from stagewright.documents import read_text
from stagewright.errors import InputError

_FACTORY = re.compile(r"(?P<module>.+):(?P<function>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class FactoryName:
    """The two halves of `package.module:factory` or `path/to/file.py:factory`."""

    module: str
    function: str

    @property
    def is_file(self) -> bool:
        return self.module.endswith(".py")


def split_factory(text: str) -> FactoryName | None:
    """Return the factory that `text` names, or None when it names none.

    >>> split_factory("nets/unet.py:build")
    FactoryName(module='nets/unet.py', function='build')
    >>> split_factory("llama-3-8b")
    """
    match = _FACTORY.fullmatch(text)
    return FactoryName(match["module"], match["function"]) if match else None


def search_last(folder: str) -> None:
    """Let imports find the modules in `folder`, after all other entries except those searched last before, so that none
    replaces a library."""
    if folder in sys.path and folder not in _SEARCHED_LAST:
        return
    _SEARCHED_LAST.add(folder)
    searched_before = [entry for entry in sys.path if entry in _SEARCHED_LAST and entry != folder]
    sys.path[:] = [*(entry for entry in sys.path if entry not in _SEARCHED_LAST), folder, *searched_before]


_SEARCHED_LAST: set[str] = set()


@contextmanager
def searching_last(folder: str) -> Iterator[None]:
    """Let imports find the modules in `folder`, after all others, for as long as the context lasts."""
    path, before = list(sys.path), set(_SEARCHED_LAST)
    search_last(folder)
    try:
        yield
    finally:
        sys.path[:] = path
        _SEARCHED_LAST.intersection_update(before)


def factory_source(text: str) -> str:
    """Return the content of the file that defines the factory. Raises `InputError` if there is no such file."""
    name = split_factory(text)
    if name is None:
        raise InputError(f"'{text}' is not of the form package.module:factory or path/to/file.py:factory")
    if name.is_file:
        path = Path(os.path.expanduser(name.module))
        if not os.path.isfile(path):
            raise InputError(
                f"there is no file '{name.module}' to take '{name.function}' from: check the path, which is "
                "relative to the current folder (or, in a plan, to the plan's folder)"
            )
        return read_text(path, "factory")
    try:
        spec = _spec_of(name.module)
    except (ImportError, ValueError, AttributeError, OSError) as error:
        raise InputError(f"module '{name.module}' cannot be found ({error}): {_fix(name)}") from None
    if spec is None:
        raise InputError(f"module '{name.module}' cannot be found: {_fix(name)}")
    return read_text(spec.origin, "factory") if spec.origin and spec.origin.endswith(".py") else ""


def takes_sequence_length(text: str) -> bool:
    """Return whether the factory has a parameter `sequence_length`, from its source alone; True if that does not tell."""
    name = split_factory(text)
    try:
        tree = ast.parse(factory_source(text))
    except (SyntaxError, ValueError):
        return True
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and name is not None and node.name == name.function:
            parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            return any(parameter.arg == "sequence_length" for parameter in parameters)
    return True


def factory_file(text: str) -> Path | None:
    """Return the file that defines the factory, whose code runs when the model is built; None if unknown."""
    name = split_factory(text)
    if name is None:
        return None
    if name.is_file:
        return Path(os.path.expanduser(name.module)).resolve()
    try:
        spec = _spec_of(name.module)
    except (ImportError, ValueError, AttributeError, OSError):
        return None
    return Path(spec.origin).resolve() if spec is not None and spec.has_location and spec.origin else None


def _spec_of(module: str) -> ModuleSpec | None:
    """Return the location of `module`. Unlike `importlib.util.find_spec`, this imports no package, so no code runs."""
    spec, name = None, ""
    with searching_last(os.getcwd()):
        for part in module.split("."):
            if spec is not None and spec.submodule_search_locations is None:
                return None  # a module, not a package
            if spec is not None and spec.origin is None:
                importlib.import_module(name)  # a namespace has no code, and must be loaded to search it
            name = f"{name}.{part}" if name else part
            path = None if spec is None else spec.submodule_search_locations
            finders = (finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next((match for find in finders if (match := find(name, path)) is not None), None)
            if spec is None:
                return None
    return spec


def _fix(name: FactoryName) -> str:
    return f"install it, run where it lies, or give the file as path/to/file.py:{name.function}"
