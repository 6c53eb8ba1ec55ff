"""Ranks on hosts by measured links, for real: probe, plan and run over network namespaces with a planted slow link.

Each host is a network namespace; `tc` shapes every pair of hosts and way of its own. On every host torchrun starts
`stagewright probe --cluster`, then `stagewright run`: as the plan places its ranks, and with hosts in their own order.

Run with `python benchmarks/placement.py` as root on Linux (`--help` for sizes). Prints the links found, predicted and
measured seconds of a step, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import namespaces  # pyright: ignore[reportMissingImports]
from stagewright.cluster import load_cluster
from stagewright.planning.estimate import staged_model_of
from stagewright.planning.plan import Plan, load_plan
from stagewright.planning.prediction.predict import step_seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--slow", default="20mbit", help="rate of the planted link, both ways")
    parser.add_argument("--between", type=int, nargs=2, default=(1, 2), help="the hosts it joins")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if (reason := namespaces.why_not()) is not None:
        sys.exit(f"no hosts on this machine: {reason}")
    a, b = options.between
    slow = {(a, b): options.slow, (b, a): options.slow}
    with (
        tempfile.TemporaryDirectory() as folder,
        namespaces.hosts(options.hosts, options.rate, slow) as made,
    ):
        judge(Path(folder), made, options.dp, options.rounds)


def judge(folder: Path, made: list[namespaces.Host], dp: int, rounds: int) -> None:
    """Probe, plan, run both ways in turns, and print what came out."""
    cluster, plan, in_order = folder / "cluster.toml", folder / "plan.json", folder / "in-order.csv"
    print(on_hosts(made, "probe", "--cluster", "-o", str(cluster)))
    words = ["plan", "tiny-llama", "--cluster", str(cluster), "--pp", str(len(made) // dp), "--dp", str(dp)]
    words += ["--global-batch", "16", "--sequence-length", "128", "--dtype", "fp32", "--microbatch", "2"]
    words += ["--schedule", "1f1b", "--recompute", "none", "-o", str(plan)]
    _run([sys.executable, "-m", "stagewright.cli", *words])
    placed = load_plan(plan)
    print(f"devices of the ranks: {list(placed.devices) or 'in order'}")
    lines = [f"{rank},{rank},0" for rank in range(len(made))]
    in_order.write_text("\n".join(["rank,node,device", *lines]) + "\n")
    seconds: dict[str, list[float]] = {"as planned": [], "in order": []}
    for number in range(rounds):
        for name, more in (("as planned", []), ("in order", ["--ranks", str(in_order)])):
            out = folder / f"{name.replace(' ', '-')}-{number}"
            on_hosts(made, "run", str(plan), "--steps", "6", "--out", str(out), *more)
            record = json.loads((out / "record.json").read_text())
            steps = [
                s for step, s in enumerate(record["step_seconds"]) if step not in record["metered_steps"]
            ]
            seconds[name].append(statistics.median(steps))
    predicted = {
        "as planned": placed.predictions.step_seconds,
        "in order": _predicted(placed.model_copy(update={"devices": ()}), cluster),
    }
    print("order        predicted   measured (median of runs)   runs")
    for name, found in seconds.items():
        print(
            f"{name:12} {predicted[name]:7.3f} s   {statistics.median(found):7.3f} s   "
            + " ".join(f"{one:.3f}" for one in found)
        )
    ratio = statistics.median(seconds["in order"]) / statistics.median(seconds["as planned"])
    print(
        f"in order / as planned: measured {ratio:.2f}, predicted {predicted['in order'] / predicted['as planned']:.2f}"
    )


def _predicted(plan: Plan, cluster: Path) -> float:
    staged = staged_model_of(plan, load_cluster(cluster))
    return step_seconds(staged)


def on_hosts(made: list[namespaces.Host], *words: str) -> str:
    """What the first host prints when torchrun starts `stagewright` with `words` on all of them."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    processes = []
    for number, host in enumerate(made):
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(made)), "--nproc-per-node", "1",
            "--node-rank", str(number), "--master-addr", made[0].address, "--master-port", "29500",
            "--local-addr", host.address, "-m", "stagewright.cli", *words,
        ]  # fmt: skip
        command = host.command(*torchrun)
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    found = [process.communicate(timeout=600) for process in processes]
    for process, (_, errors) in zip(processes, found, strict=True):
        if process.returncode:
            sys.exit(f"a host failed: {' '.join(words)}\n{errors[-3000:]}")
    return found[0][0]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
