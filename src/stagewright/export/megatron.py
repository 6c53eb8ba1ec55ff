"""A plan as the options of Megatron-LM's `pretrain_gpt.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import layers_per_stage

RUNTIME = "megatron-core+te"
"""The runtime that is today's Megatron-LM."""

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def megatron_options(plan: Plan) -> tuple[str, ...]:
    """How a plan is laid out, one option with its value each; the model, data and learning rate are the user's. None for a
    plan of another runtime, or one that is cut elsewhere than between layers.

    Source: Megatron-Core's user guide (parallelism, mixtures of experts, custom pipeline layout).
    """
    counts = layers_per_stage(plan)
    if plan.job.runtime != RUNTIME or (counts is None and plan.num_stages > 1):
        return ()
    return tuple(_options(plan, counts or ()))


def shell_lines(options: tuple[str, ...], width: int = 78) -> str:
    """Options as lines that a shell takes for one.

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
    config = plan.model.reference().config or {}
    if any(config.get(key) for key in _EXPERTS):
        yield f"--expert-model-parallel-size {plan.ep}"
        yield "--expert-tensor-parallel-size 1"
        yield "--moe-grouped-gemm"
        yield "--moe-token-dispatcher-type alltoall"
    yield f"--micro-batch-size {plan.microbatch_size}"
    yield f"--global-batch-size {plan.job.global_batch}"
    yield f"--seq-length {plan.job.sequence_length}"
    yield f"--{plan.job.dtype}"
    if "layers" in plan.memory_policy:
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    elif "selective" in plan.memory_policy:
        yield "--recompute-granularity selective"
    if max(plan.sharding):
        yield "--use-distributed-optimizer"
    if plan.dp > 1 and plan.job.profile.overlaps_reduction:
        yield "--overlap-grad-reduce"
        if max(plan.sharding):
            yield "--overlap-param-gather"


def _stages(plan: Plan, counts: tuple[int, ...]) -> Iterator[str]:
    """Chunks by their number where all stages are equal, else layer by layer."""
    if len(set(counts)) > 1:
        yield f'--pipeline-model-parallel-layout "{_drawn(counts)}"'
    elif plan.num_stages > plan.pp:
        yield f"--num-virtual-stages-per-pipeline-rank {plan.num_stages // plan.pp}"


def _drawn(counts: tuple[int, ...]) -> str:
    """Stages from first to last: E the embedding, t a layer, L head and loss.

    >>> _drawn((1, 2, 2, 2, 2, 1)), _drawn((3, 2))
    ('Et|(t*2|)*4tL', 'Et*3|t*2L')
    """
    layers = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    first, *inner, last = layers
    middle = ""
    for drawn, group in groupby(inner):
        num = len(list(group))
        middle += f"({drawn}|)*{num}" if num > 1 else f"{drawn}|"
    return f"E{first}|{middle}{last}L"
