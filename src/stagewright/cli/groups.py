"""Help of verbs, with options grouped under headings, and dataclasses as groups of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

_UNBROKEN = "\u2011"
"""A non-breaking hyphen, used while lines are wrapped."""

Verb = TypeVar("Verb", bound=Callable[..., None])

_CONTEXT: ContextVar[typer.Context] = ContextVar("context")


def current_context() -> typer.Context:
    """Return the context of the verb that runs; typer has no public function for it."""
    return _CONTEXT.get()


def explains(*names: str) -> Callable[[Verb], Verb]:
    """Mark the parameters of a verb that `--help` explains; it only names the others, which `--help-all` explains."""

    def marked(verb: Verb) -> Verb:
        verb.explained = frozenset(names)  # type: ignore[attr-defined]
        return verb

    return marked


class GroupedCommand(TyperCommand):
    """A verb whose help lists options under the headings of their groups and ends with the docstring's example."""

    @property
    def _explained(self) -> frozenset[str] | None:
        """The parameters that `--help` explains; None for all."""
        return getattr(self.callback, "explained", None)

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        if self._explained is not None and (help_option := self.get_help_option(ctx)) is not None:
            help_all = copy(help_option)
            help_all.name, help_all.opts = "help_all", ["--help-all"]
            help_all.help, help_all.callback = "Explain all options and exit.", _show_all
            params.append(help_all)
        return params

    def invoke(self, ctx: Any) -> Any:
        _CONTEXT.set(ctx)
        return super().invoke(ctx)

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_UNBROKEN, "-")

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        whole = self.help
        self.help = _unbroken(inspect.cleandoc(whole or "").partition(_EXAMPLE)[0])
        super().format_help_text(ctx, formatter)
        self.help = whole

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _, heading, lines = inspect.cleandoc(self.help or "").partition(_EXAMPLE)
        if heading:
            formatter.write(f"\nExample:\n{lines}\n".replace("\n    ", "\n  "))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        explained = None if ctx.meta.get(EVERYTHING) else self._explained
        sections: dict[str, list[tuple[str, str]]] = {}
        more: dict[str, list[str]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            is_argument = param.param_type_name == "argument"
            heading = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
            if is_argument or explained is None or param.name in explained | _ALWAYS:
                sections.setdefault(heading, []).append(record)
            else:
                more.setdefault(heading.partition(":")[0], []).append(max(param.opts, key=len))
        if more:
            sections["More, which --help-all explains"] = [
                (heading, ", ".join(names)) for heading, names in more.items()
            ]
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, _unbroken(text)) for name, text in records])


_EXAMPLE = "\n\nExample:\n"
EVERYTHING = "stagewright.help_all"
"""Key in the `meta` of a context: whether its help explains all options."""
_ALWAYS = frozenset({"help", "help_all", "as_json"})


def _show_all(ctx: Any, param: Any, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[EVERYTHING] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _unbroken(text: str) -> str:
    return text.replace("-", _UNBROKEN)


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Return `verb` with the fields of its dataclass parameters as separate options.

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
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        verb(**given)

    with_groups.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return with_groups


def _options(group: Any) -> Iterator[inspect.Parameter]:
    heading = (inspect.getdoc(group) or "Options").splitlines()[0].rstrip(".")
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        (shared,) = hints[field.name].__metadata__
        option = copy(shared)  # other verbs share it
        option.rich_help_panel = heading
        annotation = Annotated[hints[field.name].__origin__, option]
        parameter = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
        yield parameter if field.default is MISSING else parameter.replace(default=field.default)
