"""Zoomed out, the page shows the mean of what lies in a pixel; its script runs in node where there is one."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from patience import patient
from stagewright.report.pictures import html_page, scene_of
from stagewright.schedule import build
from stagewright.simulation import StageCosts, Timeline, simulate

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")

STUBS = """
const bars = { kind: k, stage: k, chunk: c, microbatch: mb, half: h, start: t, seconds: d };
const view = { from: 0, to: data.makespan };
let followed = -1;
"""


def run_in_node(script: str) -> str:
    assert NODE is not None
    done = subprocess.run([NODE, "-"], input=script, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, done.stderr
    return done.stdout


def script_of(page: str) -> str:
    found = re.search(r"<script type=\"module\">\n(.*)</script>", page, re.DOTALL)
    assert found is not None
    return found[1]


@needs_node
def test_the_script_of_a_page_can_be_parsed(tmp_path: Path) -> None:
    page = html_page(scene_of(simulate(build("1f1b", 2, 3), StageCosts.uniform(2))))
    script = tmp_path / "page.mjs"
    script.write_text(script_of(page))
    done = subprocess.run([str(NODE), "--check", script], capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, done.stderr


def columns(timeline: Timeline, num_columns: int) -> np.ndarray:
    """What the page draws of rank 0: [column, red green blue and share], colours weighted by their shares."""
    bars = scene_of(timeline).bars
    mine = np.flatnonzero((bars.rank == 0) & ~bars.is_overlapped)
    arrays = {
        "k": np.zeros(len(mine), int),
        "c": np.zeros(len(mine), int),
        "mb": bars.microbatch[mine],
        "h": bars.half[mine],
        "t": bars.start_s[mine],
        "d": (bars.end_s - bars.start_s)[mine],
    }
    coarse = files("stagewright.report.pictures").joinpath("coarse.js").read_text(encoding="utf-8")
    data = {"kinds": [{"fills": ["#3a6fd8"]}], "makespan": timeline.makespan_s}
    given = "".join(f"const {name} = {json.dumps(values.tolist())};" for name, values in arrays.items())
    asked = f"console.log(JSON.stringify([...columnsOf(0, {len(mine)}, {num_columns}, [])]))"
    script = f"const data = {json.dumps(data)};{given}{STUBS}{coarse}{asked}"
    return np.array(json.loads(run_in_node(script))).reshape(num_columns, 4)


@needs_node
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_every_pixel_has_the_share_that_its_rank_was_busy(name: str) -> None:
    timeline = simulate(build(name, 4, 40), StageCosts.uniform(4, 1.0, 1.3, 0.9), 0.3)
    num_columns = 37  # pixels much wider than actions
    sums = columns(timeline, num_columns)
    edges = np.linspace(0, timeline.makespan_s, num_columns + 1)
    events = list(timeline.events(0))
    expected = [
        sum(max(0.0, min(e.end_s, right) - max(e.start_s, left)) for e in events) / (right - left)
        for left, right in itertools.pairwise(edges)
    ]
    np.testing.assert_allclose(sums[:, 3], expected, atol=1e-5)
    np.testing.assert_allclose(sums[:, :3], sums[:, 3:] * [0x3A, 0x6F, 0xD8], rtol=1e-5)


@needs_node
def test_wide_actions_are_left_to_be_drawn_one_by_one() -> None:
    timeline = simulate(build("gpipe", 2, 2), StageCosts.uniform(2))
    assert not columns(timeline, 1000).any()
