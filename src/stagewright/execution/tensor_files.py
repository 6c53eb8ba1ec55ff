"""Tensor files of a checkpoint: written with digests, and read by regions, whichever rank wrote them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from stagewright.errors import InputError, RunError
from stagewright.execution import checkpoint_folder as folders
from stagewright.execution.manifest import Checkpoint, FileRecord, damaged
from stagewright.execution.regions import Region
from stagewright.execution.state import Held, RegionIndex, key_of, named_by, overlap

RANK = "rank-"
"""Prefix of the names of files with a rank's state."""

Sources = list[tuple[str, Region]]
"""Names of files, each with a region that it has."""


def rank_file(rank: int) -> str:
    return f"{RANK}{rank:05d}.safetensors"


class Stored:
    """The contents of the files of all ranks of a checkpoint: regions by the names of tensors.

    Raises:
        InputError: a file cannot be read, or was not written by stagewright.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        self.index = RegionIndex[str](checkpoint.manifest.has_optimizer_state)
        self._readers: dict[str, safe_open] = {}
        for file in sorted(name for name in checkpoint.manifest.files if name.startswith(RANK)):
            for name, region in _regions(checkpoint.path, file):
                self.index.add(name, region, file)

    def sources(self, name: str, wanted: Region) -> Sources:
        """Return the files and regions that contain the region `wanted` of a tensor.

        Raises:
            InputError: a part of it is in none.
        """
        try:
            return self.index.sources(name, wanted)
        except InputError as error:
            raise InputError(f"checkpoint '{self.path}': {error}") from None

    def read(self, held: Held, sources: Sources) -> None:
        """Fill the tensor of `held` from the files."""
        name = self.index.known_as(held.name)
        try:
            for file, region in sources:
                reader = self._reader(file)
                both, key = overlap(held.region, region), key_of(name, region)
                if not region.shape or both == region:
                    read = reader.get_tensor(key)
                else:
                    read = reader.get_slice(key)[both.within(region)]
                if read.dtype != held.tensor.dtype:
                    raise RunError(
                        f"the checkpoint has '{name}' as {read.dtype}, this run as {held.tensor.dtype}: resume with the "
                        "version of stagewright that wrote it"
                    )
                target = held.tensor[both.within(held.region)] if both.shape else held.tensor
                target.copy_(read)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"checkpoint '{self.path}' cannot be read: {error}; {folders.instead_of(self.path)}"
            ) from None

    def layout(self, name: str) -> torch.Tensor:
        """Return a whole tensor without contents."""
        regions = self.index.regions(name)
        ends = [[first + size for first, size in zip(box.start, box.shape, strict=True)] for box in regions]
        region, file = next(iter(regions.items()))
        dtype = _DTYPES[self._reader(file).get_slice(key_of(name, region)).get_dtype()]
        return torch.empty(tuple(map(max, *ends)) if len(ends) > 1 else ends[0], dtype=dtype, device="meta")

    def whole(self, name: str) -> torch.Tensor:
        """Read a whole tensor. Raises as `sources` and `read`."""
        tensor = torch.empty_like(self.layout(name), device="cpu")
        wanted = Region.whole(tensor.shape)
        self.read(Held(name, wanted, 0, tensor), self.sources(name, wanted))
        return tensor

    def _reader(self, file: str) -> safe_open:
        if file not in self._readers:
            self._readers[file] = safe_open(str(self.path / file), framework="pt")
        return self._readers[file]


def _regions(folder: Path, file: str) -> list[tuple[str, Region]]:
    """Return the names and regions in a file. Raises `InputError` where it cannot be read."""
    try:
        with safe_open(str(folder / file), framework="pt") as reader:
            keys = list(reader.keys())
            return [named_by(key, tuple(reader.get_slice(key).get_shape())) for key in keys]
    except (OSError, SafetensorError, ValueError) as error:
        raise damaged(folder, f"file '{file}' cannot be read ({error})") from None


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
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}
_ALIGNMENT = 8
_FILE_BYTES = 4 * 2**30


def in_files(sizes: Mapping[str, int]) -> list[list[str]]:
    """Group the names of tensors, by their `sizes` in bytes, into files of up to 4 GiB.

    >>> in_files({"a": 3 * 2**30, "b": 2**30, "c": 1})
    [['a', 'b'], ['c']]
    """
    files: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > _FILE_BYTES:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Write a file of `tensors`, which may be on any device, and flush it to the disk.

    Raises:
        OSError: the file cannot be written.
        RunError: a tensor has a dtype that such files do not support.
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
    # Sorted by element size, so that all are aligned.
    offset, order = 0, sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _TYPES:
            raise RunError(
                f"tensor '{name}' is of type {tensor.dtype}, which safetensors files do not support"
            )
        end = offset + tensor.numel() * tensor.element_size()
        shape, dtype = list(tensor.shape), _TYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        flat = tensors[name].detach().reshape(-1).cpu().contiguous()
        yield flat.view(torch.uint8).numpy().data
