"""Tracing of a model into its operator graph, and of a stage into the F, I and W modules that run it."""
