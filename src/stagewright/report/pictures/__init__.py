"""Timelines as pictures: SVG, PNG, an interactive page, and traces for ui.perfetto.dev."""

from stagewright.report.pictures.page import html_page
from stagewright.report.pictures.panels import Panels, plan_panels, timeline_panels
from stagewright.report.pictures.scene import Scene, scene_of
from stagewright.report.pictures.svg import png_image, svg_image
from stagewright.report.pictures.trace import chrome_trace

__all__ = [
    "Panels",
    "Scene",
    "chrome_trace",
    "html_page",
    "plan_panels",
    "png_image",
    "scene_of",
    "svg_image",
    "timeline_panels",
]
