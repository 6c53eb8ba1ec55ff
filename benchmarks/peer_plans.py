"""What another system's planner makes of a model and a cluster, costed, simulated and replayed like any plan.

    python benchmarks/peer_plans.py torchgpipe tiny-llama --cluster 4x-h100 --job job.toml [--pp 2] [--microbatch 4] [-o F]

The first argument is `even`, `gpipe`, `torchgpipe`, `adapipe`, `pipedream` or `vpipe`, which plan pipelines of Stagewright's
runtime, or `amp`, `megatron`, `pipette` or `varuna`, which choose widths under the runtime that the job names. What they do:
`benchmarks/peers/README.md`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from peers.plans.search import plan_with
from peers.plans.strategies import STRATEGIES as PLANS
from peers.widths.choice import STRATEGIES as WIDTHS
from peers.widths.choice import chosen, find_strategy, own_seconds
from stagewright.cluster import load_cluster
from stagewright.planning.job import load_job
from stagewright.planning.space import Space
from stagewright.report.configurations import configurations_table
from stagewright.report.console import stdout
from stagewright.units import format_seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("planner", choices=[*PLANS, *WIDTHS])
    parser.add_argument("model")
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--job", required=True, type=Path)
    parser.add_argument("--pp", type=int)
    parser.add_argument("--microbatch", type=int)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    cluster, job = load_cluster(given.cluster), load_job(given.job)
    if given.planner in PLANS:
        found = plan_with(given.planner, given.model, cluster, job, pp=given.pp, microbatch=given.microbatch)
    else:
        bounds = Space(pp=given.pp, microbatch=given.microbatch)
        found = chosen(find_strategy(given.planner), given.model, cluster, job, space=bounds, keep=5)
    stdout().print(configurations_table(found.plans[:5]))
    if given.planner in WIDTHS:
        own = own_seconds(find_strategy(given.planner), found.plans[0], cluster)
        stdout().print(f"{given.planner} itself predicts {format_seconds(own)} for the first.")
    if given.output:
        found.plans[0].save(given.output)


if __name__ == "__main__":
    main()
