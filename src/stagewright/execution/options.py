"""Options of a training run, in one value that travels from the command line or Python keywords to every rank's process."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, get_args

from pydantic import BaseModel

from stagewright.errors import InputError, nearest
from stagewright.execution.data.prepared import Data, PreparedData
from stagewright.execution.logs import Callback
from stagewright.planning.plan import Plan

OnNan = Literal["warn", "skip", "stop", "rollback"]
ON_NAN: tuple[OnNan, ...] = get_args(OnNan)


@dataclass(frozen=True)
class RunOptions:
    """The options of a training run.

    Args:
        plan: the path of a ``plan.json``, or, for a `Trainer`, a plan; None takes the one that ``stagewright launch`` was
            given.
        data: text (bytes are tokens), records, ``.npy`` of token ids or a token store; several are mixed; a `DataRequest`
            says more. None makes synthetic samples.
        steps: number of optimizer steps, counted from the start of the first run; None takes the job's.
        out: folder for ``record.json`` and ``steps.jsonl``; None makes ``runs/<model>-<time>``.
        device: ``cpu``, ``cuda`` or ``auto``: CUDA if the plan is for GPUs and this machine has any.
        random_weights: start from the seed even if there are weights next to the model's config.
        timeout: seconds a rank may stay at one action.
        start_timeout: seconds until every rank must have joined the others; None takes those that ``stagewright launch``
            was given, else 300.
        ranks: the device of every rank, or a rank file that says it; None takes the plan's.
        checkpoint: folder for checkpoints, of which one is written after the last step.
        checkpoint_every: steps between further checkpoints.
        resume: continue from the newest checkpoint in that folder.
        other_data: resume even if the data, or the order in which it comes, changed.
        keep_last: number of newest checkpoints to keep; None keeps all.
        keep_every: also keep the checkpoints after multiples of this number of steps.
        held_out: data of which every sample is evaluated once before the first step and once at the end.
        evaluate_every: steps between further evaluations.
        adapt: change to another plan when ranks or links stay slower or faster than planned and the change pays off.
        replan: with fewer processes or devices than the plan has ranks, plan again for the remaining ones, and resume
            from the newest checkpoint; `run` does so also when a process that it started is killed.
        tensorboard: folder for the figures of every step, for TensorBoard.
        wandb: project of Weights & Biases for the same.
        rates: learning rate keys of the job, which replace those of the plan's.
        on_nan: what to do when loss or gradients are NaN or Inf: ``warn`` and update as usual, ``skip`` the update,
            ``stop`` the run, or ``rollback`` to the newest checkpoint and continue with later data.
        compare: compare the traced graph with the model before its first run; without, errors of the trace are trained.
        callbacks: of a `Trainer`: called on the first rank with every finished `TrainingStep`.
        is_checked: whether the process that started this one has checked the options and locked the folders.

    Raises:
        InputError: an option would have no effect, lacks one that it needs, or has an unknown value.
    """

    plan: Plan | str | Path | None = None
    data: Data = None
    steps: int | None = None
    out: str | Path | None = None
    device: str = "auto"
    random_weights: bool = False
    timeout: float = 1800.0
    start_timeout: float | None = None
    ranks: str | Path | Sequence[int] | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    other_data: bool = False
    keep_last: int | None = None
    keep_every: int | None = None
    held_out: Data = None
    evaluate_every: int | None = None
    adapt: bool = False
    replan: bool = False
    tensorboard: str | Path | None = None
    wandb: str | None = None
    rates: Mapping[str, Any] | None = None
    on_nan: OnNan = "warn"
    compare: bool = True
    callbacks: Iterable[Callback] = ()
    is_checked: bool = False

    def __post_init__(self) -> None:
        if self.on_nan not in ON_NAN:
            hint = nearest(self.on_nan, ON_NAN)
            raise InputError(f"--on-nan {self.on_nan}{hint}: give one of {', '.join(ON_NAN)}")
        if self.checkpoint is None:
            self._check_without_checkpoints()
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise InputError(
                f"checkpoints every {self.checkpoint_every} steps: give a whole number of at least 1"
            )
        if self.evaluate_every is not None and self.held_out is None:
            raise InputError("--evaluate-every needs --held-out PATH, the data to evaluate")
        if self.keep_every is not None and self.keep_last is None:
            raise InputError("--keep-every needs --keep-last N: without it all checkpoints are kept")
        if self.other_data and not self.resume:
            raise InputError("--other-data needs --resume: a run that starts afresh takes any data")
        if self.replan and self.ranks is not None:
            raise InputError("--replan and --ranks: a rank file is for one number of ranks; give one of them")

    def _check_without_checkpoints(self) -> None:
        if self.on_nan == "rollback":
            raise InputError(
                "--on-nan rollback needs --checkpoint FOLDER: it goes back to the newest checkpoint there"
            )
        if self.replan:
            raise InputError(
                "--replan needs --checkpoint FOLDER: the remaining ranks resume from the newest checkpoint"
            )
        options = {
            "--resume": self.resume,
            "--checkpoint-every": self.checkpoint_every,
            "--keep-last": self.keep_last,
        }
        for option, value in options.items():
            if value:
                raise InputError(f"{option} needs --checkpoint FOLDER, where the checkpoints are")

    @property
    def checkpoint_folder(self) -> Path | None:
        """`checkpoint` as a path."""
        return None if self.checkpoint is None else Path(self.checkpoint)

    def to_json(self) -> str:
        """Return the options as the processes of other ranks take them; the data must be prepared."""
        values = {name: value for name, value in vars(self).items() if name != "callbacks"}
        return json.dumps(values, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> RunOptions:
        """Return the options that `to_json` wrote."""
        values = json.loads(text)
        for name in ("data", "held_out"):
            if values.get(name) is not None:
                values[name] = PreparedData(**values[name])
        return cls(**values)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


Fields = ParamSpec("Fields")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


class _Keywords(Generic[Fields]):
    """Decorators of functions and methods that take a `RunOptions`: callers give its fields as arguments instead."""

    def __init__(self, create: Callable[Fields, RunOptions]) -> None:
        self._create = create
        self._parameters = list(inspect.signature(create).parameters.values())

    def function(self, function: Callable[[RunOptions], Result]) -> Callable[Fields, Result]:
        @wraps(function)
        def call(*arguments: Fields.args, **keywords: Fields.kwargs) -> Result:
            return function(self._create(*arguments, **keywords))

        call.__signature__ = inspect.Signature(self._parameters)  # type: ignore[attr-defined]
        return call

    def method(
        self, method: Callable[[Owner, RunOptions], Result]
    ) -> Callable[Concatenate[Owner, Fields], Result]:
        @wraps(method)
        def call(owner: Owner, /, *arguments: Fields.args, **keywords: Fields.kwargs) -> Result:
            return method(owner, self._create(*arguments, **keywords))

        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        call.__signature__ = inspect.Signature([first, *self._parameters])  # type: ignore[attr-defined]
        return call


options_as_keywords = _Keywords(RunOptions)
