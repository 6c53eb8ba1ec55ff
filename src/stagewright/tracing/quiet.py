"""Notices of libraries that a trace must not pass on: they are about things a trace does not do."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

_KERNEL_LOGGER = "transformers.integrations.hub_kernels"
_TREESPEC = r".*isinstance\(treespec, LeafSpec\)"


@contextlib.contextmanager
def quiet_capture(device_type: str) -> Iterator[None]:
    """While it is open, silences

    * torch's `FutureWarning` about its own `LeafSpec`, which `torch.export` itself brings about;
    * on a CPU, transformers' notice that a kernel of a GPU library falls back to its reference: there is no
      such kernel to install. Tracing on a GPU is what a run there does, and then the notice is true.

    Everything else that a model's code says while it is traced is let through.
    """
    logger = logging.getLogger(_KERNEL_LOGGER)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _TREESPEC, FutureWarning)
        if device_type == "cpu":
            logger.addFilter(_is_no_fallback)
        try:
            yield
        finally:
            logger.removeFilter(_is_no_fallback)


def _is_no_fallback(record: logging.LogRecord) -> bool:
    return "falling back to its reference" not in record.getMessage()
