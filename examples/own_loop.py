"""A training loop of one's own: evaluates as it goes, and keeps the weights of the best evaluation.

    stagewright plan tiny-llama --cluster local.toml --global-batch 16 --sequence-length 128 --dtype fp32 -o plan.json
    stagewright launch plan.json examples/own_loop.py -- --steps 30

Every rank runs this script; each takes its part of the batches, and all call the same methods in the same order.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import stagewright

TEXT = Path(stagewright.__file__).parent / "data" / "moby_dick.txt"


def batch(tokens: torch.Tensor, size: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Samples at random places of a text, the same on every rank."""
    starts = torch.randint(len(tokens) - length, (size,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": torch.stack([tokens[start : start + length] for start in starts]).long()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--out", default="runs/own-loop")
    options = parser.parse_args()

    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8)
    split = len(text) * 9 // 10
    with stagewright.Trainer(steps=options.steps, out=options.out) as trainer:
        job = trainer.plan.job
        size, length = job.global_batch, job.sequence_length
        held_out = [batch(text[split:], size, length, seed) for seed in range(2)]
        best, weights = float("inf"), {}
        while trainer.step_number < options.steps and not trainer.is_stopping:
            trainer.step(batch(text[:split], size, length, 1000 + trainer.step_number))
            if trainer.step_number % options.evaluate_every:
                continue
            loss = trainer.evaluate(held_out).loss
            if trainer.is_first:
                print(f"held-out loss after step {trainer.step_number}: {loss:.4f}", flush=True)
            if loss < best:
                best, weights = loss, trainer.weights()
    if trainer.is_first:
        torch.save(weights, Path(options.out) / "best.pt")


if __name__ == "__main__":
    main()
