"""The wheel: whole, with what `pip install stagewright[finetune]` needs, and enough to plan a fine-tuning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from patience import patient

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "stagewright"
PLANNED = (
    "finetune",
    "tiny-llama",
    "--cluster",
    "2x-rtx3090",
    "--sequence-length",
    "64",
    "--dry-run",
    "--within",
    "1",
)


def done(*command: object, **environment: str) -> str:
    finished = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, env={**os.environ, **environment},
        timeout=patient(200),
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files of the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    done(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    return next(folder.glob("*.whl"))


def test_it_has_every_file_and_what_fine_tuning_needs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (described,) = (name for name in names if name.endswith("METADATA"))
        metadata = Parser().parsestr(archive.read(described).decode())
    files = (path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*") if path.is_file())
    assert {str(path) for path in files if "__pycache__" not in path.parts} <= names
    required = metadata.get_all("Requires-Dist") or []
    assert "finetune" in (metadata.get_all("Provides-Extra") or [])
    needed = {re.split(r"\W", line)[0] for line in required if "extra == 'finetune'" in line}
    assert needed == {"bitsandbytes", "peft", "pyarrow"}

    done(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "site", wheel)
    code = "import stagewright; from stagewright.cli import main; print(stagewright.__file__, flush=True); main()"
    said = done(
        sys.executable, "-P", "-c", code, *PLANNED, "--out", tmp_path / "out",
        PYTHONPATH=str(tmp_path / "site"), STAGEWRIGHT_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    assert said.startswith(str(tmp_path / "site")) and "LoRA of rank 16" in said


def test_a_clean_environment_plans_a_fine_tuning(wheel: Path, tmp_path: Path) -> None:
    """From an index, as `pip install stagewright[finetune]` does it."""
    venv.create(tmp_path / "env", with_pip=True)
    programs = tmp_path / "env" / "bin"
    done(programs / "pip", "install", "-q", f"{wheel}[finetune]")
    said = done(
        programs / "stagewright",
        *PLANNED,
        "--out",
        tmp_path / "out",
        STAGEWRIGHT_CACHE=str(tmp_path / "cache"),
    )
    assert "tokens/s" in said and (tmp_path / "out" / "plan.json").is_file()
