"""Data is known again by its contents, however large."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stagewright.execution import data_identity
from stagewright.execution.data_identity import identity_of


def test_every_change_of_a_small_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "tokens.npy"
    ids = np.arange(1000)
    seen = []
    for place in (0, 1, 500, 999):
        ids[place] += 1
        np.save(file, ids)
        seen.append(identity_of(file))
    np.save(file, ids.astype(np.int32))
    seen.append(identity_of(file))
    assert all(not one.is_same(other) for index, one in enumerate(seen) for other in seen[:index])
    assert seen[0].kind == "tokens" and seen[0].num_tokens == 1000 and not seen[0].is_sampled


def test_a_large_file_is_known_by_its_size_ends_and_blocks_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_identity, "_WHOLE_BYTES", 4096)
    monkeypatch.setattr(data_identity, "_BLOCK_BYTES", 256)
    file = tmp_path / "text"
    whole = bytes(range(256)) * 64
    file.write_bytes(whole)
    before = identity_of(file)
    assert before.is_sampled and before.is_same(identity_of(file))
    last = len(whole) - 1
    for changed in (b"x" + whole[1:], whole[:last] + b"x", whole[:-256], whole + b"x", whole[::-1]):
        file.write_bytes(changed)
        assert not before.is_same(identity_of(file))
    middle = (len(whole) - 256) * 7 // 15
    file.write_bytes(whole[:middle] + b"x" * 256 + whole[middle + 256 :])
    assert not before.is_same(identity_of(file))
