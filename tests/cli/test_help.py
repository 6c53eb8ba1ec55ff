"""Help of every verb: a screen of it, with an example, and nothing that cannot be found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stagewright.cli.app import app

GROUP: Any = typer.main.get_group(app)
HELP = {"--help", "--help-all"}
VERBS = [(name,) for name in GROUP.commands if name != "checkpoint"]
VERBS += [("checkpoint", name) for name in GROUP.commands["checkpoint"].commands]


def helped(*words: str) -> str:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_is_a_screen_with_an_example(verb: tuple[str, ...]) -> None:
    text = helped(*verb, "--help")
    lines = text.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 80
    if verb == ("schema",):
        return
    example = lines[lines.index("Example:") + 1]
    assert example.startswith(f"  stagewright {' '.join(verb)}")
    assert not re.search(r"\w-$", text, re.MULTILINE), "a name is broken at its hyphen"


@pytest.mark.parametrize("verb", ["plan", "estimate", "run", "trace"])
def test_what_help_does_not_explain_it_names(verb: str) -> None:
    brief, whole = helped(verb, "--help"), helped(verb, "--help-all")
    names = {
        max(param.opts, key=len) for param in GROUP.commands[verb].params if param.opts[0].startswith("-")
    }
    assert all(re.search(rf"{name}\b", brief) for name in names)
    explained = re.findall(r"^  (?:-\w, )?(--[\w-]+)", whole, re.MULTILINE)
    assert set(explained) >= names | HELP > set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", brief, re.MULTILINE))
    assert "More, which --help-all explains:" in brief and "More, which" not in whole


def test_first_sentences_are_whole_in_the_list_of_verbs() -> None:
    assert "..." not in helped("--help").partition("Plan:")[2]


def test_every_verb_is_listed_under_one_heading() -> None:
    listed = re.findall(r"^  ([a-z-]+)  ", helped("--help").partition("\nPlan:")[2], re.MULTILINE)
    assert sorted(listed) == sorted(GROUP.commands)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "tiny-llama", "--clustr", "4x-h100"), "No such option: --clustr"),
        (("plan", "tiny-llama"), "Missing option '--cluster' / '-c' (see `stagewright plan --help`)"),
        (
            ("plan", "tiny-llama", "-c", "4x-h100", "--global-batch", "4M"),
            "'--global-batch': give a whole number",
        ),
        (("checkpoint", "shw"), "No such command 'shw'"),
        (("--versio",), "No such option: --versio"),
    ],
)
def test_errors_of_the_parser_look_like_all_others(words: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, words, prog_name="stagewright")
    assert done.exit_code == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_a_shell_completes_options() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from stagewright.cli.app import app; app(prog_name='stagewright')"],
        env={**os.environ, "_STAGEWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": "stagewright plan --help-",
             "COMP_CWORD": "2"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["--help-all"], done.stderr
