"""Plans made by hand, for tests of the executor that should not depend on the planner's choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from stagewright.cluster import load_cluster
from stagewright.execution.launch import run
from stagewright.execution.record import Record
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Stage
from stagewright.planning.configuration import Configuration
from stagewright.planning.estimate import staged_model_of
from stagewright.planning.job import load_job
from stagewright.planning.plan import (
    ClusterSection,
    ModelSection,
    Plan,
    Predictions,
    StagePolicy,
)
from stagewright.planning.plan_stages import cut_names
from stagewright.planning.prediction.predict import rank_memories
from stagewright.planning.prediction.sharding import sharded_program, streamed_program
from stagewright.schedule import Program
from stagewright.schedule.builders import build as build_schedule
from stagewright.schedule.lower import insert_recomputation
from stagewright.schedule.subdivide import subdivided
from stagewright.tracing.cache import trace
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.reference import resolve
from stagewright.version import __version__


def trained(item: Plan, folder: Path) -> Record:
    """The record of a run of `item` by local processes, all files in `folder`."""
    item.save(folder / "plan.json")
    record = run(folder / "plan.json", out=folder / "run", device="cpu")
    assert record is not None
    return record


def make_plan(
    path: Path,
    model: str = "tiny-llama",
    schedule: str = "1f1b",
    pp: int = 2,
    dp: int = 1,
    num_microbatches: int = 4,
    dtype: str = "fp32",
    num_steps: int = 4,
    clip_norm: float | None = 1.0,
    overrides: Mapping[str, object] | None = None,
    microbatch_size: int = 1,
    sharding: int | Sequence[int] | None = None,
    num_chunks: int | None = None,
    policy: str = "keep",
    sequence_length: int = 32,
    reduce_dtype: str | None = None,
    tp: int = 1,
    sequence_parallel: bool = False,
    loss_scale: float = 65536.0,
    shard_size: int | None = None,
    compiled: bool = False,
    host_optimizer: Sequence[int] = (),
    num_units: int = 1,
    options: Mapping[str, object] | None = None,
    lora: Lora | None = None,
    program: Program | None = None,
    streamed: bool = False,
) -> Plan:
    """A plan with equal numbers of operators per stage, written to `path`.

    `sharding` is one level for all stages, or one for each; None leaves the sums of replicas to the end of the batch. Each
    stage of the schedule is divided into `num_units`. A `program` stands in for schedule, ranks and microbatches.
    `policy` is ``keep``, ``recompute``, ``some`` (recomputes half of what is saved), ``reruns`` (runs operators again in the
    backwards of others, whatever that is good for) or ``offload``. `options` are further keys of the job.
    """
    overrides = {"num_hidden_layers": 4} if overrides is None else dict(overrides)
    if program is not None:
        schedule, pp, num_microbatches = "custom", program.num_ranks, program.num_microbatches
    keys: dict[str, object] = {
        "global_batch": num_microbatches * microbatch_size * dp,
        "sequence_length": sequence_length,
        "dtype": dtype,
        "learning_rate": 3e-3,
        "num_steps": num_steps,
        "clip_norm": clip_norm,
        "loss_scale": loss_scale,
        "compiled": compiled,
        "loss_scale_window": 2,
    }
    job = load_job(None, keys | dict(options or {})).with_state()
    reference = resolve(model, overrides).adapted(lora)
    degrees = Configuration(tp=tp, sequence_parallel=sequence_parallel)
    traced = job.traced("cuda") | degrees.trace_arguments  # as for clusters nothing describes
    graph = trace(reference, microbatch_size, **traced)
    whole = program or build_schedule(schedule, pp, num_microbatches, num_chunks)
    program = subdivided(whole, (num_units,) * whole.num_stages)
    stages = program.num_stages
    cuts = [len(graph.forward_ids) * stage // stages for stage in range(1, stages)]
    split_stages = split_graph(graph, cuts)
    policies = [_policy(stage, policy) for stage in split_stages]
    if policy != "keep":
        saving = (isinstance(chosen, str) or chosen.recompute or chosen.offload for chosen in policies)
        program = insert_recomputation(program, [stage for stage, saves in enumerate(saving) if saves])
    levels = (sharding,) * stages if isinstance(sharding, int) else tuple(sharding or (0,) * stages)
    if streamed:
        on_host = program.placement.stages_on(host_optimizer)
        program = streamed_program(program, split_stages, on_host)
    elif sharding is not None:
        program = sharded_program(program, split_stages, levels)
    plan = Plan(
        stagewright=__version__,
        model=ModelSection.of(reference),
        job=job,
        cluster=ClusterSection(name="local", num_devices=pp * dp * tp, device="cpu"),
        dp=dp,
        tp=tp,
        sequence_parallel=sequence_parallel,
        pp=pp,
        num_stages=stages,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        cuts=cut_names(graph, cuts),
        placement=program.placement.rank_of_stage,
        schedule=schedule,
        program=tuple(tuple(str(action) for action in actions) for actions in program.ranks),
        memory_policy=tuple(policies),
        sharding=levels,  # type: ignore[arg-type]
        reduce_dtype=reduce_dtype,  # type: ignore[arg-type]
        shard_size=shard_size,
        host_optimizer=tuple(host_optimizer),
        streamed=streamed,
        predictions=Predictions(
            step_seconds=1.0,
            lower_bound_seconds=0.5,
            tokens_per_second=1.0,
            mfu=0.1,
            bubble_fraction=0.1,
            ranks=(),
            stages=(),
        ),
    )
    plan.save(path)
    return plan


def _policy(stage: Stage, policy: str) -> str | StagePolicy:
    if policy in ("keep", "recompute"):
        return policy
    made = (stage.graph.values[value].node for value in stage.saved)
    names = tuple(sorted({stage.graph.nodes[node].name for node in made if node in stage.graph.position}))
    if policy == "reruns":
        body = [node.name for node in stage.forward.nodes if node.id in stage.graph.position]
        reruns = tuple((name, tuple(body[at % 7 : at : 7])) for at, name in enumerate(body) if at % 3 == 0)
        again = {name for _, names in reruns for name in names}
        return StagePolicy(recompute=tuple(sorted(again)), reruns=reruns)
    return StagePolicy(recompute=names[::2]) if policy == "some" else StagePolicy(offload=names)


def peaks_on_cpus(plan: Plan) -> list[int]:
    """What each pipeline rank of a plan for GPUs has at its peak on CPUs, which keep no buffers for transfers."""
    cluster = load_cluster(f"{plan.num_ranks}x-h100", {"device.kind": "cpu"})
    return [memory.peak_bytes for memory in rank_memories(staged_model_of(plan, cluster))]
