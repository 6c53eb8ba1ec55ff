"""The model as options of the command line: changes of its configuration, and adapters that are trained in its place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli import options
from stagewright.cli.refuse import refuse
from stagewright.errors import InputError
from stagewright.text import say

if TYPE_CHECKING:
    from stagewright.export.reading import Reading
    from stagewright.tracing.models.reference import ModelReference


# fmt: off
@dataclass(frozen=True)
class ModelOptions:
    """The model."""

    settings: options.Settings = None
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
    lora_base: Annotated[
        str | None, typer.Option("--lora-base", metavar="nf4|int8|fp8",
            help="Store the frozen linear layers in 4 or 8 bits (QLoRA); default: in the job's precision.")] = None
# fmt: on

    def reference(self, text: str | None, reading: Reading | None = None) -> ModelReference:
        """Return the named model, by default that of a file, with these changes; print the file's model on stderr.

        Raises:
            InputError: neither names a model, there is none of that name, or options would have no effect or are out of
                range.
        """
        from stagewright.tracing.models.reference import resolve

        settings = options.parse_settings(self.settings)
        if text is not None:
            return self._adapted(resolve(text, settings))
        if reading is None:
            raise InputError(
                "no model was given: name MODEL, a bundled name (`stagewright models`) or a config.json"
            )
        read = reading.read_model()
        say(f"the model is {read}")
        for note in read.notes:
            say(f"not taken: {note}")
        return self._adapted(resolve(read.text, {**read.settings, **settings}))

    def _adapted(self, reference: ModelReference) -> ModelReference:
        from stagewright.tracing.models.lora import Lora

        adapter_options = ["lora_alpha", "lora_targets", "lora_dropout"]
        if self.lora_from is not None:
            from stagewright.execution.weight_files import check_adapter_contents

            refuse(["lora", *adapter_options], "the folder of --lora-from sets its adapters", "start new ones")
            check_adapter_contents(self.lora_from)
            return reference.adapted(Lora.stored_in(self.lora_from, self.lora_base))
        if self.lora is None:
            adapter_options.append("lora_base")
            refuse(adapter_options, "without adapters the whole model is trained", "give their rank with --lora")
            return reference
        given = self.lora_alpha, self.lora_targets, self.lora_dropout, self.lora_base
        return reference.adapted(Lora.of(self.lora, *given))
