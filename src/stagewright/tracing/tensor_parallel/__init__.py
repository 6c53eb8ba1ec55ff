"""Tensor parallelism: the model of one rank, with shards for parameters and collectives for operators."""
