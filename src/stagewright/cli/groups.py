"""Options in groups: a verb takes a dataclass for each, and its help shows every group under a heading."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

from typer.core import TyperCommand


class Grouped(TyperCommand):
    """A verb whose help has the options of every group under the heading of that."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        found: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = getattr(param, "rich_help_panel", None) or "Options"
                is_argument = param.param_type_name == "argument"
                found.setdefault("Arguments" if is_argument else heading, []).append(record)
        for heading, records in found.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` with the fields of its parameters that are dataclasses, all of which have defaults, as options of their own.

    The heading of a group is the first line of its docstring.
    """
    hints = get_type_hints(verb, include_extras=True)
    signature = inspect.signature(verb)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    flat: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            flat += _options(groups[name])
        else:
            flat.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(verb)
    def with_groups(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
        verb(**given)

    # Those that have no default come first.
    flat.sort(key=lambda one: one.default is not inspect.Parameter.empty)
    with_groups.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {one.name: one.annotation for one in flat}
    return with_groups


def _options(group: Any) -> Iterator[inspect.Parameter]:
    heading = (inspect.getdoc(group) or "Options").splitlines()[0].rstrip(".")
    hints = get_type_hints(group, include_extras=True)
    for one in fields(group):
        (shared,) = hints[one.name].__metadata__
        option = copy(shared)  # which other verbs have too
        option.rich_help_panel = heading
        annotation = Annotated[hints[one.name].__origin__, option]
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(one.name, kind, default=one.default, annotation=annotation)
