"""Training a plan on one rank: steps, checkpoints, what is said of them, and what is left at the end."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from stagewright.errors import InputError, StagewrightWarning
from stagewright.execution.checkpoint_folder import (
    Checkpointing,
    Kept,
    changed_state,
    check_start,
    has_same_stages,
)
from stagewright.execution.data.prepared import Data, PreparedData, ready, ready_beside
from stagewright.execution.folder_lock import in_use
from stagewright.execution.launch import (
    check_options,
    default_folder,
    is_restarted,
    refuse_what_is_not_run,
)
from stagewright.execution.logs import Callback, Step, StepLog, TensorBoardLog, WandbLog
from stagewright.execution.member import member
from stagewright.execution.no_number import MOST_RETURNS, OnNan, no_number, passed_over
from stagewright.execution.record import Record, finite
from stagewright.execution.watch import Limits
from stagewright.execution.weight_files import check_weights
from stagewright.planning.plan import Plan, load_plan
from stagewright.version import __version__

if TYPE_CHECKING:
    import torch

    from stagewright.cluster import Device
    from stagewright.execution.adapting import Adaptation
    from stagewright.execution.evaluation import Evaluation, Evaluator
    from stagewright.execution.session import StepResult

_STOP, _WRITING, _RECORD, _ADAPT = "stop", "writing", "record", "adapt"
"""Questions of `Session.votes`: is somebody ending the run, is a checkpoint on its way, is a record due, is another plan
worth changing to?"""

_RECORD_EVERY_S = 60.0

PLAN = "STAGEWRIGHT_PLAN"
"""Environment variable: the path of the plan that `stagewright launch` was given."""
START_TIMEOUT = "STAGEWRIGHT_START_TIMEOUT"
"""And its seconds until every rank must have joined."""
_START_TIMEOUT_S = 300.0


class Trainer:
    """Trains a plan, in the process of each rank: all of it with `fit`, or a step at a time in a loop of your own.

    Made in a script that torchrun or ``stagewright launch`` starts, with as many processes as the plan has ranks; a plan
    for one rank needs neither. All ranks call the same methods in the same order.

    >>> trainer = Trainer("plan.json", "text.txt", steps=100)  # doctest: +SKIP
    >>> record = trainer.fit()  # doctest: +SKIP

    Args:
        plan: a plan, or the path of a ``plan.json``; None takes the one that ``stagewright launch`` was given.
        data: what `stagewright.run` takes; None makes synthetic samples.
        steps: number of optimizer steps `fit` goes up to, counted from the first of all; None takes the job's.
        out: folder for ``record.json`` and ``steps.jsonl``; None makes ``runs/<model>-<time>``.
        device: ``cpu``, ``cuda`` or ``auto``: CUDA where the plan is for GPUs and this machine has any.
        random_weights: start from the seed even where weights lie beside the model's config.
        checkpoint: folder for checkpoints, of which `fit` writes one after the last step.
        checkpoint_every: steps after which it writes one more each time.
        keep_last: how many of the newest checkpoints to keep; None keeps all.
        keep_every: keep those after a multiple of so many steps besides.
        resume: go on from the newest one in that folder.
        other_data: do so also if the data, or which of it comes when, is not what that one was trained on.
        timeout: seconds a rank may stay at one action.
        start_timeout: seconds until every rank must have joined the others; None takes those that ``stagewright launch`` was
            given, else 300.
        held_out: data that `evaluate` takes every sample of once, of the same kinds of records as `data`.
        evaluate_every: steps after which `fit` evaluates it each time, and at the end.
        adapt: go on under another plan, in `fit`, where ranks stay slower or faster than the plan took them to be and that
            is worth more than it costs: another order of passes, or other cuts.
        rates: keys of the job that say the learning rate, in place of those of the plan's.
        on_nan: what a step does whose loss or gradients are no finite numbers: its update as ever (``warn``), nothing
            (``skip``), end the run (``stop``), or go back to the newest checkpoint and on with later data (``rollback``).
        tensorboard: folder for the figures of every step, for TensorBoard.
        wandb: project of Weights & Biases that they go to.
        callbacks: called on the first rank with every `Step` that is done.

    Raises:
        InputError: the plan is one that is predicted only, or something that was given cannot be used.
        RunError: other than the plan's number of processes, or a rank is lost.
    """

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        data: Data = None,
        *,
        steps: int | None = None,
        out: str | Path | None = None,
        device: str = "auto",
        random_weights: bool = False,
        checkpoint: str | Path | None = None,
        checkpoint_every: int | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        resume: bool = False,
        other_data: bool = False,
        timeout: float = 1800.0,
        start_timeout: float | None = None,
        held_out: Data = None,
        evaluate_every: int | None = None,
        adapt: bool = False,
        rates: Mapping[str, Any] | None = None,
        on_nan: OnNan = "warn",
        tensorboard: str | Path | None = None,
        wandb: str | None = None,
        callbacks: Iterable[Callback] = (),
        devices: Sequence[int] | None = None,
        _is_checked: bool = False,
    ) -> None:
        loaded = plan if isinstance(plan, Plan) else load_plan(_path_of(plan))
        if devices is not None:
            loaded = loaded.model_copy(update={"devices": tuple(devices)})
        loaded = loaded.model_copy(update={"job": loaded.job.with_rates(steps, **(rates or {}))})
        self.plan = loaded
        self.num_steps = loaded.job.num_steps
        self._on_nan: OnNan = on_nan
        self.out = default_folder(loaded) if out is None else Path(out)
        check_options(keep_last, keep_every, held_out, evaluate_every, on_nan, checkpoint)
        resume = resume or is_restarted(None if checkpoint is None else Path(checkpoint))
        kept = None if keep_last is None else Kept(keep_last, keep_every)
        asked = Checkpointing(
            None if checkpoint is None else Path(checkpoint), checkpoint_every, resume, other_data, kept
        )
        self._asked = asked
        self._tensorboard, self._wandb = tensorboard, wandb
        self._adapts = adapt
        self._stack = ExitStack()
        self._is_open = True
        found = ready(data, loaded)
        self._held_out = ready_beside(held_out, found, loaded)
        self._evaluate_every = evaluate_every
        if not _is_checked:
            try:
                self._check(found, random_weights)
            except InputError:
                self._stack.close()
                raise
        if start_timeout is None:
            start_timeout = float(os.environ.get(START_TIMEOUT, _START_TIMEOUT_S))
        launched = int(os.environ["RANK"])
        kind = _kind(device, loaded)
        self._watch, self.device = self._stack.enter_context(
            member(kind, Limits(timeout, start_timeout), loaded.rank_on(launched))
        )
        self.rank, self.num_ranks = self._watch.rank, self._watch.num_ranks
        self._launched, self._timeout = launched, timeout
        self.is_first = launched == 0
        """Whether this process writes what a run leaves."""
        with self._at_work():
            self._set_up(found, random_weights, callbacks)

    def _check(self, data: PreparedData | None, random_weights: bool) -> None:
        """What `stagewright.run` looks at before it starts processes."""
        refuse_what_is_not_run(self.plan, "the plan")
        check_weights(self.plan, random_weights, self._asked.is_resumed)
        if "RANK" not in os.environ:
            if self.plan.num_ranks > 1:
                raise InputError(
                    f"the plan needs {self.plan.num_ranks} processes: start the script with `stagewright launch PLAN "
                    f"SCRIPT` or `torchrun --nproc-per-node {self.plan.num_ranks} SCRIPT`"
                )
            alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
            os.environ.update({**alone, "MASTER_PORT": str(_free_port())})
            self._stack.callback(lambda: [os.environ.pop(name, None) for name in (*alone, "MASTER_PORT")])
        self._stack.enter_context(in_use(self._asked.folder, "checkpoint"))
        identity = None if data is None else data.identity
        check_start(self._asked, self.plan, self.num_steps, identity, random_weights)
        self._stack.enter_context(in_use(self.out, "out"))

    def _set_up(self, data: PreparedData | None, random_weights: bool, callbacks: Iterable[Callback]) -> None:
        import torch

        from stagewright.execution.adapting import Adaptation
        from stagewright.execution.checkpoint import Saver, restore
        from stagewright.execution.data.opening import open_batches
        from stagewright.execution.metering import metered_steps
        from stagewright.execution.pace import PaceWatch
        from stagewright.execution.reference import SpeedWatch
        from stagewright.execution.session import Session
        from stagewright.tracing.evaluation import evaluated

        warnings.simplefilter("always", StagewrightWarning)  # the command line hides those of libraries
        if (threads := num_threads(self.plan, self._launched)) is not None:
            torch.set_num_threads(threads)
        watch = self._watch
        self._new_session = lambda plan: Session(
            plan, self.device, data, random_weights, watch.at, watch.at, on_nan=self._on_nan
        )
        began = time.monotonic()
        self.session = self._new_session(self.plan)
        set_up_s = time.monotonic() - began  # and so it is for other cuts, in processes that are there
        self.first_step = 0
        if self._asked.folder is not None and self._asked.is_resumed:
            self.first_step = restore(self.session, self._asked.folder)
        self.step_number = watch.num_steps = self.first_step
        """Steps that are done."""
        self._saved = self.first_step if self._asked.is_resumed else None
        self.is_stopping = False
        """Whether somebody has asked the run to end behind the last step, by Ctrl-C or SIGTERM; all ranks see the same."""
        self._saver = (
            None if self._asked.folder is None else Saver(self.session, self._asked.folder, self._asked.kept)
        )
        self._recorded = time.monotonic()
        self._adaptation: Adaptation | None = None
        if self._adapts and self.is_first:
            self._adaptation = Adaptation(self.plan, self.out / "adapting", set_up_s)
            self._stack.callback(self._adaptation.close)
        self._ask_ranks()
        self._metered = metered_steps(self.plan.job, self.num_steps, self.first_step)
        self._speed = SpeedWatch(self.device, _probed_reference(self.plan, self._launched, self.device.type))
        self._paces = PaceWatch()
        if self._held_out is not None:  # what cannot be evaluated is said now, and not behind the last step
            evaluated(self.session.graph)
            _ = open_batches(self._held_out, self.plan.job, is_once=True).num_samples
        self._results: list[StepResult] = []
        self._went_back: list[tuple[int, int]] = []
        self._evaluator: Evaluator | None = None
        self._callbacks: list[Callback] = []
        self._log: StepLog | None = None
        if self.is_first:
            self._log = StepLog(self.out, self.first_step)
            self._callbacks = [self._log, *callbacks]
            if self._tensorboard is not None:
                self._callbacks.append(log := TensorBoardLog(Path(self._tensorboard)))
                self._stack.callback(log.close)
            if self._wandb is not None:
                self._callbacks.append(log := WandbLog(self._wandb, self.out.name, self.out))
                self._stack.callback(log.close)

    def _ask_ranks(self) -> None:
        """What every rank says after each step."""
        self.session.votes = {
            _STOP: lambda: self._watch.stop_asked is not None,
            _WRITING: lambda: self._saver is not None and not self._saver.is_written,
            _ADAPT: lambda: self._adaptation is not None and self._adaptation.has_proposal,
            _RECORD: lambda: self.is_first and time.monotonic() - self._recorded > _RECORD_EVERY_S,
        }

    # -- training ---------------------------------------------------------------------------------------------------

    def fit(self) -> Record | None:
        """Train up to the number of steps, with checkpoints as asked for; returns the record on the first rank.

        Ctrl-C and SIGTERM end it behind the present step.
        """
        every, record = self._asked.every, None
        while self.step_number < self.num_steps:
            done = self.step_number
            result = self.step()
            if self.step_number <= done and not self.is_stopping:
                continue  # back at a checkpoint
            is_last = self.is_stopping or self.step_number == self.num_steps
            with self._at_work():
                if self._saver is not None and self._saver.is_open and _WRITING not in result.votes:
                    self._saver.finish()
                is_due = is_last or (every and self.step_number % every == 0)
                if self._saver is not None and is_due and self._saved != self.step_number:
                    self._start_saving()
                if _RECORD in result.votes and not is_last:
                    self._record(is_going_on=True)
                if _ADAPT in result.votes and not is_last:
                    self._change()
            if is_last:  # before an evaluation, which may fail
                record = self._finish()
            if self._held_out is not None and self._is_due(is_last):
                found = self.evaluate()
                if self._log is not None:
                    self._log.evaluated(self.step_number, found.loss, found.num_tokens)
            if is_last:
                break
        else:
            record = self._finish()
        self.close()
        return record

    def _finish(self) -> Record | None:
        """The last checkpoint is whole and the record written."""
        with self._at_work():
            if self._saver is not None:
                if self._results and self._saved != self.step_number and not self._saver.is_open:
                    self._start_saving()
                self._saver.finish()
            return self._record() if self._results else None

    def _start_saving(self) -> None:
        assert self._saver is not None
        self._saved = self.step_number
        self._saver.start(self.step_number)

    def _is_due(self, is_last: bool) -> bool:
        """Whether held-out data is evaluated behind this step."""
        every = self._evaluate_every
        return is_last or (every is not None and self.step_number % every == 0)

    def step(self, batch: Mapping[str, torch.Tensor] | None = None) -> StepResult:
        """One optimizer step.

        Args:
            batch: samples of the whole batch by the name of the model's input, ``[global_batch, ...]``, of which this
                rank takes its own; None takes the next ones of the data.
        """
        from stagewright.execution.clock import waited_s

        number, first = self.step_number, self.first_step
        inputs = None if batch is None else self.session.own_part(batch, self.plan.job.length_of(number))
        with self._at_work():
            waited = waited_s()
            result = self.session.train_step(number, number in self._metered, inputs)
            self._results.append(result)
            self.is_stopping = _STOP in result.votes
            self.step_number = self._watch.num_steps = number + 1
            if self._on_nan in ("stop", "rollback") and not result.is_finite:
                self._go_back(number, result)
                return result
            self._speed.after(number - first, result.seconds, waited_s() - waited)
            if self.is_first:
                done = self._done(number, result)
                for callback in self._callbacks:
                    callback(done)
                said = self._paces.after(number, result.paces, result.seconds)
                if self._adaptation is not None:
                    left = self.num_steps - self.step_number
                    said += self._adaptation.after(number, result.paces, result.seconds, left)
                for message in said:
                    warnings.warn(message, StagewrightWarning, stacklevel=1)
            return result

    def _go_back(self, number: int, result: StepResult) -> None:
        """Step `number`, counted from 0, was left out: on from the newest checkpoint with data behind this step's, if that
        is wanted; raises `RunError` where it is not, or was done too often."""
        from stagewright.execution.checkpoint import restore
        from stagewright.execution.checkpoint_folder import steps_of

        count, folder = len(self._went_back), self._asked.folder
        if self._saver is not None:
            self._saver.finish()
        if self._on_nan == "stop" or folder is None or count == MOST_RETURNS or not steps_of(folder):
            raise no_number(number, result.loss, result.gradient_norm, self._saver, count)
        if self.is_first:
            for callback in self._callbacks:
                callback(self._done(number, result))
        so_far = self.session.passed_over
        self._renew(self.plan)
        done = self._saved = restore(self.session, folder)
        lengths = len(self.plan.job.sequence_lengths)
        self.session.passed_over = passed_over(number, so_far, done, lengths)
        self.step_number = self._watch.num_steps = done
        del self._results[max(0, done - self.first_step) :]
        self.first_step = min(self.first_step, done)
        self._metered = frozenset((*self._metered, done))
        self._went_back.append((number + 1, done))
        if self.is_first:
            warnings.warn(
                f"step {number + 1} has loss {result.loss:g} and gradient norm {result.gradient_norm:g}: back to the "
                f"checkpoint after step {done}, and on with later data ({count + 1} of at most {MOST_RETURNS} times)",
                StagewrightWarning,
                stacklevel=1,
            )

    def evaluate(
        self,
        batches: Iterable[Mapping[str, torch.Tensor]] | None = None,
        wants_tokens: bool = False,
        most_samples: int | None = None,
    ) -> Evaluation:
        """The loss as ``module.eval()`` computes it; nothing is trained.

        Args:
            batches: whole batches, as `step` takes them; None takes every sample of the data that is held out, once.
            wants_tokens: whether log-probabilities of all tokens are wanted too.
            most_samples: of held-out data, take the first so many.
        """
        from stagewright.execution.data.opening import open_batches
        from stagewright.execution.evaluation import Evaluator

        if batches is None and self._held_out is None:
            raise InputError("evaluate() needs batches, or the trainer data that is held out")
        with self._at_work():
            if self._evaluator is None:
                self._evaluator = Evaluator(self.session)
            if batches is not None or self._held_out is None:
                return self._evaluator.run(map(self.session.own_part, batches or ()), wants_tokens)
            once = open_batches(self._held_out, self.plan.job, is_once=True)
            return self._evaluator.over(once, wants_tokens, most_samples)

    def adopt(self, plan: Plan) -> None:
        """Go on under another plan of the same model for as many ranks: state moves between ranks directly. What is to come
        is what would have come, but for the order of sums.

        Raises:
            InputError: the plan is of another model, another number of ranks, or other samples in each step.
        """
        from stagewright.execution.handover import give, take

        if differing := list(changed_state(self.plan, plan)):
            raise InputError(f"a run cannot go on under this plan: {'; '.join(differing)}")
        plan = plan.model_copy(update={"job": self.plan.job})
        with self._at_work():
            if self._saver is not None:
                self._saver.finish()
            self._watch.at("handing over to another plan")
            if has_same_stages(self.plan, plan):
                self.plan = plan
                self.session.follow(plan)
                return
            taken = take(self.session)
            self._renew(plan)
            give(self.session, taken)
            self._metered = frozenset((*self._metered, self.step_number))

    def _renew(self, plan: Plan) -> None:
        """A session for `plan`, as at the start of a run, in place of the present one."""
        import torch

        from stagewright.execution.checkpoint import Saver

        metering, ahead = self.session.metering, self.session.passed_over
        self.session.close()
        saves, self._saver, self._evaluator = self._saver is not None, None, None
        del self.session
        gc.collect()  # so that there is room for the other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.plan = plan
        self.session = self._new_session(plan)
        self.session.metering, self.session.passed_over = metering, ahead
        self._ask_ranks()
        if saves:
            assert self._asked.folder is not None
            self._saver = Saver(self.session, self._asked.folder, self._asked.kept)

    def _change(self) -> None:
        """Go on under the plan that the first rank proposes."""
        from stagewright.execution.collectives import from_first

        ours, began = self._adaptation, time.monotonic()
        plan = Plan.model_validate_json(
            from_first(None if ours is None else ours.proposal.plan.model_dump_json())
        )
        self.adopt(plan)
        if ours is not None:
            seconds = time.monotonic() - began
            warnings.warn(
                f"{ours.proposal.reason} (changed in {seconds:.1f} s)", StagewrightWarning, stacklevel=1
            )
            plan.save(self.out / f"plan-{self.step_number:06d}.json")
            ours.changed(self.step_number, plan, seconds)

    # -- state ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path | None = None) -> Path:
        """Write a checkpoint of the steps done to `folder`, by default the trainer's, and wait until it is there."""
        from stagewright.execution.checkpoint import save
        from stagewright.execution.checkpoint_folder import folder_name
        from stagewright.execution.collectives import exchange

        found = self._asked.folder if folder is None else Path(folder)
        if found is None:
            raise InputError("save() needs a folder: give one, or the trainer its checkpoint folder")
        with self._at_work():
            if self._saver is not None:
                self._saver.finish()
            there = found / folder_name(self.step_number)
            if any(exchange(there.is_dir())):
                return there
            return save(self.session, found, self.step_number, self._asked.kept if folder is None else None)

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's parameters and lasting buffers as they are now, by its own names, whole and on the CPU, on the first
        rank; nothing on the others. Of a model with adapters these alone, by peft's names."""
        with self._at_work():
            return self.session.model_files.whole(self.session)

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on under the same plan: tensors of its own state, copied, and the number of steps."""
        from stagewright.execution.state import held, loss_scale_of

        return {
            "step": self.step_number,
            "state": {one.key: one.tensor.detach().clone() for one in held(self.session)},
            "loss_scale": loss_scale_of(self.session),
            "passed_over": self.session.passed_over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. Raises `InputError` where it is of another plan."""
        from stagewright.execution.state import RegionIndex, held, named_by, resumed

        index = RegionIndex[int]()
        for key, tensor in state["state"].items():
            index.add(*named_by(key, tuple(tensor.shape)), 0)
        own = {one.key: one.tensor for one in held(self.session, index)}
        if own.keys() != state["state"].keys():
            raise InputError(
                "the state is of another plan: write a checkpoint under one, and resume under the other"
            )
        with self._at_work():
            for key, tensor in own.items():
                tensor.copy_(state["state"][key])
            resumed(self.session, state["loss_scale"])
            self.session.passed_over = state["passed_over"]
            self.step_number = self._watch.num_steps = state["step"]

    # -- end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the group of ranks; every rank must, unless `fit` has."""
        if self._is_open:
            self._is_open = False
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._stack.__exit__(kind, error, trace)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """An error inside ends this rank's part in the run, and the others hear why."""
        try:
            yield
        except Exception as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    # -- what is said and left ----------------------------------------------------------------------------------------

    def _done(self, number: int, result: StepResult) -> Step:
        """Step `number`, counted from 0, as people should hear of it."""
        length = self.plan.job.length_of(number)
        predicted = self.plan.by_length.get(length, self.plan.predictions)
        pace = predicted.step_seconds / result.seconds
        recent = [one.seconds for one in self._results[-_RECENT_STEPS:]]
        return Step(
            number + 1,
            self.num_steps,
            result.loss,
            result.gradient_norm,
            result.learning_rate,
            result.is_skipped,
            result.seconds,
            predicted.tokens_per_second * pace,
            predicted.mfu * pace,
            result.memory_bytes,
            statistics.median(recent) * (self.num_steps - number - 1),
        )

    def _record(self, is_going_on: bool = False) -> Record | None:
        """Write what was measured so far; every rank must call this."""
        import torch

        from stagewright.execution.clock import clock_offset
        from stagewright.execution.collectives import exchange

        watch, plan, first, results = self._watch, self.plan, self.first_step, self._results
        self._recorded = time.monotonic()
        watch.at("comparing clocks")
        offset = clock_offset(watch.rank, watch.num_ranks, self._timeout)
        own = self.session.rank_record(offset).model_copy(
            update={
                "slowdowns": tuple(self._speed.slowdowns),
                "device": self._launched,
                "pace": _pace(plan, self._launched, [result.paces[watch.rank] for result in results[1:]]),
            }
        )
        ranks = exchange(own.model_dump(mode="json"))
        if not self.is_first:
            return None
        watch.at("writing the record")
        is_short = first + len(results) < self.num_steps
        steps_run = range(first, first + len(results))
        lengths = tuple(map(plan.job.length_of, steps_run)) if plan.job.sequence_lengths else ()
        timed = plan.at_length(max(lengths)) if lengths else plan
        record = Record(
            stagewright=__version__,
            model=plan.model.name,
            first_step=first,
            device=str(self.device),
            versions={"torch": torch.__version__, "python": sys.version.split()[0]},
            losses=tuple(finite(result.loss) for result in results),
            gradient_norms=tuple(finite(result.gradient_norm) for result in results),
            learning_rates=tuple(result.learning_rate for result in results),
            skipped_steps=tuple(step for step, result in enumerate(results) if result.is_skipped),
            went_back=tuple(self._went_back),
            step_seconds=tuple(result.seconds for result in results),
            sequence_lengths=lengths,
            stopped_by=watch.stopped_by() if is_short and not is_going_on else None,
            is_going_on=is_going_on,
            metered_steps=tuple(sorted({0, *(step - first for step in self._metered if step in steps_run)})),
            predicted_step_seconds=timed.predictions.step_seconds,
            ranks=tuple(ranks),
        )
        record.save(self.out / "record.json")
        return record


