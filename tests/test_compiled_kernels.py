"""Machine code of kernels belongs to exactly the sources it was made from."""

from __future__ import annotations

import re
from pathlib import Path

import numba
import pytest

from stagewright import compiled
from stagewright.planning.joint import compiling as ahead


def test_every_file_with_a_kernel_is_a_source() -> None:
    kernels = re.compile(r"^@compiled(_helper)?$", re.MULTILINE)
    files = {
        str(path.relative_to(compiled.PACKAGE))
        for path in compiled.PACKAGE.rglob("*.py")
        if kernels.search(path.read_text())
    }
    assert files == set(compiled.SOURCES)


def test_code_of_other_sources_lies_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [compiled.kernel_folder.__wrapped__()]
    monkeypatch.setattr(compiled, "SOURCES", compiled.SOURCES[1:])
    folders.append(compiled.kernel_folder.__wrapped__())
    assert None not in folders and len(set(folders)) == 2


def test_the_place_of_other_compiled_functions_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "elsewhere")

    @compiled.compiled
    def twice(number: int) -> int:
        return 2 * number

    assert twice(4) == 8 and numba.config.CACHE_DIR == "elsewhere"  # type: ignore[attr-defined]


def test_another_process_compiles_what_the_joint_search_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = compiled.kernel_folder()
    assert code is not None
    with ahead.compiling() as process:
        if process is not None:  # the first time with these sources
            assert process.wait(timeout=200) == 0
    assert (code / "joint-search-compiled").exists()
    with ahead.compiling() as process:
        assert process is None
    monkeypatch.setattr(ahead, "kernel_folder", lambda: tmp_path)  # in which nothing is said to be done
    monkeypatch.setattr(ahead, "num_cores", lambda: 2)
    with ahead.compiling() as process:
        assert process is not None
    assert process.returncode is not None
