"""Questions that one search after another answers: cost, time to train, the largest batch, where an order stops to win."""
