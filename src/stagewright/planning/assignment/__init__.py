"""Rank assignment: the device of each rank of a configuration, by the kinds of devices and the measured links."""
