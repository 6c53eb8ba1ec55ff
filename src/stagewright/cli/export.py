"""`stagewright export`: a plan for other runtimes and launchers."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.consent import WithModel, allow_model
from stagewright.cli.options import PlanFile
from stagewright.cli.output import check_writable, show
from stagewright.cli.progress import Progress
from stagewright.errors import InputError
from stagewright.files import whole_folder, write_whole
from stagewright.text import say

if TYPE_CHECKING:
    from stagewright.planning.plan import Plan


class Target(StrEnum):
    TORCH_PIPELINING = "torch-pipelining"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    SKYPILOT = "skypilot"


def export(
    plan: PlanFile,
    to: Annotated[Target, typer.Option("--to", help="What it is for.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="A folder; of launch files, the file.")],
    with_model: WithModel = False,
) -> None:  # fmt: skip
    """Write a plan for another runtime or a launcher.

    torch-pipelining: a folder that PyTorch's own pipelines run, without Stagewright: stages as code, their order, a script.
    slurm, kubernetes, skypilot: a file that starts `stagewright run` on the plan's cluster.

    Example:
        stagewright export plan.json --to torch-pipelining -o package
    """
    from stagewright.export.launch_files import launch_file
    from stagewright.planning.plan import load_plan

    loaded = load_plan(plan)
    if to is Target.TORCH_PIPELINING:
        _write_package(loaded, output, with_model)
        return
    check_writable(output)
    write_whole(output, launch_file(to.value, loaded, plan.name))
    show(f"Wrote {output}.")


def _write_package(plan: Plan, folder: Path, with_model: bool) -> None:
    """Into a new or empty folder, whole or not at all."""
    from stagewright.export.torch_pipelining import not_expressed, torch_package

    allow_model(plan, with_model, "the package")
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"'{folder}' is there already: name a new folder with --output")
    with Progress("exporting") as progress:
        from stagewright.execution.starting_files import write_starting
        from stagewright.tracing.cache import trace

        progress("tracing the model")
        graph = trace(plan.model.resolved(), plan.microbatch_size, device="cpu", **plan.traced())
        package = torch_package(plan, graph)
        progress("writing the weights")
        try:
            with whole_folder(folder) as scratch:
                write_starting(plan, package.tensors, scratch)
                for name, text in package.files.items():
                    write_whole(scratch / name, text)
        except OSError as error:
            raise InputError(
                f"'{folder}' cannot be written ({error.strerror or error}): make room there, or name another with --output"
            ) from None
    for sentence in not_expressed(plan):
        say(f"not in the package: {sentence}")
    show(
        f"Wrote {folder}. `torchrun --nproc-per-node {plan.num_ranks} {folder / 'train.py'}` trains with it."
    )
