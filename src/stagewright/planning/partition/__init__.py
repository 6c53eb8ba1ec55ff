"""Partitioning of a model into stages: for equal time, within memory, and with recomputation where a stage does not fit."""
