"""Options that a verb would ignore in the way it is used: refused, so that no wish goes unheard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from stagewright.errors import InputError


def refuse(context: typer.Context, names: Iterable[str], why: str, remedy: str) -> None:
    """Refuses the options `names` (parameters of the verb's function), at their defaults too, where they are given.

    Args:
        why: the clause that says why they would be ignored.
        remedy: what to do if they are meant.

    Raises:
        InputError: one of them is on the command line; names all that are.
    """
    unheard = set(names)
    given = [one for one in context.command.params if one.name in unheard and _is_given(context, one)]
    if not given:
        return
    listed = ", ".join(_written(one, context.params.get(one.name or "")) for one in given)
    raise InputError(f"{why}: leave out {listed}, or {remedy}")


def refuse_all_but(context: typer.Context, kept: Iterable[str], why: str, remedy: str) -> None:
    """The same for every option and argument of the verb but those `kept`, ones that are yet to be written included."""
    names = {one.name for one in context.command.params if one.name is not None}
    refuse(context, names - set(kept), why, remedy)


def refuse_unshared(context: typer.Context, *, is_one_replica: bool, is_one_rank_a_layer: bool) -> None:
    """Refuses what says how replicas, or tensor parallel ranks, shard where there is only one."""
    if is_one_replica:
        refuse(
            context, ["zero", "reduce_dtype", "shard_size", "shard_units"],
            "at these degrees of parallelism there is one replica, so nothing is sharded", "plan for several (--dp N)",
        )  # fmt: skip
    if is_one_rank_a_layer:
        refuse(
            context, ["sequence_parallel"],
            "the sequence is split over tensor parallel ranks, and there is one", "give --tp N, at least 2",
        )  # fmt: skip


def is_given(context: typer.Context, *names: str) -> bool:
    """Whether one of the options `names` is on the command line, at its default or not."""
    return any(one.name in names and _is_given(context, one) for one in context.command.params)


def _is_given(context: typer.Context, parameter: Any) -> bool:
    source = context.get_parameter_source(parameter.name)
    return source is not None and source.name == "COMMANDLINE"


def _written(parameter: Any, value: object) -> str:
    """As on the command line: the long name, that of the negation where that is what was given."""
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper()
    names = parameter.secondary_opts if value is False and parameter.secondary_opts else parameter.opts
    return max(names, key=len)