def _path_of(plan: str | Path | None) -> str | Path:
    found = plan or os.environ.get(PLAN)
    if found is None:
        raise InputError(
            "a Trainer needs a plan: give the path of a plan.json, or start the script with stagewright launch"
        )
    return found


_RECENT_STEPS = 20
"""By which the time that is left is told."""


def _kind(device: str, plan: Plan) -> str:
    """Type of this process's device."""
    if device != "auto":
        return device
    from stagewright.execution.device import kind_of

    return kind_of(device, plan, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def num_threads(plan: Plan, device: int) -> int | None:
    """Threads that the process of a device of the plan's cluster computes with; None where nothing says so."""
    described = _described(plan, device)
    return None if described is None else described.num_threads


def _described(plan: Plan, device: int) -> Device | None:
    """A device of the plan's cluster; None where the plan does not describe it."""
    cluster = plan.cluster.description
    return cluster.device_of(device) if cluster is not None and device < cluster.num_devices else None


def _pace(plan: Plan, device: int, beside_plan: list[float]) -> float | None:
    """`Device.pace` as some steps showed it, of computations that took so many times as long as planned, in the middle; None
    where none was looked at."""
    seen = [pace for pace in beside_plan if pace]
    described = _described(plan, device)
    planned = (described and described.pace) or 1.0
    return planned * statistics.median(seen) if seen else None


def _probed_reference(plan: Plan, device: int, kind: str) -> float | None:
    """What the reference took when the device was probed; None where that is not known, or was another `kind` of device."""
    described = _described(plan, device)
    return described.reference_s if described is not None and described.kind == kind else None
