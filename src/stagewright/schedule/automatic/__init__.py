"""The automatic scheduler: zero-bubble schedules for given stage times and memory."""

from stagewright.schedule.automatic.search import SearchSettings, automatic
from stagewright.schedule.list_scheduler.stage_times import StageTimes

__all__ = ["SearchSettings", "StageTimes", "automatic"]
