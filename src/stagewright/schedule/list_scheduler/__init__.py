"""List scheduling, compiled: every rank takes the most urgent work that is ready and fits its memory."""
