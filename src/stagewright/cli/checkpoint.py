"""`stagewright checkpoint`: shows, verifies, exports and imports checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.groups import GroupedCommand
from stagewright.cli.options import Json, PlanFile
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress
from stagewright.text import plural
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
    """Show what the checkpoints of a run contain.

    Lists step, model, plan, data and size. The files are not read; `verify` does that.

    Example:
        stagewright checkpoint show checkpoints
    """
    from stagewright.execution.checkpoint_folder import checkpoints_in

    checkpoints = [_described(path) for path in checkpoints_in(folder)]
    if as_json:
        print_document({"checkpoints": checkpoints})
    else:
        show(*(_in_words(description) for description in checkpoints))


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
        "adapters_of": None if manifest.base is None else manifest.base.text,
        "data": str(manifest.data),
        "files": len(manifest.files),
        "bytes": sum(file.bytes for file in manifest.files.values()),
    }


def _in_words(document: dict[str, Any]) -> str:
    zero = max(document["sharding"] or (0,))
    base = f", adapters only, of {document['adapters_of']}" if document["adapters_of"] else ""
    return (
        f"step {document['step']}: {document['model']} in {document['dtype']}{base}, "
        f"pp {document['pp']} x dp {document['dp']} x tp {document['tp']}, {document['schedule']}, zero {zero}, "
        f"{document['optimizer']}, batches of {document['global_batch']} x {document['sequence_length']}, "
        f"data {document['data']}; {plural(document['files'], 'file')}, {format_bytes(document['bytes'])}"
    )


@checkpoint.command(cls=GroupedCommand)
def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run's checkpoint folder, or one step's folder in it.")
    ],
    as_json: Json = False,
) -> None:
    """Check that checkpoints are undamaged.

    Compares every file of every checkpoint with the SHA-256 recorded when it was written. Exit code 1 if one is damaged.

    Example:
        stagewright checkpoint verify checkpoints
    """
    from stagewright.execution.checkpoint_folder import verified

    with Progress("reading checkpoints") as progress:
        results = verified(folder, progress)
    is_ok = all(result.fault is None for result in results)
    if as_json:
        print_document({"ok": is_ok, "checkpoints": [_document(result) for result in results]})
    else:
        show(*map(_line, results))
    if not is_ok:
        raise typer.Exit(1)


@checkpoint.command(cls=GroupedCommand)
def export(
    folder: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="One step's folder, or a run's (its newest step)."),
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the model.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into the weights.")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapters, as peft loads them.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="The adapters' base model; default: where it was during the run.",
        ),
    ] = None,
    state_dict: Annotated[
        bool,
        typer.Option(
            "--state-dict",
            help="Write a folder for torch.distributed.checkpoint.load instead, with the optimizer's state.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the model of a checkpoint in Hugging Face's layout.

    After a run with --lora, writes the model and, in its subfolder `adapter`, the adapters, unless --merge or --adapter is
    given.

    Example:
        stagewright checkpoint export checkpoints model --merge
    """
    with Progress("exporting") as progress:
        progress("importing torch")
        from stagewright.execution.model_export import export as exported

        model = exported(
            folder,
            out,
            merges=merge,
            adapter_only=adapter,
            base=base,
            is_state_dict=state_dict,
            report=progress,
        )
    if as_json:
        print_document({"path": str(model.path), "step": model.step, "files": model.files})
        return
    size = format_bytes(sum(model.files.values()))
    show(
        f"Wrote the model of step {model.step} to '{model.path}': {plural(len(model.files), 'file')}, {size}."
    )


@checkpoint.command("import", cls=GroupedCommand)
def import_(
    plan: PlanFile,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Folder of a Hugging Face model, or of a plain state dict saved by torch.distributed.checkpoint.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder, for `run --checkpoint`.")],
    step: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Number of steps already done; default: the optimizer's count, or 0."
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out the optimizer's state, if any.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write weights from elsewhere as a checkpoint.

    A run of the plan continues from it with --resume. The optimizer's state is imported too if there is one under
    `optimizer.state` that matches the plan's optimizer; otherwise it starts afresh.

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

        imported = import_weights(loaded, source, folder, step, weights_only, progress)
    contents = "with the optimizer's state" if imported.has_optimizer_state else "of weights only"
    if as_json:
        print_document(
            {
                "path": str(imported.path),
                "step": imported.step,
                "has_optimizer_state": imported.has_optimizer_state,
                "files": imported.files,
            }
        )
        return
    size = format_bytes(sum(imported.files.values()))
    show(
        f"Wrote a checkpoint {contents} after step {imported.step} to '{imported.path}' ({size}): continue from it with "
        f"`stagewright run {plan} --checkpoint {folder} --resume`."
    )


def _document(verified: Verified) -> dict[str, Any]:
    return {
        "path": str(verified.path),
        "ok": verified.fault is None,
        "fault": verified.fault,
        "files": verified.num_files,
        "bytes": verified.num_bytes,
    }


def _line(verified: Verified) -> str:
    if verified.fault is not None:
        return verified.fault
    return f"checkpoint '{verified.path}' is ok: {plural(verified.num_files, 'file')}, {format_bytes(verified.num_bytes)}"
