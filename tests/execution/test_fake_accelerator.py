"""The executor on a device that runs behind its host: no race, no device-wide wait under a receive, at most two drains of a
step; and every fault that is planted, a wait taken away or one too many, is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cells import SMALL_GPT2, SMALL_LLAMA, Cell
from fake_accelerator import POOL_SIZE, FakeAccelerator, FakeEvent, FakeStream
from nccl_simulation import BACKEND, register
from plans import make_plan

from multiprocess import run_ranks
from stagewright.errors import ScheduleError
from stagewright.execution import checkpoint, session
from stagewright.execution.accelerator import install
from stagewright.execution.collectives import Pending
from stagewright.execution.offload import HostCopies
from stagewright.execution.optimizer import HostUpdater, Optimizer
from stagewright.execution.rank_runner import RankRunner
from stagewright.execution.session import Session
from stagewright.execution.shards import FlatBuffer, Shards, StreamedBuffer
from stagewright.execution.stage_runner import StageRunner
from stagewright.execution.transport import Transport
from stagewright.planning.plan import load_plan
from stagewright.schedule.lanes import check_lanes

NUM_STEPS, MOST_DRAINS = 2, 2
DEVICE = torch.device("cpu")
PIPELINE = Cell(dp=1, dtype="fp32", num_microbatches=4, overrides=SMALL_LLAMA, policy="offload")
SHARDED = Cell(pp=1, sharding=3, num_units=3, dtype="bf16", overrides=SMALL_LLAMA)
CELLS = {
    "transport and offload": PIPELINE,
    "a V of split backwards": replace(PIPELINE, schedule="zb-v", policy="keep"),
    "interleaved, recomputed": replace(
        PIPELINE, schedule="interleaved-1f1b", num_chunks=2, policy="recompute"
    ),
    "tied weights": Cell("tiny-gpt2", dp=1, dtype="fp16", overrides=SMALL_GPT2),
    "ZeRO 1": replace(SHARDED, sharding=1, num_units=1),
    "ZeRO 2": replace(SHARDED, sharding=2, reduce_dtype="bf16"),
    "ZeRO 3, offload": replace(SHARDED, policy="offload"),
    "host optimizer": replace(SHARDED, sharding=1, num_units=1, host_optimizer=(0,)),
    "host optimizer of a pipeline": replace(PIPELINE, policy="keep", dtype="fp16", host_optimizer=(0,)),
    "streamed": replace(
        PIPELINE, schedule="breadth-first", num_chunks=4, dtype="bf16", streamed=True, host_optimizer=(0, 1)
    ),
    "streamed in turn": replace(
        PIPELINE, policy="keep", schedule="zb-h1", num_units=3, streamed=True, host_optimizer=(0, 1)
    ),
}
OF_FOUR_RANKS = {
    "ZeRO 3, split backwards": Cell(
        schedule="zb-h1", sharding=3, num_units=2, dtype="fp32", overrides=SMALL_LLAMA, policy="offload"
    ),
    "ZeRO 2, a V": Cell(
        schedule="dualpipe-v", sharding=2, num_microbatches=4, dtype="bf16", overrides=SMALL_LLAMA
    ),
    "ZeRO 1, host optimizer": Cell(sharding=1, dtype="fp16", overrides=SMALL_LLAMA, host_optimizer=(0,)),
    "copies of shards": Cell(
        sharding=2, dp=4, pp=1, shard_size=2, reduce_dtype="bf16", dtype="fp32", overrides=SMALL_LLAMA
    ),
}
MORE_DRAINS = {"streamed": 5, "streamed in turn": 100}
"""The host takes part in the norm of streamed gradients, and adds up those that are copied several times in a batch."""
SHARED_LAYERS = "tensor parallel"


# -- the fake itself ----------------------------------------------------------------------------------------------------


def on_device(fake: FakeAccelerator, size: int = 4) -> torch.Tensor:
    tensor = torch.ones(size)
    fake.own([tensor])
    return tensor


@pytest.mark.parametrize("waits", [True, False])
def test_streams_are_ordered_by_events_alone(waits: bool) -> None:
    with FakeAccelerator() as fake:
        side, x = fake.new_stream(), on_device(fake)
        x.add_(1)
        event = fake.current_stream().record_event()
        x.mul_(2)  # after the event, and read by nobody else
        y = on_device(fake)
        fake.current_stream().record_event(event)
        if waits:
            side.wait_event(event)
        with side:
            y.add_(x)
    assert bool(fake.hazards) is not waits


def test_parts_of_a_storage_are_used_at_the_same_time_and_overlaps_are_races() -> None:
    with FakeAccelerator() as fake:
        side, x = fake.new_stream(), on_device(fake, 8)
        fake.synchronize()
        x[:4].add_(1)
        with side:
            x[4:].add_(1)
        assert not fake.hazards
        with side:
            x[3:].add_(1)
    assert len(fake.hazards) == 1 and "does not wait for it" in fake.hazards[0]


@pytest.mark.parametrize("waits", [True, False])
def test_memory_is_given_out_again_to_its_stream_at_once(waits: bool) -> None:
    """To be caught, no operator needs to meet the other: the block goes to whatever is allocated next."""
    with FakeAccelerator() as fake:
        side, x = fake.new_stream(), on_device(fake)
        y, z = x + 1, on_device(fake)
        side.wait_stream(fake.current_stream())
        with side:
            z.add_(y)
        if waits:
            fake.current_stream().wait_stream(side)
        del y
        x * 2
    assert bool(fake.hazards) is not waits


def test_a_host_that_knows_of_all_work_does_not_drain() -> None:
    with FakeAccelerator() as fake:
        x, numbers = on_device(fake), torch.ones(2)
        x.add_(1)
        assert x.sum().item() == 8 and len(fake.drains) == 1
        fake.synchronize()
        assert numbers.sum().item() == 2 and len(fake.drains) == 1
        x.add_(1)
        x.tolist()
        assert len(fake.drains) == 2


def test_times_are_known_once_the_host_has_waited() -> None:
    fake = FakeAccelerator()
    with fake:
        begin = fake.mark()
        on_device(fake).add_(1)
        end = fake.mark()
        with pytest.raises(RuntimeError, match="before the host has waited"):
            begin.elapsed_time(end)
        end.synchronize()
        assert begin.elapsed_time(end) >= 0


def test_the_pool_of_streams_is_given_out_in_turn() -> None:
    fake = FakeAccelerator()
    for _ in range(POOL_SIZE):
        fake.new_stream()
    assert not fake.hazards
    fake.new_stream()
    assert len(fake.hazards) == 1 and "the same stream of the pool" in fake.hazards[0]


# -- planted faults -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What is wrong in the executor inside `plant`, and words of what the fake says of it."""

    cell: str
    plant: Callable[[FakeAccelerator], AbstractContextManager[Any]]
    words: str


