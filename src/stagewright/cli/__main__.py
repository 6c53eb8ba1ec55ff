"""`python -m stagewright.cli`: the same as `stagewright`."""

from stagewright.cli import command

command()
