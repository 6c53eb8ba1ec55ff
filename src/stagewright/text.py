"""Escaping of untrusted text before it is printed: names from files and output of other processes."""

from __future__ import annotations

import sys
import unicodedata

_KEPT = "\n\t"
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of invisible characters with an effect: controls, marks of direction, surrogates, line separators, and
code points that are not characters."""


def printable(text: str) -> str:
    r"""Return `text` with control characters escaped, except line breaks and tabs.

    >>> printable("plan \x1b[31mred\x07 \u202eleft")
    'plan \\x1b[31mred\\x07 \\u202eleft'
    >>> printable("zwölf\n層")
    'zwölf\n層'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def one_line(text: str) -> str:
    r"""Return `printable` text with line breaks and tabs escaped too.

    >>> print(one_line("x\ny\x07"))
    x\ny\x07
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """Return a count with its noun.

    >>> plural(1, "tensor"), plural(2, "tensor"), plural(2, "microbatch", "microbatches")
    ('1 tensor', '2 tensors', '2 microbatches')
    """
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def say(message: str) -> None:
    """Print a message to the user on stderr, escaped."""
    print(printable(message), file=sys.stderr, flush=True)


def silent(*_: object) -> None:
    """Report nothing: what is used where no report is given."""


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")
