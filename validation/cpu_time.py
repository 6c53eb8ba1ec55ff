"""Judge predicted step times on this machine's CPU: probe it, predict, train, and compare.

    python validation/cpu_time.py [--models NAME ...] [--processes 1 2] [--seconds 4] [--rounds 2] [--profile] [--json]

Whatever else a shared machine does halves the speed of a core for seconds, now and then. A profile is of the machine
without that: its figures are of the faster half of what was timed, and so is the step measured here; the mean of all
steps is printed as each run ends. Each run lies between two probes, whose predictions are averaged, and the verdict is
the median over models of the ratio of prediction and measurement. With `--profile` every model's operators are timed in
front of its runs, as `stagewright profile` does, and predictions made with that.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from verdict import Row, arguments, show

from stagewright.cluster import Cluster
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan

BAR = 0.10
MODELS = ("tiny-llama", "tiny-gpt2", "tiny-mixtral", "tiny-gemma", "tiny-vit", "tiny-t5")
JOB = Job(global_batch=8, sequence_length=128, dtype="fp32")
_FEWEST, _WARM_UP = 8, 2
"""Steps in front of the timed ones: the first allocates, the second counts memory."""


def rows(
    models: Sequence[str], processes: int, seconds: float, num_rounds: int, profiled: bool
) -> Iterator[Row]:
    """One row per model: the median over rounds of each side."""
    from stagewright.execution.probe import probe
    from stagewright.execution.probe_operators import faster_half
    from stagewright.execution.profiling import profile
    from stagewright.tracing.models.reference import resolve

    cores = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    pairs: dict[str, list[tuple[float, float]]] = {model: [] for model in models}
    before = probe("cpu", processes, seconds_per_figure=0.1)
    for _ in range(num_rounds):
        for model in models:
            steps = step_seconds(planned(model, before, processes), seconds)
            measured = statistics.fmean(faster_half(steps, float))
            after = probe("cpu", processes, seconds_per_figure=0.1)
            described = [before, after]
            if profiled:
                operators = profile(resolve(model), JOB, [1], "cpu", processes, seconds)
                described = [cluster.with_profile(operators) for cluster in described]
            predicted = statistics.fmean(
                planned(model, cluster, processes).predictions.step_seconds for cluster in described
            )
            pairs[model].append((predicted, measured))
            line = f"{predicted:.4f} s, measured {measured:.4f} s, mean of all steps {statistics.fmean(steps):.4f} s"
            print(f"{model} x {processes}: {line}", file=sys.stderr)
            before = after
    for model, found in pairs.items():
        ratio = statistics.median(predicted / measured for predicted, measured in found)
        measured = statistics.median(measured for _, measured in found)
        yield Row(f"{model} on {processes}", f"{processes} processes", ratio * measured, measured)


def planned(model: str, cluster: Cluster, processes: int) -> Plan:
    """A pipeline over all processes."""
    return estimate(model, cluster, JOB, pp=processes, schedule="1f1b")


def step_seconds(plan: Plan, seconds: float) -> list[float]:
    """The time of each step of `plan`, trained for about `seconds` by processes of its own."""
    from stagewright.execution.launch import run

    num_steps = max(_FEWEST, round(seconds / plan.predictions.step_seconds))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        record = run(path, steps=num_steps + _WARM_UP, out=Path(folder) / "run", device="cpu")
    assert record is not None, "no launcher is around this script"
    return list(record.step_seconds[_WARM_UP:])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run, about")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="time each model's operators")
    options = parser.parse_args()
    found = [
        row
        for processes in options.processes
        for row in rows(options.models, processes, options.seconds, options.rounds, options.profile)
    ]
    show(found, BAR, "s", options.json)


if __name__ == "__main__":
    main()
