"""Where to cut a model into stages, when a stage that does not fit pays for memory with time."""
