"""Export of plans to other training frameworks and cluster managers, and import of their configurations."""
