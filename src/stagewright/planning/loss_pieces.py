"""In how many pieces over tokens head and loss are evaluated: asked for, or as many as memory asks for.

With a vocabulary of 128,000 the logits of one microbatch, in float32 with their softmax and its gradient, are more than all
else that the last stage makes. In pieces only those of one slice of tokens are there at a time. No operator of the model
runs a second time for it, but every piece adds to the gradient of the head: 10 bytes a parameter, where that is float32,
beside 6 FLOP a parameter and token. With an H100 that is an eighth of the head's time for pieces of 2,048 tokens, and half
of it for 512. So the loss is in pieces where memory is short, and not elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from stagewright.tracing.models.overrides import of_text
from stagewright.tracing.models.reference import ModelReference

if TYPE_CHECKING:
    from stagewright.planning.found import Excluded
    from stagewright.planning.plan import Plan

PIECE_TOKENS = (2048, 512)
"""Of the pieces that are tried where memory is short: the smaller ones if nothing fits with the larger."""
_LARGE_SHARE = 1 / 4
"""Logits in float32 that take more of a device than this are in pieces from the beginning: they are there three times."""
_PIECE_SHARE = 1 / 16
"""What the logits of one piece may take then."""
_SHORT = 0.9
"""Memory is short on a rank that needs more than this part of what it has."""
_LOGIT_BYTES = 4
_LOGITS_ALIVE = 4
"""Times that the bytes of logits in float32 are alive at the most: those, their softmax, and the gradients of both."""
_FASTEST = 3
_MOST_SHAPES = 2


def logits_bytes(reference: ModelReference, num_tokens: int, tp: int = 1) -> int:
    """Bytes of the logits of so many tokens in float32 on one of `tp` ranks; 0 where no config says how many classes."""
    vocabulary = of_text(reference.config or {}).get("vocab_size")
    return _LOGIT_BYTES * num_tokens * -(-vocabulary // tp) if isinstance(vocabulary, int) else 0


def pieces_by_share(num_bytes: int, num_tokens: int, usable_bytes: int) -> int:
    """Pieces that bring logits of `num_bytes` down to a small share of a device; 1 where they are one already.

    >>> gib = 2**30
    >>> pieces_by_share(32 * gib, 65536, 75 * gib), pieces_by_share(4 * gib, 8192, 75 * gib)
    (8, 1)
    """
    if num_bytes <= _LARGE_SHARE * usable_bytes:
        return 1
    return _power_of_two(num_bytes / (_PIECE_SHARE * usable_bytes), num_tokens)


def pieces_of_tokens(piece_tokens: int, num_tokens: int) -> int:
    """Pieces of about so many tokens each.

    >>> [pieces_of_tokens(2048, count) for count in (512, 4096, 8192)]
    [1, 2, 4]
    """
    return _power_of_two(num_tokens / piece_tokens, num_tokens)


class Shape(NamedTuple):
    """Widths and microbatches of configurations."""

    tp: int
    microbatch_size: int
    widths: tuple[tuple[int, int], ...]
    """(dp, pp)."""


def short_of_memory(
    plans: Sequence[Plan], excluded: Iterable[Excluded], logits: Callable[[int, int], int], usable_bytes: int
) -> list[Shape]:
    """Configurations that may fit, or be faster, if logits take next to nothing: of the fastest plans those that are short
    of `usable_bytes` on the rank that makes them; where there are no plans all that lack less than logits take.

    `logits` are the bytes of the logits of microbatches of a size on one of so many tensor parallel ranks. At most
    `_MOST_SHAPES` kinds of microbatches are named, each of which takes a trace.
    """
    found: dict[tuple[int, int], dict[tuple[int, int], None]] = {}
    if plans:
        fastest = sorted(plans, key=lambda plan: plan.predictions.step_seconds)[:_FASTEST]
        for plan in fastest:
            if _is_short(plan, usable_bytes):
                found.setdefault((plan.tp, plan.microbatch_size), {})[plan.dp, plan.pp] = None
    else:
        for one in sorted(excluded, key=lambda one: one.missing_bytes or 0):
            size = one.microbatch_size
            if size and 0 < (one.missing_bytes or 0) <= _LOGITS_ALIVE * logits(size, one.tp):
                found.setdefault((one.tp, size), {})[one.dp, one.pp] = None
    return [Shape(*shape, tuple(widths)) for shape, widths in found.items()][:_MOST_SHAPES]


def _is_short(plan: Plan, usable_bytes: int) -> bool:
    """Whether the rank of the last stage gives something up, or nearly has to."""
    rank, policy = plan.placement[-1], plan.memory_policy[-1]
    kept = policy == "keep" or (not isinstance(policy, str) and not (policy.recompute or policy.offload))
    peak = plan.predictions.ranks[rank].reserved_peak_bytes
    return not kept or rank in plan.host_optimizer or peak > _SHORT * usable_bytes


def _power_of_two(wanted: float, num_tokens: int) -> int:
    pieces = 1
    while pieces < wanted and 2 * pieces * PIECE_TOKENS[-1] <= num_tokens:
        pieces *= 2
    return pieces
