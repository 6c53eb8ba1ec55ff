"""Which open models fit which machines: the table of own-cards.md, from `stagewright finetune ... --dry-run`.

    python docs/model_table.py                 # an hour; keeps every answer, so that it can be stopped and started again
    python docs/model_table.py --only qwen3-14b
    python docs/model_table.py --table         # only the table, from the answers there are

Answers are in `images/own-cards/answers.json`, each with the day on which its plan was made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ANSWERS = DOCS / "images" / "own-cards" / "answers.json"
PAGE = DOCS / "own-cards.md"
BEGIN, END = "<!-- models by machine -->", "<!-- end of models by machine -->"

MODELS = "llama-3-8b", "qwen3-14b", "gemma-3-27b", "qwen3-30b-a3b", "qwen2.5-32b", "llama-3.3-70b"
MACHINES = {
    "1x-rtx3090": "RTX 3090",
    "2x-rtx3090": "2 x RTX 3090",
    "cards.toml": "3090 + 4090 + 3060",
    "4x-rtx4090": "4 x RTX 4090",
    "8x-rtx4090": "8 x RTX 4090",
    "2x1x-gb10": "2 x DGX Spark",
}
UNEQUAL = 'name = "3090+4090+3060"\n\n[[nodes]]\ndevices = ["rtx3090", "rtx4090", "rtx3060-12"]\n'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", help="a model, or a machine; repeatable")
    parser.add_argument("--within", default="120", help="seconds for each search")
    parser.add_argument("--table", action="store_true", help="write the table from the answers there are")
    options = parser.parse_args()
    answers: dict[str, Any] = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    for machine in MACHINES if not options.table else ():
        for model in MODELS:
            key = f"{model} {machine}"
            is_wanted = not options.only or {model, machine}.intersection(options.only)
            if is_wanted and (options.only or key not in answers):
                answers[key] = answer(model, machine, options.within)
                print(key, answers[key], file=sys.stderr)
                ANSWERS.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(table(answers)) + f"\n{END}{after}", encoding="utf-8")


def answer(model: str, machine: str, within: str) -> dict[str, Any]:
    """Return what `finetune` plans for a model on a machine, or why it does not."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = machine
        if machine.endswith(".toml"):
            cluster = f"{folder}/{machine}"
            Path(cluster).write_text(UNEQUAL, encoding="utf-8")
        command = [
            sys.executable, "-m", "stagewright.cli", "finetune", model, "--cluster", cluster, "--dry-run", "--json",
            "--within", within, "--out", f"{folder}/out",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    day = date.today().isoformat()
    if done.returncode:
        return {"day": day, "error": done.stderr.strip().splitlines()[-1]}
    document = json.loads(done.stdout)
    plan = document["plan"]
    return {
        "day": day, "base": document["base"], "streamed": plan["streamed"], "tokens_per_second": plan["tokens_per_second"],
        "degrees": [plan["pp"], plan["dp"], plan["tp"]],
    }  # fmt: skip


def table(answers: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table, of the machines for which there are all answers."""
    shown = [machine for machine in MACHINES if all(f"{model} {machine}" in answers for model in MODELS)]
    yield ""
    yield "| model | " + " | ".join(MACHINES[machine] for machine in shown) + " |"
    yield "| --- |" + " --- |" * len(shown)
    for model in MODELS:
        yield f"| {model} | " + " | ".join(_cell(answers[f"{model} {machine}"]) for machine in shown) + " |"
    days = sorted({entry["day"] for entry in answers.values()})
    yield ""
    yield (
        f"Made by `python docs/model_table.py` on {' and '.join(dict.fromkeys((days[0], days[-1])))}."
        if days
        else ""
    )


def _cell(entry: dict[str, Any]) -> str:
    if "error" in entry:
        return "-"
    return f"{entry['base']}{' +W' if entry['streamed'] else ''}, {entry['tokens_per_second']:,.0f}"


if __name__ == "__main__":
    main()
