"""The carved model of a plan, where the verbs expect it."""

from stagewright.planning.estimate import line_of

__all__ = ["line_of"]
