"""The automatic scheduler: zero-bubble schedules for given stage times and memory."""

from stagewright.schedule.automatic.search import StageTimes, automatic

__all__ = ["StageTimes", "automatic"]