def _unwaited(kind: str) -> Callable[[FakeAccelerator], AbstractContextManager[Any]]:
    wait = Pending.wait

    def wait_for_others(self: Pending) -> None:
        if not self._doing.startswith(kind):
            wait(self)

    return lambda fake: mock.patch.object(Pending, "wait", wait_for_others)


def _without(owner: Any, name: str) -> Callable[[FakeAccelerator], AbstractContextManager[Any]]:
    return lambda fake: mock.patch.object(owner, name, lambda self, *_: None)


def _copies_at_once(direction: int) -> Callable[[FakeAccelerator], AbstractContextManager[Any]]:
    """Copies of a direction do not wait for what was computed before."""
    return lambda fake: mock.patch.object(fake.copy_streams[direction], "wait_stream", lambda other: None)


def _arrived_at_once(fake: FakeAccelerator) -> AbstractContextManager[Any]:
    arrived = HostCopies.fetched

    def at_once(self: HostCopies, copy: Any, flat: torch.Tensor, **places: Any) -> Any:
        copy.copied_back = None
        return arrived(self, copy, flat, **places)

    return mock.patch.object(HostCopies, "fetched", at_once)


def _gathered_at_once(
    kind: type[FlatBuffer], waited_for: str
) -> Callable[[FakeAccelerator], AbstractContextManager[Any]]:
    """Parameters are used without a wait for what the attribute `waited_for` of their buffer stands for."""
    gathered = kind.gathered

    def at_once(self: FlatBuffer) -> Any:
        setattr(self, waited_for, None)
        return gathered(self)

    return lambda fake: mock.patch.object(kind, "gathered", at_once)


