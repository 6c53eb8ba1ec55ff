"""The plan of a fine-tuning in ten lines: the data, what each device holds, the speed and the time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from stagewright.planning.assignment.placing import on_devices
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import layers_per_stage
from stagewright.report.plans import described_schedule, marks_legend, spare_bytes
from stagewright.report.tables import Table, table
from stagewright.text import plural
from stagewright.units import format_bytes, format_seconds


@dataclass(frozen=True)
class DataSummary:
    """The data of a fine-tuning, in samples of the plan's length."""

    name: str
    num_documents: int
    num_held_out: int
    num_samples: int
    num_tokens: int
    """Tokens to train on."""
    num_learnt: int
    """Tokens with a loss."""
    num_cut: int
    """Documents that are longer than a sample and lose their end."""


def model_line(plan: Plan, why: str) -> str:
    """Return one line about the model, its adapters and the precision of its weights."""
    lora = plan.model.lora
    assert lora is not None, "a fine-tuning trains adapters"
    targets = (
        lora.targets
        if isinstance(lora.targets, str)
        else ", ".join(lora.targets or ("peft's layers for this model",))
    )
    return (
        f"{plan.model.name} on {plan.cluster.name}: LoRA of rank {lora.rank} on {targets}, the model frozen in "
        f"{held_in(plan)}, {why}"
    )


def held_in(plan: Plan) -> str:
    """Return the precision that the frozen model of a plan is held in."""
    lora = plan.model.lora
    return plan.job.dtype if lora is None or lora.base is None else lora.base


def data_lines(data: DataSummary, plan: Plan) -> Iterator[str]:
    """Yield one line about the data, and one about documents that are cut."""
    length = plan.job.sequence_length
    full = data.num_tokens / (data.num_samples * length)
    learnt = (
        "" if data.num_learnt == data.num_tokens else f", {data.num_learnt / data.num_tokens:.0%} with a loss"
    )
    held_out = f"; {plural(data.num_held_out, 'document')} held out" if data.num_held_out else ""
    yield (
        f"{data.name}: {plural(data.num_documents, 'document')} of {plural(data.num_tokens, 'token')}{learnt}, in "
        f"{plural(data.num_samples, 'sample')} of {length:,} tokens ({min(full, 1.0):.0%} full){held_out}"
    )
    if data.num_cut:
        are = "document is" if data.num_cut == 1 else "documents are"
        yield f"{data.num_cut:,} {are} longer than {length:,} tokens and cut: a larger --sequence-length keeps them"


def device_table(plan: Plan) -> Table:
    """Return a row per device: its name, its layers, and its predicted memory of what it may use."""
    cluster = plan.cluster.load()
    ordered = on_devices(cluster, plan.devices)
    whole = plan.job.model_copy(update={"memory_to_spare": 0.0})
    usable = plan.model_copy(update={"job": whole}).usable_bytes(cluster)
    layers = _layers(plan)
    rows = []
    for pipeline_rank in range(plan.pp):
        numbers = [
            plan.global_rank(pipeline_rank, replica, shard)
            for replica in range(plan.num_holders)
            for shard in range(plan.tp)
        ]
        names = dict.fromkeys(ordered.device_of(number).name for number in numbers)
        cards = (
            ", ".join(str(plan.devices[number] if plan.devices else number) for number in numbers),
            " + ".join(names),
        )
        peak = plan.predictions.ranks[pipeline_rank].reserved_peak_bytes
        spare = 1 - peak / usable[pipeline_rank]
        rows.append(
            (
                *cards, layers[pipeline_rank], format_bytes(peak), format_bytes(usable[pipeline_rank]), f"{spare:.0%}",
            )
        )  # fmt: skip
    return table("", ("device", "", "layers", "predicted", "usable", "spare"), rows, text=3)


def _layers(plan: Plan) -> list[str]:
    """Return the layers of every pipeline rank, as ranges."""
    counts = layers_per_stage(plan)
    sizes = counts or [stage.stop - stage.start for stage in plan.predictions.stages]
    by_rank: list[list[str]] = [[] for _ in range(plan.pp)]
    number = 0
    runs = [
        (rank, list(run)) for rank, run in groupby(range(plan.num_stages), key=plan.placement.__getitem__)
    ]
    for place, (rank, run) in enumerate(runs):
        count = sum(sizes[stage] for stage in run)
        last = number + count - 1
        parts = ["embedding"] if place == 0 and counts else []
        parts += [f"{number}-{last}" if last > number else f"{number}"] if count else []
        parts += ["head"] if place == len(runs) - 1 and counts else []
        by_rank[rank].append(("" if counts else "operators ") + " ".join(parts))
        number += count
    return [", ".join(parts) for parts in by_rank]


def speed_lines(plan: Plan, has_data: bool) -> Iterator[str]:
    """Yield the schedule, and tokens per second with the time of the whole training."""
    predictions, job = plan.predictions, plan.job
    shape = {"replicas": plan.dp, "tensor parallel": plan.tp, "pipeline ranks": plan.pp}
    degrees = " x ".join(f"{count} {name}" for name, count in shape.items() if count > 1) or "one device"
    degrees += f" (ZeRO {level})" if (level := max(plan.sharding)) else ""
    microbatches = plural(plan.num_microbatches, "microbatch", "microbatches")
    legend = marks_legend(plan)
    yield (
        f"{degrees}, {described_schedule(plan)}, {microbatches} of {plan.microbatch_size}; bubble "
        f"{predictions.bubble_fraction:.1%}" + (f" ({legend})" if legend else "")
    )
    seconds = job.num_steps * predictions.step_seconds
    speed = f"{predictions.tokens_per_second:,.0f} tokens/s, {format_seconds(predictions.step_seconds)} a step of "
    speed += plural(job.global_batch, "sample")
    if has_data:
        yield f"{speed}; {plural(job.num_steps, 'step')}: {duration(seconds)}"
    else:
        yield f"{speed}; a million tokens: {duration(1e6 / predictions.tokens_per_second)}"


def alternative_line(plans: Sequence[Plan]) -> str | None:
    """Return how much slower the best of `plans` would be without a pipeline if the first has one, or with one if it has
    none; None where no such plan was looked at to the end."""
    best, *others = plans
    other = next((plan for plan in others if (plan.pp == 1) != (best.pp == 1)), None)
    if other is None:
        return None
    kind = "Without a pipeline" if other.pp == 1 else f"As a pipeline of {other.pp}"
    slower = 1 - best.mean_step_seconds / other.mean_step_seconds
    spare, _ = spare_bytes(other)
    return f"{kind} it would be {slower:.0%} slower, with {format_bytes(spare)} to spare."


def duration(seconds: float) -> str:
    """Return a duration as one waits for it.

    >>> duration(9000), duration(90), duration(5)
    ('2.5 hours', '1.5 minutes', '5 s')
    """
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} s"
