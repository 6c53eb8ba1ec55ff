"""Which physical devices take which places of a configuration, by the links as they were measured."""

from stagewright.planning.assignment.exact import best_of_all
from stagewright.planning.assignment.problem import Assignment, Grid, as_numbered, grid_of
from stagewright.planning.assignment.solve import assign

__all__ = ["Assignment", "Grid", "as_numbered", "assign", "best_of_all", "grid_of"]
