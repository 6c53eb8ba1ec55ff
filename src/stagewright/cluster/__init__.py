"""Devices, links, nodes and the cost of their collectives; a catalog of hardware with its sources."""
