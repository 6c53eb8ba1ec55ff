"""A plan as the settings of another training framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from stagewright.export import deepspeed, megatron, torchtitan
from stagewright.export.expressed import Expressed, Stack, expressed
from stagewright.export.megatron_bridge import bridge_files
from stagewright.planning.plan import Plan


@dataclass(frozen=True)
class _Format:
    """How a plan is written for a framework."""

    stack: Stack
    write: Callable[[Expressed], dict[str, str]]
    """Files by name."""
    remarks: Callable[[Plan], Iterable[str]] = lambda plan: ()
    """What is to be done beside them."""


_FORMATS = {
    "megatron": _Format(megatron.STACK, megatron.megatron_files),
    "megatron-bridge": _Format(replace(megatron.STACK, name="megatron-bridge"), bridge_files),
    "torchtitan": _Format(torchtitan.STACK, torchtitan.torchtitan_files, torchtitan.remarks),
    "deepspeed": _Format(deepspeed.STACK, deepspeed.deepspeed_files),
}


def settings_files(
    name: str, plan: Plan, report: Callable[[str], None] = lambda stage: None
) -> tuple[dict[str, str], Expressed]:
    """Files by name, and the configuration that they say.

    Raises:
        InputError: the framework has no such model or configuration.
    """
    form = _FORMATS[name]
    remarks = tuple(form.remarks(plan))
    found = expressed(plan, form.stack, report)
    found = replace(found, differences=(*found.differences, *remarks))
    return form.write(found), found
