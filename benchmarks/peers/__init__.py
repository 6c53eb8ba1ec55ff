"""What plans are compared with: those of other systems, as published, and the exact optima of small problems."""
