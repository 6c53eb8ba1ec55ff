"""Verbs as Python functions: what the command line does, without printing."""
