"""Memory of decoders under Megatron's runtimes, which split layers over devices and fuse their operators."""

from stagewright.estimation.megatron.footprint import RankFootprint, StageBytes, footprints, stage_bytes
from stagewright.estimation.megatron.layout import Layout, Recompute
from stagewright.estimation.megatron.shape import Experts, Latent, Shape, shape_of
from stagewright.estimation.megatron.stack import MEGATRON_STACKS, MegatronStack, find_megatron_stack

__all__ = [
    "MEGATRON_STACKS",
    "Experts",
    "Latent",
    "Layout",
    "MegatronStack",
    "RankFootprint",
    "Recompute",
    "Shape",
    "StageBytes",
    "find_megatron_stack",
    "footprints",
    "shape_of",
    "stage_bytes",
]
