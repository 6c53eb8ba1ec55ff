"""Training data: documents, tokenizers, token stores, and the order of samples."""
