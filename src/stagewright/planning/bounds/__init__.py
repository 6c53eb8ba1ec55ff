"""What configurations take at the least, from the costs of their layers."""
