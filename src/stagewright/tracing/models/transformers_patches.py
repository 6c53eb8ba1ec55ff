"""Patches of transformers so that models trace as they run; the only file with its private names.

Under `torch.export` transformers (5.x) materialises an S x S causal mask that it would leave to the attention kernel,
because an exported graph might be used for decoding; it takes position ids made by the model for packed sequences; and it
replaces grouped matmuls of types other than bfloat16 by a loop over experts. A training graph is traced for one shape
without packing: it needs none of this, and each changes the kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import masking_utils
from transformers.integrations import moe


@contextlib.contextmanager
def trace_as_run(packed: bool = False) -> Iterator[None]:
    """Make transformers models compute inside, when traced, what they compute when run.

    No mask is built if `is_causal` (or no mask) means the same; grouped matmuls stay grouped. With `packed` the position
    ids given to the model may start several sequences, which need a separate mask.
    """
    before = [(module, name, getattr(module, name)) for module, name in _ORIGINALS]
    try:
        for place, original in _ORIGINALS.items():
            is_as_given = packed and place == _PACKED
            setattr(*place, original if is_as_given else _REPLACEMENTS[place])
        yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)


def _no() -> bool:
    return False


def _traces_values_of(tensor: Any = None) -> bool:
    """Return whether `tensor` has no values to inspect; tracing alone is no reason."""
    return tensor is not None and _is_tracing(tensor)


def _no_packed_sequences(position_ids: Any) -> None:
    return None


_PACKED = masking_utils, "find_packed_sequence_indices"
_REPLACEMENTS: dict[tuple[Any, str], Any] = {
    (masking_utils, "is_torchdynamo_exporting"): _no,
    (masking_utils, "is_tracing"): _traces_values_of,
    (moe, "is_torchdynamo_compiling"): _no,
    _PACKED: _no_packed_sequences,
}
_ORIGINALS = {place: getattr(*place) for place in _REPLACEMENTS if hasattr(*place)}
"""As transformers has them. What is replaced is set from these: what an interrupted trace left lasts no longer."""
_is_tracing = _ORIGINALS.get((masking_utils, "is_tracing"), lambda tensor: False)
