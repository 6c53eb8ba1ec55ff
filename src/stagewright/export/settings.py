"""A plan as the settings of another training framework."""

from __future__ import annotations

from collections.abc import Callable

from stagewright.export import megatron
from stagewright.export.expressed import Expressed, Stack, expressed
from stagewright.planning.plan import Plan

_FORMATS: dict[str, tuple[Stack, Callable[[Expressed], dict[str, str]]]] = {
    "megatron": (megatron.STACK, megatron.megatron_files),
}


def settings_files(
    name: str, plan: Plan, report: Callable[[str], None] = lambda stage: None
) -> tuple[dict[str, str], Expressed]:
    """Files by name, and the configuration that they say.

    Raises:
        InputError: the framework has no such model or configuration.
    """
    stack, write = _FORMATS[name]
    found = expressed(plan, stack, report)
    return write(found), found
