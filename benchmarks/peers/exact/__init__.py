"""The true optima of small problems: what searches are measured against."""
