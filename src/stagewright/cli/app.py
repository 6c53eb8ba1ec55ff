"""The `stagewright` command: its verbs and how it fails."""

from __future__ import annotations

import itertools
import os
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from stagewright.cli import (
    check,
    checkpoint,
    compare,
    demo,
    doctor,
    estimate,
    evaluate,
    explain,
    export,
    finetune,
    launch,
    lists,
    plan,
    plan_costs,
    probe,
    profile,
    run,
    schedule,
    simulate,
    tokenize,
    trace,
    verify,
)
from stagewright.cli.failure import fail, fail_unexpectedly
from stagewright.cli.groups import GroupedCommand
from stagewright.errors import TRACEBACK, InputError, StagewrightError
from stagewright.version import __version__


class Verbs(TyperGroup):
    """A group of verbs that prints errors as messages and accepts `--traceback` before or after the verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--traceback" in args:
            args = ["--traceback", *(word for word in args if word != "--traceback")]
        return super().parse_args(ctx, args)

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except _UsageError as error:
            _fail_usage(error)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StagewrightError as error:
            fail(error)
        except _UsageError as error:
            _fail_usage(error)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except EOFError as error:  # else taken for Ctrl-D at a prompt
            fail_unexpectedly(error)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order in which they are used."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs under the headings of their groups."""
        width = max(map(len, self.commands))
        for heading, verbs in _GROUPS.items():
            names = [_name(verb) for verb in verbs]
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(width), self.commands[name].get_short_help_str(limit=100)) for name in names]
                )


# The parser exports only this one of its errors.
_UsageError: Any = typer.BadParameter.__mro__[1]
_WORDED = {
    "Input should be a valid integer, unable to parse string as an integer": "give a whole number",
    "Input should be a valid number, unable to parse string as a number": "give a number",
}


def _fail_usage(error: Any) -> NoReturn:
    """Report an error of the command line in the style of all errors; without arguments, the help was asked for."""
    if type(error).__name__ == "NoArgsIsHelpError":
        raise error
    message = error.format_message().rstrip(".")
    for words, better in _WORDED.items():
        message = message.replace(words, better)
    command = error.ctx.command_path if error.ctx else "stagewright"
    fail(InputError(f"{message} (see `{command} --help`)"))


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stagewright {__version__}")
        raise typer.Exit


@app.callback()
def stagewright(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help=f"Show the traceback of an error (also {TRACEBACK}=1).")
    ] = False,
) -> None:
    """Plan and run pipeline-parallel training of PyTorch models."""
    if traceback:
        os.environ[TRACEBACK] = "1"


_GROUPS: dict[str, tuple[Any, ...]] = {
    "Plan": (
        plan.plan,
        estimate.estimate,
        explain.explain,
        simulate.simulate,
        check.check,
        plan_costs.plan_costs,
    ),
    "Train": (
        finetune.finetune,
        run.run,
        evaluate.evaluate,
        compare.compare,
        verify.verify,
        launch.launch,
        tokenize.tokenize,
    ),
    "Look": (lists.models, lists.clusters, trace.trace, schedule.schedule, demo.demo),
    "Exchange": (export.export, checkpoint.checkpoint, lists.schema),
    "This machine": (doctor.doctor, probe.probe, profile.profile),
}
"""Verbs by the headings under which `--help` lists them."""


def _name(verb: Any) -> str:
    """Return what a verb or a group of verbs is called on the command line."""
    return str(verb.info.name) if isinstance(verb, typer.Typer) else verb.__name__.replace("_", "-")


for _verb in itertools.chain.from_iterable(_GROUPS.values()):
    if isinstance(_verb, typer.Typer):
        app.add_typer(_verb)
    else:
        app.command(cls=GroupedCommand)(_verb)
