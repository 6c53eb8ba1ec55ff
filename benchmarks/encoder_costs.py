"""What a microbatch costs on one layer of an encoder, in closed form.

Matrix products and attention by their FLOP at the attained rate of the device, other operators by the bytes
of the activations they make, tensor-parallel all-reduces by the collectives' cost model and exposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from stagewright.cluster import Cluster, all_reduce_seconds

DTYPE, ITEM_BYTES = "fp16", 2


@dataclass(frozen=True)
class Model:
    """An encoder of equal layers with a head over the vocabulary."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    sequence: int = 1024
    vocabulary: int = 30_592

    @property
    def layer_parameters(self) -> float:
        return 12.0 * self.hidden**2

    def hardware_flop(self, num_samples: int) -> float:
        """With recomputation; Narayanan et al. 2021, equation 3.

        >>> f"{Model('52 B', 64, 8192, 64).hardware_flop(1):.4g}"
        '4.325e+14'
        """
        s, h, layers = self.sequence, self.hidden, self.num_layers
        return 96 * num_samples * s * layers * h**2 * (1 + s / (6 * h) + self.vocabulary / (16 * layers * h))


@dataclass(frozen=True)
class LayerCosts:
    """Seconds and bytes of a microbatch on one layer of one tensor-parallel rank, and of the head."""

    model: Model
    cluster: Cluster
    tp: int
    microbatch_size: int

    @property
    def tokens(self) -> int:
        return self.model.sequence * self.microbatch_size

    @cached_property
    def forward_s(self) -> float:
        return self._products_s(1.0) + self._elementwise_s + 2 * self._all_reduce_s

    @cached_property
    def backward_s(self) -> float:
        """With the recomputation of the forward."""
        own = self._products_s(2.0) + 2 * self._elementwise_s + 2 * self._all_reduce_s
        return own + self.forward_s

    @cached_property
    def head_forward_s(self) -> float:
        flop = 2.0 * self.tokens * self.model.hidden * self.model.vocabulary / self.tp
        return self.cluster.device.matmul_seconds(flop, DTYPE)

    def _products_s(self, passes: float) -> float:
        """The four products of a layer and attention's two; a backward has two passes."""
        device, h = self.cluster.device, self.model.hidden
        widths = (3, 1, 4, 4)
        products = (2.0 * self.tokens * width * h * h / self.tp for width in widths)
        attention = 4.0 * self.tokens * self.model.sequence * h / self.tp
        peak = device.peak_flops.get(DTYPE) or math.nan
        return passes * (
            sum(device.matmul_seconds(flop, DTYPE) for flop in products)
            + attention / (peak * device.attention_efficiency)
        )

    @cached_property
    def activation_bytes(self) -> float:
        """Korthikanti et al. 2022, equation 2."""
        model = self.model
        scores = 5.0 * model.num_heads * model.sequence / (model.hidden * self.tp)
        return self.tokens * model.hidden * (10 + 24 / self.tp + scores)

    @property
    def _elementwise_s(self) -> float:
        return self.cluster.device.memory_seconds(2 * self.activation_bytes)

    @cached_property
    def _all_reduce_s(self) -> float:
        return all_reduce_seconds(self.cluster, ITEM_BYTES * self.tokens * self.model.hidden, range(self.tp))

    @property
    def boundary_bytes(self) -> float:
        return ITEM_BYTES * self.tokens * self.model.hidden
