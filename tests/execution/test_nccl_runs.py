"""Runs under the simulated NCCL: they end, with the losses and gradient norms that they have under gloo, to the last bit.

On a machine with GPUs they also run under NCCL itself; `NCCL_MULTI_RANK_GPU_ENABLE=1`, with NCCL 2.30 or later, lets ranks
share one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cells import SMALL_GPT2, SMALL_LLAMA
from matrix import SKIP_NET
from nccl_simulation import BACKEND, num_communicators, register, synchronize_device
from plans import make_plan

from multiprocess import Failed, run_ranks, watch_ranks
from random_programs import random_program
from stagewright.execution.accelerator import num_devices
from stagewright.execution.device import gpus_are_shared
from stagewright.planning.plan import Plan, load_plan
from stagewright.schedule import Program
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.overrides import DROPOUT

if TYPE_CHECKING:
    import torch

    from stagewright.execution.session import Session

pytestmark = pytest.mark.multiprocess

Change = Callable[[], None]
NUM_STEPS = 2
PER_TEST = 14
"""Cases that one set of processes runs, one after the other."""
TOLERANCES = {"fp32": 1e-4, "bf16": 0.02, "fp16": 0.02}
"""Of losses and gradient norms on GPUs, relative to those on a CPU, whose kernels add in other orders."""


def evaluation(session: Session) -> list[float]:
    from stagewright.execution.evaluation import Evaluator

    batches = [session.microbatches(step, session.graph) for step in (7, 8)]
    return [Evaluator(session).run(batches).loss]


def weights(session: Session) -> list[float]:
    """Sums of the model's, which the first rank has."""
    whole = session.model_files.whole(session)
    return [float(tensor.double().sum()) for _, tensor in sorted(whole.items())]


def links(session: Session) -> list[float]:
    """Numbers of bytes that are timed between ranks, and the mean loss of a batch for which nothing is updated."""
    from stagewright.execution.link_times import link_times

    return [*(float(sum(link.there)) for link in link_times(session)), session.accumulate(NUM_STEPS)]


@dataclass(frozen=True)
class Case:
    """A plan to train, and what is done after it."""

    options: dict[str, Any] = field(default_factory=dict)
    between: Callable[[Session], list[float]] | None = None
    """What is done with the session after its steps, and before one more."""
    then: dict[str, Any] | None = None
    """Options of the plan under which one more step is trained, in another session."""
    through_files: bool = False
    """Whether that session reads a checkpoint; otherwise the ranks hand their state over."""
    program: Callable[[int], Program] | None = None
    """For so many ranks, in place of a schedule."""

    @property
    def num_ranks(self) -> int:
        degrees = {"pp": 2, "dp": 1, "tp": 1} | self.options
        return degrees["pp"] * degrees["dp"] * degrees["tp"]

    def save(self, path: Path, overrides: Mapping[str, Any]) -> None:
        """Write its plan, and that of the further step, with more `overrides` where the model has a configuration."""
        common = {"overrides": dict(SMALL_LLAMA), "sequence_length": 16, "num_steps": NUM_STEPS + 1}
        program = None if self.program is None else self.program(self.num_ranks)
        plans = [(path, {**common, "program": program, **self.options})]
        if self.then is not None:
            plans.append((path.with_suffix(".then"), common | self.then))
        for file, options in plans:
            more = {} if options.get("model") == SKIP_NET else overrides
            make_plan(file, **{**options, "overrides": {**options["overrides"], **more}})


def schedule(name: str, num_chunks: int | None = None, **options: Any) -> Case:
    return Case({"schedule": name, "num_chunks": num_chunks, **options})


def sharded(level: int, dp: int = 2, pp: int = 1, **options: Any) -> Case:
    return Case({"dp": dp, "pp": pp, "sharding": level, "num_microbatches": 2, **options})


def streamed(**options: Any) -> Case:
    looped = {"schedule": "breadth-first", "num_chunks": 4, "streamed": True, "host_optimizer": (0, 1)}
    return Case(looped | options)