@contextmanager
def _gradients_read_at_once(fake: FakeAccelerator) -> Iterator[None]:
    """The host reads streamed gradients while they are copied to it."""
    with (
        mock.patch.object(StreamedBuffer, "finish", lambda self: None),
        mock.patch.object(FakeEvent, "synchronize", lambda self: None),
    ):
        yield


def _gradients_freed_at_once(fake: FakeAccelerator) -> AbstractContextManager[Any]:
    reduce = StreamedBuffer.reduce

    def reduce_and_free(self: StreamedBuffer) -> None:
        reduce(self)
        assert self._sent is not None
        self._sent = (torch.empty(0), *self._sent[1:])

    return mock.patch.object(StreamedBuffer, "reduce", reduce_and_free)


def _summed_at_once(fake: FakeAccelerator) -> AbstractContextManager[Any]:
    return mock.patch.object(FlatBuffer, "_sum", lambda self, over: self._sums.pop(over, (None, None))[1])


def _copied_while_summed(fake: FakeAccelerator) -> AbstractContextManager[Any]:
    """The buffer of a sum is replaced by a copy while its sum is under way."""
    reduce = FlatBuffer.reduce

    def reduce_and_copy(self: FlatBuffer) -> None:
        reduce(self)
        pending, sent = self._sums["replicas"]
        self._sums["replicas"] = pending, sent.clone()

    return mock.patch.object(FlatBuffer, "reduce", reduce_and_copy)


def _spread_at_once(fake: FakeAccelerator) -> AbstractContextManager[Any]:
    def spread(self: Shards) -> None:
        for buffer in self.buffers.values():
            buffer.gather()
            buffer._gathering = None

    return mock.patch.object(Shards, "spread", spread)


def _written_at_once(fake: FakeAccelerator) -> AbstractContextManager[Any]:
    """A checkpoint's copies are written to the disk while they are made."""
    return mock.patch.object(fake, "synchronize", lambda: None)


def _rounded_aside(fake: FakeAccelerator) -> AbstractContextManager[Any]:
    """The host optimizer's parameters are copied back on a stream that nothing waits for."""
    round_ = HostUpdater.round

    def aside(self: HostUpdater) -> None:
        with fake.copy_streams[1]:
            round_(self)

    return mock.patch.object(HostUpdater, "round", aside)


def _waits_under_receives(fake: FakeAccelerator) -> AbstractContextManager[Any]:
    post = Transport.post

    def post_and_wait(self: Transport, *transfer: Any) -> None:
        post(self, *transfer)
        fake.synchronize()

    planted = ExitStack()
    planted.enter_context(_receives_ahead(fake))
    planted.enter_context(mock.patch.object(Transport, "post", post_and_wait))
    return planted


def _receives_ahead(fake: FakeAccelerator) -> AbstractContextManager[Any]:
    return mock.patch.object(session, "receives_ahead", lambda on_gpus: 1)


