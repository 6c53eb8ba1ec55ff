"""Estimates of operator times, memory and stage costs of a graph on a device."""
