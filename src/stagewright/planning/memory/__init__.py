"""Fitting of configurations into the memory of devices and their hosts."""
