"""What other systems would do with a model and a pipeline, to compare with."""
