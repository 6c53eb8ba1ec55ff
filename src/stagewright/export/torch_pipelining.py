"""Export of a plan to a small Python package for `torch.distributed.pipelining`: stages, schedule, and a script.

Stages are straight-line code of PyTorch's operators, so that the plan may cut between any operators; PyTorch's autograd
runs the backward. Values that skip stages pass through the stages between, because PyTorch's stages send to neighbours
only. `not_translated` lists what the package omits.

Source: PyTorch 2.13, torch/distributed/pipelining (`PipelineStage`, `_PipelineScheduleRuntime`). Ignores: random numbers,
which differ from those of `stagewright run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from stagewright.errors import InputError
from stagewright.export.differences import Report, with_level, with_policy, with_weights_on_devices
from stagewright.export.translation import plan_command
from stagewright.graph import Node, OperatorGraph, Ref, Symbol
from stagewright.graph.graph import Value
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Stage
from stagewright.planning.estimate import estimate, graph_of
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_cuts, stage_program
from stagewright.schedule.program import Program
from stagewright.schedule.torch_csv import write_torch_csv
from stagewright.text import one_line
from stagewright.units import format_bytes

_WHAT_TO_DO = "plan without it, or train with `stagewright run`"


@dataclass(frozen=True)
class Package:
    """The files of a package by name, and the names of the tensors with initial values of each stage."""

    files: dict[str, str]
    tensors: tuple[tuple[str, ...], ...]
    """Names per stage; buffers come after parameters."""


def torch_package(plan: Plan, graph: OperatorGraph) -> Package:
    """Return the package of `plan`, from the `graph` of its model, traced for a CPU.

    Raises:
        InputError: the plan has a feature that PyTorch's pipelines lack.
    """
    if plan.tp > 1 or plan.cp > 1 or plan.ep > 1:
        raise InputError(
            f"torch-pipelining: stages of tp {plan.tp}, cp {plan.cp}, ep {plan.ep} contain collectives of Stagewright: "
            f"{_WHAT_TO_DO}"
        )
    if plan.job.dtype == "fp16":
        raise InputError(
            "torch-pipelining: the package does not scale the loss, as fp16 needs: plan with --dtype bf16 or fp32"
        )
    stages = split_graph(graph, list(stage_cuts(plan, graph)))
    program = stage_program(plan)
    received = _received(stages)
    classes = [_class(stage, received[stage.index], received[stage.index + 1]) for stage in stages]
    head = _template("stages_head.txt")
    script = _template("train.txt")
    for mark, fact in _facts(plan, graph, stages, program.placement.rank_of_stage).items():
        script = script.replace(f"@{mark}@", repr(fact))
    names = ", ".join(f"Stage{stage.index}" for stage in stages)
    files = {
        "stages.py": "\n\n".join([head, *classes, f"STAGES = ({names},)\n"]),
        "train.py": script,
        "schedule.csv": write_torch_csv(_computing(program)),
        "README.md": _readme(plan),
    }
    tensors = tuple(
        tuple(stage.value(value).name for value in (*stage.parameters, *stage.buffers)) for stage in stages
    )
    return Package(files, tensors)


def _facts(
    plan: Plan, graph: OperatorGraph, stages: Sequence[Stage], rank_of_stage: Sequence[int]
) -> dict[str, Any]:
    """Return the constants of the script by name."""
    job = plan.job
    decay_steps = job.num_steps
    if job.lr_schedule == "wsd":
        decay_steps = job.decay_steps or max(1, job.num_steps // 10)
    config = {} if plan.model.is_code else plan.model.reference().config or {}
    adamw = (
        {"lr": job.learning_rate, "betas": job.betas, "eps": job.eps}
        if job.is_plain_adamw
        else {"lr": job.learning_rate}
    )
    return {
        "NUM_STAGES": plan.num_stages, "NUM_MICROBATCHES": plan.num_microbatches, "DP": plan.dp,
        "PLACEMENT": list(rank_of_stage), "BATCH": plan.num_microbatches * plan.microbatch_size,
        "TIED": _tied(stages, rank_of_stage), "TOKENS": config.get("vocab_size", 100),
        "INPUTS": {
            name: (list(graph.values[value].meta.shape[1:]), graph.values[value].meta.dtype)
            for name, value in graph.inputs.items()
        },
        "STEPS": job.num_steps, "SEED": job.seed, "ADAMW": adamw, "CLIP_NORM": job.clip_norm,
        "WEIGHT_DECAY": job.weight_decay, "DECAYED_DIMS": job.least_decayed_dims,
        "DECAY": job.lr_schedule, "WARMUP_STEPS": job.warmup_steps, "DECAY_STEPS": decay_steps,
        "FINAL_FRACTION": job.final_fraction,
    }  # fmt: skip


def _tied(stages: Sequence[Stage], rank_of_stage: Sequence[int]) -> dict[str, list[int]]:
    """Return the ranks of each trained parameter that several ranks have, by its name."""
    ranks: dict[str, set[int]] = {}
    for stage in stages:
        for parameter in map(stage.value, stage.parameters):
            if parameter.needs_grad:
                ranks.setdefault(parameter.name, set()).add(rank_of_stage[stage.index])
    return {name: sorted(sharing) for name, sharing in ranks.items() if len(sharing) > 1}


def check_memory(plan: Plan, report: Report = lambda stage: None) -> None:
    """Raise `InputError` if the package, which recomputes, offloads and shards nothing, needs more memory than there is."""
    keeps_all = all(policy == "keep" for policy in plan.memory_policy)
    on_host = plan.host_optimizer or plan.streamed
    if keeps_all and not any(plan.sharding) and plan.loss_pieces == 1 and not on_host:
        return
    graph = graph_of(plan, report)
    whole = with_policy(plan, graph, "none")
    whole = whole and with_level(whole, graph, 0)
    whole = whole and with_weights_on_devices(whole)
    if whole is None:
        return
    whole = whole.model_copy(update={"loss_pieces": 1, "host_optimizer": (), "shard_size": None})
    report("predicting the package")
    cluster = plan.cluster.load()
    predicted = estimate(whole, cluster, report=report)
    lacking = {}
    for rank, usable in zip(predicted.predictions.ranks, predicted.usable_bytes(cluster), strict=True):
        gradients = rank.categories.get("gradients", 0)  # in fp32, and in the package in the parameters' type
        saved = gradients // 2 if plan.job.dtype in ("bf16", "fp8") else 0
        lacking[rank.rank] = rank.reserved_peak_bytes - saved - usable
    fullest = max(lacking, key=lambda rank: lacking[rank])
    if lacking[fullest] > 0:
        options = "--tp 1 --cp 1 --ep 1 --recompute none --zero 0 --loss-pieces 1 --host-optimizer never"
        options += " --streamed never" * plan.streamed
        raise InputError(
            f"torch-pipelining: the package keeps everything on every replica, for which rank {fullest} lacks "
            f"{format_bytes(lacking[fullest])}: plan for it instead: {plan_command(plan, *options.split())}"
        )


def not_translated(plan: Plan) -> Iterator[str]:
    """Yield what the package omits of `plan`, a sentence each."""
    if any(policy != "keep" for policy in plan.memory_policy):
        yield (
            "stages recompute or offload under the plan, and here they keep everything: wrap layers in "
            "torch.utils.checkpoint, or leave headroom"
        )
    if any(plan.sharding):
        yield "replicas shard state under the plan, and here each holds all of it (gradients are averaged after the batch)"
    if plan.loss_pieces > 1:
        yield f"the loss goes in {plan.loss_pieces} pieces under the plan, and here whole: it needs memory for all logits"
    if plan.host_optimizer:
        yield "the optimizer runs on the host under the plan, and here where the parameters are"
    if plan.streamed:
        yield "weights are streamed from the host under the plan, and here on the devices"
    if not plan.job.is_plain_adamw:
        yield f"the optimizer is {plan.job.optimizer} under the plan, and here AdamW"
    if plan.job.dtype in ("bf16", "fp8"):
        yield "gradients are added up in fp32 under the plan, and here in bf16, as PyTorch's pipelines do"
    if plan.job.dtype == "fp8":
        yield "matmuls are in fp8 under the plan, and here in bf16"
    if plan.job.dtype == "tf32":
        yield "matmuls are in tf32 under the plan: call torch.set_float32_matmul_precision('high') for that"
    if plan.job.compiled:
        yield "operators are compiled under the plan, and here they run one by one"
    if plan.job.sequence_lengths:
        yield f"batches have one length here, {plan.job.sequence_length} tokens"


def _template(name: str) -> str:
    return (resources.files("stagewright.export") / "templates" / name).read_text(encoding="utf-8")


def _computing(program: Program) -> Program:
    """Return the program without recomputation, gathers and reductions."""
    kept = ("F", "I", "W", "B")
    ranks = tuple(
        tuple(action for action in actions if action.kind.value in kept) for actions in program.ranks
    )
    return Program(program.name, program.placement, program.num_microbatches, ranks)


def _received(stages: Sequence[Stage]) -> list[tuple[int, ...]]:
    """Return the values each stage receives from the previous one: those that it or a later stage uses. The last entry is
    empty."""
    arriving: list[tuple[int, ...]] = [()]
    needed: set[int] = set()
    for stage in reversed(stages):
        produced = {value for node in _nodes(stage) for value in node.outputs if value is not None}
        received = {value for transfer in stage.receives for value in transfer.values}
        needed = (needed - produced) | received
        arriving.append(tuple(sorted(needed)))
    return arriving[::-1]


def _nodes(stage: Stage) -> tuple[Node, ...]:
    return (*stage.static, *stage.derived, *stage.forward.nodes)


def _class(stage: Stage, arrives: Sequence[int], leaves: Sequence[int]) -> str:
    """Return the module of a stage, as code."""
    attributes = [
        *(
            _declared(parameter, f"nn.Parameter({{}}, requires_grad={parameter.needs_grad})")
            for parameter in map(stage.value, stage.parameters)
        ),
        *(_declared(stage.value(value), "Buffer({})") for value in stage.buffers),
    ]
    named = [(f"t{value}", stage.value(value).name) for value in (*stage.parameters, *stage.buffers)]
    body = []
    if arrives:
        body.append(f"{''.join(f'v{value}, ' for value in arrives)}= map(Received.apply, received)")
    used = {value for node in _nodes(stage) for value in node.inputs}
    inputs = {value: name for name, value in stage.graph.inputs.items()}
    body += [f"v{value} = batch[{inputs[value]!r}]" for value in stage.inputs]
    body += [f"v{value} = self.t{value}" for value in (*stage.parameters, *stage.buffers) if value in used]
    body += [_statement(node, stage) for node in _nodes(stage)]
    body += [f"self.t{buffer} = v{value}.detach()" for buffer, value in stage.mutations]
    if stage.computes_loss:
        body.append(f"return v{stage.graph.loss}.reshape(1)  # outputs of microbatches are put together")
    else:
        body.append(f"return ({''.join(f'Sent.apply(v{value}), ' for value in leaves)})")
    lines = [
        f"class Stage{stage.index}(nn.Module):",
        f"    NAMES = {dict(named)!r}",
        "",
        "    def __init__(self) -> None:",
        "        super().__init__()",
        *(f"        {line}" for line in attributes),
        "",
        "    def forward(self, *received, **batch):",
        *(f"        {line}" for line in body),
    ]
    return "\n".join(lines)


def _declared(value: Value, how: str) -> str:
    meta = value.meta
    empty = f"torch.empty({list(meta.shape)}, dtype=torch.{meta.dtype})"
    return f"self.t{value.id} = {how.format(empty)}"


_ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (
        "query",
        "key",
        "value",
        "dropout_p",
        "is_causal",
    ),
    "stagewright.attention.default": (
        "query",
        "key",
        "value",
        "attn_mask",
        "dropout_p",
        "is_causal",
        "scale",
    ),
}
"""Names of the arguments of operators that become PyTorch's attention, which chooses the kernel on every device."""


