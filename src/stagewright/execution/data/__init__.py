"""What a run is trained on: documents, tokenizers, token stores, and the order in which samples come."""
