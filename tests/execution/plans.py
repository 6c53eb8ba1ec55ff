"""Plans made by hand, for tests of the executor that should not depend on the planner's choices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stagewright.planning.job import Job
from stagewright.planning.plan import ClusterSection, ModelSection, Plan, Predictions, cut_names
from stagewright.schedule.families import build as build_schedule
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve
from stagewright.version import __version__


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
) -> Plan:
    """A plan with equal numbers of operators per stage, written to `path`."""
    overrides = {"num_hidden_layers": 4} if overrides is None else dict(overrides)
    job = Job(
        global_batch=num_microbatches * microbatch_size * dp,
        sequence_length=32,
        dtype=dtype,  # type: ignore[arg-type]
        learning_rate=3e-3,
        num_steps=num_steps,
        clip_norm=clip_norm,
    )
    reference = resolve(model, overrides)
    graph = trace(reference, microbatch_size, job.sequence_length, job.torch_name)
    program = build_schedule(schedule, pp, num_microbatches)
    stages = program.num_stages
    cuts = [len(graph.body) * stage // stages for stage in range(1, stages)]
    plan = Plan(
        stagewright=__version__,
        model=ModelSection(text=model, overrides=overrides, digest=reference.digest, name=reference.name),
        job=job,
        cluster=ClusterSection(name="local", num_devices=pp * dp, device="cpu"),
        dp=dp,
        pp=pp,
        num_stages=stages,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        cuts=cut_names(graph, cuts),
        placement=program.placement.rank_of_stage,
        schedule=schedule,
        program=tuple(tuple(str(action) for action in actions) for actions in program.ranks),
        memory_policy=("keep",) * stages,
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
