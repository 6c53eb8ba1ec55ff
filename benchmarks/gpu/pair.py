"""A rank of a pipeline whose processes share one device; started by `training`, with its options as JSON.

NCCL refuses two ranks on one GPU, and gloo sends no tensors of a GPU: what goes to the other rank goes through the host.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from stagewright.execution.collectives import exchange
from stagewright.execution.member import end_process, exit_code, member, start_process
from stagewright.execution.session import Session
from stagewright.execution.transport import Channel, Transport
from stagewright.execution.watch import Limits
from stagewright.planning.plan import load_plan

_METERED = 1
"""The first step has optimizer state to make."""


class HostTransport(Transport):
    """To and from `target` through memory of the host."""

    def __init__(self, target: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self._target = target

    def receive(self, channel: Channel, microbatch: int) -> dict[int, torch.Tensor]:
        return moved(super().receive(channel, microbatch), self._target)

    def send(self, channel: Channel, microbatch: int, values: dict[int, torch.Tensor]) -> None:
        super().send(channel, microbatch, moved(values, torch.device("cpu")))


def moved(values: Mapping[int, torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """The same on `device`; what shares a storage shares one there."""
    storages: dict[int, torch.UntypedStorage] = {}
    found: dict[int, torch.Tensor] = {}
    for value, tensor in values.items():
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in storages:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[place] = flat.to(device).untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=device)
        found[value] = empty.set_(storages[place], tensor.storage_offset(), tensor.shape, tensor.stride())
    return found


def trained(session: Session, steps: range) -> tuple[list[float], list[float]]:
    """Losses, and seconds of the steps that count."""
    results = [session.train_step(step, metered=step == _METERED) for step in steps]
    timed = [one.seconds for step, one in zip(steps, results, strict=True) if step > _METERED]
    return [one.loss for one in results], timed


def work(plan: str, out: str, device: str, steps: int) -> None:
    """Rank 0 leaves losses, seconds and every rank's peak in the file `out`."""
    with member("cpu", Limits(action_s=120.0, start_s=120.0)) as (watch, _):  # for its gloo
        target = torch.device(device)
        session = Session(load_plan(plan), target, None, True, watch.at, watch.at)
        session.runner.transport = HostTransport(target)
        losses, seconds = trained(session, range(steps))
        peaks = exchange(session.metering.peak_bytes)
        if watch.rank == 0:
            Path(out).write_text(json.dumps({"losses": losses, "seconds": seconds, "peaks": peaks}))


if __name__ == "__main__":
    start_process()
    end_process(exit_code(lambda: work(**json.loads(sys.argv[1]))))
