"""Values rebuilt from their messages have the same elements, strides and aliasing, and no byte travels twice."""

from __future__ import annotations

import pytest
import torch

from stagewright.execution.transport import _pack, _unpack
from stagewright.graph import Origin, Value
from stagewright.graph.messages import messages, num_bytes
from stagewright.tracing.arguments import meta_of

BASE = torch.arange(120, dtype=torch.float64).reshape(4, 5, 6)

CASES = {
    "contiguous": [BASE],
    "transposed": [BASE.transpose(0, 2)],
    "slice with gaps": [BASE[:, 1:3, ::2]],
    "expanded": [torch.arange(3.0)[None, :, None].expand(4, 3, 2)],
    "scalar": [torch.tensor(3.5)],
    "empty": [torch.empty(0, 3)],
    "integers": [torch.arange(10)],
    "booleans": [torch.tensor([True, False, True])],
    "complex": [torch.view_as_complex(torch.randn(3, 2))],
    "two views of one storage": [BASE, BASE.transpose(0, 1)],
    "chunks of one storage": list(BASE.chunk(2, dim=0)),
    "small slices of a large storage": [BASE[0, :1], BASE[3, :1]],
}


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case: str) -> None:
    tensors = CASES[case]
    roots: dict[int, int] = {}
    values = [
        Value(
            index,
            meta_of(tensor),
            roots.setdefault(tensor.untyped_storage().data_ptr() or -index, index),
            Origin.NODE,
        )
        for index, tensor in enumerate(tensors)
    ]
    given = dict(enumerate(tensors))
    rebuilt: dict[int, torch.Tensor] = {}
    sent = 0
    for message in messages(values):
        packed = _pack(message, given)
        assert packed.numel() == message.num_elements
        sent += packed.numel() * packed.element_size()
        buffer = torch.empty(message.num_elements, dtype=packed.dtype)
        buffer.view(torch.uint8).copy_(packed.view(torch.uint8))
        rebuilt.update(_unpack(message, buffer))
    assert sent == num_bytes(values)
    for index, tensor in enumerate(tensors):
        assert torch.equal(rebuilt[index], tensor)
        assert rebuilt[index].stride() == tensor.stride()


def test_views_of_one_storage_travel_once() -> None:
    root = Value(0, meta_of(BASE), 0, Origin.NODE)
    view = Value(1, meta_of(BASE.transpose(0, 1)), 0, Origin.NODE)
    assert num_bytes([root, view]) == num_bytes([root])


def test_gaps_and_repeats_do_not_travel() -> None:
    gaps = Value(0, meta_of(BASE[:, 0]), 0, Origin.NODE)
    repeated = Value(1, meta_of(torch.zeros(1, 6).expand(100, 6)), 1, Origin.NODE)
    assert num_bytes([gaps]) == 4 * 6 * 8
    assert num_bytes([repeated]) == 6 * 4
