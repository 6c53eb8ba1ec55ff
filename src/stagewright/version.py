"""The version of Stagewright, where every layer can read it."""

__version__ = "0.1.0"
