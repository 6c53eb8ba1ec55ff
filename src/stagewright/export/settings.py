"""Export of a plan to the settings of another training framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from stagewright.export import deepspeed, megatron, megatron_bridge, torchtitan
from stagewright.export.translation import Stack, Translation, translate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan


@dataclass(frozen=True)
class _Format:
    """The export of plans to one framework."""

    stack: Stack
    write: Callable[[Translation], dict[str, str]]
    """Files by name."""
    remarks: Callable[[Plan], Iterable[str]] = lambda plan: ()
    """Things the user has to do in addition."""


_FORMATS = {
    "megatron": _Format(megatron.STACK, megatron.megatron_files, megatron.remarks),
    "megatron-bridge": _Format(
        replace(megatron.STACK, name="megatron-bridge"), megatron_bridge.bridge_files, megatron_bridge.remarks
    ),
    "torchtitan": _Format(torchtitan.STACK, torchtitan.torchtitan_files, torchtitan.remarks),
    "torchtitan-0.2": _Format(torchtitan.STACK_OF_TOML, torchtitan.toml_files, torchtitan.remarks),
    "deepspeed": _Format(deepspeed.STACK, deepspeed.deepspeed_files, deepspeed.remarks),
}


def settings_files(
    name: str, plan: Plan, report: Callable[[str], None] = lambda stage: None
) -> tuple[dict[str, str], Translation]:
    """Return files by name, and the translation they hold.

    Raises:
        InputError: the framework has no such model or configuration.
    """
    framework = _FORMATS[name]
    translation = translate(plan, framework.stack, report)
    remarks = (*framework.remarks(translation.plan), *_defaults(plan.job))
    translation = replace(translation, differences=(*translation.differences, *remarks))
    return framework.write(translation), translation


_RATES = ("learning_rate", "lr_schedule", "warmup_steps", "num_steps")


def _defaults(job: Job) -> Iterator[str]:
    """Yield that the plan says nothing of the learning rate, if its job has the defaults."""
    if all(getattr(job, name) == Job.model_fields[name].default for name in _RATES):
        yield f"a learning rate and number of steps of your own: {job.learning_rate:g} and {job.num_steps} are defaults"
