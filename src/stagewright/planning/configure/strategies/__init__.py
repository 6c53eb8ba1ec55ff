"""Published rules for choosing a configuration, as their authors state them: what to compare with."""

from stagewright.planning.configure.strategies.amp import amp_seconds
from stagewright.planning.configure.strategies.pipette import (
    PipetteTimes,
    gpipe_like_seconds,
    pipette_seconds,
)
from stagewright.planning.configure.strategies.profiled import NodeRates, ProfiledLayers, Widths
from stagewright.planning.configure.strategies.rule_of_thumb import megatron_rule
from stagewright.planning.configure.strategies.varuna import VarunaStage, varuna_microbatch, varuna_seconds

__all__ = [
    "NodeRates",
    "PipetteTimes",
    "ProfiledLayers",
    "VarunaStage",
    "Widths",
    "amp_seconds",
    "gpipe_like_seconds",
    "megatron_rule",
    "pipette_seconds",
    "varuna_microbatch",
    "varuna_seconds",
]
