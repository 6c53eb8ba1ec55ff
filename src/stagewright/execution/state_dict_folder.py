"""Folders of `torch.distributed.checkpoint`: read without running untrusted code, and written tensor by tensor.

Such a folder describes itself in a pickle. It is read here as plain data, from which the objects that torch needs are
built; files of tensors are read as torch reads them with ``weights_only``.

Source: ``metadata.py``, ``filesystem.py`` and ``default_planner.py`` of `torch.distributed.checkpoint` (torch 2.13).
Ignores: entries that are not tensors, such as the numbers of an optimizer's parameter groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from stagewright.errors import InputError
from stagewright.execution.plain_pickle import Name, PickledObject, read_plain
from stagewright.files import inside

DESCRIPTION = ".metadata"
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = {
    *_DTYPES,
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem.SerializationFormat",
    "torch.Size",
    "torch.serialization._get_layout",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath", "Path")),
    "collections.OrderedDict",
}  # fmt: skip
"""Names that a description may contain."""


@dataclass(frozen=True)
class _Location:
    """The location of a chunk: a file of the folder, with offset and length in bytes, and torch's encoding."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """A planner that loads only tensors: torch's planner unpickles all other entries."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"'{read_item.dest_index.fqn}' is not a tensor")


class StateDictFolder:
    """The tensors that `torch.distributed.checkpoint` saved to a folder: `shapes` by their names in the flat state dict.

    Raises:
        InputError: it is not such a folder, or its description contains other names than those that describe tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = _described(folder)
        self._types = {
            name: (tuple(storage.size), storage.properties.dtype)
            for name, storage in self._metadata.state_dict_metadata.items()
            if isinstance(storage, TensorStorageMetadata)
        }
        self.shapes = {name: shape for name, (shape, _) in self._types.items()}

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor in its stored dtype. Raises `InputError` where it cannot be read."""
        shape, dtype = self._types[name]
        try:
            tensor = torch.empty(shape, dtype=dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about there being only one process
                reader = _Reader(self.folder, self._metadata)
                dcp.load({name: tensor}, storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
        except (
            Exception,
            dcp.CheckpointException,
        ) as error:  # torch raises many types, and one that is not an `Exception`
            raise InputError(
                f"tensor '{name}' in '{self.folder}' cannot be read ({' '.join(str(error).split())[:200]}): copy the folder "
                "again, or save it again"
            ) from None
        return tensor


def _described(folder: Path) -> Metadata:
    path = inside(folder, DESCRIPTION)
    try:
        if not path.is_file():
            raise ValueError("it is not a file")
        with path.open("rb") as file:
            metadata = _metadata(read_plain(file, _NAMES))
    except Exception as error:  # damaged bytes may raise anything
        raise InputError(
            f"'{path}' cannot be read ({error}): name a folder that torch.distributed.checkpoint has written"
        ) from None
    for name in {location.relative_path for location in metadata.storage_data.values()}:
        if not inside(folder, name).is_file():
            raise InputError(f"'{path}' names file '{name}', which is missing: copy the folder again")
    return metadata


def _metadata(data: Any) -> Metadata:
    """Build a description of the tensors in `data` from new objects. Raises `ValueError` where it is not a description."""
    fields = _fields(data, "Metadata")
    tensors = {
        _checked(name, str): _tensor(stored)
        for name, stored in _checked(fields["state_dict_metadata"], dict).items()
        if not _is(stored, "BytesStorageMetadata")
    }
    locations = {_index(index): place for index, place in _checked(fields["storage_data"], dict).items()}
    storage = {index: _location(place) for index, place in locations.items() if index.fqn in tensors}
    return Metadata(dict(tensors), storage_data=storage, storage_meta=StorageMeta())


def _tensor(data: Any) -> TensorStorageMetadata:
    fields = _fields(data, "TensorStorageMetadata")
    if not _is(fields["properties"], "TensorProperties"):
        raise ValueError("a tensor has no properties")
    dtype = _DTYPES[_checked(_checked(fields["properties"].state, tuple)[0], Name).text]
    parts = [_fields(part, "ChunkStorageMetadata") for part in _checked(fields["chunks"], list)]
    chunks = [ChunkStorageMetadata(_size(part["offsets"]), _size(part["sizes"])) for part in parts]
    size = _size(fields["size"])
    if sum(chunk.sizes.numel() for chunk in chunks) != size.numel():
        raise ValueError("the chunks of a tensor do not add up to its size")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(data: Any) -> MetadataIndex:
    fields = _fields(data, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _checked(fields["fqn"], str),
        None if offset is None else _size(offset),
        None if index is None else _checked(index, int),
    )


def _location(data: Any) -> _Location:
    fields = _fields(data, "_StorageInfo")
    transforms = fields.get("transform_descriptors") or ()
    return _Location(
        _checked(fields["relative_path"], str),
        _checked(fields["offset"], int),
        _checked(fields["length"], int),
        tuple(_checked(text, str) for text in _checked(transforms, list | tuple)),
    )


def _size(data: Any) -> torch.Size:
    if not isinstance(data, PickledObject) or data.name != "torch.Size" or len(data.arguments) != 1:
        raise ValueError("a shape is not a torch.Size")
    return torch.Size([_checked(extent, int) for extent in _checked(data.arguments[0], tuple | list)])


def _is(data: Any, name: str) -> bool:
    return isinstance(data, PickledObject) and data.name.rpartition(".")[2] == name


def _fields(data: Any, name: str) -> dict[str, Any]:
    if not _is(data, name):
        raise ValueError(f"it lacks a {name} where one is required")
    return data.fields


def _checked(value: Any, kind: Any) -> Any:
    """Return `value`, which must be of `kind`. Raises `ValueError` otherwise."""
    if not isinstance(value, kind):
        raise ValueError(
            f"it has a {type(value).__name__} where a {getattr(kind, '__name__', kind)} is required"
        )
    return value


class _Planner(dcp.DefaultSavePlanner):
    """A planner that makes each tensor when it is written."""

    def __init__(self, tensor_of: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._tensor_of = tensor_of

    def lookup_object(self, index: Any) -> torch.Tensor:
        return self._tensor_of(index.fqn)


def write_state_dict(
    folder: Path, layouts: Mapping[str, torch.Tensor], tensor_of: Callable[[str], torch.Tensor]
) -> None:
    """Write a folder that `torch.distributed.checkpoint.load` reads: a file per tensor, with one tensor at a time in memory.

    Args:
        layouts: tensors on the device ``meta``, by name in the state dict.
        tensor_of: returns the tensor of a name.

    Raises:
        OSError: the folder cannot be written.
    """
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(layouts), storage_writer=writer, planner=_Planner(tensor_of), no_dist=True)


def same_names(expected: Iterable[str], stored: Iterable[str]) -> str | None:
    """Return the prefix of the `expected` names among those `stored`, such as ``model.`` where a state dict was one of
    several; None where they are missing.

    >>> same_names(["0.weight"], ["model.0.weight", "optimizer.state.0.weight.exp_avg"])
    'model.'
    """
    first, every = next(iter(expected)), set(stored)
    prefixes = (name.removesuffix(first) for name in sorted(every, key=len) if name.endswith(first))
    return next((prefix for prefix in prefixes if prefix == "" or prefix.endswith(".")), None)
