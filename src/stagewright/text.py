"""Text of others on a terminal: names from files and words of other processes, shown and never obeyed."""

from __future__ import annotations

import sys
import unicodedata

_KEPT = "\n\t"
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode's categories of what is not seen but acts: controls, marks of direction, halves of pairs, line separators, what is
no character."""


def printable(text: str) -> str:
    r"""`text` with what a terminal would obey written out; line breaks and tabs stay.

    >>> printable("plan \x1b[31mred\x07 \u202eleft")
    'plan \\x1b[31mred\\x07 \\u202eleft'
    >>> printable("zwölf\n層")
    'zwölf\n層'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def one_line(text: str) -> str:
    r"""`printable` text in which line breaks and tabs are written out too.

    >>> print(one_line("x\ny\x07"))
    x\ny\x07
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def say(message: str) -> None:
    """Lines on stderr, for the user: of text of others what can be seen."""
    print(printable(message), file=sys.stderr, flush=True)


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")