_RESHAPES = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}
"""Operators that rely on strides, which a value loses when it is sent, and what works on any strides."""


def _statement(node: Node, stage: Stage) -> str:
    if node.op in _ATTENTION:
        given = dict(zip(_ATTENTION[node.op], node.args, strict=False)) | dict(node.kwargs)
        arguments = ", ".join(f"{name}={_text(argument)}" for name, argument in given.items())
        heads = [stage.value(value).meta.shape[1] for value in node.inputs[:2]]
        arguments += ", enable_gqa=True" * (heads[0] != heads[1])
        return f"v{node.outputs[0]} = F.scaled_dot_product_attention({arguments})"
    if not node.op.startswith("aten."):
        raise InputError(f"torch-pipelining: operator {node.op} is not one of PyTorch's: {_WHAT_TO_DO}")
    arguments = [_text(argument) for argument in node.args]
    arguments += [f"{key}={_text(value)}" for key, value in node.kwargs]
    targets = ", ".join(f"v{value}" if value is not None else "_" for value in node.outputs)
    name = _RESHAPES.get(node.op, node.op).removeprefix("aten.")
    call = f"ops.{name}({', '.join(arguments)})"
    return f"{targets} = {call}" if targets else call


_SYMBOLS = {"dtype": "torch.{}", "layout": "torch.{}", "memory_format": "torch.{}"}


