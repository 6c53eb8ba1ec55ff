"""Adaptation of a running plan to ranks or links whose speed has changed.

Another process (this module run with a folder) searches for the new plan while the ranks go on training. It is started
with the run and has already read the model at the first request.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.errors import StagewrightError
from stagewright.execution.link_watch import LinkWatch, Pair, shift_in_words
from stagewright.machine import python_command
from stagewright.planning.plan import Plan, load_plan
from stagewright.units import format_seconds

if TYPE_CHECKING:
    from stagewright.execution.link_times import LinkTime
    from stagewright.planning.replanning import Replanned

_SHIFT = 1.2
"""Factor by which a rank's speed, relative to the other ranks, must differ from the present plan's assumption."""

_SEARCHES_AFTER, _STEPS = 3, 5
"""Consecutive shifted steps after which a search starts, and after which its plan is adopted: steps go by during the
search, and they show whether the ranks still have the speeds that it assumed."""

_PAUSE = 10
"""Steps without a new search after a search or a change of plan, whose effect has to show first."""

_LEAST_GAIN = 0.05
"""Minimum gain as a fraction of a step; less is within the error of predictions."""

_PAYS = 2.0
"""Factor by which the gain over the remaining steps must exceed the cost of a change."""


@dataclass(frozen=True)
class PlanProposal:
    """A plan that is worth changing to, and why, in words."""

    plan: Plan
    reason: str


class Adaptation:
    """The first rank's record of all ranks' speeds, with a proposal once another plan is worth the change.

    Args:
        folder: folder for its files.
        change_s: assumed seconds of a change of plan until the first one has been timed.
    """

    def __init__(self, plan: Plan, folder: Path, change_s: float) -> None:
        self.plan = plan
        self.links = LinkWatch(plan)
        self._searcher = Searcher(folder, plan)
        self.change_s = change_s
        self._assumed = [1.0] * plan.num_ranks
        """Pace of every rank that the present plan assumes, relative to its device's figures."""
        self._recent: list[Sequence[float]] = []
        self._streak = 0
        self._quiet_until = 0
        self._wanted: list[float] = []
        self._shifts: dict[Pair, float] = {}
        """Shifts of links that caused the last search; empty if ranks did."""
        self._proposal: PlanProposal | None = None
        self._seconds: list[float] = []
        self._before: float | None = None

    @property
    def has_proposal(self) -> bool:
        return self._proposal is not None

    def after(self, step: int, slowdowns: Sequence[float], seconds: float, num_left: int) -> list[str]:
        """Record step number `step`, whose computations took each rank `slowdowns` times as long as planned (zero where not
        measured); `num_left` steps remain. Returns lines for the log."""
        if not all(slowdowns):
            return []
        self._recent = [*self._recent[-_STEPS + 1 :], slowdowns]
        self._seconds = [*self._seconds[-_STEPS + 1 :], seconds]
        self.links.after(self.plan, step, slowdowns, seconds)
        self._streak = self._streak + 1 if _is_shifted(slowdowns) else 0
        if self._searcher.is_asked:
            return self._hear(step, num_left) if self._searcher.is_done and self._is_decided else []
        if step < self._quiet_until:
            return self._changed_times(step)
        return self._look({}) if self._streak >= _SEARCHES_AFTER else []

    def looked(self, step: int, times: Sequence[LinkTime], num_left: int) -> list[str]:
        """Record the times of links measured after step number `step`. Returns lines for the log."""
        self.links.looked(self.plan, times)
        if self._searcher.is_asked:
            return self._hear(step, num_left) if self._shifts and self._searcher.is_done else []
        if step >= self._quiet_until and (shifts := self.links.staying):
            return self._look(shifts)
        return []

    def changed(self, step: int, plan: Plan, seconds: float) -> None:
        """Record that the run continues under `plan`, a change that took `seconds`."""
        self.plan, self.change_s, self._proposal = plan, seconds, None
        self._assumed = self._wanted
        self.links.settle(step, self._shifts)
        self._before = statistics.median(self._seconds)
        self._recent, self._seconds, self._streak = [], [], 0
        self._quiet_until = step + _PAUSE

    def close(self) -> None:
        """End the process that searches."""
        self._searcher.close()

    def _changed_times(self, step: int) -> list[str]:
        if self._before is None or len(self._seconds) < _STEPS or step < self._quiet_until - 1:
            return []
        before, self._before = self._before, None
        return [
            f"a step takes {format_seconds(statistics.median(self._seconds))} since; it took {format_seconds(before)}"
        ]

    @property
    def _is_decided(self) -> bool:
        """Whether to accept or drop the answer without another timing of links, which may never come."""
        if self._shifts:
            return not self.links.is_still(self._shifts)
        return self._streak >= _STEPS or self._streak == 0

    def _look(self, shifts: dict[Pair, float]) -> list[str]:
        """Start a search for a plan for the present speeds of ranks, if these have shifted, and for links with `shifts`.
        Returns lines for the log."""
        if self._searcher.has_ended:
            return self._searcher.unsaid()
        now = [1.0] * len(self._assumed)
        if self._streak >= _SEARCHES_AFTER:
            now = _medians(self._recent[-_SEARCHES_AFTER:])
        self._shifts = shifts
        self._wanted = [assumed * slowdown for assumed, slowdown in zip(self._assumed, now, strict=True)]
        by_device = {device: self._wanted[self.plan.rank_on(device)] for device in range(self.plan.num_ranks)}
        self._searcher.ask(self.plan, by_device, self.links.factors_with(shifts))
        return self._searcher.unsaid()

    def _hear(self, step: int, num_left: int) -> list[str]:
        """Evaluate the answer of the search. Returns lines for the log."""
        answer = self._searcher.answer()
        if answer is None:
            self._streak, self._quiet_until = 0, step + _PAUSE
            self.links.settle(step)
            return self._searcher.unsaid()
        searched_for = [wanted / assumed for wanted, assumed in zip(self._wanted, self._assumed, strict=True)]
        now = _medians(self._recent[-_SEARCHES_AFTER:])
        stays = self.links.is_still(self._shifts) if self._shifts else self._streak > 0
        is_past = not stays or not _are_alike(searched_for, now)
        self._streak = 0
        if is_past:
            self.links.settle(step)
            return []
        self._quiet_until = step + _PAUSE
        gain = answer.stays_s - answer.seconds
        pays = gain * num_left > _PAYS * self.change_s
        if gain < _LEAST_GAIN * answer.stays_s or not pays:
            if not self._shifts:
                return []
            self.links.settle(step, self._shifts)
            return [f"{self._seen()}; no other order or cuts are worth a change"]
        what = "other cuts" if answer.plan.cuts != self.plan.cuts else "another order of actions"
        what += " and other recomputation" * (answer.plan.memory_policy != self.plan.memory_policy)
        self._proposal = PlanProposal(
            answer.plan,
            f"{self._seen()}; continues with {what}: {gain / answer.stays_s:.0%} less time a step, as predicted",
        )
        return []

    def _seen(self) -> str:
        """Return the reason for the search, in words."""
        if self._shifts:
            return shift_in_words(self.plan, self._shifts)
        slow = max(range(len(self._wanted)), key=lambda rank: self._wanted[rank] / self._assumed[rank])
        shift = self._wanted[slow] / self._assumed[slow] / statistics.median_low(self._recent[-1])
        return f"rank {slow} takes {shift:.1f} times as long as the plan assumes, relative to the others"

    @property
    def proposal(self) -> PlanProposal:
        """The present proposal; there must be one (`has_proposal`)."""
        assert self._proposal is not None, "there is a proposal"
        return self._proposal


