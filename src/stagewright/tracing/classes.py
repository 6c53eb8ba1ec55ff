"""Classes made of a model's own, so that its modules do something around what they do."""

from __future__ import annotations

import functools


@functools.cache
def around(outer: type, inner: type) -> type:
    """A class that does what `outer` does around what `inner` does."""
    return type(f"{outer.__name__.strip('_')}{inner.__name__}", (outer, inner), {})
