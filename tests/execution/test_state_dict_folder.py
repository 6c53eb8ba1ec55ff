"""Folders of torch.distributed.checkpoint from strangers: read as plain data, or refused, and nothing of them runs."""

from __future__ import annotations

import io
import os
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from stagewright.errors import InputError
from stagewright.execution.state_dict_folder import DESCRIPTION, StateDictFolder

TENSORS = {"weight": torch.arange(12.0).view(3, 4), "half": torch.ones(2, dtype=torch.bfloat16)}
PICKLER: Any = vars(pickle)["_Pickler"]  # the one in Python, which can be changed
PATH = b"cpathlib\nPosixPath\n"
LAYOUT = b"ctorch.serialization\n_get_layout\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {**TENSORS, "scalar": torch.tensor(3), "steps": 7, "text": "what is no tensor"}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def described(folder: Path) -> Metadata:
    with (folder / DESCRIPTION).open("rb") as file:
        return pickle.load(file)


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


class Command:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_tensors_are_read_as_torch_saved_them(folder: Path) -> None:
    stored = StateDictFolder(folder)
    assert stored.shapes == {"weight": (3, 4), "half": (2,), "scalar": ()}
    assert all(torch.equal(stored.read(name), tensor) for name, tensor in TENSORS.items())
    assert stored.read("half").dtype == torch.bfloat16 and stored.read("scalar").item() == 3


def _replaced(change: Callable[[Metadata, Path], None]) -> Callable[[Path, Path], None]:
    """Rewrite the description after `change`, which gets a folder that nothing may make."""

    def write(folder: Path, mark: Path) -> None:
        metadata = described(folder)
        change(metadata, mark)
        (folder / DESCRIPTION).write_bytes(pickle.dumps(metadata, protocol=4))

    return write


def _prefixed(opcodes: bytes) -> Callable[[Path, Path], None]:
    """Put `opcodes` in front of the description's own, in protocol 2, as a pickle may."""

    def write(folder: Path, mark: Path) -> None:
        body = pickle.dumps(described(folder), protocol=2)
        (folder / DESCRIPTION).write_bytes(body[:2] + opcodes + body[2:])

    return write


def _raw(opcodes: bytes) -> Callable[[Path, Path], None]:
    def write(folder: Path, mark: Path) -> None:
        (folder / DESCRIPTION).write_bytes(opcodes)

    return write


def _calls(metadata: Metadata, mark: Path) -> None:
    metadata.planner_data = Command(mark)


def _leaves(metadata: Metadata, mark: Path) -> None:
    for location in metadata.storage_data.values():
        location.relative_path = "../outside.distcp"


def _path_object(metadata: Metadata, mark: Path) -> None:
    for location in metadata.storage_data.values():
        location.relative_path = Path("__0_0.distcp")


def _lacks_a_chunk(metadata: Metadata, mark: Path) -> None:
    metadata.state_dict_metadata["weight"].chunks.clear()  # type: ignore[union-attr]


def _has_no_shape(metadata: Metadata, mark: Path) -> None:
    metadata.state_dict_metadata["weight"].size = (3, 4)  # type: ignore[union-attr,assignment]


def _has_no_locations(metadata: Metadata, mark: Path) -> None:
    metadata.storage_data = None


def _linked(folder: Path, mark: Path) -> None:
    moved = folder.parent / "elsewhere.distcp"
    (folder / "__0_0.distcp").rename(moved)
    (folder / "__0_0.distcp").symlink_to(moved)


def _linked_description(folder: Path, mark: Path) -> None:
    (folder / DESCRIPTION).rename(folder.parent / "elsewhere")
    (folder / DESCRIPTION).symlink_to(folder.parent / "elsewhere")


