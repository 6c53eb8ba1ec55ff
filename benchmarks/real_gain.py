"""What the best plan gains on a model whose head and loss cost as much as several layers.

    python benchmarks/real_gain.py [--rounds 30] [--vocabulary 31744] [--json]
    python benchmarks/real_gain.py --choose

A Gemma-like model of 8 layers, hidden 512, sequence 256, on two local ranks with 8 microbatches. The best plan for this
machine as it is probed now, against interleaved 1F1B with two chunks a rank and two layers each. Both are held by the same
processes and take their steps in turn; prints the median of the paired ratios (interleaved over best) and a 95 % bootstrap
interval. `--choose` measures what the head with the loss costs in layers for a few vocabularies: the default is about the
one at which they cost four.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import interval, machine

os.environ.setdefault("OMP_NUM_THREADS", "1")

MODEL = "tiny-gemma"
LAYERS, HIDDEN, LENGTH, MICROBATCHES = 8, 512, 256, 8
VOCABULARY = 31744
VOCABULARIES = (24576, 28672, 31744, 32768)
CHOICES = 15
BAR = 1.25


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.choose:
        choose()
        return
    found = measured(options)
    if options.json:
        print(json.dumps({"machine": machine(), "options": vars(options), **found}, indent=1))
        return
    low, high = found["interval"]
    print(
        f"{found['best']} {found['best_s']:.3f} s, interleaved 1F1B with even layers {found['even_s']:.3f} s: "
        f"{found['gain']:.3f}x faster [{low:.3f}, {high:.3f}], predicted {found['predicted_gain']:.3f}x, bar {BAR}x"
    )


def overrides(vocabulary: int, num_layers: int = LAYERS) -> dict[str, object]:
    return {
        "num_hidden_layers": num_layers, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": HIDDEN // 8, "vocab_size": vocabulary,
    }  # fmt: skip


def measured(options: argparse.Namespace) -> dict[str, Any]:
    from side_by_side import step_seconds
    from stagewright.execution.probe import probe
    from stagewright.planning.job import Job
    from stagewright.planning.search import plan
    from stagewright.tracing.models.reference import resolve

    cluster = probe("cpu", processes=2)
    job = Job(global_batch=MICROBATCHES, sequence_length=LENGTH, dtype="fp32")
    reference = resolve(MODEL, overrides(options.vocabulary))
    best = plan(reference, cluster, job, pp=2, microbatch=1).plans[0]
    even = even_layers(best, reference, cluster)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("best.json", "even.json")]
        for path, one in zip(paths, (best, even), strict=True):
            one.save(path)
        fast, slow = step_seconds(paths, 2, options.rounds)
    ratios = [even_s / best_s for best_s, even_s in zip(fast, slow, strict=True)]
    return {
        "best": f"{best.schedule} in {best.num_stages} stages",
        "best_s": statistics.median(fast),
        "even_s": statistics.median(slow),
        "gain": statistics.median(ratios),
        "interval": interval(ratios),
        "predicted_gain": even.predictions.step_seconds / best.predictions.step_seconds,
    }


def even_layers(like: Any, reference: Any, cluster: Any) -> Any:
    """Interleaved 1F1B in four stages of two layers each, embedding and head with the first and the last."""
    from stagewright.planning.estimate import estimate
    from stagewright.schedule.builders import build

    program = build("interleaved-1f1b", 2, MICROBATCHES, 2)
    per = LAYERS // program.num_stages
    changes = {
        "schedule": program.name,
        "num_stages": program.num_stages,
        "cuts": tuple(
            f"net.model.layers.{index * per}.input_layernorm:0" for index in range(1, program.num_stages)
        ),
        "placement": program.placement.rank_of_stage,
        "program": tuple(tuple(map(str, actions)) for actions in program.ranks),
        "memory_policy": ("keep",) * program.num_stages,
        "sharding": (0,) * program.num_stages,
    }
    return estimate(like.model_copy(update=changes), cluster)


def choose() -> None:
    """What the head with the loss costs in layers, for a few vocabularies, in one process of the kind that runs plans."""
    import torch

    from stagewright.execution.allocation import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    models = [_training_step(num_layers) for num_layers in (2, 6)]
    heads = {vocabulary: _head_step(vocabulary) for vocabulary in VOCABULARIES}
    for _ in range(2):
        for call in (*models, *heads.values()):
            call()
    shares: dict[int, list[float]] = {vocabulary: [] for vocabulary in VOCABULARIES}
    for _ in range(CHOICES):
        small, large = (_seconds(call) for call in models)
        for vocabulary, call in heads.items():
            shares[vocabulary].append(_seconds(call) / ((large - small) / 4))
    for vocabulary, found in shares.items():
        low, high = interval(found)
        print(f"{vocabulary} words: {statistics.median(found):.2f} layers [{low:.2f}, {high:.2f}]")


def _training_step(num_layers: int) -> Callable[[], None]:
    """Forward and backward of a model whose head costs next to nothing."""
    from stagewright.tracing.models.build import build
    from stagewright.tracing.models.reference import resolve

    built = build(resolve(MODEL, overrides(64, num_layers)), 1, LENGTH, "float32", seed=0)
    return lambda: built.module(**built.inputs).backward()


def _head_step(vocabulary: int) -> Callable[[], None]:
    """Forward and backward of the head and the loss alone: the table of the embedding is not theirs."""
    import torch

    head = torch.nn.Linear(HIDDEN, vocabulary, bias=False)
    hidden = torch.randn(LENGTH, HIDDEN, requires_grad=True)
    targets = torch.randint(0, vocabulary, (LENGTH,))
    return lambda: torch.nn.functional.cross_entropy(head(hidden), targets).backward()


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
