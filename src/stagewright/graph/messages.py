"""Messages between ranks: the fewest bytes from which the receiver rebuilds values with the same layouts.

A receiver must see the strides the graph was traced with, or kernels and views would differ. So a dense value is sent as the
memory it covers, repeated elements (stride zero) are sent once, gaps are not sent, and several views of one storage are
sent as that storage when that is less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagewright.graph.graph import Value
from stagewright.graph.tensor import TensorMeta


@dataclass(frozen=True, slots=True)
class Message:
    """One buffer that is sent.

    `values` are rebuilt from it. With `whole` it is the memory from the start of the storage (or of the value, if there
    is only one), `num_elements` long; without, it is the value's distinct elements in row-major order.
    """

    values: tuple[Value, ...]
    dtype: str
    num_elements: int
    num_bytes: int
    whole: bool


def messages(values: Iterable[Value]) -> tuple[Message, ...]:
    """Return the messages of one transfer, in the order of its values.

    Ignores: values of one storage that overlap only in part; each of them is sent separately.
    """
    groups: dict[int, list[Value]] = defaultdict(list)
    for value in values:
        groups[value.storage].append(value)
    grouped: list[Message] = []
    for group in groups.values():
        span = max(value.meta.offset + value.meta.extent for value in group)
        same_type = len({value.meta.dtype for value in group}) == 1
        alone = sum(value.meta.num_distinct for value in group)
        if len(group) > 1 and same_type and span <= alone:
            item = group[0].meta.item_bytes
            grouped.append(Message(tuple(group), group[0].meta.dtype, span, span * item, True))
        else:
            grouped.extend(_single(value) for value in group)
    return tuple(grouped)


def _single(value: Value) -> Message:
    meta = value.meta
    dense = meta.num_distinct == meta.extent
    return Message((value,), meta.dtype, meta.num_distinct, meta.payload_bytes, dense)


def distinct(meta: TensorMeta) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of the elements that differ in address: repeated dimensions have size one.

    >>> distinct(TensorMeta((4, 3), (0, 1), "float32"))
    ((1, 3), (0, 1))
    """
    shape = tuple(
        1 if step == 0 and size > 1 else size for size, step in zip(meta.shape, meta.stride, strict=True)
    )
    return shape, meta.stride


def num_bytes(values: Sequence[Value]) -> int:
    """Return the bytes that one transfer of `values` moves."""
    return sum(message.num_bytes for message in messages(values))
