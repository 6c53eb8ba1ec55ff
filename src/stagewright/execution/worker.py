"""The training process of a rank: it joins the group that torchrun's environment describes, trains and reports.

`stagewright.execution.launch` runs it with one argument, the `RunOptions` as JSON.
"""

from __future__ import annotations

import sys

from stagewright.execution.options import RunOptions
from stagewright.execution.rank_process import end_process, exit_code, start_process


def main(options: str) -> int:
    """Run a rank and return the exit code. `options` is the JSON of a `RunOptions`."""
    return exit_code(lambda: work(RunOptions.from_json(options)))


def work(options: RunOptions) -> None:
    """Train the plan on this rank; rank 0 writes the record.

    Raises:
        InputError: the record cannot be written.
        RunError: the run failed; names the rank, the action and the transfer that it waited for.
    """
    from stagewright.execution.trainer import Trainer

    Trainer(**vars(options)).fit()


if __name__ == "__main__":
    start_process()
    end_process(main(sys.argv[1]))
