"""The joint search over partition, placement and schedule, from costs per layer."""
