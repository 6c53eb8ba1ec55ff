"""Options of `plan`, `schedule` and `simulate` that write a timeline as pictures, pages and traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.output import check_writable
from stagewright.errors import InputError
from stagewright.files import write_whole

if TYPE_CHECKING:
    from stagewright.planning.plan import Plan
    from stagewright.planning.search_result import SearchResult
    from stagewright.report.pictures.scene import Curve
    from stagewright.simulation import Timeline


def _file(name: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(name, metavar="FILE", help=help)


Html = Annotated[Path | None, _file("--html", "Write a report as one interactive page; works offline.")]


@dataclass(frozen=True)
class Pictures:
    """Pictures."""

    svg: Annotated[Path | None, _file("--svg", "Write the timetable as an SVG picture.")] = None
    png: Annotated[Path | None, _file("--png", "Write the timetable as a PNG picture.")] = None
    html: Html = None
    trace: Annotated[Path | None, _file("--trace", "Write a trace that opens at ui.perfetto.dev.")] = None
    dark: Annotated[bool, typer.Option("--dark", help="Dark background for --svg and --png.")] = False

    @property
    def files(self) -> list[Path]:
        """The files to write."""
        return [path for path in (self.svg, self.png, self.html, self.trace) if path is not None]

    def check(self, source: str | Path) -> None:
        """Raise `InputError` for files that cannot be written, or that are the drawn file `source`, before work is lost."""
        if self.dark and self.svg is None and self.png is None:
            raise InputError("--dark is the background of --svg and --png: give one of them, or leave it out")
        for path in self.files:
            if path.exists() and path.resolve() == Path(source).resolve():
                raise InputError(f"'{path}' is the file to draw and would be overwritten: name another file")
            check_writable(path)

    def write(
        self,
        timeline: Timeline,
        curves: Callable[[], Sequence[Curve] | None] = lambda: None,
        plan: Plan | None = None,
        search_result: SearchResult | None = None,
    ) -> None:
        """Write every file asked for.

        Args:
            curves: memory of the ranks over time in bytes; None counts activations.
            plan: the plan to report on the page.
            search_result: the search that the plan comes from.
        """
        if not self.files:
            return
        from stagewright.report.pictures import (
            chrome_trace,
            html_page,
            plan_panels,
            png_image,
            scene_of,
            svg_image,
            timeline_panels,
        )

        capacities = plan.usable_bytes(plan.cluster.load()) if plan and plan.predictions.ranks else ()
        scene = scene_of(timeline, curves(), capacities)
        if self.svg is not None or self.png is not None:
            image = svg_image(scene, theme="dark" if self.dark else "light")
            if self.svg is not None:
                write_whole(self.svg, image)
            if self.png is not None:
                write_whole(self.png, png_image(image))
        if self.html is not None:
            panels = (
                timeline_panels(timeline, scene.title)
                if plan is None
                else plan_panels(plan, timeline, search_result)
            )
            write_whole(self.html, html_page(scene, panels))
        if self.trace is not None:
            write_whole(self.trace, chrome_trace(scene))
