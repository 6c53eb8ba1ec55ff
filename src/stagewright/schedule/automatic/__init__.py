"""The automatic scheduler: zero-bubble schedules for given stage times and memory."""

from stagewright.schedule.automatic.search import automatic
from stagewright.schedule.list_scheduler.stage_times import StageTimes

__all__ = ["StageTimes", "automatic"]
