"""The `stagewright` command: its verbs and how it fails."""

from __future__ import annotations

import os
from typing import Annotated, Any

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
from stagewright.errors import TRACEBACK, StagewrightError
from stagewright.version import __version__


class Verbs(TyperGroup):
    """A group of verbs that prints errors as messages and accepts `--traceback` before or after the verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--traceback" in args:
            args = ["--traceback", *(word for word in args if word != "--traceback")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StagewrightError as error:
            fail(error)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except EOFError as error:  # else taken for Ctrl-D at a prompt
            fail_unexpectedly(error)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order in which they are used."""
        return list(self.commands)


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


_VERBS = (
    plan.plan, plan_costs.plan_costs, estimate.estimate, simulate.simulate, explain.explain, check.check, tokenize.tokenize,
    run.run, evaluate.evaluate, launch.launch, compare.compare, verify.verify, trace.trace, schedule.schedule, probe.probe,
    profile.profile, export.export, doctor.doctor, lists.models, lists.clusters, lists.schema, demo.demo,
)  # fmt: skip

for _verb in _VERBS:
    app.command(cls=GroupedCommand)(_verb)

app.add_typer(checkpoint.checkpoint)
