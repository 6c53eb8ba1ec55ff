"""A configuration as the options of Megatron-LM's `pretrain_gpt.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from stagewright.estimation.megatron import Layout, Shape
from stagewright.planning.configure.configuration import Configuration
from stagewright.planning.job import Job

STACKS = ("megatron-core+te", "megatron-core+te+deepep")
"""Those whose runtime is today's Megatron-LM."""


def megatron_options(one: Configuration, shape: Shape, job: Job, stack: str) -> tuple[str, ...]:
    """How a configuration is laid out, one option with its value each; the model, data and learning rate are the user's.

    Source: Megatron-Core's user guide (parallelism, mixtures of experts, custom pipeline layout).
    """
    return tuple(_options(one.layout, shape, job, stack))


def shell_lines(options: tuple[str, ...], width: int = 100) -> str:
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


def _options(layout: Layout, shape: Shape, job: Job, stack: str) -> Iterator[str]:
    yield f"--tensor-model-parallel-size {layout.tp}"
    if layout.sequence_parallel:
        yield "--sequence-parallel"
    if layout.cp > 1:
        yield f"--context-parallel-size {layout.cp}"
    yield f"--pipeline-model-parallel-size {layout.pp}"
    yield from _stages(layout, shape.num_layers)
    if shape.experts is not None:
        yield f"--expert-model-parallel-size {layout.tp * layout.ep}"
        yield "--expert-tensor-parallel-size 1"
        yield "--moe-grouped-gemm"
        flexible = stack.endswith("deepep")
        yield (
            "--moe-token-dispatcher-type flex --moe-enable-deepep"
            if flexible
            else "--moe-token-dispatcher-type alltoall"
        )
    yield f"--micro-batch-size {layout.microbatch_size}"
    yield f"--global-batch-size {job.global_batch}"
    yield f"--seq-length {job.sequence_length}"
    yield f"--{job.dtype}"
    if layout.recompute == "full":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    elif layout.recompute == "selective":
        yield "--recompute-granularity selective"
    if layout.shards_optimizer:
        yield "--use-distributed-optimizer"
    if layout.overlaps_reduction and layout.dp > 1:
        yield "--overlap-grad-reduce"
        if layout.shards_optimizer:
            yield "--overlap-param-gather"


def _stages(layout: Layout, num_layers: int) -> Iterator[str]:
    """Chunks by their number where all stages are equal, else layer by layer."""
    counts = layout.layers(num_layers)
    if len(set(counts)) > 1:
        yield f'--pipeline-model-parallel-layout "{_drawn(counts)}"'
    elif layout.num_chunks > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {layout.num_chunks}"


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
