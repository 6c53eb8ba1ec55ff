"""Machine code of kernels belongs to exactly the sources it was made from."""

from __future__ import annotations

import re

import numba
import pytest

from stagewright import compiled


def test_every_file_with_a_kernel_is_a_source() -> None:
    kernels = re.compile(r"^@compiled(_helper)?$", re.MULTILINE)
    files = {
        str(path.relative_to(compiled.PACKAGE))
        for path in compiled.PACKAGE.rglob("*.py")
        if kernels.search(path.read_text())
    }
    assert files == set(compiled.SOURCES)


def test_code_of_other_sources_lies_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [compiled._folder.__wrapped__()]
    monkeypatch.setattr(compiled, "SOURCES", compiled.SOURCES[1:])
    folders.append(compiled._folder.__wrapped__())
    assert None not in folders and len(set(folders)) == 2


def test_the_place_of_other_compiled_functions_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "elsewhere")

    @compiled.compiled
    def twice(number: int) -> int:
        return 2 * number

    assert twice(4) == 8 and numba.config.CACHE_DIR == "elsewhere"  # type: ignore[attr-defined]
