"""Rejection of options that would have no effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from stagewright.errors import InputError


def refuse(context: typer.Context, names: Iterable[str], why: str, remedy: str) -> None:
    """Reject the options `names` (parameters of the verb's function) if they are given, even at their defaults.

    Args:
        why: the reason why they would be ignored, as a clause.
        remedy: what to do to use them.

    Raises:
        InputError: one of them is on the command line; the message names all that are.
    """
    ignored = set(names)
    given = [param for param in context.command.params if param.name in ignored and _is_given(context, param)]
    if not given:
        return
    listed = ", ".join(_written(param, context.params.get(param.name or "")) for param in given)
    raise InputError(f"{why}: leave out {listed}, or {remedy}")


def refuse_all_but(context: typer.Context, kept: Iterable[str], why: str, remedy: str) -> None:
    """Reject every option and argument of the verb except `kept`, future ones included."""
    names = {param.name for param in context.command.params if param.name is not None}
    refuse(context, names - set(kept), why, remedy)


def refuse_unshared(context: typer.Context, *, is_one_replica: bool, is_tp_one: bool) -> None:
    """Reject options for sharding over replicas, or over tensor parallel ranks, where there is only one."""
    if is_one_replica:
        refuse(
            context, ["zero", "reduce_dtype", "shard_size", "shard_units"],
            "at these parallel degrees there is one replica, so nothing is sharded", "plan for several (--dp N)",
        )  # fmt: skip
    if is_tp_one:
        refuse(
            context, ["sequence_parallel"],
            "the sequence is split over tensor parallel ranks, and there is one", "give --tp N, at least 2",
        )  # fmt: skip


def is_given(context: typer.Context, *names: str) -> bool:
    """Return whether one of the options `names` is on the command line, at its default or not."""
    return any(param.name in names and _is_given(context, param) for param in context.command.params)


def _is_given(context: typer.Context, parameter: Any) -> bool:
    source = context.get_parameter_source(parameter.name)
    return source is not None and source.name == "COMMANDLINE"


def _written(parameter: Any, value: object) -> str:
    """Return the name as on the command line: the long form, negated if the negation was given."""
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper()
    names = parameter.secondary_opts if value is False and parameter.secondary_opts else parameter.opts
    return max(names, key=len)
