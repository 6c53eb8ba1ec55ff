"""Compiled list scheduling: every rank takes the most urgent work that is ready and has memory."""
