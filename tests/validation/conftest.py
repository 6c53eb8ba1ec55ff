"""The scripts in `validation/` are programs, not a package: their folder is put on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "validation"))
