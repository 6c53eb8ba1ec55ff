"""Configurations made to fit in memory, on devices and on their hosts."""
