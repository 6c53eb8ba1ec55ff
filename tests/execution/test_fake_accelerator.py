"""The executor on a device that runs behind its host: no race, no device-wide wait under a receive, at most two drains."""

from __future__ import annotations

from cells import SMALL_LLAMA, Cell
