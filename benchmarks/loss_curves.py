"""Loss curves of one model and text under different plans, beside the same training in one process.

    python benchmarks/loss_curves.py [--steps 300] [--dtype fp64] [--picture docs/images/loss_curves.svg] [--output FILE]

Plans of the bundled small Llama, on this machine's processor, run one after the other by `stagewright run` on the text that
ships with it. Prints the largest difference between each curve and that of one process, relative to the loss; the picture
has all of them. Sums in another order differ in the last digit, and training magnifies that from step to step: in float32 to
what can be seen after some hundred steps, in float64 not.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from figures import machine, write
from local_cluster import local

WAYS: dict[str, dict[str, Any]] = {
    "one process": {},
    "PP 4": {"pp": 4},
    "PP 2 x DP 2": {"pp": 2, "dp": 2},
    "ZeRO 3 x 4": {"dp": 4, "zero": 3},
    "TP 2 x PP 2": {"tp": 2, "pp": 2},
}
SEQUENCE, BATCH = 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dtype", choices=("fp32", "fp64"), default="fp32")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = {
            name: curve(Path(folder) / name, way, options.steps, options.dtype) for name, way in WAYS.items()
        }
    plain = curves["one process"]
    lines = [
        f"# Loss curves of {options.steps} steps, {date.today()}", "",
        f"`python benchmarks/loss_curves.py --steps {options.steps} --dtype {options.dtype}`: the bundled tiny-llama on the "
        f"bundled text, batches of {BATCH} x {SEQUENCE} bytes; {json.dumps(machine())}", "",
        "| plan | loss at the start | at the end | largest difference from one process |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, losses in curves.items():
        apart = max(abs(one - other) / other for one, other in zip(losses, plain, strict=True))
        lines.append(f"| {name} | {losses[0]:.4f} | {losses[-1]:.4f} | {apart:.1e} |")
    write(lines, options.output)
    if options.picture:
        draw(curves, options.picture)


def curve(folder: Path, way: dict[str, Any], num_steps: int, dtype: str) -> list[float]:
    """The losses of all steps of a run."""
    import stagewright

    job = stagewright.Job(
        global_batch=BATCH, sequence_length=SEQUENCE, dtype=dtype, learning_rate=1e-3, num_steps=num_steps
    )
    widths: dict[str, Any] = {"pp": way.get("pp", 1), "dp": way.get("dp", 1), "tp": way.get("tp", 1)}
    cluster = local(widths["pp"] * widths["dp"] * widths["tp"], like="h100")
    found = stagewright.plan("tiny-llama", cluster, job, zero=way.get("zero", 0), **widths)
    folder.mkdir(parents=True)
    found.plans[0].save(folder / "plan.json")
    text = Path(stagewright.__file__).parent / "data" / "moby_dick.txt"
    record = stagewright.run(folder / "plan.json", text, out=folder, device="cpu")
    assert record is not None
    return [loss or float("nan") for loss in record.losses]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """All curves in one picture, an SVG without further libraries."""
    width, height, left, bottom = 720, 360, 56, 40
    colours = ("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
    top = max(max(losses) for losses in curves.values())
    low = min(min(losses) for losses in curves.values())
    count = len(next(iter(curves.values())))

    def at(step: int, loss: float) -> str:
        x = left + (width - left - 12) * step / max(count - 1, 1)
        y = 12 + (height - bottom - 12) * (top - loss) / (top - low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for loss in (low, (low + top) / 2, top):
        x, y = at(0, loss).split(",")
        parts.append(
            f'<text x="{float(x) - 6}" y="{y}" text-anchor="end" dominant-baseline="middle">{loss:.2f}</text>'
        )
        parts.append(f'<line x1="{left}" x2="{width - 12}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
    for step in (0, count // 2, count - 1):
        x, _ = at(step, low).split(",")
        parts.append(f'<text x="{x}" y="{height - 22}" text-anchor="middle">{step + 1}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">step</text>')
    for place, (name, losses) in enumerate(curves.items()):
        points = " ".join(at(step, loss) for step, loss in enumerate(losses))
        dash = f' stroke-dasharray="{3 + 2 * place} {3 * place}"' if place else ""
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[place]}" stroke-width="1.5"{dash}/>'
        )
        y = 24 + 16 * place
        parts.append(
            f'<line x1="{width - 150}" x2="{width - 126}" y1="{y}" y2="{y}" stroke="{colours[place]}"{dash}/>'
        )
        parts.append(f'<text x="{width - 120}" y="{y + 4}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


if __name__ == "__main__":
    main()
