"""`stagewright export`: a plan for other runtimes and launchers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.consent import WithModel, allow_model
from stagewright.cli.options import PlanFile
from stagewright.cli.output import show
from stagewright.cli.progress import Progress
from stagewright.errors import InputError
from stagewright.text import say


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

    stagewright export plan.json --to torch-pipelining -o package
    """
    from stagewright.planning.plan import load_plan

    loaded = load_plan(plan)
    if to is Target.TORCH_PIPELINING:
        _torch_pipelining(plan, output, with_model)
        return
    from stagewright.cli.output import check_writable
    from stagewright.export.launch_files import launch_file
    from stagewright.files import write_whole

    check_writable(output)
    write_whole(output, launch_file(to.value, loaded, plan.name))
    show(f"Wrote {output}.")


def _torch_pipelining(path: Path, folder: Path, with_model: bool) -> None:
    from stagewright.export.torch_pipelining import not_expressed, torch_package
    from stagewright.files import make_writable, write_whole
    from stagewright.planning.plan import load_plan

    plan = load_plan(path)
    allow_model(plan, with_model, "the package")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"folder '{folder}' has files in it: name a new one with --output")
    with Progress("exporting") as progress:
        from stagewright.execution.starting_files import write_starting
        from stagewright.tracing.cache import trace

        progress("tracing the model")
        graph = trace(plan.model.reference(), plan.microbatch_size, device="cpu", **plan.traced())
        package = torch_package(plan, graph)
        make_writable(folder, "--output")
        progress("writing the weights")
        write_starting(plan, package.tensors, folder)
        for name, text in package.files.items():
            write_whole(folder / name, text)
    for sentence in not_expressed(plan):
        say(f"not in the package: {sentence}")
    show(
        f"Wrote {folder}. `torchrun --nproc-per-node {plan.num_ranks} {folder / 'train.py'}` trains with it."
    )
