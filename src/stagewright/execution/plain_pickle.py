"""Pickles of plain data, read opcode by opcode without importing or calling anything.

`pickle.Unpickler` with an allow-list of names is not enough: ``BUILD`` also sets attributes of the allowed classes and
functions themselves. Here a name stays text: objects that a pickle would build with it become `PickledObject`s.

Source: ``pickletools`` of the standard library and PEP 307, 3154 and 574 (protocols 2 to 5).
Ignores: protocols 0 and 1, sets, persistent ids, extension codes, and buffers outside of the pickle.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Name:
    """A class or function that a pickle names, which is neither imported nor called."""

    text: str


@dataclass(eq=False)
class PickledObject:
    """An object that a pickle describes: class or function `name`, its arguments, and the state set after construction."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        """Attributes by name. Raises `ValueError` where the object is described by anything else."""
        if self.arguments or not isinstance(self.state, dict | None):
            raise ValueError(f"'{self.name}' is not described by its attributes")
        return self.state or {}


def read_plain(file: BinaryIO, names: Container[str]) -> Any:
    """Return the data of a pickle: numbers, texts, tuples, lists, dicts, `Name`s and `PickledObject`s.

    Args:
        names: the classes and functions that the pickle may name, as ``module.name``.

    Raises:
        ValueError: it is not a pickle, names anything else, or uses an opcode that plain data does not need.
    """
    machine = _Machine(names)
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "STOP":
            return machine.pop()
        machine.step(opcode.name, argument)
    raise ValueError("it ends too early")


_MARK = object()

_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The stack and memo of a pickle that is being read."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("it takes more from its stack than it has put there")
        return self._stack.pop()

    def step(self, opcode: str, argument: Any) -> None:
        """Execute an opcode. Raises `ValueError` where plain data does not use it."""
        push = self._stack.append
        if opcode in _LITERALS:
            push(argument)
        elif opcode in _CONSTANTS:
            push(_CONSTANTS[opcode]())
        elif opcode in _TUPLES:
            push(tuple(reversed([self.pop() for _ in range(_TUPLES[opcode])])))
        elif opcode == "TUPLE":
            push(tuple(self._to_mark()))
        elif opcode == "MARK":
            push(_MARK)
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = self._top(object)
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._top(object)
        elif opcode in ("BINGET", "LONG_BINGET"):
            if argument not in self._memo:
                raise ValueError(f"it has no entry {argument} in its memo")
            push(self._memo[argument])
        elif opcode in ("APPEND", "APPENDS"):
            values = [self.pop()] if opcode == "APPEND" else self._to_mark()
            self._top(list).extend(values)
        elif opcode in ("SETITEM", "SETITEMS"):
            pairs = [self.pop(), self.pop()][::-1] if opcode == "SETITEM" else self._to_mark()
            self._set_items(pairs)
        elif opcode in ("GLOBAL", "STACK_GLOBAL"):
            push(self._name(argument if opcode == "GLOBAL" else None))
        elif opcode in ("REDUCE", "NEWOBJ"):
            push(self._record())
        elif opcode == "BUILD":
            state, record = self.pop(), self._top(PickledObject)
            if record.state is not None:
                raise ValueError(f"it sets the state of '{record.name}' twice")
            record.state = state
        elif opcode not in ("PROTO", "FRAME"):
            raise ValueError(f"it has opcode {opcode}, which no plain data has")

    def _top(self, kind: type) -> Any:
        value = self._stack[-1] if self._stack else _MARK
        if value is _MARK or not isinstance(value, kind):
            uses = "nothing" if value is _MARK else type(value).__name__
            raise ValueError(f"it uses {uses} as {kind.__name__}")
        return value

    def _to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise ValueError("it takes more from its stack than it has put there")

    def _set_items(self, pairs: list[Any]) -> None:
        items, keys = self._top(dict), pairs[::2]
        if len(pairs) % 2 or not all(isinstance(key, str | int | PickledObject) for key in keys):
            raise ValueError("it has a dict whose keys are neither texts, numbers nor objects")
        items.update(zip(keys, pairs[1::2], strict=True))

    def _name(self, argument: str | None) -> Name:
        parts = [self.pop(), self.pop()][::-1] if argument is None else argument.split(" ")
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("it names a class by something else than text")
        text = ".".join(parts)
        if text not in self._names:
            raise ValueError(f"it names '{text}', which no description has")
        return Name(text)

    def _record(self) -> Any:
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, Name) or not isinstance(arguments, tuple):
            raise ValueError("it calls something else than a class or function by its name")
        return (
            {}
            if name.text == "collections.OrderedDict" and not arguments
            else PickledObject(name.text, arguments)
        )
