"""The event engine that turns a program and its costs into a timeline."""
