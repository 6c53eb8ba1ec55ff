"""The search for the best plan: parallel degrees, partition, schedule, activation checkpointing and device order."""