def _is_shifted(slowdowns: Sequence[float]) -> bool:
    """Return whether a rank is slower or faster than planned, relative to the median rank.

    >>> _is_shifted([1.1, 1.0, 1.15]), _is_shifted([1.0, 2.1, 1.0]), _is_shifted([2.0, 1.0, 2.1])
    (False, True, True)
    """
    middle = statistics.median(slowdowns)
    return max(slowdowns) > _SHIFT * middle or min(slowdowns) * _SHIFT < middle


def _medians(steps: Sequence[Sequence[float]]) -> list[float]:
    """Return every rank's median slowdown over some steps."""
    return [statistics.median(slowdowns) for slowdowns in zip(*steps, strict=True)]


def _are_alike(before: Sequence[float], now: Sequence[float]) -> bool:
    """Return whether the relative speeds of ranks are as before, so that a search would have the same result.

    >>> _are_alike([1.0, 2.0, 1.0], [1.5, 2.9, 1.6]), _are_alike([1.0, 2.0, 1.0], [1.0, 1.1, 1.0])
    (True, False)
    """
    return not _is_shifted([slowdown / other for slowdown, other in zip(now, before, strict=True)])


class Searcher:
    """A process that searches for another plan on request.

    Args:
        folder: folder for its files.
        plan: plan of the run; its model is read before the first request.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.is_asked = self.has_ended = False
        self._fault = ""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            plan.save(folder / _NOW)
        except (OSError, StagewrightError) as error:  # a full disk ends no training
            self.has_ended, self._fault = True, f"{error}; nothing is searched"
            return
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = python_command("stagewright.execution.adapting", str(folder))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )

    def ask(self, plan: Plan, slowdowns: Mapping[int, float], links: Mapping[Pair, float]) -> None:
        """Request the best replacement for `plan` on devices that take `slowdowns` times as long as described, by number,
        and over links that take `links` times as long, by pair of devices."""
        assert self._process is not None and self._process.stdin is not None, "it was started with pipes"
        try:
            plan.save(self.folder / _NOW)
            (self.folder / _SLOWDOWNS).write_text(json.dumps(slowdowns))
            (self.folder / _LINKS).write_text(json.dumps([[*pair, factor] for pair, factor in links.items()]))
        except (OSError, StagewrightError) as error:
            self._fault = str(error)
            return
        self.is_asked = True
        with contextlib.suppress(OSError):  # it has died, and `answer` says so
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    @property
    def is_done(self) -> bool:
        """Whether `answer` would not wait."""
        assert self._process is not None and self._process.stdout is not None, "it was started with pipes"
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def answer(self) -> Replanned | None:
        """Return the result of the search, or None where it failed; `unsaid` then has the reason."""
        from stagewright.planning.replanning import Replanned

        assert self._process is not None and self._process.stdout is not None, "it was started with pipes"
        self.is_asked = False
        reply = self._process.stdout.readline().strip()
        self.has_ended = not reply
        try:
            if reply == _FAILED:
                self._fault = (self.folder / _FAULT).read_text()
            elif self.has_ended:
                code = self._process.wait()
                self._fault = (
                    f"the process that searches has ended ({code}), and nothing is searched any more"
                )
            if reply != _FOUND:
                return None
            times = json.loads((self.folder / _ANSWER).read_text())
            return Replanned(load_plan(self.folder / _NEXT), times["seconds"], times["stays_s"])
        except (OSError, ValueError, StagewrightError) as error:
            self._fault = str(error)
            return None

    def unsaid(self) -> list[str]:
        """Return the reason of a failed search, once."""
        fault, self._fault = self._fault, ""
        return [f"no other plan was found, so the run keeps its own: {fault}"] if fault else []

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


_NOW, _SLOWDOWNS, _LINKS = "now.json", "slowdowns.json", "links.json"
_NEXT, _ANSWER, _FAULT = "next.json", "found.json", "failed.txt"
_FOUND, _FAILED = b"found", b"failed"


def main(folder: Path) -> None:
    """Answer each line of stdin with a line on stdout, until stdin ends."""
    from stagewright.cluster import with_slower_devices, with_slower_links
    from stagewright.planning.estimate import graph_of
    from stagewright.planning.replanning import replanned

    graph = graph_of(load_plan(folder / _NOW))
    for _ in sys.stdin.buffer:
        plan = load_plan(folder / _NOW)
        slowdowns = {
            int(device): slowdown
            for device, slowdown in json.loads((folder / _SLOWDOWNS).read_text()).items()
        }
        links = {(a, b): factor for a, b, factor in json.loads((folder / _LINKS).read_text())}
        try:
            replacement = replanned(
                plan, with_slower_links(with_slower_devices(plan.cluster.load(), slowdowns), links), graph
            )
            replacement.plan.save(folder / _NEXT)
            (folder / _ANSWER).write_text(
                json.dumps({"seconds": replacement.seconds, "stays_s": replacement.stays_s})
            )
            answer = _FOUND
        except (OSError, StagewrightError) as error:
            with contextlib.suppress(OSError):
                (folder / _FAULT).write_text(str(error))
            answer = _FAILED
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    os.nice(5)
    main(Path(sys.argv[1]))
