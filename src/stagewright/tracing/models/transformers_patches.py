"""Undoes what transformers does differently while a model is traced; the one file with its private names.

Under `torch.export` transformers (5.x) materialises an S x S causal mask that it would leave to the attention
kernel, because an exported graph might be used for decoding; it takes position ids made by the model for
packed sequences; and it replaces grouped matrix products of other types than bfloat16 by a loop over experts.
A training graph is traced for one shape without packing: it needs none of this, and each changes the kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import masking_utils
from transformers.integrations import moe


@contextlib.contextmanager
def trace_as_run() -> Iterator[None]:
    """Within it transformers models compute, when traced, what they compute when run.

    No mask is built where `is_causal` (or nothing) says the same; grouped matrix products stay grouped.
    """
    replaced: list[tuple[Any, str, Any]] = []
    for module, name, value in _REPLACEMENTS:
        if hasattr(module, name):
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, original in reversed(replaced):
            setattr(module, name, original)


def _no(*_: Any, **__: Any) -> bool:
    return False


def _nothing(*_: Any, **__: Any) -> None:
    return None


_REPLACEMENTS = (
    (masking_utils, "is_torchdynamo_exporting", _no),
    (masking_utils, "find_packed_sequence_indices", _nothing),
    (moe, "is_torchdynamo_compiling", _no),
)
