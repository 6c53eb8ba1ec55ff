"""`--from FILE`: a configuration from a file, overridden by options of the command line."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from stagewright.cli.refuse import is_given
from stagewright.text import say

if TYPE_CHECKING:
    from stagewright.export.read_finetuning import FinetuneReading
    from stagewright.export.reading import Reading
    from stagewright.planning.configuration import Configuration

AnyReading = TypeVar("AnyReading", "Reading", "FinetuneReading")

FromFile = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Read the configuration from a file: a Megatron-LM script (its arguments may follow, all in quotes) or "
        "argv.json, torchtitan TOML, DeepSpeed JSON, or a TOML with options of this verb; options override it.",
    ),
]


def read_and_report(path: Path) -> Reading:
    """Return what a configuration file says; print on stderr what of it is ignored."""
    from stagewright.export.reading import read_configuration

    return reported(path, read_configuration(path), "not taken")


def reported(path: Path, reading: AnyReading, label: str) -> AnyReading:
    """Return what a file says; print on stderr how much of it was read, and its notes after `label`."""
    say(f"{path}: {reading.summary()}")
    for note in reading.notes:
        say(f"{label}: {note}")
    return reading


def job_keys(reading: Reading, dp: int, **options: Any) -> dict[str, Any]:
    """Return the keys of a job: those of the file, overridden by the options that are not None. A file that says the
    samples of a replica alone is for `dp` of them."""
    given = {name: value for name, value in options.items() if value is not None}
    runtime = {} if reading.runtime is None else {"runtime": reading.runtime}
    read = {
        key: value
        for key, value in reading.job.items()
        if key != "sequence_length" or "sequence_lengths" not in given
    }
    if "global_batch" not in read | given and reading.samples_per_replica is not None:
        read["global_batch"] = dp * reading.samples_per_replica
        say(
            f"the global batch is {read['global_batch']}: {reading.samples_per_replica} on each of {dp} replicas"
        )
    return {**runtime, **read, **given}


def replicas_of(configuration: Configuration, num_devices: int) -> int:
    """Return the replicas of a configuration, which by default fill the devices."""
    per_replica = (configuration.pp or num_devices) * configuration.tp * configuration.cp
    return configuration.dp or max(num_devices // per_replica, 1)


def overridden(read: Configuration, options: Configuration) -> Configuration:
    """Return `read` overridden by the options that are on the command line."""
    given = (field.name for field in fields(options) if is_given(field.name))
    return replace(read, **{name: getattr(options, name) for name in given})
