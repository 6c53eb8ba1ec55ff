"""Where to cut a model into stages: for equal time, within memory, and where a stage that does not fit pays with time."""
