"""Quoting of a plan's text in files for other programs: comments, words of a shell, strings.

Names of models, schedules and files may hold any characters; they reach a file only through these functions.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable

from stagewright.errors import InputError
from stagewright.planning.plan import Plan
from stagewright.text import one_line


def title(plan: Plan) -> str:
    """Return one line that names the plan of a file."""
    return one_line(
        f"{plan.model.name}, {plan.schedule}, pp {plan.pp} x dp {plan.dp} x tp {plan.tp}: written by Stagewright"
    )


def comments(lines: Iterable[str]) -> str:
    r"""Return a comment of a shell, YAML, TOML or Python for each of `lines`, none of which ends it.

    >>> print(comments(["tiny", "x\ntouch y"]))
    # tiny
    # x\ntouch y
    """
    return "\n".join(f"# {one_line(line)}" for line in lines)


def quoted(text: str) -> str:
    r"""Return `text` as a string of YAML or TOML, in which what cannot be seen is written out.

    >>> print(quoted('a "b"\n'))
    "a \"b\"\\n"
    """
    return json.dumps(one_line(text), ensure_ascii=False)


def file_word(name: str) -> str:
    """Return the name of a file as one word of a shell that is not taken for an option.

    Raises:
        InputError: it has invisible characters, such as a line break.

    >>> file_word("plan.json"), file_word("-x $(y).json")
    ('plan.json', "'./-x $(y).json'")
    """
    if one_line(name) != name:
        raise InputError(
            f"file '{one_line(name)}' has characters in its name that cannot be seen, which launch files do not quote: "
            "rename it"
        )
    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def label(name: str, most: int = 40) -> str:
    """Return `name` as a label of DNS, which names a job: small letters, digits and hyphens, a letter first.

    >>> label("Llama-3.1 8B"), label("7b"), label("../../x"), label("層")
    ('llama-3-1-8b', 'run-7b', 'x', 'run')
    """
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower()).strip("-")
    named = kept if kept[:1].isalpha() else f"run-{kept}".strip("-")
    return named[:most].strip("-")
