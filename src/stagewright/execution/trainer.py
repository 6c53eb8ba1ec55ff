"""The trainer of a plan on one rank: steps, checkpoints, logs and the record."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from stagewright.errors import InputError, RunError, StagewrightWarning
from stagewright.execution.checkpoint_folder import changed_state, check_start, has_same_stages, steps_of
from stagewright.execution.data.prepared import PreparedData, held_out_data, ready
from stagewright.execution.folder_lock import in_use
from stagewright.execution.history import History
from stagewright.execution.launch_environment import kind_of_device, launched, start_timeout_s
from stagewright.execution.logs import Callback, StepLog, figures_sent
from stagewright.execution.options import RunOptions, options_as_keywords
from stagewright.execution.planned_device import measured_slowdown, num_threads, probed_reference
from stagewright.execution.preflight import prepare
from stagewright.execution.rank_process import rank_process
from stagewright.execution.record import Record
from stagewright.execution.watchdog import Limits
from stagewright.planning.plan import Plan

if TYPE_CHECKING:
    import torch

    from stagewright.execution.adapting import Adaptation
    from stagewright.execution.checkpoint import Saver
    from stagewright.execution.data.batches import Batches
    from stagewright.execution.evaluation import Evaluation, Evaluator
    from stagewright.execution.session import StepResult

_STOP, _WRITING, _RECORD, _ADAPT, _LINKS = "stop", "writing", "record", "adapt", "links"
"""Questions of `Session.votes`: was the run asked to stop, is a checkpoint being written, is a record due, is another plan
worth a change, should links be timed?"""

_RECORD_EVERY_S = 60.0
_MOST_ROLLBACKS = 3
"""Maximum number of rollbacks in a run: NaN or Inf in that many other batches does not come from the data."""


class Trainer:
    """A trainer of a plan in the process of each rank: for the whole run with `fit`, or step by step in a user's loop.

    It is created in a script that torchrun or ``stagewright launch`` starts, with as many processes as the plan has ranks; a
    plan for one rank needs neither. All ranks call the same methods in the same order.

    >>> trainer = Trainer("plan.json", "text.txt", steps=100)  # doctest: +SKIP
    >>> record = trainer.fit()  # doctest: +SKIP

    Args:
        options: the fields of a `RunOptions`, as keyword arguments.

    Raises:
        InputError: the plan can only be predicted, or an argument cannot be used.
        TraceError: the traced graph differs from the model; names the differences.
        RunError: the number of processes is not the plan's, or a rank is lost.
    """

    @options_as_keywords.method
    def __init__(self, options: RunOptions) -> None:
        plan, options = prepare(options)
        self.plan, self.options = plan, options
        assert options.out is not None, "it is filled in"
        self.out = Path(options.out)
        self._path = options.plan if isinstance(options.plan, Path) else None
        self.num_steps = plan.job.num_steps
        self._stack = ExitStack()
        self._slow_exits = self._stack.enter_context(ExitStack())
        """Exits that may take long, run once the other ranks know how this rank ended."""
        self._is_open = True
        data = ready(options.data, plan)
        self._held_out = held_out_data(options.held_out, data, plan)
        if not options.is_checked:
            try:
                self._check(data)
            except InputError:
                self._stack.close()
                raise
        self._place = int(os.environ["RANK"])
        limits = Limits(options.timeout, start_timeout_s(options.start_timeout))
        self._watch, self.device = self._stack.enter_context(
            rank_process(kind_of_device(options.device, plan), limits, plan.rank_on(self._place))
        )
        self.rank, self.num_ranks = self._watch.rank, self._watch.num_ranks
        self.is_first = self._place == 0
        """Whether this process writes the run's files."""
        with self._at_work():
            self._set_up(data)

    def _check(self, data: PreparedData | None) -> None:
        """Make the checks that `stagewright.run` makes before it starts processes."""
        self._stack.enter_context(launched(self.plan))
        self._stack.enter_context(in_use(self.options.checkpoint, "checkpoint"))
        check_start(self.options, self.plan, None if data is None else data.identity)
        self._stack.enter_context(in_use(self.out, "out"))

    def _set_up(self, data: PreparedData | None) -> None:
        import torch

        from stagewright.execution.adapting import Adaptation
        from stagewright.execution.checkpointer import Checkpointer
        from stagewright.execution.data.prefetch import Prefetcher
        from stagewright.execution.first_comparison import compare_once
        from stagewright.execution.metering import metered_steps
        from stagewright.execution.reference import SpeedWatch
        from stagewright.execution.session import Session
        from stagewright.execution.stragglers import StragglerWatch
        from stagewright.tracing.evaluation import evaluated

        warnings.simplefilter("always", StagewrightWarning)  # the command line hides those of libraries
        if (threads := num_threads(self.plan, self._place)) is not None:
            torch.set_num_threads(threads)
        options, watch, reader = self.options, self._watch, Prefetcher()
        if options.compare and self.is_first:  # the others wait for it
            compare_once(self.plan, watch.at, apart=self.device.type == "cpu")
        self._slow_exits.callback(reader.close)
        self._new_session = lambda plan: Session(
            plan, self.device, data, options.random_weights, watch.at, watch.at, options.on_nan, reader
        )
        began = time.monotonic()
        self.session = self._new_session(self.plan)
        watch.device_position = lambda: self.session.runner.device_position()
        set_up_s = time.monotonic() - began  # also the cost of a change to other cuts, in running processes
        self._saving = Checkpointer(options, self.session)
        self.step_number = first = self._saving.restore(self.session) if options.resume else 0
        """Number of steps done."""
        watch.begin_steps(first)
        metered = metered_steps(self.plan.job, self.num_steps, first)
        self._history = History(first, self.num_steps, metered)
        self.is_stopping = False
        """Whether the run was asked to end after the last step, by Ctrl-C or SIGTERM; the same on all ranks."""
        self._recorded = time.monotonic()
        self._adaptation: Adaptation | None = None
        if options.adapt and self.is_first:
            self._adaptation = Adaptation(self.plan, self.out / "adapting", set_up_s)
            self._stack.callback(self._adaptation.close)
        self._ask_ranks()
        self._speed = SpeedWatch(self.device, probed_reference(self.plan, self._place, self.device.type))
        self._stragglers = StragglerWatch(lambda rank: self.plan.described_rank(rank))
        if (
            self._held_out is not None
        ):  # so that errors of the evaluation come now and not after the last step
            evaluated(self.session.graph)
            _ = self._held_out_batches(self._held_out).num_samples
        self._evaluator: Evaluator | None = None
        self._callbacks: list[Callback] = []
        self._log: StepLog | None = None
        if self.is_first:
            self._log = StepLog(self.out, first)
            sent = self._stack.enter_context(figures_sent(options.tensorboard, options.wandb, self.out))
            self._callbacks = [self._log, *options.callbacks, *sent]

    def _ask_ranks(self) -> None:
        """Set the questions that every rank answers after each step."""
        self.session.votes = {
            _STOP: lambda: self._watch.stop_asked is not None,
            _WRITING: lambda: not self._saving.is_written,
            _ADAPT: lambda: self._adaptation is not None and self._adaptation.has_proposal,
            _LINKS: lambda: self._adaptation is not None and self._adaptation.links.wants_look,
            _RECORD: lambda: self.is_first and time.monotonic() - self._recorded > _RECORD_EVERY_S,
        }

    # -- training ---------------------------------------------------------------------------------------------------

    def fit(self) -> Record | None:
        """Train up to the number of steps, with checkpoints and evaluations by the options, of which one comes before the
        first step; return the record on the first rank.

        Ctrl-C and SIGTERM end training after the present step.
        """
        from stagewright.execution.accelerator import accelerator_of

        record = None
        if self._held_out is not None and self.step_number == 0:
            self._evaluate_held_out()
            accelerator_of(self.device).empty_cache()  # training finds the memory as its prediction does
        while self.step_number < self.num_steps:
            done = self.step_number
            result = self.step()
            if self.step_number <= done and not self.is_stopping:
                continue  # back at a checkpoint
            is_last = self.is_stopping or self.step_number == self.num_steps
            with self._at_work():
                self._saving.after(self.step_number, is_last, _WRITING in result.votes)
                if _RECORD in result.votes and not is_last:
                    self._record(is_going_on=True)
                if _ADAPT in result.votes and not is_last:
                    self._change()
                elif _LINKS in result.votes and not is_last:
                    self._time_links()
            if is_last:  # before an evaluation, which may fail
                record = self._finish()
            if self._held_out is not None and self._is_due(is_last):
                self._evaluate_held_out()
            if is_last:
                break
        else:
            record = self._finish()
        self.close()
        return record

    def _finish(self) -> Record | None:
        """Complete the last checkpoint, and write and return the record."""
        with self._at_work():
            if not self._history.results:
                self._saving.finish()
                return None
            self._saving.end(self.step_number)
            return self._record()

    @property
    def first_step(self) -> int:
        """Number of steps done before, by the runs that this one continues."""
        return self._history.first_step

    def _evaluate_held_out(self) -> None:
        """Evaluate held-out data and log the loss."""
        evaluation = self.evaluate()
        if self._log is not None:
            self._log.evaluated(self.step_number, evaluation.loss, evaluation.num_tokens)

    def _is_due(self, is_last: bool) -> bool:
        """Return whether to evaluate held-out data after this step."""
        every = self.options.evaluate_every
        return is_last or (every is not None and self.step_number % every == 0)

    def step(self, batch: Mapping[str, torch.Tensor] | None = None) -> StepResult:
        """Take an optimizer step.

        Args:
            batch: samples of the whole batch by the name of the model's input, ``[global_batch, ...]``, of which this
                rank uses its part; None takes the next samples of the data.
        """
        from stagewright.execution.clock import waited_s

        number, history = self.step_number, self._history
        inputs = None if batch is None else self.session.own_part(batch, self.plan.job.length_of(number))
        with self._at_work():
            waited = waited_s()
            result = self.session.train_step(number, number in history.metered, inputs)
            history.results.append(result)
            self.is_stopping = _STOP in result.votes
            self.step_number = self._watch.num_steps = number + 1
            if self.options.on_nan in ("stop", "rollback") and not result.is_finite:
                self._go_back(number, result)
                return result
            self._speed.after(number - history.first_step, result.seconds, waited_s() - waited)
            if self.is_first:
                done = history.log_entry(self.plan, number, result, self.device.type == "cpu")
                for callback in self._callbacks:
                    callback(done)
                messages = self._stragglers.after(number, result.slowdowns, result.seconds)
                if self._adaptation is not None:
                    num_left = self.num_steps - self.step_number
                    messages += self._adaptation.after(number, result.slowdowns, result.seconds, num_left)
                for message in messages:
                    warnings.warn(message, StagewrightWarning, stacklevel=1)
            return result

    def _go_back(self, number: int, result: StepResult) -> None:
        """Handle the skipped step `number`, counted from 0: continue from the newest checkpoint with later data, if the
        options say so. Raises `RunError` otherwise, or after too many rollbacks."""
        history, count = self._history, len(self._history.returns)
        self._saving.finish()
        if self.options.on_nan == "stop" or count == _MOST_ROLLBACKS or not self._saving.can_go_back:
            raise _nan_error(number, result.loss, result.gradient_norm, self._saving.saver, count)
        if self.is_first:
            for callback in self._callbacks:
                callback(history.log_entry(self.plan, number, result, self.device.type == "cpu"))
        so_far = self.session.passed_over
        self._renew(self.plan)
        done = self._saving.restore(self.session)
        num_lengths = len(self.plan.job.sequence_lengths)
        self.session.passed_over = batches_to_skip(number, so_far, done, num_lengths)
        self.step_number = self._watch.num_steps = done
        history.went_back(number, done)
        if self.is_first:
            warnings.warn(
                f"step {number + 1} has loss {result.loss:g} and gradient norm {result.gradient_norm:g}: going back to the "
                f"checkpoint after step {done} and continuing with later data (rollback {count + 1} of at most "
                f"{_MOST_ROLLBACKS})",
                StagewrightWarning,
                stacklevel=1,
            )

    def evaluate(
        self,
        batches: Iterable[Mapping[str, torch.Tensor]] | None = None,
        wants_tokens: bool = False,
        most_samples: int | None = None,
    ) -> Evaluation:
        """Evaluate the loss as under ``module.eval()``, without training.

        Args:
            batches: whole batches, as for `step`; None takes every sample of the held-out data once.
            wants_tokens: whether to return log-probabilities of all tokens too.
            most_samples: maximum number of samples of the held-out data, taken from its start.
        """
        from stagewright.execution.evaluation import Evaluator

        if batches is None and self._held_out is None:
            raise InputError("evaluate() needs batches, or a trainer with held-out data: give one of them")
        with self._at_work():
            if self._evaluator is None:
                self._evaluator = Evaluator(self.session)
            if batches is not None or self._held_out is None:
                return self._evaluator.run(map(self.session.own_part, batches or ()), wants_tokens)
            return self._evaluator.over(self._held_out_batches(self._held_out), wants_tokens, most_samples)

    def _held_out_batches(self, data: PreparedData) -> Batches:
        """Return every sample of held-out data once, in the longest of the job's lengths."""
        from stagewright.execution.data.batches import open_batches

        job = self.plan.job.model_copy(update={"sequence_lengths": ()})
        return open_batches(data, job, is_once=True)

    def adopt(self, plan: Plan) -> None:
        """Continue under another plan of the same model for the same number of ranks; state moves directly between ranks.
        Later results are the same except for the order of sums.

        Raises:
            InputError: the plan has another model, another number of ranks, or other samples in each step.
        """
        from stagewright.execution.handover import give, take

        if differing := list(changed_state(self.plan, plan)):
            raise InputError(f"a run cannot continue under this plan: {'; '.join(differing)}")
        plan = plan.model_copy(update={"job": self.plan.job})
        with self._at_work():
            self._saving.finish()
            self._watch.at("handing over to another plan")
            self._path = None
            if has_same_stages(self.plan, plan):
                self.plan = plan
                self.session.follow(plan)
                return
            taken = take(self.session)
            self._renew(plan)
            give(self.session, taken)
            self._history.metered.add(self.step_number)

    def _renew(self, plan: Plan) -> None:
        """Replace the present session by one for `plan`, as at the start of a run."""
        from stagewright.execution.accelerator import accelerator_of

        metering, ahead = self.session.metering, self.session.passed_over
        self.session.close()
        self._saving.leave()
        self._evaluator = None
        del self.session
        gc.collect()  # frees memory for the new session
        accelerator_of(self.device).empty_cache()
        self.plan = plan
        self.session = self._new_session(plan)
        self.session.metering, self.session.passed_over = metering, ahead
        self._ask_ranks()
        self._saving.enter(self.session)

    def _time_links(self) -> None:
        """Time the present transfers between ranks."""
        from stagewright.execution.link_times import link_times

        times = link_times(self.session)
        if self._adaptation is not None:
            step = self.step_number - 1
            for message in self._adaptation.looked(step, times, self.num_steps - self.step_number):
                warnings.warn(message, StagewrightWarning, stacklevel=1)

    def _change(self) -> None:
        """Continue under the plan that the first rank proposes."""
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
            path = self.out.resolve() / f"plan-{self.step_number:06d}.json"
            try:
                plan.save(path)
                self._path = path
            except InputError as error:  # the run continues without a copy of its plan
                warnings.warn(str(error), StagewrightWarning, stacklevel=1)
            ours.changed(self.step_number, plan, seconds)

    # -- state ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path | None = None) -> Path:
        """Write a checkpoint of the steps done to `folder`, by default the trainer's, and wait until it is complete."""
        if folder is None and self.options.checkpoint is None:
            raise InputError(
                "save() needs a folder: give one, or create the trainer with a checkpoint folder"
            )
        with self._at_work():
            return self._saving.write(
                self.session, self.step_number, None if folder is None else Path(folder)
            )

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the model's present parameters and lasting buffers by its own names, whole and on the CPU, on the first
        rank; empty on other ranks. For a model with adapters, return only these, by peft's names."""
        with self._at_work():
            return self.session.model_files.whole(self.session)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's state, and the number of steps, for continuing under the same plan."""
        from stagewright.execution.rank_state import copied

        return {"step": self.step_number, **copied(self.session)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`. Raises `InputError` where it is of another plan."""
        from stagewright.execution.rank_state import places_for, put_back

        places = places_for(self.session, state)
        with self._at_work():
            put_back(self.session, state, places)
            self.step_number = self._watch.num_steps = state["step"]

    # -- end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the group of ranks; every rank must call this, unless `fit` has done so."""
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
        """End this rank's part in the run at an error in the context, and report the error to the other ranks."""
        try:
            yield
        except Exception as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    # -- record -------------------------------------------------------------------------------------------------------

    def _record(self, is_going_on: bool = False) -> Record | None:
        """Write the record of the measurements so far, and return it on the first rank; every rank must call this."""
        from stagewright.execution.clock import clock_offset
        from stagewright.execution.collectives import exchange

        watch, plan, history = self._watch, self.plan, self._history
        self._recorded = time.monotonic()
        watch.at("comparing clocks")
        offset = clock_offset(watch.rank, watch.num_ranks, self.options.timeout)
        rank_record = self.session.rank_record(offset).model_copy(
            update={
                "slowdowns": tuple(self._speed.slowdowns),
                "device": self._place,
                "pace": measured_slowdown(plan, self._place, history.slowdowns(watch.rank)),
            }
        )
        ranks = exchange(rank_record.model_dump(mode="json"))
        if not self.is_first:
            return None
        watch.at("writing the record")
        stopped_by = watch.stopped_by() if history.is_short and not is_going_on else None
        record = history.record(plan, self._path, str(self.device), ranks, stopped_by, is_going_on)
        record.save(self.out / "record.json")
        return record


def _nan_error(step: int, loss: float, norm: float, saver: Saver | None, num_returns: int = 0) -> RunError:
    """Return the error that ends a run at `step`, counted from 0, whose update was skipped, after `num_returns` rollbacks.
    Every rank must call this; it completes a checkpoint that is being written."""
    remedy = "there is no checkpoint to resume from: give --checkpoint FOLDER"
    if saver is not None:
        saver.finish()
        newest = next((path.name for path in steps_of(saver.folder)), None)
        remedy = (
            f"no checkpoint was written to '{saver.folder}' before it"
            if newest is None
            else f"the last good checkpoint is {newest} in '{saver.folder}': continue from it with --resume, with a lower "
            "--learning-rate or other data"
        )
    before = f", after going back to checkpoints {num_returns} times" if num_returns else ""
    return RunError(f"step {step + 1} has loss {loss:g} and gradient norm {norm:g}{before}; {remedy}")


def batches_to_skip(step: int, so_far: int, back_to: int, num_lengths: int) -> int:
    """Return the number of batches by which the data is ahead of the steps after a rollback from `step`, counted from 0, to
    the checkpoint after `back_to` steps: all that the run has seen, in whole cycles if batches cycle through `num_lengths`
    sequence lengths.

    Source: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways" (arXiv 2204.02311), section 5.1.

    >>> batches_to_skip(step=12, so_far=0, back_to=10, num_lengths=0), batches_to_skip(12, 3, 10, 2)
    (3, 6)
    """
    seen, turn = step + 1 + so_far - back_to, max(num_lengths, 1)
    return -(-seen // turn) * turn
