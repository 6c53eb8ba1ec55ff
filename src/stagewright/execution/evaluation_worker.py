"""The process of one rank that evaluates a checkpoint; its one argument is the options of `work` as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.execution.data.prepared import PreparedData
from stagewright.execution.rank_process import end_process, exit_code, start_process
from stagewright.files import write_whole

if TYPE_CHECKING:
    from stagewright.execution.evaluation import Evaluation


def work(
    plan: str,
    data: Mapping[str, Any],
    outcome: str,
    device: str,
    checkpoint: str | None,
    log_probabilities: str | None,
    most_samples: int | None,
    start_timeout: float,
) -> None:
    """Evaluate on this rank; the first rank writes the result to `outcome`, and the log-probabilities of all tokens to
    `log_probabilities` if given."""
    from stagewright.execution.trainer import Trainer

    prepared = PreparedData(**data)
    with Trainer(
        plan, prepared, out=Path(outcome).parent, device=device, checkpoint=checkpoint, resume=checkpoint is not None,
        held_out=prepared, start_timeout=start_timeout, is_checked=True,
    ) as trainer:  # fmt: skip
        evaluation = trainer.evaluate(wants_tokens=log_probabilities is not None, most_samples=most_samples)
        if trainer.is_first:
            if log_probabilities is not None:
                write_whole(log_probabilities, "".join(_lines(evaluation)))
            document = {
                "loss": evaluation.loss,
                "num_tokens": evaluation.num_tokens,
                "step": trainer.first_step,
            }
            write_whole(outcome, json.dumps(document))


def _lines(evaluation: Evaluation) -> Iterator[str]:
    for sample, tokens in sorted(evaluation.log_probabilities.items()):
        counted = [number for number in tokens if number is not None]
        line = {
            "sample": sample,
            "sum": sum(counted),
            "num_tokens": len(counted),
            "log_probabilities": tokens,
        }
        yield json.dumps(line) + "\n"


if __name__ == "__main__":
    start_process()
    end_process(exit_code(lambda: work(**json.loads(sys.argv[1]))))
