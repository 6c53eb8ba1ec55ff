"""How a model is laid out over devices under Megatron: widths, microbatches, what is recomputed and sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stagewright.errors import InputError

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Layout:
    """One configuration of a Megatron run.

    Args:
        tp, pp, dp, cp, ep: widths of tensor, pipeline, data, context and expert parallelism; whole experts are spread over
            `tp` times `ep` devices, of which `ep` are data- and context-parallel.
        microbatch_size, sequence_length: samples, and tokens of a sample.
        num_microbatches: per replica and step.
        schedule: a family of `stagewright.schedule`; `num_chunks` stages per rank where it places several.
        sequence_parallel: whether the parts of a layer between the tensor-parallel products are split over `tp`.
        recompute: ``selective`` makes attention's core again in the backward, ``full`` whole layers.
        shards_optimizer: the distributed optimizer (ZeRO-1) over the data-parallel devices.
        overlaps_reduction: whether gradients are reduced beside the last backward, and parameters gathered beside the first
            forward, layer by layer.
        layers_per_stage: by default as even as the number of layers allows.
        recomputed_layers: per stage, how many layers are recomputed whole; by default all or none, as `recompute` says.
        flash_attention, fp32_gradients: whether attention is fused, and gradients are added up in fp32; by default as
            the stack does it.
    """

    sequence_length: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    microbatch_size: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    shards_optimizer: bool = False
    overlaps_reduction: bool = False
    layers_per_stage: tuple[int, ...] | None = None
    recomputed_layers: tuple[int, ...] | None = None
    flash_attention: bool | None = None
    fp32_gradients: bool | None = None

    @property
    def num_stages(self) -> int:
        return self.pp * self.num_chunks

    @property
    def num_tokens(self) -> int:
        """Tokens of a microbatch on one device."""
        return self.microbatch_size * self.sequence_length // self.cp

    @property
    def sequence_shards(self) -> int:
        """Over how many devices the parts between tensor-parallel products are split."""
        return self.tp if self.sequence_parallel else 1

    @property
    def num_expert_shards(self) -> int:
        """Over how many devices the experts of a layer are spread."""
        return self.tp * self.ep

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of every stage.

        Raises:
            InputError: fewer layers than stages, or given counts that do not add up.

        >>> Layout(128, pp=4).layers(10)
        (3, 3, 2, 2)
        """
        if self.layers_per_stage is not None:
            if len(self.layers_per_stage) != self.num_stages or sum(self.layers_per_stage) != num_layers:
                raise InputError(
                    f"layers per stage {'/'.join(map(str, self.layers_per_stage))} are not {num_layers} layers on "
                    f"{self.num_stages} stages: give one count per stage that add up"
                )
            return self.layers_per_stage
        if num_layers < self.num_stages:
            raise InputError(
                f"{num_layers} layers cannot fill {self.num_stages} stages (pp {self.pp} x {self.num_chunks} chunks): "
                "choose fewer"
            )
        each, more = divmod(num_layers, self.num_stages)
        return tuple(each + (stage < more) for stage in range(self.num_stages))

    def checked(self, num_heads: int, num_experts: int) -> Layout:
        """This layout, if a model of so many heads and experts can be split so.

        Raises:
            InputError: names the width that does not divide.
        """
        rules = (
            ("tp", self.tp, "attention heads", num_heads),
            ("ep", self.ep, "experts", num_experts or 1),
            ("tp x ep", self.num_expert_shards if num_experts else 1, "experts", num_experts),
            ("ep", self.ep, "devices of dp x cp", self.dp * self.cp),
            ("cp", self.cp, "tokens of a sample", self.sequence_length),
        )
        for name, width, things, count in rules:
            if width < 1 or count % width:
                raise InputError(f"{name} = {width} does not divide the {count} {things}: choose a divisor")
        return self
