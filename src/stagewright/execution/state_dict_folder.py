"""Folders of `torch.distributed.checkpoint`: read without running what a stranger put there, and written tensor by tensor.

Such a folder describes itself in a pickle. It is read here by an unpickler that knows the classes of that description and
nothing else, and files of tensors are read as torch reads them with ``weights_only``.

Source: ``metadata.py``, ``filesystem.py`` and ``default_planner.py`` of `torch.distributed.checkpoint` (torch 2.13).
Ignores: what is no tensor, such as the numbers of an optimizer's parameter groups.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from stagewright.errors import InputError
from stagewright.files import inside

DESCRIPTION = ".metadata"
_OF_DESCRIPTION = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "SerializationFormat"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath", "Path"),
    "collections": ("OrderedDict",),
}  # fmt: skip
"""The names that a description needs, by module; and of torch itself its types and `torch.Size`."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        of_torch = getattr(torch, name, None) if module == "torch" else None
        if (
            name in _OF_DESCRIPTION.get(module, ())
            or of_torch is torch.Size
            or isinstance(of_torch, torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names '{module}.{name}', which no description has")


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class StateDictFolder:
    """The tensors that `torch.distributed.checkpoint` saved to a folder: `shapes` by their names in the flat state dict.

    Raises:
        InputError: it is no such folder, or its description names something else than what describes tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = _described(folder)
        self._types = {
            name: (tuple(one.size), one.properties.dtype)
            for name, one in self._metadata.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }
        self.shapes = {name: shape for name, (shape, _) in self._types.items()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor, whole and as it is stored. Raises `InputError` where it cannot be read."""
        shape, dtype = self._types[name]
        found = torch.empty(shape, dtype=dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # says that there is one process
                dcp.load({name: found}, storage_reader=_Reader(self.folder, self._metadata), no_dist=True)
        except Exception as error:  # torch raises many types, an exception of several ranks among them
            raise InputError(
                f"tensor '{name}' in '{self.folder}' cannot be read ({' '.join(str(error).split())[:200]}): copy the folder "
                "again, or save it anew"
            ) from None
        return found


def _described(folder: Path) -> Metadata:
    path = folder / DESCRIPTION
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
        files = {str(one.relative_path) for one in found.storage_data.values()}
        assert isinstance(found, Metadata)
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise InputError(
            f"'{path}' cannot be read ({error}): name a folder that torch.distributed.checkpoint has written"
        ) from None
    for name in files:
        if not inside(folder, name).is_file():
            raise InputError(f"'{path}' names file '{name}', which is not there: copy the folder again")
    found.storage_meta = found.storage_meta or StorageMeta()
    return found


class _Planner(dcp.DefaultSavePlanner):
    """Makes each tensor when it is written."""

    def __init__(self, made: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._made = made

    def lookup_object(self, index: Any) -> torch.Tensor:
        return self._made(index.fqn)


def write_state_dict(
    folder: Path, layouts: Mapping[str, torch.Tensor], made: Callable[[str], torch.Tensor]
) -> None:
    """A folder that `torch.distributed.checkpoint.load` reads: a file per tensor, of which one at a time is in memory.

    Args:
        layouts: tensors on the device ``meta``, by name in the state dict.
        made: the tensor of a name.

    Raises:
        OSError: it cannot be written.
    """
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(layouts), storage_writer=writer, planner=_Planner(made), no_dist=True)


def same_names(known: Iterable[str], stored: Iterable[str]) -> str | None:
    """What is in front of the `known` names among those `stored`, such as ``model.`` where a state dict was one of several;
    None where they are not there.

    >>> same_names(["0.weight"], ["model.0.weight", "optimizer.state.0.weight.exp_avg"])
    'model.'
    """
    first, every = next(iter(known)), set(stored)
    found = (name.removesuffix(first) for name in sorted(every, key=len) if name.endswith(first))
    return next((one for one in found if one == "" or one.endswith(".")), None)
