"""The scripts in `examples`, as their first lines say that they are started."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plans import make_plan
from typer.testing import CliRunner

from stagewright.cli.app import app

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.multiprocess


def test_a_loop_of_ones_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_plan(tmp_path / "plan.json", num_microbatches=2, sequence_length=32, microbatch_size=2)
    script, out = EXAMPLES / "own_loop.py", tmp_path / "out"
    words = ["--", "--steps", "4", "--evaluate-every", "2", "--out", str(out)]
    done = CliRunner().invoke(app, ["launch", str(tmp_path / "plan.json"), str(script), *words])
    assert done.exit_code == 0, done.output
    said = capfd.readouterr()
    before, after = (
        float(line.rpartition(" ")[2]) for line in (said.out + said.err).splitlines() if "held-out" in line
    )
    assert after < before
    assert "step 4/4" in said.err
    assert torch.load(out / "best.pt")["model.embed_tokens.weight"].dtype == torch.float32


def test_scripts_that_cannot_run_say_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_plan(tmp_path / "plan.json", num_microbatches=2, sequence_length=32)
    done = CliRunner().invoke(app, ["launch", str(tmp_path / "plan.json"), str(tmp_path / "none.py")])
    assert done.exit_code == 2 and "is not there: check the path" in " ".join(done.stderr.split())
    (tmp_path / "wrong.py").write_text("raise ValueError('of the script')\n")
    done = CliRunner().invoke(app, ["launch", str(tmp_path / "plan.json"), str(tmp_path / "wrong.py")])
    assert done.exit_code == 1 and "ValueError: of the script" in capfd.readouterr().err
