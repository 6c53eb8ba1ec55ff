"""The options of verbs that take a model of which only adapters may be trained."""

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
            help="Go on training the adapters in a folder that peft, or a run as a checkpoint, has written.")] = None
    lora_alpha: Annotated[
        float | None, typer.Option("--lora-alpha", metavar="A",
            help="What adapters add is multiplied by A / RANK; default twice the rank.")] = None
    lora_targets: Annotated[
        str | None, typer.Option("--lora-targets", metavar="NAME,NAME|all-linear",
            help="Linear layers that get adapters, as q_proj,v_proj; default peft's for the kind of model.")] = None
    lora_dropout: Annotated[
        float, typer.Option("--lora-dropout", metavar="P", help="Dropout of what enters adapters.")] = 0.0
# fmt: on

    def adapted(self, context: typer.Context, reference: ModelReference) -> ModelReference:
        """`reference` with the adapters that are asked for. Raises `InputError` for options that would do nothing, or are
        out of range."""
        from stagewright.tracing.models.lora import Lora

        others = ["lora_alpha", "lora_targets", "lora_dropout"]
        if self.lora_from is not None:
            from stagewright.execution.weight_files import check_adapter_contents

            refuse(context, ["lora", *others], "the folder of --lora-from says what its adapters are", "start new ones")
            check_adapter_contents(self.lora_from)
            return reference.adapted(Lora.stored_in(self.lora_from))
        if self.lora is None:
            refuse(context, others, "without adapters all of the model is trained", "give their rank with --lora")
            return reference
        return reference.adapted(Lora.of(self.lora, self.lora_alpha, self.lora_targets, self.lora_dropout))