def joint_program(num_ranks: int) -> Program:
    """What the joint search returns for layers of random costs."""
    from stagewright.planning.joint.problem import JointProblem, LayerTable
    from stagewright.planning.joint.search import Effort, search

    rng = np.random.default_rng(1)
    problem = JointProblem.of(LayerTable.of(*rng.integers(1, 9, (3, 7)), boundary_bytes=1.0), num_ranks, 5)
    return search(problem, Effort(rounds=1, gap=0.05, num_workers=1), seed=1).best.program


def drawn_program(num_ranks: int) -> Program:
    """The first random program of so many ranks with several stages on one."""
    programs = (random_program(seed)[0] for seed in range(1000))
    return next(
        program
        for program in programs
        if program.num_ranks == num_ranks and program.num_stages > num_ranks and program.num_microbatches > 2
    )


GPT2 = {"model": "tiny-gpt2", "overrides": dict(SMALL_GPT2)}
CASES: dict[str, Case] = {
    "1f1b": schedule("1f1b"),
    "gpipe": schedule("gpipe"),
    "interleaved": schedule("interleaved-1f1b", 2),
    "breadth-first": schedule("breadth-first", 2),
    "zb-h1": schedule("zb-h1"),
    "zb-h2": schedule("zb-h2"),
    "interleaved-zb": schedule("interleaved-zb", 2),
    "zb-v": schedule("zb-v"),
    "v-half": schedule("v-half"),
    "v-min": schedule("v-min"),
    "dualpipe-v": schedule("dualpipe-v"),
    "joint": Case(program=joint_program),
    "random": Case(program=drawn_program),
    "one microbatch": schedule("1f1b", num_microbatches=1),
    "many microbatches": schedule("interleaved-1f1b", 4, num_microbatches=12),
    "units": schedule("1f1b", num_units=2),
    "recomputation": schedule("zb-h1", policy="some"),
    "offload": schedule("1f1b", policy="offload"),
    "tied weights": schedule("interleaved-1f1b", 2, **GPT2),
    "skip connections": schedule("zb-v", model=SKIP_NET, overrides={}),
    "encoder and decoder": schedule(
        "1f1b", model="tiny-t5", overrides={"d_model": 32, "d_ff": 64, "d_kv": 8, "vocab_size": 96}
    ),
    "no clipping": schedule("1f1b", clip_norm=None),
    "scaled loss": schedule("zb-h1", dtype="fp16", loss_scale=65536.0),
    "bfloat16": schedule("1f1b", dtype="bf16"),
    "lengths": schedule("1f1b", options={"sequence_lengths": [8, 16]}),
    **({"compiled": schedule("1f1b", compiled=True)} if shutil.which("g++") else {}),
    "zero 0": sharded(0),
    "zero 1": sharded(1),
    "zero 2": sharded(2),
    "zero 3": sharded(3),
    "tensor parallel": Case({"pp": 1, "tp": 2}),
    "sequence parallel": Case({"pp": 1, "tp": 2, "sequence_parallel": True}),
    "evaluation": Case({"schedule": "zb-v"}, evaluation),
    "evaluation of shards": replace(sharded(3), between=evaluation),
    "weights of a pipeline": Case({}, weights),
    "weights of tensor parallel ranks": Case({"pp": 1, "tp": 2}, weights),
    "links": Case({"schedule": "dualpipe-v"}, links),
    "checkpoint": Case({}, then={}, through_files=True),
    "checkpoint under another plan": replace(sharded(3), then={"schedule": "zb-v"}, through_files=True),
    "hand-over": Case({}, then={"schedule": "interleaved-1f1b", "num_chunks": 2}),
    "hand-over to replicas": Case(
        {"schedule": "zb-v"}, then={"pp": 1, "dp": 2, "sharding": 3, "num_microbatches": 2}
    ),
    "streamed": streamed(),
    "streamed base": streamed(host_optimizer=(), lora=Lora(rank=4, alpha=8)),
    "evaluation of streamed weights": replace(streamed(), between=evaluation),
    "checkpoint of streamed weights": replace(streamed(), then={"schedule": "zb-v"}, through_files=True),
    "hand-over to streamed weights": Case({"schedule": "zb-v"}, then=streamed().options),
    # 3 ranks
    "1f1b on 3": schedule("1f1b", pp=3),
    "interleaved on 3": schedule("interleaved-1f1b", 2, pp=3, num_microbatches=6),
    "zb-v on 3": schedule("zb-v", pp=3, num_microbatches=5),
    "joint on 3": Case({"pp": 3}, program=joint_program),
    # 4 ranks
    "1f1b on 4": schedule("1f1b", pp=4),
    "dualpipe-v on 4": schedule("dualpipe-v", pp=4, num_microbatches=8),
    "random on 4": Case({"pp": 4}, program=drawn_program),
    "zero 1 with pipelines": sharded(1, pp=2),
    "zero 2 with pipelines": sharded(2, pp=2, schedule="zb-v"),
    "zero 3 with pipelines": sharded(3, pp=2, schedule="breadth-first", num_chunks=2),
    "hybrid shards": sharded(3, dp=4, shard_size=2, num_microbatches=2),
    "tensor parallel pipelines": Case({"pp": 2, "tp": 2}),
    "tied weights with replicas": sharded(2, pp=2, **GPT2),
}


