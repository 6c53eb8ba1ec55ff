"""Rejection of options that would have no effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stagewright.cli.groups import current_context
from stagewright.errors import InputError


def refuse(names: Iterable[str], why: str, remedy: str) -> None:
    """Reject the options `names` (parameters of the verb's function) if they are given, even at their defaults.

    Args:
        why: the reason why they would be ignored, as a clause.
        remedy: what to do to use them.

    Raises:
        InputError: one of them is on the command line; the message names all that are.
    """
    context, given = current_context(), set(filter(is_given, names))
    ignored = [
        _written(param, context.params.get(param.name or ""))
        for param in context.command.params
        if param.name in given
    ]
    if ignored:
        raise InputError(f"{why}: leave out {', '.join(ignored)}, or {remedy}")


def refuse_all_but(kept: Iterable[str], why: str, remedy: str) -> None:
    """Reject every option and argument of the verb except `kept`, future ones included."""
    names = {param.name for param in current_context().command.params if param.name is not None}
    refuse(names - set(kept), why, remedy)


def refuse_unshared(*, is_one_replica: bool, is_tp_one: bool) -> None:
    """Reject options for sharding over replicas, or over tensor parallel ranks, where there is only one."""
    if is_one_replica:
        refuse(
            ["zero", "reduce_dtype", "shard_size", "shard_units"],
            "at these parallel degrees there is one replica, so nothing is sharded", "plan for several (--dp N)",
        )  # fmt: skip
    if is_tp_one:
        refuse(
            ["sequence_parallel"],
            "the sequence is split over tensor parallel ranks, and there is one", "give --tp N, at least 2",
        )  # fmt: skip


def is_given(*names: str) -> bool:
    """Return whether one of the options `names` is on the command line, at its default or not."""
    sources = map(current_context().get_parameter_source, names)
    return any(source is not None and source.name == "COMMANDLINE" for source in sources)


def given_words(names: Iterable[str]) -> list[str]:
    """Return the options `names` that are on the command line, as words of a command."""
    context = current_context()
    words: list[str] = []
    for param in context.command.params:
        if param.name not in set(names) or not is_given(param.name or ""):
            continue
        value = context.params.get(param.name or "")
        name = _written(param, value)
        if isinstance(value, bool):
            words.append(name)
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            words += [name, str(item)]
    return words


def _written(parameter: Any, value: object) -> str:
    """Return the name as on the command line: the long form, negated if the negation was given."""
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper()
    names = parameter.secondary_opts if value is False and parameter.secondary_opts else parameter.opts
    return max(names, key=len)
