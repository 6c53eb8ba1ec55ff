"""Evaluation under the pipeline: the forwards of a plan alone, on the weights of a session."""

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
    """What some samples came to.

    `loss` is the mean over all tokens that count, `num_tokens`, or over the microbatches where the model's loss is not one
    of tokens (`num_tokens` is 0 then). `log_probabilities` are, by number of the sample, those of its tokens, in their
    order, if they were asked for.
    """

    loss: float
    num_tokens: int
    log_probabilities: dict[int, list[float | None]]
    """None for tokens that do not count."""


class Evaluator:
    """Runs the forwards of a session's plan as `module.eval()` would; every rank makes one and calls `run` alike.

    Raises:
        InputError: the model draws random numbers in a way that cannot be switched off.
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
        """The loss of every sample of `batches`, or of the first so many, once. Of a model whose loss is not one of tokens,
        the last samples are left out that fill no microbatch."""
        session, each = self.session, self.session.plan.job.global_batch
        num_samples = min(batches.num_samples, most_samples or batches.num_samples)
        steps = range(-(-num_samples // each))
        graph = session.lengths.turn_to(session.plan.job.sequence_length).graph
        return self.run(
            (session.microbatches(step, graph, batches) for step in steps), wants_tokens, num_samples
        )

    def run(
        self,
        batches: Iterable[Sequence[Inputs]],
        wants_tokens: bool = False,
        num_samples: int | None = None,
    ) -> Evaluation:
        """The loss of `batches`, each this replica's microbatches of one global batch; samples from number `num_samples` on
        only fill the last one."""
        session = self.session
        plan, size = session.plan, session.plan.microbatch_size
        total = torch.zeros(2, dtype=torch.float64, device=session.device)
        found: dict[int, list[float | None]] = {}
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
                    found |= {
                        place + row: [None if one == NOT_COUNTED else -one for one in tokens]
                        for row, tokens in enumerate(rows.tolist())
                    }
            first_sample += plan.job.global_batch
            self.runner.drop()
        self.runner.release()
        session.runner.restore()
        torch.distributed.all_reduce(total)
        summed, count = total.tolist()
        if session.mesh.tensor_rank:
            found = {}
        told = exchange({str(sample): tokens for sample, tokens in found.items()}) if wants_tokens else []
        return Evaluation(
            summed / max(count, 1.0),
            round(count / plan.tp) if self.is_by_token else 0,
            {
                int(sample): tokens
                for one in told
                for sample, tokens in sorted(one.items(), key=lambda item: int(item[0]))
            },
        )


def forwards(program: Program) -> Program:
    """The F actions of `program`, in its order, with gathered parameters there for each run of them on a stage."""
    gathered = {action.stage for action in program if action.kind is Kind.GATHER}

    def on_rank(actions: Iterable[Action]) -> list[Action]:
        parts = [part for action in actions for part in action.parts if part.kind is Kind.F]
        found: list[Action] = []
        for stage, run in groupby(parts, key=lambda part: part.stage):
            if stage in gathered:
                found += [Action(Kind.GATHER, stage), *run, Action(Kind.RELEASE, stage)]
            else:
                found += run
        return found

    return program.with_ranks(map(on_rank, program.ranks))


def forward_only(stage: Stage) -> Stage:
    """`stage` with nothing but what its forward sends on, or the loss."""
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
