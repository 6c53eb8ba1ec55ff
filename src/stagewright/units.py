"""Conversion between SI units, used inside, and the units that people read and write."""

from __future__ import annotations

import re

from stagewright.errors import InputError
from stagewright.limits import check_bytes

KIB, MIB, GIB = 2**10, 2**20, 2**30
KILO, MEGA, GIGA, TERA = 1e3, 1e6, 1e9, 1e12
MICRO, MILLI = 1e-6, 1e-3

_BYTE_UNITS = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def parse_bytes(text: str | int | float) -> int:
    """Return bytes from ``"16GiB"``, ``"80 GB"`` or a plain number; binary and decimal units differ.

    >>> parse_bytes("1.5GiB")
    1610612736
    >>> parse_bytes("80 GB")
    80000000000

    Raises:
        InputError: not an amount of memory, or impossibly large.
    """
    if isinstance(text, int | float):
        return int(check_bytes(text, "the amount of memory"))
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and _BYTE_UNITS.get(match[2].lower())
    if not match or unit is None:
        raise InputError(
            f"'{text}' is not an amount of memory: write a number with KiB, MiB, GiB, MB or GB, e.g. 16GiB"
        )
    return int(check_bytes(float(match[1]) * unit, f"'{text.strip()}'"))


def parse_count(text: str) -> int | None:
    """Return a whole number of at most nine ASCII digits; None for anything else.

    >>> parse_count("12"), parse_count("-1"), parse_count("²"), parse_count("9" * 5000)
    (12, None, None, None)
    """
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def format_bytes(count: float) -> str:
    """Return bytes in a suitable unit.

    >>> format_bytes(1610612736), format_bytes(2048), format_bytes(3 * 10**6)
    ('1.50 GiB', '2.0 KiB', '2.9 MiB')
    """
    magnitude = abs(count)
    if magnitude >= GIB:
        return f"{count / GIB:.2f} GiB"
    if magnitude >= MIB:
        return f"{count / MIB:.1f} MiB"
    if magnitude >= KIB:
        return f"{count / KIB:.1f} KiB"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return seconds in a suitable unit.

    >>> format_seconds(12.345), format_seconds(20.01), format_seconds(0.01234), format_seconds(4.2e-5)
    ('12.3 s', '20.0 s', '12.3 ms', '42.0 us')
    >>> format_seconds(9.0)  # a whole number, as of schedules in units of time
    '9 s'
    """
    magnitude = abs(seconds)
    if magnitude >= 1:
        digits = 0 if seconds == round(seconds) or magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2
        return f"{seconds:.{digits}f} s"
    if magnitude >= MILLI:
        return f"{seconds / MILLI:.1f} ms"
    return f"{seconds / MICRO:.1f} us"


def format_count(count: float) -> str:
    """Return a count in a suitable unit.

    >>> format_count(8.03e9), format_count(1500), format_count(12)
    ('8.03 B', '1.50 K', '12')
    """
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {suffix}"
    return f"{count:.0f}"
