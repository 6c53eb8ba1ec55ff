"""LoRA options of verbs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.refuse import refuse

if TYPE_CHECKING:
    from stagewright.tracing.models.reference import ModelReference


# fmt: off
@dataclass(frozen=True)
class LoraOptions:
    """Fine-tuning."""

    lora: Annotated[
        int | None, typer.Option("--lora", metavar="RANK", min=1,
            help="Train only adapters of this rank (LoRA, by peft); the model itself is frozen.")] = None
    lora_from: Annotated[
        Path | None, typer.Option("--lora-from", metavar="FOLDER",
            help="Continue training adapters from a folder written by peft, or as a checkpoint by a run.")] = None
    lora_alpha: Annotated[
        float | None, typer.Option("--lora-alpha", metavar="A",
            help="Scale the adapters' output by A / RANK; default: twice the rank.")] = None
    lora_targets: Annotated[
        str | None, typer.Option("--lora-targets", metavar="NAME,NAME|all-linear",
            help="Linear layers that get adapters, e.g. q_proj,v_proj; default: peft's for this kind of model.")] = None
    lora_dropout: Annotated[
        float, typer.Option("--lora-dropout", metavar="P", help="Dropout on the adapters' input.")] = 0.0
# fmt: on

    def adapted(self, context: typer.Context, reference: ModelReference) -> ModelReference:
        """Return `reference` with the requested adapters. Raises `InputError` for options that would have no effect or are
        out of range."""
        from stagewright.tracing.models.lora import Lora

        adapter_options = ["lora_alpha", "lora_targets", "lora_dropout"]
        if self.lora_from is not None:
            from stagewright.execution.weight_files import check_adapter_contents

            refuse(context, ["lora", *adapter_options], "the folder of --lora-from sets its adapters", "start new ones")
            check_adapter_contents(self.lora_from)
            return reference.adapted(Lora.stored_in(self.lora_from))
        if self.lora is None:
            refuse(context, adapter_options, "without adapters the whole model is trained", "give their rank with --lora")
            return reference
        return reference.adapted(Lora.of(self.lora, self.lora_alpha, self.lora_targets, self.lora_dropout))
