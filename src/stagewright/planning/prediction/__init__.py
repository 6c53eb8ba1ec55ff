"""What a step of a split model takes on a cluster: the time of every action, the memory of every rank."""
