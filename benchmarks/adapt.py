"""What `run --adapt` recovers of the time that ranks lose to a slow one: four local ranks, of which one is slowed and freed.

    python benchmarks/adapt.py [--steps 90] [--quiet 200] [--json]

Four ranks do not fit on two cores side by side, so devices are made that do: behind every computation a rank sleeps for as
many times what the computation took as makes its device slow (`SLOWNESS`), which leaves the cores to others; the slowed
rank takes twice that. All else is a real run, of a thousand steps that ends early: passes, transfers, the watch, the search
and the change. A rank is slowed at a third of the steps looked at and freed at two thirds.
Four runs: one that stays under its plan, one that adapts, one that is slow from the start under the plan that suits that
(what there is to gain), and a quiet one that adapts. Prints how much of the gain was recovered from the tenth step after the
event on, the number of changes, and the largest difference of losses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import machine

RANKS, SLOWED = 4, 1
SLOWNESS = 4.0
BAR, MOST_CHANGES, WITHIN = 0.8, 2, 10
SHAPE = {
    "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 16, "num_attention_heads": 4, "head_dim": 32,
}  # fmt: skip
NEVER, WHOLE = 10**9, 1000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--quiet", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    third = options.steps // 3
    events = (third, 2 * third)
    with tempfile.TemporaryDirectory() as folder:
        plan, suited = plans()
        plan.save(f"{folder}/plan.json")
        suited.save(f"{folder}/suited.json")
        stayed = trained(folder, "plan", options.steps, events, adapts=False)
        adapted = trained(folder, "plan", options.steps, events, adapts=True)
        fresh = trained(folder, "suited", third, (0, NEVER), adapts=False)
        quiet = trained(folder, "plan", options.quiet, (NEVER, NEVER), adapts=True)
    result = {"machine": machine(), "events": events, **judged(stayed, adapted, fresh, events)}
    result["quiet_changes"] = len(quiet["changes"])
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    within = result["recovered"] >= BAR and max(result["changes"]) <= MOST_CHANGES
    return int(not within or bool(quiet["changes"]))


def plans() -> tuple[Any, Any]:
    """The plan for four equal devices, and the one that suits them when one is half as fast."""
    import stagewright
    from stagewright.cluster import with_slower_devices
    from stagewright.execution.probe import probe
    from stagewright.planning.replanning import replanned
    from stagewright.tracing.models.reference import resolve

    found = probe("cpu", processes=2, seconds_per_figure=0.1)
    (node,) = found.nodes
    cluster = found.model_copy(update={"nodes": (node.model_copy(update={"devices_per_node": RANKS}),)})
    cluster = with_slower_devices(cluster, dict.fromkeys(range(RANKS), SLOWNESS))
    job = stagewright.Job(global_batch=8, sequence_length=64, dtype="fp32")
    plan = stagewright.plan(
        resolve("tiny-llama", SHAPE), cluster, job, pp=RANKS, dp=1, tp=1, microbatch=1, schedules="1f1b", recompute="none",
    ).plans[0]  # fmt: skip
    slower = {device: 2.0 if plan.rank_on(device) == SLOWED else 1.0 for device in range(RANKS)}
    return plan, replanned(plan, with_slower_devices(plan.cluster.load(), slower)).plan


def trained(folder: str, name: str, steps: int, events: tuple[int, int], adapts: bool) -> dict[str, Any]:
    """What the first rank of a run saw."""
    from stagewright.execution.processes import start_ranks

    way = f"{name}-{adapts}-{steps}"
    asked = {"plan": name, "steps": steps, "events": events, "adapts": adapts, "way": way}
    words = [str(Path(__file__).resolve()), folder, json.dumps(asked)]
    start_ranks("stagewright.execution.script", words, list(range(RANKS)))
    found = json.loads((Path(folder) / f"{way}.json").read_text())
    print(f"{way}: {statistics.median(found['seconds']):.3f} s a step, {found['changes']}", file=sys.stderr)
    return found


def work(folder: str, asked: dict[str, Any]) -> None:
    """A rank: trains, asleep behind its computations."""
    from stagewright.execution.stage_runner import StageRunner
    from stagewright.execution.trainer import Trainer

    slowness = [SLOWNESS]
    for name in ("forward", "input_grad", "weight_grad", "backward"):
        setattr(StageRunner, name, slowed(getattr(StageRunner, name), slowness))
    way, (begins, ends) = asked["way"], asked["events"]
    trainer = Trainer(
        f"{folder}/{asked['plan']}.json", steps=WHOLE, out=f"{folder}/{way}", device="cpu",
        random_weights=True, adapt=asked["adapts"],
    )  # fmt: skip
    changes: list[int] = []
    adopt, step, losses = trainer.adopt, trainer.step, []

    def adopted(plan: Any) -> None:
        adopt(plan)
        changes.append(trainer.step_number)

    def stepped(batch: Any = None) -> Any:
        is_slow = begins <= trainer.step_number < ends and int(os.environ["RANK"]) == SLOWED
        slowness[0] = SLOWNESS * (2 if is_slow else 1)
        result = step(batch)
        losses.append((result.loss, result.seconds))
        trainer.is_stopping |= len(losses) == asked["steps"]
        return result

    trainer.adopt, trainer.step = adopted, stepped
    trainer.fit()
    if trainer.is_first:
        found = {
            "losses": [loss for loss, _ in losses], "seconds": [seconds for _, seconds in losses], "changes": changes,
        }  # fmt: skip
        (Path(folder) / f"{way}.json").write_text(json.dumps(found))


def slowed(method: Any, slowness: list[float]) -> Any:
    """A computation of a device so many times as slow as this processor."""

    def called(*given: Any, **named: Any) -> Any:
        began = time.thread_time()
        made = method(*given, **named)
        time.sleep((slowness[0] - 1) * (time.thread_time() - began))
        return made

    return called


def judged(stayed: Any, adapted: Any, fresh: Any, events: tuple[int, int]) -> dict[str, Any]:
    """Seconds of a step in the slowed part and behind it, and what was recovered of the time lost."""
    begins, ends = events
    settled = slice(begins + WITHIN, ends)
    stays, adapts = (statistics.median(one["seconds"][settled]) for one in (stayed, adapted))
    best = statistics.median(fresh["seconds"][1:])
    quick, freed = (
        statistics.median(stayed["seconds"][1:begins]),
        statistics.median(adapted["seconds"][ends + WITHIN :]),
    )
    changes = [
        sum(begin < step <= end for step in adapted["changes"])
        for begin, end in ((begins, ends), (ends, NEVER))
    ]
    return {
        "before_s": quick, "stays_s": stays, "adapts_s": adapts, "suited_s": best, "freed_s": freed,
        "recovered": (stays - adapts) / (stays - best), "changed_behind": adapted["changes"], "changes": changes,
        "loss_difference": max(
            abs(one / other - 1) for one, other in zip(stayed["losses"], adapted["losses"], strict=True)
        ),
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    begins, ends = result["events"]
    print(
        f"slowed in steps {begins} to {ends}; changed behind steps {result['changed_behind']}\n"
        f"a step: {result['before_s']:.3f} s before; slowed {result['stays_s']:.3f} s under the plan, "
        f"{result['adapts_s']:.3f} s adapted, {result['suited_s']:.3f} s under the plan that suits; freed "
        f"{result['freed_s']:.3f} s\n"
        f"recovered {result['recovered']:.0%} (bar {BAR:.0%}); {result['changes']} changes (bar {MOST_CHANGES} each), "
        f"{result['quiet_changes']} in quiet steps (bar 0); losses differ by {result['loss_difference']:.1e}"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(sys.argv[1], json.loads(sys.argv[2]))
    else:
        sys.exit(main())
