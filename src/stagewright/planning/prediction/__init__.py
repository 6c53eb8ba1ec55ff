"""Predictions for a split model on a cluster: the time of every action and the memory of every rank."""