def _text(argument: Any) -> str:
    """Return an argument as code.

    >>> _text((Ref(3), 1.5, None, Symbol("dtype", "float32"), float("-inf")))
    "[v3, 1.5, None, torch.float32, float('-inf')]"
    """
    if isinstance(argument, Ref):
        return f"v{argument.value}"
    if isinstance(argument, Symbol):
        return (
            "device_of(self)" if argument.kind == "device" else _SYMBOLS[argument.kind].format(argument.name)
        )
    if isinstance(argument, tuple):
        return "[" + ", ".join(_text(item) for item in argument) + "]"
    if isinstance(argument, float):
        return repr(argument) if math.isfinite(argument) else f"float('{argument!r}')"
    return repr(argument)


def _readme(plan: Plan) -> str:
    """Return how to run the package, and what it omits."""
    omitted = [f"* {sentence}" for sentence in not_translated(plan)]
    omissions = ["", "What the plan has and this package has not:", "", *omitted] if omitted else []
    lines = [
        f"# {one_line(plan.model.name)} in {plan.num_stages} stages, for torch.distributed.pipelining",
        "",
        f"{one_line(plan.schedule)}: {plan.num_microbatches} microbatches of {plan.microbatch_size} on {plan.pp} pipeline "
        f"ranks x {plan.dp} replicas.",
        "",
        "```sh",
        f"torchrun --nproc-per-node {plan.num_ranks} train.py --steps 10",
        "```",
        "",
        "`stages.py` has the modules, `schedule.csv` the order of their forwards and backwards, `stage-N.safetensors`",
        "their initial tensors.",
        "Batches are random in `train.py`: put your own in the place of `batches`.",
        *omissions,
    ]
    return "\n".join(lines) + "\n"
