"""Panels of a page around its timeline: an answer, figures, and tables of raw numbers, which the page formats, draws and
offers for download."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stagewright.planning.explanation import Explanation, explain
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.search_result import SearchResult
from stagewright.report.plans import (
    answer_line,
    described_schedule,
    host_memory_line,
    job_text,
    tight_warnings,
)
from stagewright.simulation import Timeline
from stagewright.text import printable

Cell = str | int | float | None

_BEFORE_CATEGORIES = 5
"""Columns of the memory table before its categories."""


@dataclass(frozen=True)
class Column:
    """A heading, and the unit of its cells: ``s``, ``B``, ``%`` (of one), or none for counts and text."""

    name: str
    unit: str = ""


@dataclass(frozen=True)
class Figure:
    """A highlighted number."""

    name: str
    value: float
    unit: str = ""


@dataclass(frozen=True)
class PanelTable:
    """Rows of raw numbers under `columns`; `key` names the table in downloads."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Panels:
    """All that a page shows besides the timeline and the memory of its ranks."""

    title: str
    answer: str
    figures: tuple[Figure, ...]
    tables: tuple[PanelTable, ...]

    @property
    def categories(self) -> list[str]:
        """Names of memory categories in the memory table."""
        columns = next((table.columns for table in self.tables if table.key == "memory"), ())
        return [column.name for column in columns[_BEFORE_CATEGORIES:]]

    def document(self) -> dict[str, Any]:
        """Return the data of the page, with unprintable characters escaped."""
        return _shown(asdict(self))


def timeline_panels(timeline: Timeline, title: str) -> Panels:
    """Return the panels of a schedule without a plan: busy and idle time of its ranks."""
    figures = (
        Figure("makespan", timeline.makespan_s, "s"),
        Figure("bubble", timeline.bubble_fraction, "%"),
        Figure("ranks", timeline.num_ranks),
    )
    return Panels(title, "", figures, (_busy_table(timeline),))


def plan_panels(plan: Plan, timeline: Timeline, result: SearchResult | None = None) -> Panels:
    """Return the panels of `plan`, simulated as `timeline`, with the alternatives of its search `result`."""
    predictions = plan.predictions
    figures = (
        Figure("step", plan.mean_step_seconds, "s"),
        Figure(f"{plan.job.unit}/s", plan.mean_rate(lambda item: item.tokens_per_second)),
        Figure("MFU", plan.mean_rate(lambda item: item.mfu), "%"),
        Figure("bubble", predictions.bubble_fraction, "%"),
        *(Figure("reserved peak", predictions.reserved_peak_bytes, "B") for _ in predictions.ranks[:1]),
        Figure("devices", plan.num_ranks),
    )
    tables = [
        _stage_table(plan),
        _memory_table(plan),
        _busy_table(timeline),
        _link_table(plan),
        _place_table(plan),
    ]
    if predictions.costs is not None:
        tables[:0] = _explanation_tables(explain(plan))
    if result is not None:
        tables.insert(0, _alternatives(result))
    title = f"{plan.model.name} on {plan.cluster.name}: {plan.degrees}, {described_schedule(plan)}"
    lines = [f"{job_text(plan)}; {plan.batch_text}."]
    if predictions.ranks:
        lines.insert(0, answer_line(plan))
        lines += [line for line in (host_memory_line(plan),) if line is not None]
        lines += [f"Warning: {text}." for text in tight_warnings(plan)]
    answer = "\n".join(lines)
    return Panels(title, answer, figures, tuple(item for item in tables if item.rows))


def _explanation_tables(explanation: Explanation) -> list[PanelTable]:
    parts = tuple(
        (item.what, item.count or None, item.seconds, item.seconds / explanation.seconds)
        for item in explanation.parts
    )
    columns = (
        Column("what"),
        Column("number"),
        Column("takes", "s"),
        Column("of the step", "%"),
    )
    changed = Column("what"), Column("note"), Column("step", "s"), Column("change", "%")
    tables = [PanelTable("parts", "Critical path of the step", columns, parts)]
    for key, title, changes in (
        ("changes", "What would make it faster", explanation.changes),
        ("errors", "If the estimate is wrong", explanation.errors),
    ):  # fmt: skip
        rows = tuple(
            (item.what, item.note, item.seconds, item.seconds / explanation.seconds - 1) for item in changes
        )
        tables.append(PanelTable(key, title, changed, rows))
    return tables


def _stage_table(plan: Plan) -> PanelTable:
    named = ("forward", "input_grad", "weight_grad", "recompute")
    sized = ("parameter_bytes", "saved_bytes", "recomputed_bytes", "offloaded_bytes", "boundary_bytes")
    columns = (
        Column("stage"), Column("rank"), Column("starts at"), Column("saved values"),
        Column("F", "s"), Column("I", "s"), Column("W", "s"), Column("R", "s"),
        *(Column(name, "B") for name in ("parameters", "saved", "recomputed", "offloaded", "sent")),
    )  # fmt: skip
    rows = tuple(
        (
            number, rank, start, policy_text(policy),
            *(getattr(stage, f"{name}_seconds") for name in named), *(getattr(stage, name) for name in sized),
        )
        for number, (rank, start, policy, stage) in enumerate(
            zip(plan.placement, ["(start)", *plan.cuts], plan.memory_policy, plan.predictions.stages, strict=False)
        )
    )  # fmt: skip
    return PanelTable("stages", "Stages, per microbatch", columns, rows)


