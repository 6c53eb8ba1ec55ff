"""Loss pieces: the number of slices of tokens for which head and loss are evaluated, as given or as memory requires.

With a vocabulary of 128,000 the logits of one microbatch, in float32 with their softmax and its gradient, take more memory
than everything else on the last stage. In pieces only those of one slice of tokens are alive at a time. No operator of the
model is recomputed for it, but every piece adds to the gradient of the head: 10 bytes per parameter, where that is float32,
next to 6 FLOP per parameter and token. On an H100 that is an eighth of the head's time for pieces of 2,048 tokens, and half
of it for 512. So the loss is in pieces where memory is short, and not elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from stagewright.tracing.models.overrides import of_text
from stagewright.tracing.models.reference import ModelReference

if TYPE_CHECKING:
    from stagewright.planning.plan import Plan
    from stagewright.planning.search_result import Excluded

PIECE_TOKENS = (2048, 512)
"""Tokens of the pieces tried where memory is short; the smaller ones if nothing fits with the larger, or if a microbatch has
no more tokens than those."""
_LARGE_SHARE = 1 / 4
"""Fraction of a device above which logits in float32 are always in pieces: they are alive three times."""
_PIECE_SHARE = 1 / 16
"""Fraction of a device for the logits of one piece in that case."""
_SHORT = 0.9
"""Fraction of its memory above which a rank is short of memory."""
_LOGIT_BYTES = 4
_LOGITS_ALIVE = 4
"""Maximum copies of the float32 logits alive at once: logits, their softmax, and the gradients of both."""
_FASTEST = 3
"""Number of shapes, the fastest, whose plans may be faster with the loss in pieces."""
_MOST_SHAPES = 2


def logits_bytes(reference: ModelReference, num_tokens: int, tp: int = 1) -> int:
    """Return the bytes of the float32 logits of `num_tokens` on one of `tp` ranks; 0 without a vocabulary size."""
    vocabulary = of_text(reference.config or {}).get("vocab_size")
    return _LOGIT_BYTES * num_tokens * -(-vocabulary // tp) if isinstance(vocabulary, int) else 0


def pieces_by_share(num_bytes: int, num_tokens: int, usable_bytes: int) -> int:
    """Return the number of pieces that reduce logits of `num_bytes` to a small share of a device; 1 if they are small.

    >>> gib = 2**30
    >>> pieces_by_share(32 * gib, 65536, 75 * gib), pieces_by_share(4 * gib, 8192, 75 * gib)
    (8, 1)
    """
    if num_bytes <= _LARGE_SHARE * usable_bytes:
        return 1
    return _power_of_two(num_bytes / (_PIECE_SHARE * usable_bytes), num_tokens)


def pieces_of_tokens(piece_tokens: int, num_tokens: int) -> int:
    """Return the number of pieces of about `piece_tokens` each.

    >>> [pieces_of_tokens(2048, count) for count in (512, 4096, 8192)]
    [1, 2, 4]
    """
    return _power_of_two(num_tokens / piece_tokens, num_tokens)


class Shape(NamedTuple):
    """Parallel degrees and microbatch size of configurations."""

    tp: int
    microbatch_size: int
    degrees: tuple[tuple[int, int], ...]
    """Pairs (dp, pp)."""


def short_of_memory(
    plans: Sequence[Plan], excluded: Iterable[Excluded], logits: Callable[[int, int], int], usable_bytes: int
) -> list[Shape]:
    """Return the configurations that may fit, or be faster, if logits take almost no memory.

    They are the fastest ones with plans that are short of `usable_bytes` on the rank that computes the logits; where there
    are no plans, all that are over by less than the logits take. `logits` returns the bytes of the logits for a microbatch
    size and a tensor parallel degree. At most `_MOST_SHAPES` kinds of microbatches are returned, as each needs a trace.
    """
    shapes: dict[tuple[int, int], dict[tuple[int, int], None]] = {}
    if plans:
        fastest: dict[tuple[int, ...], list[Plan]] = {}
        for plan in sorted(plans, key=lambda plan: plan.predictions.step_seconds):
            fastest.setdefault((plan.tp, plan.microbatch_size, plan.dp, plan.pp), []).append(plan)
        for (tp, size, dp, pp), of_shape in list(fastest.items())[:_FASTEST]:
            if any(_is_short(plan, usable_bytes) for plan in of_shape):
                shapes.setdefault((tp, size), {})[dp, pp] = None
    else:
        for exclusion in sorted(excluded, key=lambda exclusion: exclusion.missing_bytes or 0):
            size = exclusion.microbatch_size
            if size and 0 < (exclusion.missing_bytes or 0) <= _LOGITS_ALIVE * logits(size, exclusion.tp):
                shapes.setdefault((exclusion.tp, size), {})[exclusion.dp, exclusion.pp] = None
    return [Shape(*shape, tuple(degrees)) for shape, degrees in shapes.items()][:_MOST_SHAPES]


def _is_short(plan: Plan, usable_bytes: int) -> bool:
    """Return whether the rank of the last stage recomputes or offloads, or nearly has to."""
    rank, policy = plan.placement[-1], plan.memory_policy[-1]
    kept = policy == "keep" or (not isinstance(policy, str) and not (policy.recompute or policy.offload))
    peak = plan.predictions.ranks[rank].reserved_peak_bytes
    return not kept or rank in plan.host_optimizer or peak > _SHORT * usable_bytes


def _power_of_two(wanted: float, num_tokens: int) -> int:
    pieces = 1
    while pieces < wanted and 2 * pieces * PIECE_TOKENS[-1] <= num_tokens:
        pieces *= 2
    return pieces
