"""How long `stagewright plan` takes for large models on large clusters, in units of what `torch.export` of Llama-3-8B takes.

    python benchmarks/plan_scale.py [--only PART-OF-A-NAME] [--limit 600] [--first] [--json]

X is `torch.export` of Llama-3-8B, 8,192 tokens with labels, on fake tensors, imports left out, around every case. Each
case is the whole command in a new process: with no trace kept (`new`), then with those that the run before has kept
(`kept`); kernels are compiled before. `first` is when its progress on a terminal shows a plan. A case that takes longer
than the limit is stopped and counted as that. With `--first` every bundled model is planned for 512 H100 with nothing kept,
and only until a plan is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from large_estimates import EXPORT

_FACTORY = """
import torch

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.mix = torch.nn.Linear(width, width)
        self.wide = torch.nn.Linear(width, 4 * width)
        self.back = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + torch.cumsum(torch.tanh(self.mix(self.norm(x))), 1) / x.shape[1]
        return x + self.back(torch.nn.functional.gelu(self.wide(x)))

class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50304, 2048)
        self.blocks = torch.nn.ModuleList(Block(2048) for _ in range(32))
        self.head = torch.nn.Linear(2048, 50304)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

def build(microbatch_size, sequence_length):
    tokens = torch.zeros(microbatch_size, sequence_length, dtype=torch.long)
    return Mixer(), (tokens, tokens.clone())
"""
"""A module that no formula of ours ever knew."""


@dataclass(frozen=True)
class Case:
    """A question, and the most that it may take, in X, with no trace kept and with all."""

    model: str
    cluster: str
    batch: int
    tokens: int
    new: float
    kept: float
    more: tuple[str, ...] = field(default=())

    def command(self) -> list[str]:
        return [
            sys.executable, "-m", "stagewright.cli", "plan", self.model, "--cluster", self.cluster, "--global-batch",
            str(self.batch), "--sequence-length", str(self.tokens), "--json", *self.more,
        ]  # fmt: skip


CASES = (
    Case("llama-3-8b", "8x-h100", 64, 8192, 1.5, 0.5),
    Case("llama-3-70b", "64x8x-h100", 1024, 8192, 3, 1.5),
    Case("llama-3-405b", "2048x8x-h100", 2048, 8192, 5, 2.5),
    Case("deepseek-v3", "256x8x-h100", 2048, 4096, 8, 4, ("--runtime", "megatron-core+te")),
    Case("nemotron-h-8b", "32x8x-h100", 512, 4096, 4, 2),
    Case("stagewright_factory:build", "8x8x-h100", 256, 2048, 2, 1),
)


def export_seconds() -> float:
    """X."""
    done = subprocess.run([sys.executable, "-c", EXPORT], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def once(case: Case, folder: str, limit_s: float, *, only_first: bool = False) -> dict[str, Any]:
    """One run of the command, with its stderr on a terminal; with `only_first`, until that shows a plan."""
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ, "STAGEWRIGHT_CACHE": folder, "PYTHONPATH": path, "COLUMNS": "200", "TERM": "xterm",
    }  # fmt: skip
    ours, theirs = os.openpty()
    begun, shown, first = time.perf_counter(), b"", None
    with tempfile.TemporaryFile() as results:
        process = subprocess.Popen(case.command(), env=environment, stdout=results, stderr=theirs)
        os.close(theirs)
        while process.poll() is None and time.perf_counter() - begun < limit_s:
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the process has ended
                break
            if first is None and b"best so far" in shown:
                first = round(time.perf_counter() - begun, 1)
                if only_first:
                    process.terminate()
        if process.poll() is None and time.perf_counter() - begun >= limit_s:
            process.kill()
            return {"seconds": limit_s, "first": first, "error": f"stopped after {limit_s:.0f} s"}
        process.wait()
        seconds = round(time.perf_counter() - begun, 1)
        os.close(ours)
        if process.returncode:
            error = shown.decode(errors="replace").strip().splitlines()[-1][:200]
            return {"seconds": seconds, "first": first, "error": error}
        results.seek(0)
        best = json.loads(results.read())["plans"][0]
    kept = ("step_seconds", "tp", "cp", "ep", "pp", "dp", "schedule", "microbatch_size")
    return {"seconds": seconds, "first": first or seconds, "best": {name: best[name] for name in kept}}


def measured(case: Case, limit_s: float) -> dict[str, Any]:
    """Both runs, and X before and behind them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stagewright_factory.py").write_text(_FACTORY)
        before = export_seconds()
        new = once(case, folder, limit_s)
        kept = once(case, folder, limit_s) if "error" not in new else new
        export = statistics.mean((before, export_seconds()))

    def row(run: dict[str, Any], bar: float) -> dict[str, Any]:
        first = run["first"]
        return {
            "s": run["seconds"], "X": round(run["seconds"] / export, 1), "bar": bar, "first_s": first,
            "first_X": None if first is None else round(first / export, 1),
        }  # fmt: skip

    return {
        "model": case.model, "cluster": case.cluster, "export_s": round(export, 2), "best": new.get("best"),
        "error": new.get("error"), "new": row(new, case.new), "kept": row(kept, case.kept),
    }  # fmt: skip


def first_plans(only: str, limit_s: float) -> list[dict[str, Any]]:
    """When progress shows a plan of every bundled model that is not for tests, with nothing kept."""
    from stagewright.tracing.models.reference import bundled_names, resolve

    rows = []
    for name in bundled_names():
        if only not in name or name.startswith("tiny-"):
            continue
        config = resolve(name).config or {}
        tokens = min(4096, config.get("max_position_embeddings") or config.get("n_positions") or 512)
        with tempfile.TemporaryDirectory() as folder:
            run = once(Case(name, "64x8x-h100", 1024, tokens, 0, 0), folder, limit_s, only_first=True)
        rows.append({"model": name, "tokens": tokens, "first_s": run["first"], "error": run.get("error")})
        print(f"{name:26} {tokens:5} tokens  first plan after {run['first']} s", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="models whose name has this part")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a command may take")
    parser.add_argument("--first", action="store_true", help="first plans of all bundled models alone")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.first:
        first = first_plans(given.only, given.limit)
        if given.json:
            print(json.dumps({"cores": os.cpu_count(), "first": first}, indent=1))
        return
    rows = []
    for case in CASES:
        if given.only in case.model:
            rows.append(measured(case, given.limit))
            row = rows[-1]
            runs = "  ".join(
                "{} {s:6.1f} s {X:5.1f} X (bar {bar}, first {first_X} X)".format(name, **row[name])
                for name in ("new", "kept")
            )
            result = row["best"] or row["error"]
            case_name = f"{case.model:26} on {case.cluster:14}"
            print(f"{case_name} X {row['export_s']:5.2f} s  {runs}  {result}", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps({"cores": os.cpu_count(), "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