def policy_text(policy: str | StagePolicy) -> str:
    """Return a description of a stage's memory policy.

    >>> policy_text("keep"), policy_text(StagePolicy(recompute=("a:1", "a:2"), offload=("b:1",)))
    ('keep', 'recompute 2, offload 1')
    """
    if isinstance(policy, str):
        return policy
    ways = {"recompute": policy.recompute, "offload": policy.offload}
    return ", ".join(f"{way} {len(names)}" for way, names in ways.items() if names) or "keep"


def category_text(name: str) -> str:
    """Return the display name of a memory category."""
    return printable(name.replace("_", " "))


def _memory_table(plan: Plan) -> PanelTable:
    ranks = plan.predictions.ranks
    limits = plan.usable_bytes(plan.cluster.load()) if ranks else []
    names = tuple(dict.fromkeys(name for rank in ranks for name, size in rank.categories.items() if size))
    columns = (
        Column("rank"), Column("capacity", "B"), Column("reserved", "B"), Column("allocated", "B"), Column("at"),
        *(Column(category_text(name), "B") for name in names),
    )  # fmt: skip
    rows = tuple(
        (
            rank.rank, limits[rank.rank], rank.reserved_peak_bytes,
            rank.allocated_peak_bytes, rank.peak_at, *(rank.categories.get(name, 0) for name in names),
        )
        for rank in ranks
    )  # fmt: skip
    return PanelTable("memory", "Memory at the peak of each rank, by category", columns, rows)


def _busy_table(timeline: Timeline) -> PanelTable:
    makespan = timeline.makespan_s or 1.0
    rows = tuple(
        (rank, float(busy), float(idle), float(idle) / makespan)
        for rank, (busy, idle) in enumerate(zip(timeline.busy_s, timeline.idle_s, strict=True))
    )
    columns = (
        Column("rank"),
        Column("busy", "s"),
        Column("idle", "s"),
        Column("idle share", "%"),
    )
    return PanelTable("ranks", "Busy and idle", columns, rows)


def _link_table(plan: Plan) -> PanelTable:
    costs = plan.predictions.costs
    columns = (
        Column("from stage"), Column("to stage"), Column("from rank"), Column("to rank"), Column("value", "B"),
        Column("value takes", "s"), Column("gradient", "B"), Column("gradient takes", "s"),
    )  # fmt: skip
    rows = tuple(
        (
            transfer.source, transfer.target, plan.placement[transfer.source], plan.placement[transfer.target],
            transfer.value_bytes, transfer.value_seconds, transfer.gradient_bytes, transfer.gradient_seconds,
        )
        for transfer in (() if costs is None else costs.transfers)
        if transfer.value_seconds or transfer.gradient_seconds
    )  # fmt: skip
    return PanelTable("links", "Transfers between stages, per microbatch", columns, rows)


def _place_table(plan: Plan) -> PanelTable:
    """Return the devices of the replicas and tensor-parallel ranks of each pipeline rank."""
    width = plan.num_ranks // plan.pp
    numbers = plan.devices or range(plan.num_ranks)
    rows = tuple((rank, _listed(numbers[rank * width : (rank + 1) * width])) for rank in range(plan.pp))
    return PanelTable("devices", "Devices of each rank", (Column("rank"), Column("devices")), rows)


def _listed(numbers: Sequence[int]) -> str:
    """Return consecutive numbers as a range, others with commas.

    >>> _listed(range(4, 8)), _listed((0, 2))
    ('4-7', '0, 2')
    """
    is_run = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if is_run else ", ".join(map(str, numbers))


def _alternatives(result: SearchResult) -> PanelTable:
    columns = (
        *(Column(name) for name in ("schedule", "tp", "cp", "pp", "dp", "ep", "zero", "microbatches x size")),
        Column("step", "s"), Column("slower by", "%"), Column("bubble", "%"), Column("reserved peak", "B"),
    )  # fmt: skip
    return PanelTable("alternatives", "Other plans, and what each loses", columns, tuple(_others(result)))


def _others(result: SearchResult) -> Iterator[tuple[Cell, ...]]:
    best = result.plans[0].mean_step_seconds
    for plan in result.plans:
        step = plan.mean_step_seconds
        yield (
            described_schedule(plan), plan.tp, plan.cp, plan.pp, plan.dp, plan.ep, max(plan.sharding),
            f"{plan.num_microbatches} x {plan.microbatch_size}", step, step / best - 1,
            plan.predictions.bubble_fraction, plan.predictions.reserved_peak_bytes,
        )  # fmt: skip
    if (near := result.next_best) is not None:
        bound = f"not simulated; lower bound of {near.configuration}"
        yield (bound, *(None,) * 7, near.seconds, near.seconds / best - 1, None, None)


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list | tuple) else value
