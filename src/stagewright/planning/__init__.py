"""The search for the best plan: partition, memory saving, placement, schedule, widths and rank mapping."""
