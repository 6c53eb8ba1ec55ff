"""From a model to its operator graph, and from a stage to the F, I and W modules that run it."""
