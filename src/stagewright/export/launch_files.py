"""Launch files for runs of a plan on a cluster: Slurm batch scripts, Kubernetes PyTorchJobs, SkyPilot tasks.

They start `stagewright run` under `torchrun`, restart it after failures, and resume from the last checkpoint.

Source: Slurm's sbatch and scontrol; Kubeflow's training operator, PyTorchJob v1; SkyPilot's task YAML and its variables
SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES.
"""

from __future__ import annotations

from stagewright.errors import InputError
from stagewright.export.quoting import comments, file_word, label, quoted, title
from stagewright.planning.plan import Plan

_SLURM = """\
#!/bin/bash
{title}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={devices}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --output=%x-%j.log
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

_KUBERNETES = """\
{title}
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {quoted_name}
spec:
  nprocPerNode: "{devices}"
  pytorchReplicaSpecs:
{replicas}
"""

_REPLICA = """\
    {role}:
      replicas: {count}
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: IMAGE  # one with PyTorch and Stagewright
              command: ["bash", "-c"]
              args:  # started again, the run goes on from its last checkpoint
                - |
                  RESUME=""
                  compgen -G "/data/checkpoints/step-*" > /dev/null && RESUME="--resume"
                  exec torchrun -m stagewright.cli run /run/plan/plan.json --data /data/train.jsonl \
                    --checkpoint /data/checkpoints $RESUME
              resources:
                limits:
                  {resource}: {devices}
              volumeMounts:
                - {{name: plan, mountPath: /run/plan}}
                - {{name: data, mountPath: /data}}
                - {{name: shared-memory, mountPath: /dev/shm}}
          volumes:
            - name: plan
              configMap: {{name: {name}-plan}}  # kubectl create configmap {name}-plan --from-file=plan.json={plan}
            - name: data
              persistentVolumeClaim: {{claimName: training-data}}
            - name: shared-memory
              emptyDir: {{medium: Memory}}"""

_SKYPILOT = """\
{title}
name: {quoted_name}
num_nodes: {nodes}
resources:
  accelerators: {accelerator}:{devices}
file_mounts:
  /data: {{name: training-data, mode: MOUNT}}  # a bucket of yours with train.jsonl
workdir: .  # has {plan}
setup: |
  pip install stagewright
run: |
  HEAD="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"
  RESUME=""  # started again, the run goes on from its last checkpoint
  compgen -G "/data/checkpoints/step-*" > /dev/null && RESUME="--resume"
  torchrun --nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" --nproc-per-node {devices} \\
    --master-addr "$HEAD" --master-port 29400 \\
    -m stagewright.cli run {plan} --data /data/train.jsonl --checkpoint /data/checkpoints $RESUME
"""

_FILES = {"slurm": _SLURM, "kubernetes": _KUBERNETES, "skypilot": _SKYPILOT}

_ACCELERATORS = {
    "h100": "H100", "h100-hbm2e": "H100", "h200": "H200", "b200": "B200", "a100-40": "A100", "a100-80": "A100-80GB",
    "a10": "A10", "a10g": "A10G", "a40": "A40", "l4": "L4", "l40s": "L40S", "t4": "T4", "v100-16": "V100",
    "v100-32": "V100-32GB", "gh200": "GH200", "mi300x": "MI300X", "rtx3090": "RTX3090", "rtx4090": "RTX4090",
}  # fmt: skip
"""SkyPilot's names of the catalog's devices."""


def launch_file(kind: str, plan: Plan, plan_name: str) -> str:
    """Return the launch file of `plan`, stored in the file `plan_name`, for ``slurm``, ``kubernetes`` or ``skypilot``.

    Raises:
        InputError: nodes have different numbers of devices, SkyPilot has no such device, or the file name has invisible
            characters.
    """
    nodes, devices = node_shape(plan, kind)
    device = plan.cluster.load().nodes[0].device
    accelerator = _ACCELERATORS.get(device.name)
    if kind == "skypilot" and accelerator is None:
        raise InputError(
            f"skypilot: no name of it is known for '{device.name}': write `accelerators` by hand"
        )
    name = label(plan.model.name)
    resource = "amd.com/gpu" if device.vendor.upper().startswith("AMD") else "nvidia.com/gpu"
    shared = {"name": name, "devices": devices, "plan": file_word(plan_name), "resource": resource}
    roles = [("Master", 1), *([("Worker", nodes - 1)] if nodes > 1 else [])]
    replicas = "\n".join(_REPLICA.format(role=role, count=count, **shared) for role, count in roles)
    return _FILES[kind].format(
        title=comments([title(plan)]),
        quoted_name=quoted(name),
        nodes=nodes,
        accelerator=accelerator,
        replicas=replicas,
        **shared,
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
