"""Element types of training state."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.graph.flat_buffers import GRADIENTS, OPTIMIZER, PARAMETERS
from stagewright.graph.tensor import ITEM_BYTES


@dataclass(frozen=True)
class Precision:
    """Element types of training state: `gradient` is that of the buffers that accumulate gradients, `state` of the moments.

    If `state` is not the type of a parameter, the optimizer keeps a master copy of that type. AdamW has two moments.

    >>> Precision.of("bfloat16").bytes_per_parameter, Precision.of("float32").bytes_per_parameter
    (18, 16)
    """

    parameter: str
    gradient: str
    state: str
    num_moments: int = 2

    @classmethod
    def of(cls, dtype: str) -> Precision:
        """Return the types for parameters of `dtype` (a torch name): half precision accumulates gradients in float32."""
        whole = "float32" if ITEM_BYTES[dtype] < 4 else dtype
        return cls(dtype, whole, whole)

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of parameter, gradient, moments, and the master copy if there is one."""
        state = ITEM_BYTES[self.state]
        kept = ITEM_BYTES[self.parameter] + ITEM_BYTES[self.gradient] + self.num_moments * state
        return kept + (state if self.has_master else 0)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer works on copies of the parameters."""
        return self.state != self.parameter

    def kept_per_parameter(self, level: int, num_replicas: int, host_optimizer: bool = False) -> float:
        """Return the part of `bytes_per_parameter` that one replica's device keeps with sharding `level`, and possibly with
        the optimizer on the host.

        >>> [Precision.of("bfloat16").kept_per_parameter(level, 4) for level in (0, 1, 2, 3)]
        [18.0, 9.0, 6.0, 4.5]
        >>> Precision.of("bfloat16").kept_per_parameter(0, 4, host_optimizer=True)
        6.0
        """
        parameter, gradient = ITEM_BYTES[self.parameter], ITEM_BYTES[self.gradient]
        optimizer = 0 if host_optimizer else self.bytes_per_parameter - parameter - gradient
        parts = ((optimizer, OPTIMIZER), (gradient, GRADIENTS), (parameter, PARAMETERS))
        return float(sum(size / num_replicas if level >= first else size for size, first in parts))
