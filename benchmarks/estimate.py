"""How long an estimate takes beside PyTorch's own: `MemTracker` for memory and `FlopCounterMode` for arithmetic.

    python benchmarks/estimate.py [--models NAME ...] [--repeats 3] [--json]

Every model is estimated for one step on one device. PyTorch's tools run the model's forward and backward and an
optimizer step on fake tensors, which also allocate nothing. Ours is timed twice: with nothing known of the model
(`traced`: it is traced first, where the tools run it), and for a further question about it (`asked again`: another
device or schedule), which the tools answer by running everything once more. Building the model is part of our first
figure and not of the tools'.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable

MODELS = ("gpt2", "bert-large", "vit-huge", "t5-large", "llama-2-7b")
LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {model: measured(model, options.repeats) for model in options.models}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'model':<14}{'traced':>9}{'again':>9}{'tools':>9}{'ratio':>9}{'again':>9}{'FLOP':>9}")
    for model, row in found.items():
        print(
            f"{model:<14}{row['traced_s']:>8.2f}s{row['again_s']:>8.3f}s{row['tools_s']:>8.2f}s"
            f"{row['tools_s'] / row['traced_s']:>8.1f}x{row['tools_s'] / row['again_s']:>8.0f}x"
            f"{row['flop_ratio']:>9.6f}"
        )


def measured(model: str, repeats: int) -> dict[str, float]:
    """Median seconds of each, and our FLOP over those that PyTorch counts."""
    tools = [_tools(model) for _ in range(repeats)]
    ours = [_ours(model) for _ in range(repeats)]
    return {
        "traced_s": statistics.median(row[0] for row in ours),
        "again_s": statistics.median(row[1] for row in ours),
        "tools_s": statistics.median(row[0] for row in tools),
        "flop_ratio": ours[0][2] / tools[0][1],
    }


def _ours(model: str) -> tuple[float, float, float]:
    from stagewright.cluster import load_cluster
    from stagewright.estimation.time import Costing
    from stagewright.planning.estimate import estimate
    from stagewright.planning.job import Job
    from stagewright.tracing.cache import trace

    cluster = load_cluster("1x-h200")
    job = Job(global_batch=1, sequence_length=LENGTH, dtype="fp32")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STAGEWRIGHT_CACHE"] = folder
        seconds = [_timed(lambda: estimate(model, cluster, job)) for _ in range(2)]
        graph = trace(model, 1, **job.traced("cuda"))
    return seconds[0], seconds[1], Costing(graph, cluster.device).flop


def _tools(model: str) -> tuple[float, float]:
    """Seconds and FLOP of a step under both trackers at once."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils.flop_counter import FlopCounterMode

    from stagewright.tracing.models.build import build
    from stagewright.tracing.models.reference import resolve

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    built = build(resolve(model), 1, LENGTH, "float32", fake_mode=mode)
    with mode:
        optimizer = torch.optim.AdamW(built.module.parameters())
        tracker = MemTracker()
        tracker.track_external(built.module, optimizer)
        counter = FlopCounterMode(display=False)

        def step() -> None:
            with tracker, counter:
                built.module(**built.inputs).backward()
                optimizer.step()
                optimizer.zero_grad()

        seconds = _timed(step)
    return seconds, float(counter.get_total_flops())


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
