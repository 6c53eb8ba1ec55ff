"""Whether the one search finds what is as fast as the better of the two searches that it took the place of.

The answers of both were recorded before they were joined (`two_searches-2026-11-23.json` beside the results), each by the
commands that `--record` runs on a checkout of that time. What predictions are made of has changed since, so the widths and
microbatches of the better one are planned anew, and the one search is compared with these. One of them also answered with
context or expert parallelism, which our own runtime predicts but does not run; the one search tries these only where they
are given, so such answers are shown apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ANSWERS = HERE / "results" / "two_searches-2026-11-23.json"
_WORSE = 0.005
"""So much slower than the better of the two, as a part of it, the one search may be."""
_FORMER = (("plan",), ("plan", "--tp", "auto"), ("configure", "--runtime", "stagewright"))
"""How the two searches were asked."""


@dataclass(frozen=True)
class Case:
    """A model for so many samples of so many tokens a step, on a cluster."""

    model: str
    cluster: str
    batch: int
    tokens: int
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        return f"{self.model} on {self.cluster}"

    def options(self) -> list[str]:
        """Of the command line, beside the verb."""
        model = str(HERE / "models" / self.model) if self.model.endswith(".json") else self.model
        return [
            model, "--cluster", self.cluster, "--global-batch", str(self.batch), "--sequence-length", str(self.tokens),
            "--dtype", self.dtype, "--json",
        ]  # fmt: skip


CASES = (
    Case("llama-3-8b", "8x-h100", 64, 8192),
    Case("llama-3-70b", "8x8x-h100", 128, 8192),
    Case("llama-3-70b", "64x8x-h100", 1024, 8192),
    Case("llama-3-405b", "64x8x-h100", 512, 8192),
    Case("gpt2-xl", "8x-v100-16", 64, 1024, "fp16"),
    Case("nemotron-h-8b", "4x8x-h100", 128, 4096),
    Case("mixtral-8x7b", "4x8x-h100", 128, 4096),
    Case("bert-large", "4x-v100-32+4x-t4", 64, 512, "fp16"),
    Case("gpt-52b.json", "8x8x-v100-32", 64, 1024, "fp16"),
    Case("gemma-2b", "4x-a10g", 32, 2048),
    Case("t5-large", "8x-v100-16", 64, 512, "fp16"),
    Case("qwen3-8b", "4x-rtx4090", 16, 2048),
)


def asked(verb: tuple[str, ...], case: Case, limit_s: float) -> dict[str, Any]:
    """What a command answers: the seconds of a step of the best, which that is, and what it took; or its error."""
    command = [sys.executable, "-m", "stagewright.cli", *verb, *case.options()]
    begun = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit_s:.0f} s"}
    wall = round(time.perf_counter() - begun, 1)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300], "wall_s": wall}
    document = json.loads(done.stdout)
    best = document["plans"][0] if "plans" in document else document["sizes"][0]["configurations"][0]
    return {"step_s": best["step_seconds"], "wall_s": wall, "best": best}


def record(limit_s: float, cases: list[Case]) -> None:
    """Write what the two searches answer, one case after the other."""
    known = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    for case in cases:
        if case.name not in known:
            answers = {" ".join(verb): asked(verb, case, limit_s) for verb in _FORMER}
            known[case.name] = {"case": asdict(case), "answers": answers}
            ANSWERS.write_text(json.dumps(known, indent=1) + "\n")
            told = {verb: answer.get("step_s", answer.get("error")) for verb, answer in answers.items()}
            print(case.name, told, file=sys.stderr, flush=True)


def compared(case: Case, answers: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """The one search beside the better of the two."""
    steps = {verb: answer["step_s"] for verb, answer in answers.items() if "step_s" in answer}
    runs = {verb: step for verb, step in steps.items() if _runs(answers[verb]["best"])} or steps
    former = min(runs, key=lambda verb: runs[verb])
    fastest = min(steps.values())
    now = asked(("plan",), case, limit_s)
    anew = asked(("plan", *_widths(answers[former]["best"])), case, limit_s)
    ratio = now["step_s"] / anew["step_s"] if "step_s" in now and "step_s" in anew else None
    return {
        "case": case.name, "former": former, "former_s": steps[former],
        "former_today_s": anew.get("step_s", anew.get("error")), "now_s": now.get("step_s", now.get("error")),
        "ratio": ratio, "met": ratio is not None and ratio <= 1 + _WORSE, "wall_s": now.get("wall_s"),
        "not_run_s": fastest if fastest < steps[former] else None,
        "best": {key: now["best"].get(key) for key in ("dp", "tp", "pp", "schedule", "microbatch_size")}
        if "best" in now else None,
    }  # fmt: skip


def _widths(best: dict[str, Any]) -> tuple[str, ...]:
    """Options that leave nothing but the widths and microbatches of a former answer to plan."""
    names = {"dp": "--dp", "tp": "--tp", "cp": "--cp", "pp": "--pp", "microbatch_size": "--microbatch"}
    return tuple(word for key, option in names.items() for word in (option, str(best.get(key, 1))))


def _runs(best: dict[str, Any]) -> bool:
    """Whether our own runtime executes a configuration."""
    return best.get("cp", 1) == best.get("ep", 1) == 1


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="record the answers of the two former searches")
    parser.add_argument("--only", default="", help="cases whose name has this part")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds a command may take")
    given = parser.parse_args()
    cases = [case for case in CASES if given.only in case.name]
    if given.record:
        record(given.limit, cases)
        return
    known = json.loads(ANSWERS.read_text())
    results = []
    for case in cases:
        if case.name not in known:
            print(f"{case.name}: no former answer is recorded", file=sys.stderr, flush=True)
            continue
        results.append(compared(case, known[case.name]["answers"], given.limit))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    ratios = [one["ratio"] for one in results if one["ratio"]]
    print(
        json.dumps(
            {"cases": results, "worst_ratio": max(ratios), "met": sum(one["met"] for one in results)},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
