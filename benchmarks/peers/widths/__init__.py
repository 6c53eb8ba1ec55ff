"""Published rules for choosing a configuration, as their authors state them: what to compare with."""

from peers.widths.amp import amp_seconds
from peers.widths.pipette import (
    PipetteTimes,
    gpipe_like_seconds,
    pipette_seconds,
)
from peers.widths.profiled import NodeRates, ProfiledLayers, Widths
from peers.widths.rule_of_thumb import megatron_rule
from peers.widths.varuna import VarunaStage, varuna_microbatch, varuna_seconds

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
