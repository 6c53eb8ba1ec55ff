"""Files of the current folder that have the names of libraries: nothing imports them, in no process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.execution import script
from stagewright.machine import python_command
from stagewright.tracing.models import source
from stagewright.tracing.models.factories import function_of
from stagewright.tracing.models.source import factory_source

HOSTILE = "open('IMPORTED', 'a').write(__name__)\nraise SystemExit('imported from the current folder')\n"
PACKAGE = Path(__file__).resolve().parents[2] / "src" / "stagewright"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files that have names of libraries, of which `colorsys` is not imported yet."""
    for name in ("typer", "torch", "numpy", "json", "subprocess", "pydantic", "random", "colorsys"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    for name in ("colorsys", "neighbour_of_factory", "factory_here"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_processes_import_nothing_from_the_current_folder(hostile: Path) -> None:
    worker = "stagewright.execution.adapting"
    for command in (
        python_command(worker, "nowhere"),
        [sys.executable, "-m", "stagewright.cli", "--version"],
    ):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert "from the current folder" not in done.stderr
        assert done.returncode == 0 or worker in command
    assert not (hostile / "IMPORTED").exists()


def test_one_function_says_how_another_python_starts() -> None:
    elsewhere = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if "[sys.executable" in path.read_text() and path.name != "machine.py"
    ]
    assert elsewhere == []


@pytest.mark.parametrize("text", ["factory_here:make", "factory_here.py:make"])
def test_a_factory_sees_its_folder_after_libraries(text: str, hostile: Path) -> None:
    """Its neighbours also when it is called; looking for its source leaves no trace."""
    (hostile / "neighbour_of_factory.py").write_text("value = 7\n")
    (hostile / "factory_here.py").write_text(
        "import colorsys\n"
        "def make():\n"
        "    from neighbour_of_factory import value\n"
        "    return colorsys.rgb_to_hsv(0, 0, value)\n"
    )
    before, earlier = list(sys.path), set(source._SEARCHED_LAST)
    libraries = [entry for entry in before if entry not in earlier]
    factories = [entry for entry in before if entry in earlier]
    assert "colorsys" in factory_source(text)
    assert sys.path == before
    assert function_of(text)()[2] == 7
    assert sys.path == [*libraries, str(hostile), *factories] and not (hostile / "IMPORTED").exists()


def test_a_script_has_its_own_folder_first(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `python SCRIPT`; and that of `launch` is not the current one."""
    folder = hostile / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text("import sys, colorsys\nsys.own = colorsys.__file__, sys.path[0]\n")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    assert script.main(str(folder / "train.py"), []) == 0
    where, first = sys.own  # type: ignore[attr-defined]
    assert Path(where) == Path(sys.base_prefix) / "lib" / Path(where).parent.name / "colorsys.py"
    assert first == str(folder) and not (hostile / "IMPORTED").exists()
