"""`stagewright export`: plans for other runtimes and launchers."""

from __future__ import annotations

import os
from collections.abc import Mapping
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


class ExportTarget(StrEnum):
    TORCH_PIPELINING = "torch-pipelining"
    MEGATRON = "megatron"
    MEGATRON_BRIDGE = "megatron-bridge"
    TORCHTITAN = "torchtitan"
    TORCHTITAN_02 = "torchtitan-0.2"
    DEEPSPEED = "deepspeed"
    SLURM = "slurm"


def export(
    plan: PlanFile,
    to: Annotated[ExportTarget, typer.Option("--to", metavar="FORMAT", help="The target, one of the above.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="A folder; for slurm, a file.")],
    with_model: WithModel = False,
) -> None:  # fmt: skip
    """Write a plan for another runtime or for Slurm.

    torch-pipelining: a folder that runs in PyTorch's pipelines without Stagewright: stages as code, schedule, a script.
    megatron: a folder with all arguments of Megatron-LM as JSON and in a shell script that starts it; or one of the two.
    megatron-bridge, torchtitan, deepspeed: their recipe, configuration or JSON; torchtitan-0.2: the TOML of that version.
    slurm: a batch script that starts `stagewright run` on the plan's cluster.

    A plan that the target cannot run, or not within the memory of its devices, is refused.

    Example:
        stagewright export plan.json --to torch-pipelining -o package
    """
    from stagewright.export.slurm import slurm_script
    from stagewright.planning.plan import load_plan

    loaded = load_plan(plan)
    if to is ExportTarget.TORCH_PIPELINING:
        _write_package(loaded, output, with_model)
        return
    if to is ExportTarget.SLURM:
        check_writable(output)
        write_whole(output, slurm_script(loaded, plan.name))
        show(f"Wrote {output}. `sbatch {output}` submits it.")
        return
    allow_model(loaded, with_model, f"an export to {to.value}")
    _write_settings(loaded, to, output)


def _write_settings(plan: Plan, to: ExportTarget, output: Path) -> None:
    """Write the settings of another stack to a folder, or one of its files if `output` has that file's extension."""
    from stagewright.export.settings import settings_files

    with Progress("exporting") as progress:
        files, notes = settings_files(to.value, plan, progress)
    matching = [name for name in files if Path(name).suffix == output.suffix]
    if matching and "schedule.csv" in files:
        raise InputError(f"'{output}': the schedule is a separate file: name a new folder with --output")
    if matching:
        check_writable(output)
        write_whole(output, files[matching[0]])
    else:
        _check_new(output)
        _write_folder(output, files)
    for sentence in notes.differences:
        say(f"not in {to.value}: {sentence}")
    if notes.cost is not None:
        say(f"{to.value}: {notes.cost}")
    show(f"Wrote {output}.")


def _write_folder(folder: Path, files: Mapping[str, str]) -> None:
    try:
        with whole_folder(folder) as scratch:
            for name, text in files.items():
                write_whole(scratch / name, text)
    except OSError as error:
        raise _unwritten(folder, error) from None


def _check_new(folder: Path) -> None:
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"'{folder}' is there already: name a new folder with --output")


def _unwritten(folder: Path, error: OSError) -> InputError:
    return InputError(
        f"'{folder}' cannot be written ({error.strerror or error}): make room there, or name another with --output"
    )


def _write_package(plan: Plan, folder: Path, with_model: bool) -> None:
    """Write the package into a new or empty folder, whole or not at all."""
    from stagewright.export.torch_pipelining import check_memory, not_translated, torch_package

    allow_model(plan, with_model, "the package")
    _check_new(folder)
    with Progress("exporting") as progress:
        from stagewright.execution.initial_weights import write_initial_weights
        from stagewright.tracing.cache import trace

        check_memory(plan, progress)
        progress("tracing the model")
        graph = trace(plan.model.resolved(), plan.microbatch_size, device="cpu", **plan.traced())
        package = torch_package(plan, graph)
        progress("writing the weights")
        try:
            with whole_folder(folder) as scratch:
                write_initial_weights(plan, package.tensors, scratch)
                for name, text in package.files.items():
                    write_whole(scratch / name, text)
        except OSError as error:
            raise _unwritten(folder, error) from None
    for sentence in not_translated(plan):
        say(f"not in the package: {sentence}")
    show(
        f"Wrote {folder}. `torchrun --nproc-per-node {plan.num_ranks} {folder / 'train.py'}` trains with it."
    )
