"""Export of a plan to options of Megatron-LM's `pretrain_gpt.py` and a shell script that starts it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence

from stagewright.errors import InputError
from stagewright.export.megatron_layout import write_layout
from stagewright.export.megatron_model import load_balancing, model_options
from stagewright.export.quoting import comments, title
from stagewright.export.slurm import node_shape
from stagewright.export.translation import Stack, Translation
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import layers_per_stage

RUNTIME = "megatron-core+te"
"""The runtime that models current Megatron-LM."""
RUNTIME_BF16 = f"{RUNTIME}-bf16-gradients"
"""The same with `--grad-reduce-in-bf16`."""

STACK = Stack(
    name="megatron",
    runtimes=(RUNTIME, RUNTIME_BF16),
    schedules=("1f1b", "interleaved-1f1b"),
    recomputes=("none", "full"),
    level=lambda level, pp: min(level, 1),
    shards_in_groups=True,
)
"""Its distributed optimizer shards optimizer state, and it recomputes the same part of every layer."""


def megatron_options(plan: Plan) -> tuple[str, ...]:
    """Return the parallelism of a plan as options, one with its value each; model, data and learning rate are the user's.
    Empty for a plan of another runtime, or one with cuts inside layers.

    Source: Megatron-Core's user guide (parallelism, mixtures of experts, custom pipeline layout).
    """
    counts = layers_per_stage(plan)
    if plan.job.runtime not in STACK.runtimes or (counts is None and plan.num_stages > 1):
        return ()
    return tuple(_options(plan, counts or ()))


def megatron_arguments(plan: Plan) -> tuple[str, ...]:
    """Return all options of `pretrain_gpt.py` for a plan of its runtime except the data, one with its value each.

    Raises:
        InputError: Megatron-LM has no such model or optimizer; says why.
    """
    check_is_config(plan, "megatron")
    config = plan.model.reference().config or {}
    model = model_options(config, plan.job.sequence_length, plan.tp)
    return (*model, *megatron_options(plan), *_training(plan.job))


def reduces_in_bf16(plan: Plan) -> bool:
    """Return whether Megatron's buffers of gradients are in bf16: the type that it reduces them in."""
    return plan.reduce_dtype == "bf16" or plan.job.runtime == RUNTIME_BF16


def has_experts(plan: Plan) -> bool:
    """Return whether the model of `plan` is a mixture of experts."""
    return not plan.model.is_code and plan.model.reference().names_experts


def remarks(plan: Plan) -> Iterator[str]:
    """Yield what users may not expect of the options."""
    if has_experts(plan) and load_balancing(plan.model.reference().config or {})[0] == "none":
        yield "no loss balances the experts, as under the plan: change the type of load balancing if training needs one"


def check_is_config(plan: Plan, name: str) -> None:
    """Raise `InputError` if the model of `plan` is code, or is trained by adapters."""
    if plan.model.is_code or plan.model.lora is not None:
        what = "adapters of a model" if plan.model.lora else f"a factory ({plan.model.text})"
        raise InputError(
            f"{name}: its models are made from a config.json, and this is {what}: plan for one without --lora, or train "
            "with `stagewright run`"
        )


def argv(options: Sequence[str]) -> list[str]:
    """Return options as the words of a command.

    >>> argv(("--bf16", "--seq-length 4096", '--moe-layer-freq "([0]*3+[1]*58)"'))
    ['--bf16', '--seq-length', '4096', '--moe-layer-freq', '([0]*3+[1]*58)']
    """
    return [word for option in options for word in shlex.split(option)]


def megatron_files(translation: Translation) -> dict[str, str]:
    """Return `train.sh`, which starts Megatron-LM on every node, and `argv.json`, its arguments.

    Raises:
        InputError: as `megatron_arguments`; or nodes have different numbers of devices.
    """
    plan = translation.plan
    options = megatron_arguments(plan)
    nodes, devices = node_shape(plan, "megatron")
    arguments = "\n".join(f"  {shlex.join(argv([option]))}" for option in options)
    head = comments([title(plan), *translation.notes])
    script = _SCRIPT.format(comments=head, nodes=nodes, devices=devices, arguments=arguments)
    return {"train.sh": script, "argv.json": json.dumps(argv(options), indent=1) + "\n"}