def _piped_description(folder: Path, mark: Path) -> None:
    (folder / DESCRIPTION).unlink()
    os.mkfifo(folder / DESCRIPTION)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_replaced(_calls), r"names 'posix.mkdir', which no description has"),
        (_prefixed(b"(N}" + text("__call__") + LAYOUT + b"stb0"), "uses nothing as PickledObject"),
        (_prefixed(PATH + b"}" + text("cwd") + LAYOUT + b"sb0"), "uses Name as PickledObject"),
        (_prefixed(PATH + b"(N}" + text("_str") + text("/etc/passwd") + b"stb0"), "uses Name as PickledObject"),
        (_prefixed(LAYOUT + b"}" + text("cache") + b"}sb0"), "uses Name as PickledObject"),
        (_prefixed(b"ccollections\nOrderedDict\n)R}" + text("items") + LAYOUT + b"sb0"), "uses dict as PickledObject"),
        (_prefixed(b"ctorch\nload\n0"), "names 'torch.load', which no description has"),
        (_prefixed(b"ctorch\n_utils._rebuild_tensor\n0"), "which no description has"),
        (_prefixed(b"(cposix\nsystem\no0"), "names 'posix.system', which no description has"),
        (_prefixed(b"(iposix\nsystem\n0"), "opcode INST, which no plain data has"),
        (_prefixed(b"Pname\n0"), "opcode PERSID, which no plain data has"),
        (_prefixed(b"\x82\x010"), "opcode EXT1, which no plain data has"),
        (_prefixed(b"})Ns0"), "a dict whose keys are neither texts, numbers nor objects"),
        (_raw(b"\x80\x02."), "takes more from its stack"),
        (_raw(b"\x80\x02h\x07."), "no entry 7 in its memo"),
        (_raw(b"\x80\x02]]a."), "lacks a Metadata where one is required"),
        (_raw(b"\x80\x02N"), "cannot be read"),
        (_raw(b""), "cannot be read"),
        (_raw(b"\x00" * 100), "cannot be read"),
        (_replaced(_leaves), "lies outside of"),
        (_replaced(_path_object), "has a PickledObject where a str is required"),
        (_replaced(_lacks_a_chunk), "the chunks of a tensor do not add up to its size"),
        (_replaced(_has_no_shape), "a shape is not a torch.Size"),
        (_replaced(_has_no_locations), "has a NoneType where a dict is required"),
        (_linked, "lies outside of"),
        (_linked_description, "lies outside of"),
        (_piped_description, "it is not a file"),
    ],
)  # fmt: skip
def test_descriptions_that_are_more_than_data_are_refused(
    write: Callable[[Path, Path], None], message: str, folder: Path, tmp_path: Path
) -> None:
    write(folder, tmp_path / "mark")
    with pytest.raises(InputError, match=message):
        StateDictFolder(folder)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("is_described_as_bytes", [False, True])
def test_objects_next_to_tensors_are_never_unpickled(
    is_described_as_bytes: bool, folder: Path, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    torch.save(Command(tmp_path / "mark"), buffer)
    (folder / "zz.distcp").write_bytes(buffer.getvalue())
    metadata = described(folder)
    location: Any = type(next(iter(metadata.storage_data.values())))
    for index in list(metadata.storage_data):
        if index.fqn == "weight":
            metadata.storage_data[index] = location("zz.distcp", 0, len(buffer.getvalue()))
    if is_described_as_bytes:
        metadata.state_dict_metadata["weight"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex("weight")] = location("zz.distcp", 0, len(buffer.getvalue()))
    (folder / DESCRIPTION).write_bytes(pickle.dumps(metadata))
    stored = StateDictFolder(folder)
    if is_described_as_bytes:
        assert "weight" not in stored.shapes
    else:
        with pytest.raises(InputError, match=r"tensor 'weight' in '.*' cannot be read"):
            stored.read("weight")
    assert torch.equal(stored.read("half"), TENSORS["half"]) and not (tmp_path / "mark").exists()


def test_a_description_that_says_tensors_to_one_and_bytes_to_another_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    """A dict whose `items` is replaced by a path that can be called: what an allow-list of names lets through."""
    metadata = described(folder)
    pairs = list(metadata.state_dict_metadata.items())
    entries = OrderedDict((name, BytesStorageMetadata()) for name, _ in pairs)
    listing = io.BytesIO()
    PICKLER(listing, 2).dump(pairs)

    class Dict: ...

    class Pickler(PICKLER):
        def save(self, obj: Any, save_persistent_id: bool = True) -> None:
            if not isinstance(obj, Dict):
                super().save(obj, save_persistent_id)
                return
            self.write(b"ccollections\nOrderedDict\n)R(")
            for name, entry in entries.items():
                super().save(name)
                super().save(entry)
            self.write(b"u}" + text("items") + PATH + b"(" + text("k") + b"tRsb")

    metadata.state_dict_metadata = Dict()  # type: ignore[assignment]
    body = io.BytesIO()
    Pickler(body, 2).dump(metadata)
    callable_paths = PATH + b"(N}" + text("__call__") + LAYOUT + b"stb0"
    answers = (
        LAYOUT
        + b"}"
        + text("cache")
        + b"}"
        + PATH
        + b"("
        + text("k")
        + b"tR"
        + listing.getvalue()[2:-1]
        + b"ssb0"
    )
    (folder / DESCRIPTION).write_bytes(
        body.getvalue()[:2] + callable_paths + body.getvalue()[2:-1] + answers + b"."
    )
    before = dict(vars(Path)), dict(vars(torch.serialization._get_layout))
    with pytest.raises(InputError, match="cannot be read"):
        StateDictFolder(folder)
    assert before == (dict(vars(Path)), dict(vars(torch.serialization._get_layout)))


def test_damaged_folders_are_one_error(folder: Path) -> None:
    """Bytes changed at random in the description and in the tensors: read, or refused with one sentence."""
    generator, refused = random.Random(0), 0
    originals = {path: path.read_bytes() for path in folder.iterdir()}
    for path, content in originals.items():
        for _ in range(100):
            damaged = bytearray(content)
            for _ in range(generator.randrange(1, 4)):
                damaged[generator.randrange(len(damaged))] = generator.randrange(256)
            path.write_bytes(damaged[: generator.choice([len(damaged), generator.randrange(len(damaged))])])
            try:
                stored = StateDictFolder(folder)
                for name in stored.shapes:
                    stored.read(name)
            except InputError:
                refused += 1
        path.write_bytes(content)
    assert refused > 100
