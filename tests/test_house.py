"""Rules of the house: light imports, layers, documented packages, no word of anything but the project."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stagewright
from nightly import nightly_tests

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "stagewright"
PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
DESIGN = ROOT / "docs" / "design"

# Further words that no file may mention, separated by commas.
FORBIDDEN = os.environ.get("STAGEWRIGHT_FORBIDDEN", "")


def python(code: str) -> str:
    """What a fresh interpreter prints for `code`."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_importing_stagewright_imports_neither_torch_nor_transformers() -> None:
    loaded = python("import sys, stagewright; print(sorted({'torch', 'transformers'} & set(sys.modules)))")
    assert loaded.strip() == "[]"


def test_everything_exported_exists() -> None:
    for name in getattr(stagewright, "__all__", []):
        assert hasattr(stagewright, name), f"stagewright.__all__ names {name}, which does not exist"


def test_import_contracts_hold() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


DEVICE_MODULES = re.compile(
    r"\btorch\.(cuda|xpu|accelerator|Stream|Event)\b|\bfrom torch import .*\b(cuda|accelerator)\b"
)


def test_one_module_names_what_torch_has_for_devices() -> None:
    named = {
        str(path.relative_to(PACKAGE)): line
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if DEVICE_MODULES.search(line)
    }
    assert named.pop("execution/accelerator.py")
    assert not named, f"ask execution/accelerator.py instead: {named}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_every_package_says_what_it_is(package: Path) -> None:
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text()))


def test_the_changelog_opens_with_this_version() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == stagewright.__version__


def test_every_design_page_is_in_the_index() -> None:
    index = (DESIGN / "0000-index.md").read_text()
    links = set(re.findall(r"\]\((\d{4}-[^)]+\.md)\)", index))
    pages = {path.name for path in DESIGN.glob("*.md")} - {"0000-index.md"}
    assert links == pages


def test_the_training_text_is_plain_and_a_few_hundred_kilobytes() -> None:
    text = (PACKAGE / "data" / "moby_dick.txt").read_bytes()
    assert 300_000 < len(text) < 450_000
    assert text.isascii()
    assert b"Gutenberg" not in text


def forbidden_words(root: Path, home: Path, further: str) -> list[str]:
    """What no file may mention: this machine's own paths and the words asked for.

    A path of one part (`/src`, `/root`) says nothing about a machine and is left out.
    """
    paths = [str(path) for path in (root, home) if len(path.parts) > 2]
    return paths + [word.strip() for word in further.split(",") if word.strip()]


def mentions(text: str, words: list[str]) -> list[str]:
    """Lines of `text` in which one of `words` stands by itself, whatever its case."""
    found = [rf"(?<!\w){re.escape(word)}(?!\w)" for word in words]
    pattern = re.compile("|".join(found), flags=re.IGNORECASE)
    return [line for line in text.splitlines() if pattern.search(line)] if words else []


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True, cwd=ROOT)
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_file_mentions_this_machine_or_a_forbidden_word() -> None:
    words = forbidden_words(ROOT, Path.home(), FORBIDDEN)
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in tracked_files()
        if path.is_file()
        for line in mentions(path.read_text(errors="ignore"), words)
    ]
    assert not found, "\n".join(found)


def test_mentions_finds_whole_words_only() -> None:
    words = forbidden_words(Path("/build/tree"), Path("/root"), "secret, ")
    assert words == ["/build/tree", "secret"]
    assert mentions("cd /build/tree/src\n/build/trees\nA Secret!\nsecretary", words) == [
        "cd /build/tree/src",
        "A Secret!",
    ]


def test_nightly_tests_exist() -> None:
    for test in nightly_tests():
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test