_SCRIPT = """\
#!/bin/bash
{comments}
# Every node runs this: MEGATRON=/path/to/Megatron-LM MASTER_ADDR=... NODE_RANK=... bash train.sh --data-path ...
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS="${{CUDA_DEVICE_MAX_CONNECTIONS:-1}}"

ARGUMENTS=(
{arguments}
)

# Tokenizer and data are yours: add their options to this command. Without options it trains on random tokens.
[ "$#" -gt 0 ] || set -- --mock-data --tokenizer-type NullTokenizer

torchrun --nproc-per-node {devices} --nnodes {nodes} --node-rank "${{NODE_RANK:-0}}" \\
  --master-addr "${{MASTER_ADDR:-localhost}}" --master-port "${{MASTER_PORT:-29500}}" \\
  "${{MEGATRON:-.}}/pretrain_gpt.py" "${{ARGUMENTS[@]}}" "$@"
"""


def shell_lines(options: tuple[str, ...], width: int = 78) -> str:
    """Return options as continued lines of a shell script.

    >>> print(shell_lines(("--tensor-model-parallel-size 8", "--bf16", "--seq-length 4096"), 40))
    --tensor-model-parallel-size 8 --bf16 \\
    --seq-length 4096
    """
    lines = [options[0]]
    for option in options[1:]:
        if len(lines[-1]) + len(option) < width:
            lines[-1] += f" {option}"
        else:
            lines.append(option)
    return " \\\n".join(lines)


def _options(plan: Plan, counts: tuple[int, ...]) -> Iterator[str]:
    yield f"--tensor-model-parallel-size {plan.tp}"
    if plan.sequence_parallel and plan.tp > 1:
        yield "--sequence-parallel"
    if plan.cp > 1:
        yield f"--context-parallel-size {plan.cp}"
    yield f"--pipeline-model-parallel-size {plan.pp}"
    yield from _stages(plan, counts)
    if has_experts(plan):
        yield f"--expert-model-parallel-size {plan.ep}"
        yield "--expert-tensor-parallel-size 1"
        yield "--moe-grouped-gemm"
        yield "--moe-token-dispatcher-type alltoall"
    yield f"--micro-batch-size {plan.microbatch_size}"
    yield f"--global-batch-size {plan.job.global_batch}"
    yield f"--seq-length {plan.job.sequence_length}"
    yield from _precision(plan.job.dtype)
    yield "--cross-entropy-loss-fusion"  # as the runtime is predicted
    if "layers" in plan.memory_policy:
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    elif "selective" in plan.memory_policy:
        yield "--recompute-granularity selective"
    if max(plan.sharding):
        yield "--use-distributed-optimizer"
        if plan.shard_size is not None:
            yield f"--num-distributed-optimizer-instances {plan.num_holders // plan.shard_size}"
    if reduces_in_bf16(plan):
        yield "--grad-reduce-in-bf16"
    if plan.dp > 1 and plan.job.profile.overlaps_reduction:
        yield "--overlap-grad-reduce"
        if max(plan.sharding):
            yield "--overlap-param-gather"


def _precision(dtype: str) -> Iterator[str]:
    yield "--fp16" if dtype == "fp16" else "--bf16"
    if dtype == "fp8":
        yield "--fp8-format hybrid"


def _stages(plan: Plan, counts: tuple[int, ...]) -> Iterator[str]:
    """Yield the number of chunks if all stages are equal, else the layers of each."""
    if len(set(counts)) > 1:
        yield f'--pipeline-model-parallel-layout "{write_layout(counts)}"'
    elif plan.num_stages > plan.pp:
        yield f"--num-virtual-stages-per-pipeline-rank {plan.num_stages // plan.pp}"


def _training(job: Job) -> Iterator[str]:
    """Yield optimizer, learning rate and number of steps."""
    decay = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}[job.lr_schedule]
    yield f"--optimizer adam --lr {job.learning_rate:g} --min-lr {job.learning_rate * job.final_fraction:g}"
    yield f"--lr-decay-style {decay} --lr-warmup-iters {job.warmup_steps}"
    if job.lr_schedule == "wsd":
        yield f"--lr-wsd-decay-style linear --lr-wsd-decay-iters {job.decay_steps or max(1, job.num_steps // 10)}"
    yield f"--weight-decay {job.weight_decay:g} --adam-beta1 {job.betas[0]:g} --adam-beta2 {job.betas[1]:g}"
    yield f"--adam-eps {job.eps:g} --clip-grad {job.clip_norm or 0.0:g}"
    yield f"--train-iters {job.num_steps} --seed {max(job.seed, 1)}"
