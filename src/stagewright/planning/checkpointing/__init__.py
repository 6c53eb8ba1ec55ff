"""Activation checkpointing and offload: which values saved for the backward to keep, recompute or offload to the host."""
