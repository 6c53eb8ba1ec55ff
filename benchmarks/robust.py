"""What choosing by the worst case buys: worst makespans under errors of the costs that the choice has not seen.

python benchmarks/robust.py [--seconds 10]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from adaptis_costs import cell
from stagewright.planning.joint.layout import stage_costs, transfer_times
from stagewright.planning.joint.plan import JointPlan
from stagewright.planning.joint.problem import JointProblem
from stagewright.planning.joint.search import Effort, JointResult, search
from stagewright.simulation import simulate

FAMILIES = ("Gemma", "DeepSeek", "Nemotron-H")
ERRORS = (0.05, 0.1, 0.2)
SAMPLES = (20, 100)
_UNSEEN = 977


def scenarios(problem: JointProblem, error: float, count: int, seed: int = 0) -> Iterator[JointProblem]:
    """The problem with the costs of every layer off by factors between ``1 - error`` and ``1 + error``."""
    rng = np.random.default_rng(seed)
    layers = problem.layers
    for factors in rng.uniform(1 - error, 1 + error, (count, layers.num_layers)):
        wrong = replace(
            layers,
            forward_s=layers.forward_s * factors,
            input_grad_s=layers.input_grad_s * factors,
            weight_grad_s=layers.weight_grad_s * factors,
        )
        yield replace(problem, layers=wrong)


def makespan_under(plan: JointPlan, problem: JointProblem) -> float:
    """Makespan of the program of `plan` when the costs are those of `problem`."""
    costs = stage_costs(problem, plan.layout)
    timeline = simulate(
        plan.encoded, costs, transfer_times(problem, plan.layout), action_overhead_s=problem.overhead_s
    )
    return timeline.makespan_s


def worst_case(plan: JointPlan, error: float, count: int = 20, seed: int = 0) -> float:
    """The longest makespan of the plan over `count` scenarios."""
    return max(makespan_under(plan, other) for other in scenarios(plan.problem, error, count, seed))


def most_robust(found: JointResult, error: float, count: int = 20) -> JointPlan:
    """Of the best plan, its runners-up and the baselines that fit, the one whose worst case is shortest."""
    return min((found.best, *found.runners_up), key=lambda plan: worst_case(plan, error, count))


def rows(family: str, seconds: float) -> Iterator[tuple[str, ...]]:
    """Worst makespans over 200 unseen errors: of the fastest plan, then of those chosen by so many errors each, over it."""
    found = search(cell(family, 2048, 0), Effort(seconds=seconds))

    def worst(plan: JointPlan, error: float) -> float:
        return worst_case(plan, error, 200, _UNSEEN)

    for error in ERRORS:
        fastest = worst(found.best, error)
        chosen = (worst(most_robust(found, error, count), error) / fastest for count in SAMPLES)
        yield f"{family} 2k Small", f"{error:.0%}", f"{fastest:.1f}", *(f"{share:.4f}" for share in chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=10.0, help="per search")
    options = parser.parse_args()
    heads = ("costs", "error", "fastest", *(f"chosen by {count}" for count in SAMPLES))
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    for family in FAMILIES:
        for row in rows(family, options.seconds):
            print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
