"""Seeds from coordinates: random numbers that depend on where they are drawn, not on what was drawn before."""

from __future__ import annotations

_MASK = (1 << 63) - 1


def key(*coordinates: int) -> int:
    """Return a well-mixed 63-bit seed for one place, such as (seed, step, microbatch, draw).

    Source: the splitmix64 finaliser (Steele, Lea and Flood 2014) applied to each coordinate in turn.
    """
    state = 0
    for coordinate in coordinates:
        state = (state + coordinate + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK
