"""Safetensors files, written tensor by tensor with their digest: no copy of the whole is made, and nothing is read again.

Source: "Format" in the README of safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from stagewright.errors import RunError
from stagewright.execution.manifest import FileRecord

_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """A file of `tensors`, which may lie on any device; on the disk when this returns.

    Raises:
        OSError: it cannot be written.
        RunError: a tensor is of a type that such files do not have.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in _pieces(tensors):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset, order = (
        0,
        sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)),
    )  # so that all are aligned
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _TYPES:
            raise RunError(f"tensor '{name}' is of type {tensor.dtype}, which safetensors files do not have")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        flat = tensors[name].detach().reshape(-1).cpu().contiguous()
        yield flat.view(torch.uint8).numpy().data
