"""The demonstration from its first line to its last, as `make demo` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient
from stagewright.planning.plan import load_plan


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_the_demonstration_plans_probes_and_trains(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stagewright.cli", "demo", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patient(560))
    assert done.returncode == 0, done.stderr
    large = load_plan(tmp_path / "demo" / "plan.json")
    assert (large.model.name, large.cluster.num_devices) == ("llama-3-8b", 8)
    small = load_plan(tmp_path / "demo" / "small.json")
    record = json.loads((tmp_path / "demo" / "record.json").read_text())
    assert len(record["losses"]) == 12 and record["losses"][-1] < 0.7 * record["losses"][0]
    for rank in record["ranks"]:
        predicted = small.predictions.ranks[rank["pipeline_rank"]].allocated_peak_bytes
        assert rank["allocated_peak_bytes"] == pytest.approx(predicted, rel=0.03)
    assert done.stdout.startswith("This takes about a minute on two idle cores")
    for heading in ("1. Planning", "2. Probing", "3. Planning", "4. Training", "Done in"):
        assert heading in done.stdout
