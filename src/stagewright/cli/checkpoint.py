"""`stagewright checkpoint`: what can be done with the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.groups import GroupedCommand
from stagewright.cli.options import Json, PlanFile
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress
from stagewright.units import format_bytes

if TYPE_CHECKING:
    from stagewright.execution.checkpoint_folder import Verified

checkpoint = typer.Typer(
    name="checkpoint",
    help="Checkpoints of runs: show, verify, export and import.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@checkpoint.command("show", cls=GroupedCommand)
def show_all(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run's checkpoint folder, or one step's folder in it.")
    ],
    as_json: Json = False,
) -> None:
    """Show what the checkpoints of a run are of.

    Steps, model, plan, data, and how large they are. Their files are not read; `verify` does.

    Example:
        stagewright checkpoint show checkpoints
    """
    from stagewright.execution.checkpoint_folder import checkpoints_in

    found = [_described(path) for path in checkpoints_in(folder)]
    if as_json:
        print_document({"checkpoints": found})
    else:
        show(*(_in_words(one) for one in found))


def _described(path: Path) -> dict[str, Any]:
    from stagewright.execution.manifest import read_checkpoint

    manifest = read_checkpoint(path).manifest
    plan = manifest.plan
    job, model = plan.get("job", {}), plan.get("model", {})
    return {
        "path": str(path),
        "step": manifest.step,
        "model": model.get("name"),
        **{name: plan.get(name) for name in ("pp", "dp", "tp", "schedule", "sharding")},
        **{name: job.get(name) for name in ("dtype", "optimizer", "global_batch", "sequence_length")},
        "data": str(manifest.data),
        "files": len(manifest.files),
        "bytes": sum(one.bytes for one in manifest.files.values()),
    }


def _in_words(one: dict[str, Any]) -> str:
    zero = max(one["sharding"] or (0,))
    return (
        f"step {one['step']}: {one['model']} in {one['dtype']}, pp {one['pp']} x dp {one['dp']} x tp {one['tp']}, "
        f"{one['schedule']}, zero {zero}, {one['optimizer']}, batches of {one['global_batch']} x {one['sequence_length']}, "
        f"data {one['data']}; {one['files']} files, {format_bytes(one['bytes'])}"
    )


@checkpoint.command(cls=GroupedCommand)
def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run's checkpoint folder, or one step's folder in it.")
    ],
    as_json: Json = False,
) -> None:
    """Check that checkpoints are as they were written.

    Compares every file of every checkpoint with the SHA-256 that it was written with. Exit code 1 if one is damaged.

    Example:
        stagewright checkpoint verify checkpoints
    """
    from stagewright.execution.checkpoint_folder import verified

    with Progress("reading checkpoints") as progress:
        found = verified(folder, progress)
    is_ok = all(one.fault is None for one in found)
    if as_json:
        print_document({"ok": is_ok, "checkpoints": [_document(one) for one in found]})
    else:
        show(*map(_line, found))
    if not is_ok:
        raise typer.Exit(1)


@checkpoint.command(cls=GroupedCommand)
def export(
    folder: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="One step's folder, or a run's, whose newest is taken."),
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the model.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Add adapters to the weights that they are for.")
    ] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only adapters, as peft loads them.")] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="The model that adapters are for; default where it was at the run.",
        ),
    ] = None,
    state_dict: Annotated[
        bool,
        typer.Option(
            "--state-dict",
            help="In place of that a folder that torch.distributed.checkpoint.load reads, with the optimizer's state.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the model of a checkpoint in Hugging Face's layout.

    Of a run with --lora that is the model with the adapters in the folder `adapter` beside it, unless one of --merge and
    --adapter is given.

    Example:
        stagewright checkpoint export checkpoints model --merge
    """
    with Progress("exporting") as progress:
        progress("importing torch")
        from stagewright.execution.model_export import export as exported

        found = exported(
            folder,
            out,
            merges=merge,
            adapter_only=adapter,
            base=base,
            is_state_dict=state_dict,
            report=progress,
        )
    if as_json:
        print_document({"path": str(found.path), "step": found.step, "files": found.files})
        return
    size = format_bytes(sum(found.files.values()))
    show(f"Wrote the model of step {found.step} to '{found.path}': {len(found.files)} files, {size}.")


@checkpoint.command("import", cls=GroupedCommand)
def import_(
    plan: PlanFile,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Folder of a model in Hugging Face's layout, or of torch.distributed.checkpoint, of a plain state dict.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder, for `run --checkpoint`.")],
    step: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Steps that count as done; default what the optimizer counted, or none."
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out the optimizer's state, if there is some.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write weights from elsewhere as a checkpoint.

    A run of the plan goes on from it with --resume. The optimizer's state comes along if there is some under
    `optimizer.state`, of one like the plan's; else it starts anew.

    Example:
        stagewright checkpoint import plan.json model checkpoints
    """
    from stagewright.cli.consent import say_what_runs
    from stagewright.planning.plan import load_plan

    loaded = load_plan(plan)
    say_what_runs(loaded.model.text)
    say_what_runs(loaded.job.optimizer)
    with Progress("importing") as progress:
        progress("importing torch")
        from stagewright.execution.model_import import import_weights

        found = import_weights(loaded, source, folder, step, weights_only, progress)
    has = "with the optimizer's state" if found.has_optimizer_state else "of weights alone"
    if as_json:
        print_document(
            {
                "path": str(found.path),
                "step": found.step,
                "has_optimizer_state": found.has_optimizer_state,
                "files": found.files,
            }
        )
        return
    size = format_bytes(sum(found.files.values()))
    show(
        f"Wrote a checkpoint {has} after step {found.step} to '{found.path}' ({size}): go on from it with "
        f"`stagewright run {plan} --checkpoint {folder} --resume`."
    )


def _document(one: Verified) -> dict[str, Any]:
    return {
        "path": str(one.path),
        "ok": one.fault is None,
        "fault": one.fault,
        "files": one.num_files,
        "bytes": one.num_bytes,
    }


def _line(one: Verified) -> str:
    if one.fault is not None:
        return one.fault
    return f"checkpoint '{one.path}' is ok: {one.num_files} files, {format_bytes(one.num_bytes)}"
