"""Evaluation in the pipeline: only the forwards of a plan, on the weights of a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from stagewright.execution.collectives import exchange
from stagewright.execution.data.batches import Batches
from stagewright.execution.rank_runner import Inputs
from stagewright.execution.session import Session
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Function, Stage
from stagewright.planning.plan_stages import stage_cuts
from stagewright.schedule.action import Action, Kind
from stagewright.schedule.program import Program
from stagewright.tracing.evaluation import NOT_COUNTED, evaluated, is_by_token

_NONE = Function((), (), ())


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    `loss` is the mean over all `num_tokens` tokens that count, or over microbatches where the model's loss is not per token
    (`num_tokens` is 0 then). `log_probabilities` has, if requested, the log-probabilities of each sample's tokens in order,
    by the number of the sample.
    """

    loss: float
    num_tokens: int
    log_probabilities: dict[int, list[float | None]]
    """None for tokens that do not count."""


class Evaluator:
    """A runner of the forwards of a session's plan as under `module.eval()`; every rank makes one and makes the same calls.

    Raises:
        InputError: the model draws random numbers in a way that cannot be disabled.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        graph = evaluated(session.graph)
        self.is_by_token = is_by_token(graph)
        stages = [
            forward_only(stage) for stage in split_graph(graph, stage_cuts(session.plan, session.graph))
        ]
        self.runner = session.runner_of(stages, session.lowered(forwards(session.program), stages))
        self.runner.release()

    def over(
        self, batches: Batches, wants_tokens: bool = False, most_samples: int | None = None
    ) -> Evaluation:
        """Evaluate every sample of `batches` once, or the first `most_samples`. Where the model's loss is not per token, the
        last samples that do not fill a microbatch are left out."""
        session, batch_size = self.session, self.session.plan.job.global_batch
        num_samples = min(batches.num_samples, most_samples or batches.num_samples)
        steps = range(-(-num_samples // batch_size))
        graph = session.by_length.turn_to(session.plan.job.sequence_length).graph
        return self.run(
            (session.microbatches(step, graph, batches) for step in steps), wants_tokens, num_samples
        )

    def run(
        self,
        batches: Iterable[Sequence[Inputs]],
        wants_tokens: bool = False,
        num_samples: int | None = None,
    ) -> Evaluation:
        """Evaluate `batches`, each this replica's microbatches of one global batch; samples from number `num_samples` on are
        padding of the last one."""
        session = self.session
        plan, size = session.plan, session.plan.microbatch_size
        total = torch.zeros(2, dtype=torch.float64, device=session.device)
        by_sample: dict[int, list[float | None]] = {}
        first_sample = 0
        session.runner.release()
        self.runner.restore()
        for batch in batches:
            result = self.runner.run_batch(0, batch)
            for microbatch, loss in result.losses.items():
                place = first_sample + (session.mesh.replica * plan.num_microbatches + microbatch) * size
                num_rows = size if num_samples is None else min(size, max(0, num_samples - place))
                if not self.is_by_token:
                    if num_rows == size:
                        total += torch.stack((loss.double(), torch.ones_like(loss, dtype=torch.float64)))
                    continue
                rows = loss.reshape(size, -1)[:num_rows]
                counts = rows != NOT_COUNTED
                total += torch.stack((torch.where(counts, rows, 0).double().sum(), counts.double().sum()))
                if wants_tokens:
                    by_sample |= {
                        place + row: [None if value == NOT_COUNTED else -value for value in tokens]
                        for row, tokens in enumerate(rows.tolist())
                    }
            first_sample += plan.job.global_batch
            self.runner.drop()
        self.runner.release()
        session.runner.restore()
        torch.distributed.all_reduce(total)
        summed, count = total.tolist()
        if session.mesh.tensor_rank:
            by_sample = {}
        by_rank = (
            exchange({str(sample): tokens for sample, tokens in by_sample.items()}) if wants_tokens else []
        )
        return Evaluation(
            summed / max(count, 1.0),
            round(count / plan.tp) if self.is_by_token else 0,
            {
                int(sample): tokens
                for samples in by_rank
                for sample, tokens in sorted(samples.items(), key=lambda item: int(item[0]))
            },
        )


def forwards(program: Program) -> Program:
    """Return the F actions of `program` in its order, with a gather and a release around each run of them on a stage whose
    parameters are sharded."""
    gathered = {action.stage for action in program if action.kind is Kind.GATHER}

    def on_rank(actions: Iterable[Action]) -> list[Action]:
        parts = [part for action in actions for part in action.parts if part.kind is Kind.F]
        lowered: list[Action] = []
        for stage, run in groupby(parts, key=lambda part: part.stage):
            if stage in gathered:
                lowered += [Action(Kind.GATHER, stage), *run, Action(Kind.RELEASE, stage)]
            else:
                lowered += run
        return lowered

    return program.with_ranks(map(on_rank, program.ranks))


def forward_only(stage: Stage) -> Stage:
    """Return `stage` reduced to the computation of the values that its forward sends, and of the loss."""
    sent = [value for transfer in stage.sends for value in transfer.values]
    if stage.computes_loss:
        sent.append(stage.graph.loss)
    needed, nodes = set(sent), []
    for node in reversed(stage.forward.nodes):
        if needed.intersection(value for value in node.outputs if value is not None):
            nodes.append(node)
            needed.update(node.inputs)
    return replace(
        stage,
        forward=Function(tuple(reversed(nodes)), stage.forward.inputs, tuple(dict.fromkeys(sent))),
        input_grad=_NONE,
        weight_grad=_NONE,
        backward=_NONE,
        rebuild=_NONE,
        recomputed=_NONE,
        saved=(),
        offloaded=(),
        saved_for_weight_grad=(),
        mutations=(),
        late=(),
    )
