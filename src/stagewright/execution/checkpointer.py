"""A trainer's checkpoints: restoring the newest one and writing new ones."""

from __future__ import annotations

from pathlib import Path

from stagewright.execution.checkpoint import Saver, restore, save
from stagewright.execution.checkpoint_folder import Kept, folder_name, steps_of
from stagewright.execution.collectives import exchange
from stagewright.execution.options import RunOptions
from stagewright.execution.session import Session


class Checkpointer:
    """A writer of checkpoints of its current session, as often as the options say; none without a folder. Every rank must
    call the same methods in the same order."""

    def __init__(self, options: RunOptions, session: Session) -> None:
        self._folder = options.checkpoint_folder
        self._every = options.checkpoint_every
        self._kept = None if options.keep_last is None else Kept(options.keep_last, options.keep_every)
        self._saved: int | None = None
        """Number of steps in the newest checkpoint of this run."""
        self.saver: Saver | None = None
        self.enter(session)

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self.saver is None or self.saver.is_written

    @property
    def can_go_back(self) -> bool:
        """Whether there is a checkpoint to go back to."""
        return self._folder is not None and bool(steps_of(self._folder))

    def enter(self, session: Session) -> None:
        """Write the state of this session from now on."""
        if self._folder is not None:
            self.saver = Saver(session, self._folder, self._kept)

    def leave(self) -> None:
        """Release the session; the next one must `enter`."""
        self.saver = None

    def restore(self, session: Session) -> int:
        """Restore `session` from the newest checkpoint and return its number of steps."""
        assert self._folder is not None, "there is a checkpoint"
        self._saved = restore(session, self._folder)
        return self._saved

    def after(self, step: int, is_last: bool, is_writing: bool) -> None:
        """Write a checkpoint after `step` steps if one is due; `is_writing` if a rank still writes the previous one."""
        if self.saver is None:
            return
        if self.saver.is_open and not is_writing:
            self.saver.finish()
        if (is_last or (self._every and step % self._every == 0)) and self._saved != step:
            self._start(self.saver, step)

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete."""
        if self.saver is not None:
            self.saver.finish()

    def end(self, step: int) -> None:
        """End the run after `step` steps with a complete checkpoint of them."""
        if self.saver is not None and self._saved != step and not self.saver.is_open:
            self._start(self.saver, step)
        self.finish()

    def write(self, session: Session, step: int, folder: Path | None) -> Path:
        """Write a checkpoint of `step` steps now, unless it exists, and return its path. It goes to `folder` if given,
        else to the run's folder."""
        self.finish()
        kept = self._kept if folder is None else None
        folder = folder or self._folder
        assert folder is not None, "there is a folder"
        path = folder / folder_name(step)
        if any(exchange(path.is_dir())):
            return path
        return save(session, folder, step, kept)

    def _start(self, saver: Saver, step: int) -> None:
        self._saved = step
        saver.start(step)
