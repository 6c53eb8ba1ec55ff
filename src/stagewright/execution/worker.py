"""The process of one rank: joins the group that torchrun's environment describes, trains, reports.

Run by `stagewright.execution.launch`, or under any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from stagewright.errors import RunError, StagewrightError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    options = _parse(arguments)
    rank = int(os.environ["RANK"])
    try:
        record = work(**options)
    except StagewrightError as error:
        _report_failure(options["out"], rank, str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    if rank == 0 and record is not None:
        record.save(Path(options["out"]) / "record.json")
    return 0


def work(
    plan: str,
    out: str,
    data: str | None,
    steps: int | None,
    device: str,
    random_weights: bool,
    timeout: float,
) -> Any:
    """Train the plan on this rank; the record on rank 0, None elsewhere.

    Raises:
        RunError: the run failed; names the rank, the action and what it waited for.
    """
    import torch
    import torch.distributed as dist

    from stagewright.execution.session import Session
    from stagewright.execution.watch import Watch, own_store
    from stagewright.planning.plan import load_plan

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    target = _device(device)
    watch = Watch(rank, world, own_store(), timeout)
    watch.listen_for_termination()
    loaded = load_plan(plan)
    dist.init_process_group("nccl" if target.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
    watch.start()
    try:
        session = Session(loaded, target, data, random_weights, watch.at, watch.at)
        results = []
        num_steps = steps or loaded.job.num_steps
        metered = min(1, num_steps - 1)
        progress = _Progress(num_steps)
        for step in range(num_steps):
            result = session.train_step(step, metered=step == metered)
            results.append(result)
            if rank == 0:
                progress(step, result)
        ranks = _gather(session.rank_record().model_dump_json(), rank, world)
    except Exception as error:
        raise _failure(error, rank, watch) from error
    watch.stop()
    dist.barrier()
    dist.destroy_process_group()
    if rank != 0:
        return None
    return _record(loaded, torch, target, results, metered, ranks)


def _failure(error: Exception, rank: int, watch: Any) -> RunError:
    """What this rank should say: its own error, or which other rank's end caused it."""
    own = str(error) if isinstance(error, StagewrightError) else f"{type(error).__name__}: {error}"
    position = watch.position
    may_be_lost_peer = (
        isinstance(error, RuntimeError) or "waited for rank" in own
    )  # collectives raise RuntimeError
    blamed = watch.blame() if may_be_lost_peer else None
    if blamed is None:
        watch.failed(own)
        return RunError(f"rank {rank} failed at {position}: {own}")
    return RunError(f"{blamed}; rank {rank} stopped at {position}: {own}")


def _record(loaded: Any, torch: Any, target: Any, results: list[Any], metered: int, ranks: list[Any]) -> Any:
    from stagewright.version import __version__
    from stagewright.execution.record import Record

    return Record(
        stagewright=__version__,
        model=loaded.model.name,
        device=str(target),
        versions={"torch": torch.__version__, "python": sys.version.split()[0]},
        losses=tuple(result.loss for result in results),
        gradient_norms=tuple(result.gradient_norm for result in results),
        step_seconds=tuple(result.seconds for result in results),
        metered_steps=tuple(sorted({0, metered})),
        predicted_step_seconds=loaded.predictions.step_seconds,
        ranks=tuple(ranks),
    )


def _device(name: str) -> Any:
    import torch

    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device("cpu")


def _gather(document: str, rank: int, world: int) -> list[dict[str, Any]]:
    """Every rank's JSON document on rank 0, as bytes on the wire."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    own = torch.tensor(list(document.encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([own.numel()], dtype=torch.int64, device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    gathered = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(gathered, padded)
    if rank != 0:
        return []
    return [
        json.loads(bytes(item[: int(size)].tolist()).decode())
        for item, size in zip(gathered, sizes, strict=True)
    ]


class _Progress:
    """One line per step on stderr, at most one a second when steps are short."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.printed = 0.0

    def __call__(self, step: int, result: Any) -> None:
        now = time.monotonic()
        if 0 < step < self.num_steps - 1 and self.num_steps > 50 and now - self.printed < 1.0:
            return
        self.printed = now
        print(
            f"step {step + 1}/{self.num_steps}  loss {result.loss:.4f}  gradient norm {result.gradient_norm:.3f}  "
            f"{result.seconds:.3f} s",
            file=sys.stderr,
            flush=True,
        )


def _report_failure(out: str, rank: int, message: str) -> None:
    print(f"stagewright: {message}", file=sys.stderr, flush=True)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f".failure-{rank}").write_text(
        json.dumps({"rank": rank, "time": time.time(), "message": message})
    )


def _parse(arguments: Sequence[str] | None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m stagewright.execution.worker", description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--out", required=True)
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--timeout", type=float, default=1800.0)
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
