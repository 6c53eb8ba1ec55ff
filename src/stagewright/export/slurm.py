"""Slurm batch scripts that run a plan on its cluster.

They start `stagewright run` under `torchrun`, restart it after failures, and resume from the last checkpoint.

Source: Slurm's sbatch and scontrol.
"""

from __future__ import annotations

from stagewright.errors import InputError
from stagewright.export.quoting import comments, file_word, label, title
from stagewright.planning.plan import Plan

_SCRIPT = """\
#!/bin/bash
{title}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={devices}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --output=%x-%j.log
# Yours to fill in, by removing one # each:
##SBATCH --partition=PARTITION
##SBATCH --account=ACCOUNT
##SBATCH --time=1-00:00:00
set -euo pipefail

[ -n "${{PLAN:-}}" ] || PLAN={plan}
DATA="${{DATA:-train.jsonl}}"              # what to train on
CHECKPOINT="${{CHECKPOINT:-checkpoints}}"  # a folder that all nodes share

# Started again, the run goes on from its last checkpoint.
RESUME=""
compgen -G "$CHECKPOINT/step-*" > /dev/null && RESUME="--resume"

HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node {devices} --max-restarts 3 \\
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$HEAD:29400" \\
    -m stagewright.cli run "$PLAN" --data "$DATA" --checkpoint "$CHECKPOINT" $RESUME
"""


def slurm_script(plan: Plan, plan_name: str) -> str:
    """Return the batch script of `plan`, stored in the file `plan_name`.

    Raises:
        InputError: `stagewright run` does not run such plans, nodes have different numbers of devices, or the file name has
            invisible characters.
    """
    if plan.job.not_run is not None:
        raise InputError(
            f"slurm: the script starts `stagewright run`, which cannot run this plan: {plan.job.not_run}"
        )
    nodes, devices = node_shape(plan, "slurm")
    return _SCRIPT.format(
        title=comments([title(plan)]),
        name=label(plan.model.name),
        nodes=nodes,
        devices=devices,
        plan=file_word(plan_name),
    )


def node_shape(plan: Plan, kind: str) -> tuple[int, int]:
    """Return the number of nodes `plan` uses, and of devices per node.

    Raises:
        InputError: nodes have different numbers of devices, or are only partly used; the message names `kind`.
    """
    cluster = plan.cluster.load()
    sizes = {len(cluster.ranks_of(node)) for node in range(cluster.num_nodes)}
    if len(sizes) > 1:
        raise InputError(
            f"{kind}: nodes of {cluster.name} have {', '.join(map(str, sorted(sizes)))} devices, and one launch line starts "
            "as many processes on each: start `torchrun` on each kind of node by hand"
        )
    (devices,) = sizes
    nodes, remainder = divmod(plan.num_ranks, devices)
    if remainder and nodes:
        raise InputError(
            f"{kind}: {plan.num_ranks} ranks do not fill nodes of {devices} devices: plan for whole nodes"
        )
    return max(nodes, 1), min(devices, plan.num_ranks)
