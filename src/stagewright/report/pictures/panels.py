"""What stands around the timeline of a plan's page: the answer, the stages along the model, the ranks, the alternatives.

Plain HTML without script, from the figures that a plan states; every panel reads when the page is printed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape

from stagewright.planning.plan import Plan
from stagewright.report.pictures.colours import FILLS
from stagewright.report.plans import answer_line, described_schedule, plan_document, widths
from stagewright.schedule import Kind
from stagewright.text import printable
from stagewright.units import format_bytes, format_seconds

_GOLDEN_ANGLE = 137.5
"""Between the hues of neighbours, so that any number of them differ."""


def plan_panels(plans: Sequence[Plan]) -> tuple[str, str]:
    """What goes above and below the timeline of the first of `plans`; the others are its alternatives."""
    best = plans[0]
    above = _answer(best) + _stages(best)
    below = _ranks(best) + (_alternatives(plans) if len(plans) > 1 else "") + _download(plans)
    return above, below


def page_title(plan: Plan) -> str:
    """Which model, cluster and plan a page is of."""
    return f"{plan.model.name} on {plan.cluster.name}: {described_schedule(plan)}, pp x dp {widths(plan)}"


def _text(text: object) -> str:
    return escape(printable(str(text)))


def _answer(plan: Plan) -> str:
    predictions = plan.predictions
    peak = max(rank.reserved_peak_bytes for rank in predictions.ranks)
    tiles = (
        ("step", format_seconds(predictions.step_seconds)),
        ("tokens/s", f"{predictions.tokens_per_second:,.0f}"),
        ("MFU", f"{predictions.mfu:.1%}"),
        ("bubble", f"{predictions.bubble_fraction:.1%}"),
        ("peak", format_bytes(peak)),
        ("microbatches", f"{plan.num_microbatches} of {plan.microbatch_size}"),
    )
    shown = "".join(f"<div><b>{_text(figure)}</b><span>{name}</span></div>" for name, figure in tiles)
    return f'<section class="tiles">{shown}</section><p class="answer">{_text(answer_line(plan))}</p>'


def _stages(plan: Plan) -> str:
    """The model from left to right, every stage as wide as its passes take."""
    stages = plan.predictions.stages
    blocks = []
    for number, stage in enumerate(stages):
        seconds = stage.forward_seconds + stage.input_grad_seconds + stage.weight_grad_seconds
        policy = plan.memory_policy[number]
        says = [
            f"stage {number} on rank {plan.placement[number]}", f"forward {format_seconds(stage.forward_seconds)}",
            f"backward {format_seconds(stage.input_grad_seconds + stage.weight_grad_seconds)}",
            f"parameters {format_bytes(stage.parameter_bytes)}",
            f"saves {format_bytes(stage.saved_bytes)} a microbatch", f"sends {format_bytes(stage.boundary_bytes)}",
            f"recomputes {format_bytes(stage.recomputed_bytes)}, offloads {format_bytes(stage.offloaded_bytes)}"
            if policy != "keep" and (stage.recomputed_bytes or stage.offloaded_bytes) else "keeps all",
            f"begins at {plan.cuts[number - 1]}" if number else "begins the model",
        ]  # fmt: skip
        share = stage.forward_seconds / seconds if seconds else 0.5
        mark = "" if policy == "keep" else " &#8635;"
        blocks.append(
            f'<div class="stage" style="flex-grow:{max(seconds, 1e-9) * 1e6:.0f};background:linear-gradient(90deg,'
            f'{FILLS[Kind.F]} {share:.0%},{FILLS[Kind.B]} {share:.0%})" title="{_text(chr(10).join(says))}">'
            f"{number}{mark}</div>"
        )
    caption = "The model, cut into stages as wide as their forward and backward of a microbatch take"
    if any(policy != "keep" for policy in plan.memory_policy):
        caption += "; &#8635;: recomputes or offloads"
    return f'<h2>{caption}</h2><div class="model">{"".join(blocks)}</div>'


def _ranks(plan: Plan) -> str:
    """Busy and idle per rank, and what its peak is made of beside what its device has."""
    cluster, predictions = plan.cluster.load(), plan.predictions
    usable = plan.job.usable_bytes(cluster.nodes[0].device)
    names = list(dict.fromkeys(name for rank in predictions.ranks for name in rank.categories))
    colours = {
        name: f"hsl({(220 + _GOLDEN_ANGLE * index) % 360:.0f} 50% {46 + 10 * (index % 3)}%)"
        for index, name in enumerate(names)
    }
    rows = []
    for rank in predictions.ranks:
        whole = max(usable, rank.reserved_peak_bytes)
        parts = "".join(
            _part(size / whole, colours[name], f"{_named(name)} {format_bytes(size)}")
            for name, size in rank.categories.items()
        )
        own = [stage for stage, holder in enumerate(plan.placement) if holder == rank.rank]
        busy = rank.busy_seconds / predictions.step_seconds
        rows.append([
            f"{rank.rank}", _some(own), format_seconds(rank.busy_seconds),
            f'<span class="bar">{_part(busy, FILLS[Kind.F], "busy")}</span>{1 - busy:.1%} idle',
            f'<span class="bar memory">{parts}</span>', format_bytes(rank.reserved_peak_bytes), _text(rank.peak_at),
        ])  # fmt: skip
    keys = "".join(
        f'<span><i style="background:{colours[name]}"></i>{_text(_named(name))}</span>' for name in names
    )
    headings = (
        "rank", "stages", "busy", "of the step", f"alive at the peak, of {format_bytes(usable)}", "reserved", "peak at",
    )  # fmt: skip
    return f"<h2>Ranks</h2><p class='keys'>{keys}</p>" + _table(headings, rows)


def _named(category: str) -> str:
    return category.replace("_", " ")


def _part(share: float, colour: str, says: str) -> str:
    """A piece of a bar."""
    return f'<i style="width:{share:.2%};background:{colour}" title="{_text(says)}"></i>'


def _some(numbers: Sequence[int]) -> str:
    """
    >>> _some([0, 2]), _some(range(9))
    ('0, 2', '0, 1, 2, ... 8')
    """
    if len(numbers) > 6:
        return f"{', '.join(map(str, numbers[:3]))}, ... {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _alternatives(plans: Sequence[Plan]) -> str:
    best = plans[0].predictions.step_seconds
    rows = [
        [
            _text(widths(one)), str(one.num_stages), f"{one.num_microbatches} of {one.microbatch_size}",
            _text(described_schedule(one)), format_seconds(one.predictions.step_seconds),
            f"{one.predictions.step_seconds / best - 1:+.1%}", f"{one.predictions.mfu:.1%}",
            f"{one.predictions.bubble_fraction:.1%}",
            format_bytes(max(rank.reserved_peak_bytes for rank in one.predictions.ranks)),
        ]
        for one in plans
    ]  # fmt: skip
    headings = ("pp x dp", "stages", "microbatches", "schedule", "step", "loses", "MFU", "bubble", "peak")
    return "<h2>Alternatives, and what each loses</h2>" + _table(headings, rows)


def _table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _download(plans: Sequence[Plan]) -> str:
    """All figures of the page as a file, out of the page itself."""
    document = {
        "plans": [plan_document(one, None) for one in plans],
        "ranks": [rank.model_dump(mode="json") for rank in plans[0].predictions.ranks],
        "stages": [stage.model_dump(mode="json") for stage in plans[0].predictions.stages],
        "cuts": list(plans[0].cuts),
    }
    packed = base64.b64encode(json.dumps(document).encode()).decode("ascii")
    return f'<p><a download="plan-figures.json" href="data:application/json;base64,{packed}">All figures (JSON)</a></p>'