@contextmanager
def _streams_of_every_stage(fake: FakeAccelerator) -> Iterator[None]:
    """Every runner of a stage takes two streams of its own, as those of other lengths and of evaluation do too."""
    begin = StageRunner.__init__

    def with_streams(self: StageRunner, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        for _ in range(16):
            fake.new_stream()

    with mock.patch.object(StageRunner, "__init__", with_streams):
        yield


def _more_drains(fake: FakeAccelerator) -> AbstractContextManager[Any]:
    """The host waits for each batch, reads the norm, and waits for the optimizer."""
    run_batch, step = RankRunner.run_batch, Optimizer.step

    def run_and_wait(self: RankRunner, *arguments: Any, **options: Any) -> Any:
        result = run_batch(self, *arguments, **options)
        fake.synchronize()
        return result

    def step_and_read(self: Optimizer, *arguments: Any, **options: Any) -> Any:
        norm, is_skipped = step(self, *arguments, **options)
        float(norm)
        return norm, is_skipped

    planted = ExitStack()
    planted.enter_context(mock.patch.object(RankRunner, "run_batch", run_and_wait))
    planted.enter_context(mock.patch.object(Optimizer, "step", step_and_read))
    return planted


def _copied_in_turn(fake: FakeAccelerator) -> AbstractContextManager[Any]:
    """The host waits for each copy of a batch to the device."""
    return mock.patch.object(fake, "to_device", lambda tensor: tensor.to(DEVICE))


_RACE, _REUSE, _UNDER_RECEIVE = (
    "does not wait for it",
    "memory is allocated again",
    "nothing waits yet for irecv",
)
FAULTS = {
    "a receive is used at once": Fault("transport and offload", _unwaited("receiving"), _RACE),
    "a buffer is sent from again at once": Fault("transport and offload", _unwaited("sending"), _RACE),
    "what is computed leaves too early": Fault("transport and offload", _copies_at_once(0), _RACE),
    "what leaves is freed too early": Fault("transport and offload", _without(HostCopies, "offloaded"), _REUSE),
    "what comes back overwrites others": Fault("transport and offload", _copies_at_once(1), _RACE),
    "what comes back is used too early": Fault("transport and offload", _arrived_at_once, _RACE),
    "a gather is used at once": Fault("ZeRO 3, offload", _gathered_at_once(FlatBuffer, "_gathering"), _RACE),
    "streamed weights are used at once": Fault("streamed", _gathered_at_once(StreamedBuffer, "_copied"), _RACE),
    "streamed weights overwrite others": Fault("streamed", _copies_at_once(1), _RACE),
    "gradients leave before they are added": Fault("streamed", _copies_at_once(0), _RACE),
    "gradients that leave are freed": Fault("streamed", _gradients_freed_at_once, _REUSE),
    "the host reads gradients that leave": Fault("streamed in turn", _gradients_read_at_once, _RACE),
    "a sum is used at once": Fault("ZeRO 2", _summed_at_once, _RACE),
    "a sum is copied while under way": Fault("ZeRO 2", _copied_while_summed, _RACE),
    "updated parameters are used at once": Fault("ZeRO 1", _spread_at_once, _RACE),
    "a checkpoint is written at once": Fault("ZeRO 1", _written_at_once, _RACE),
    "the host steps at once": Fault("host optimizer", _without(FakeStream, "synchronize"), _RACE),
    "the host's parameters are used at once": Fault("host optimizer", _rounded_aside, _RACE),
    "the device is waited for under a receive": Fault("a V of split backwards", _waits_under_receives, _UNDER_RECEIVE),
    "receives are posted ahead": Fault("a V of split backwards", _receives_ahead, _UNDER_RECEIVE),
    "the pool of streams wraps around": Fault("a V of split backwards", _streams_of_every_stage, "the same stream of"),
    "a batch is copied to the device in turn": Fault("transport and offload", _copied_in_turn, "drains"),
    "a step drains the device more often": Fault("host optimizer of a pipeline", _more_drains, "drains"),
}  # fmt: skip


# -- runs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """What a rank has seen."""

    hazards: tuple[str, ...]
    drains: tuple[tuple[str, ...], ...]
    """Of every step."""
    losses: tuple[float, ...]


def _trained(path: str, fake: FakeAccelerator | None, folder: Path) -> Watched:
    """Some steps of a plan, and a checkpoint in `folder`.

    Waits for the device under a receive are no hazards of programs whose lanes do not hang of any, as the checker shows:
    where receives keep the order of their sends, some are posted before the computation in front of their own.
    """
    trained = Session(load_plan(path), DEVICE, None, random_weights=True)
    losses, drains = [], []
    watching = fake or ExitStack()
    if fake is not None:
        fake.own(trained._lasting([]))
    for step in range(NUM_STEPS):
        with watching:
            losses.append(trained.train_step(step).loss)
        if fake is not None:
            drains.append(tuple(fake.drains))
            fake.drains.clear()
    with watching:
        checkpoint.save(trained, folder, NUM_STEPS)
    try:
        check_lanes(trained.lowered(trained.program, trained.stages), waits_for_device=True)
        may_wait = True
    except ScheduleError:
        may_wait = False
    trained.close()
    hazards = () if fake is None else dict.fromkeys(fake.hazards)
    return Watched(
        tuple(hazard for hazard in hazards if not (may_wait and _UNDER_RECEIVE in hazard)),
        tuple(drains),
        tuple(losses),
    )


def watch(rank: int, num_ranks: int, paths: dict[str, str], folder: str) -> dict[str, Watched]:
    """Each plan, first without the fake, then with it."""
    register()
    dist.init_process_group(BACKEND)
    watched = {}
    for number, (name, path) in enumerate(paths.items()):
        plain = _trained(path, None, Path(folder) / f"plain-{number}")
        fake = FakeAccelerator()
        host = install(fake)
        watched[name] = _trained(path, fake, Path(folder) / str(number))
        install(host)
        assert watched[name].losses == plain.losses, f"{name}: {watched[name].losses} is not {plain.losses}"
    return watched


def watch_faults(rank: int, num_ranks: int, paths: dict[str, str], folder: str) -> dict[str, Watched]:
    """Each fault, planted in a run of the plan of its cell."""
    register()
    dist.init_process_group(BACKEND)
    watched = {}
    for number, (name, fault) in enumerate(FAULTS.items()):
        fake = FakeAccelerator()
        host = install(fake)
        with fault.plant(fake):
            watched[name] = _trained(paths[fault.cell], fake, Path(folder) / str(number))
        install(host)
    return watched


def _plans(folder: Path, names: Any) -> dict[str, str]:
    plans = {name: str(CELLS[name].plan(folder)) for name in names if name != SHARED_LAYERS}
    if SHARED_LAYERS in names:
        path = folder / "shared.json"
        make_plan(
            path,
            pp=1,
            tp=2,
            num_microbatches=2,
            num_steps=NUM_STEPS,
            overrides=dict(SMALL_LLAMA),
            sequence_length=16,
        )
        plans[SHARED_LAYERS] = str(path)
    return plans


@pytest.mark.multiprocess
def test_the_executor_has_no_race_and_drains_the_device_at_most_twice(tmp_path: Path) -> None:
    plans = _plans(tmp_path, (*CELLS, SHARED_LAYERS))
    _check(run_ranks(watch, 2, plans, str(tmp_path), timeout=180))


def _check(ranks: list[dict[str, Watched]]) -> None:
    for rank, watched in enumerate(ranks):
        for name, seen in watched.items():
            assert not seen.hazards, f"{name}, rank {rank}:\n" + "\n".join(seen.hazards)
            for step, drains in enumerate(seen.drains):
                assert len(drains) <= MORE_DRAINS.get(name, MOST_DRAINS), (
                    f"{name}, rank {rank}, step {step}:\n" + "\n".join(drains)
                )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_replicas_of_pipelines_have_no_race(tmp_path: Path) -> None:
    plans = {name: str(cell.plan(tmp_path)) for name, cell in OF_FOUR_RANKS.items()}
    _check(run_ranks(watch, 4, plans, str(tmp_path), timeout=180))


@pytest.mark.multiprocess
def test_every_planted_fault_is_found(tmp_path: Path) -> None:
    plans = _plans(tmp_path, {fault.cell for fault in FAULTS.values()})
    ranks = run_ranks(watch_faults, 2, plans, str(tmp_path), timeout=240)
    for name, fault in FAULTS.items():
        if fault.words == "drains":
            assert all(len(seen[name].drains[-1]) > MOST_DRAINS for seen in ranks), name
        else:
            told = [hazard for seen in ranks for hazard in seen[name].hazards]
            assert any(fault.words in hazard for hazard in told), f"{name} is not found; hazards are {told}"
