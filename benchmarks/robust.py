"""What choosing by the worst case buys: worst makespans under errors of the costs that the choice has not seen.

python benchmarks/robust.py [--seconds 10]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from adaptis_costs import cell
from stagewright.planning.joint.explain import most_robust, worst_case
from stagewright.planning.joint.plan import JointPlan
from stagewright.planning.joint.search import Effort, search

FAMILIES = ("Gemma", "DeepSeek", "Nemotron-H")
ERRORS = (0.05, 0.1, 0.2)
SAMPLES = (20, 100)
_UNSEEN = 977


def rows(family: str, seconds: float) -> Iterator[tuple[str, ...]]:
    """Worst makespans over 200 unseen errors: of the fastest plan, then of those chosen by so many errors each, over it."""
    found = search(cell(family, 2048, 0), Effort(seconds=seconds))

    def worst(plan: JointPlan, error: float) -> float:
        return float(worst_case(plan, error, 200, _UNSEEN).max())

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