def sets() -> list[list[str]]:
    """The names of cases that the same processes run; what takes a C++ compiler is a set of its own."""
    alike: dict[tuple[int, bool], list[str]] = {}
    for name, case in CASES.items():
        alike.setdefault((case.num_ranks, "compiled" in case.options), []).append(name)
    return [
        names[first : first + PER_TEST]
        for names in alike.values()
        for first in range(0, len(names), PER_TEST)
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", sets(), ids=lambda names: f"{len(names)} from {names[0]}")
def test_a_run_gives_what_it_gives_under_gloo(names: Sequence[str], tmp_path: Path) -> None:
    check(names, tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not num_devices("cuda"), reason="needs a GPU")
@pytest.mark.parametrize("names", sets(), ids=lambda names: f"{len(names)} from {names[0]}")
def test_a_run_on_gpus_gives_what_it_gives_on_a_cpu(names: Sequence[str], tmp_path: Path) -> None:
    size = write_plans(names, tmp_path, {DROPOUT: 0.0})  # GPUs draw other random numbers
    if size > num_devices("cuda") and not gpus_are_shared():
        pytest.skip(f"needs {size} GPUs")
    for on_cpu, on_gpus in run_ranks(trained, size, str(tmp_path), names, ("gloo", "nccl"), timeout=120):
        for name in names:
            tolerance = TOLERANCES[CASES[name].options.get("dtype", "fp32")]
            assert on_gpus[name] == pytest.approx(on_cpu[name], rel=tolerance), name


def check(names: Sequence[str], folder: Path, change: Change | None = None) -> None:
    size = write_plans(names, folder)
    for under_gloo, under_nccl in run_ranks(
        trained, size, str(folder), names, ("gloo", BACKEND), change, timeout=300
    ):
        assert under_nccl == under_gloo


def write_plans(
    names: Sequence[str], folder: Path, overrides: Mapping[str, Any] = MappingProxyType({})
) -> int:
    """Those of cases, by their place in `names`. Returns the number of ranks, which is the same for all."""
    for index, name in enumerate(names):
        CASES[name].save(folder / f"{index}.json", overrides)
    (size,) = {CASES[name].num_ranks for name in names}
    return size


def trained(
    rank: int,
    size: int,
    folder: str,
    names: Sequence[str],
    backends: Sequence[str],
    change: Change | None = None,
) -> list[dict[str, list[float]]]:
    """Losses and gradient norms of each case, under one backend after the other, of the product as `change` leaves it."""
    if change is not None:
        change()
    results = []
    for backend in backends:
        with joined(backend, rank, size):
            results.append(
                {
                    name: of_case(
                        CASES[name], Path(folder, f"{index}.json"), Path(folder, f"{index}-{backend}")
                    )
                    for index, name in enumerate(names)
                }
            )
    return results


@contextmanager
def joined(backend: str, rank: int, size: int) -> Iterator[None]:
    import os

    import torch.distributed as dist

    device_under(backend)
    register()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(backend, dist.TCPStore(host, port, is_master=False, wait_for_workers=False))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    yield
    dist.destroy_process_group()


def device_under(backend: str) -> torch.device:
    """This rank's, made the current one."""
    from stagewright.execution.device import local_device

    return local_device("cuda" if backend == "nccl" else "cpu")


def new_session(plan: Plan) -> Session:
    import torch.distributed as dist

    from stagewright.execution.session import Session

    return Session(plan, device_under(dist.get_backend()), None, random_weights=True)


def figures(session: Session, *steps: int) -> list[float]:
    """Losses and gradient norms of steps."""
    results = [session.train_step(step) for step in steps]
    return [figure for result in results for figure in (result.loss, result.gradient_norm)]


def of_case(case: Case, path: Path, checkpoints: Path) -> list[float]:
    """What a case gives under the present backend."""
    import torch.distributed as dist

    from stagewright.execution.checkpoint import restore, save
    from stagewright.execution.handover import give, take

    session = new_session(load_plan(path))
    num_created = num_communicators()
    results = figures(session, *range(NUM_STEPS))
    assert num_communicators() == num_created, (
        "a step created a communicator, which takes memory of the device"
    )
    if case.between is not None:
        results += case.between(session) + figures(session, NUM_STEPS)
    if case.then is not None:
        taken = None if case.through_files else take(session)
        if taken is None:
            save(session, checkpoints, NUM_STEPS)
            dist.barrier()
        session.close()
        session = new_session(load_plan(path.with_suffix(".then")))
        if taken is None:
            assert restore(session, checkpoints) == NUM_STEPS
        else:
            give(session, taken)
        results += figures(session, NUM_STEPS)
    session.close()
    return results


# -- faults ---------------------------------------------------------------------------------------------------------


def all_lanes_of_a_kind_are_shared() -> None:
    from stagewright.execution.mesh import Groups

    Groups.lane = lambda groups, lane: groups.lanes[lane.kind, True]  # type: ignore[method-assign]


def nothing_is_connected_before() -> None:
    from stagewright.execution.mesh import Groups

    Groups.connect = lambda *_: None  # type: ignore[method-assign]


def a_receive_is_swapped() -> None:
    """The second receive of values is posted before the first."""
    from stagewright.execution.rank_runner import RankRunner
    from stagewright.schedule.action import Kind

    follow = RankRunner.follow

    def swapped(runner: RankRunner, program: Program) -> None:
        ranks = [list(actions) for actions in program.ranks]
        first, second = [action for action in ranks[1] if action.kind is Kind.RECV_F][:2]
        ranks[1].remove(second)
        ranks[1].insert(ranks[1].index(first), second)
        follow(runner, program.with_ranks(ranks))

    RankRunner.follow = swapped  # type: ignore[method-assign]


def groups_are_destroyed_in_another_order() -> None:
    import torch.distributed as dist

    from stagewright.execution.collectives import ProcessGroups

    destroy = ProcessGroups.destroy

    def reversed_on_one(groups: ProcessGroups) -> None:
        if dist.get_rank() == 1:
            groups._own.reverse()
        destroy(groups)

    ProcessGroups.destroy = reversed_on_one  # type: ignore[method-assign]


def passes_wait_for_the_device() -> None:
    """As the first use of a kernel and memory from the driver may."""
    from stagewright.execution.rank_runner import RankRunner
    from stagewright.schedule.action import COMPUTE

    act = RankRunner._act

    def waiting(runner: RankRunner, action: Any, *others: Any) -> None:
        if action.kind in COMPUTE:
            synchronize_device()
        act(runner, action, *others)

    RankRunner._act = waiting  # type: ignore[method-assign]


def passes_wait_for_receives_ahead() -> None:
    from stagewright.execution import session

    session.receives_ahead = lambda _: 1
    passes_wait_for_the_device()


FAULTS: list[tuple[Change, str, str]] = [
    (all_lanes_of_a_kind_are_shared, "zb-v", r"no rank goes on: rank 0 waits for receive"),
    (nothing_is_connected_before, "dualpipe-v on 4", r"no rank goes on: rank 0 creates the communicator"),
    (a_receive_is_swapped, "gpipe", r"order mismatch: it met a (send|receive) of 2048 bytes"),
    (
        groups_are_destroyed_in_another_order,
        "1f1b",
        r"rank 0 destroys group (\d+) .*; rank 1 destroys group (?!\1)",
    ),
    (passes_wait_for_receives_ahead, "1f1b", r"waits for the whole device, which is at receive"),
]
"""What is changed in the product, the case that is run then, and what is said."""


@pytest.mark.parametrize(
    ("change", "name", "text"), FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_fault_of_the_product_is_said(change: Change, name: str, text: str, tmp_path: Path) -> None:
    size = write_plans([name], tmp_path)
    ends = watch_ranks(trained, size, str(tmp_path), [name], (BACKEND,), change, grace=10.0)
    details = [end.detail for end in ends if isinstance(end, Failed)]
    assert len(details) == size and any(re.search(text, detail) for detail in details), details


def test_passes_may_wait_for_the_device(tmp_path: Path) -> None:
    """Receives are posted when nothing but they can be next, so no wait for the whole device closes a circle."""
    check(
        ["1f1b", "interleaved", "zb-h1", "zb-v", "v-min", "dualpipe-v", "joint"],
        tmp_path,
        passes_wait_for_the_device,
    )


# -- a whole run ----------------------------------------------------------------------------------------------------


def test_a_trainer_gives_what_it_gives_under_gloo(tmp_path: Path) -> None:
    """Text, held-out data, another plan in the middle, a checkpoint, and another run that goes on from it."""
    (tmp_path / "text.txt").write_bytes(bytes(range(96)) * 5)
    for name, options in (("first", {}), ("second", {"schedule": "interleaved-1f1b", "num_chunks": 2})):
        make_plan(tmp_path / f"{name}.json", overrides=dict(SMALL_LLAMA), sequence_length=16, **options)
    under_gloo, under_nccl = (
        run_ranks(through_trainer, 2, str(tmp_path), backend, timeout=120) for backend in ("gloo", BACKEND)
    )
    assert under_nccl == under_gloo


def through_trainer(rank: int, size: int, folder: str, backend: str) -> list[float]:
    import os

    from stagewright.execution import collectives
    from stagewright.execution.trainer import Trainer

    register()
    collectives.backend_of = lambda kind: backend
    text, out = Path(folder, "text.txt"), Path(folder, backend)
    options: dict[str, Any] = {
        "held_out": text,
        "device": "cpu",
        "random_weights": True,
        "checkpoint": out / "kept",
    }
    first, second = (load_plan(Path(folder, f"{name}.json")) for name in ("first", "second"))
    results = []
    with Trainer(first, text, out=out / "first", **options) as trainer:
        for plan in (first, second):
            if plan is second:
                trainer.adopt(plan)
            result = trainer.step()
            results += [result.loss, result.gradient_norm, trainer.evaluate().loss]
        trainer.save()
        results += [float(tensor.double().sum()) for _, tensor in sorted(trainer.weights().items())]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # as a launcher does, so that the ranks meet anew
    record = Trainer(second, text, out=out / "second", resume=True, evaluate_every=1, **options).fit()
    return results if record is None else [*results, *record.losses]
