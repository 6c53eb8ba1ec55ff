"""What a stage does with each value it saves for its backward: keep it, compute it again, or park it on the host."""
