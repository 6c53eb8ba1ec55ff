"""Trains a vision transformer on a dataset of one's own: stripes that lie or stand, which this file draws.

    stagewright probe --processes 2 -o local.toml
    python examples/vision.py --steps 60

Data is named by a function, here `train` and `held_out` of this file; each returns a map-style dataset whose items have the
model's inputs by name. Every rank that needs samples makes it for itself.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForImageClassification

import stagewright

SIDE = 32


class Stripes(Dataset[dict[str, torch.Tensor]]):
    """Images of stripes that lie (label 0) or stand (label 1), of any width, place and colour, in noise."""

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(self.first + index)  # the same image whoever asks for it
        label = int(torch.randint(2, (), generator=random))
        period, phase = (
            4 + 6 * torch.rand((), generator=random),
            2 * math.pi * torch.rand((), generator=random),
        )
        wave = torch.sin(2 * math.pi * torch.arange(SIDE) / period + phase)
        colour = torch.randn(3, 1, 1, generator=random).sign()
        image = colour * (wave if label else wave[:, None]) + torch.randn(3, SIDE, SIDE, generator=random) / 2
        return {"pixel_values": image, "labels": torch.tensor(label)}


def train() -> Stripes:
    return Stripes(0, 4096)


def held_out() -> Stripes:
    return Stripes(100_000, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cluster", default="local.toml", help="a file of `stagewright probe`, or a catalog name"
    )
    parser.add_argument("--stages", type=int, default=2, help="processes, each with a part of the model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/vision"))
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    job = stagewright.Job(
        global_batch=32, sequence_length=1, dtype="fp32", learning_rate=5e-4, num_steps=options.steps
    )
    cluster = stagewright.load_cluster(options.cluster)
    best = stagewright.plan("tiny-vit", cluster, job, pp=options.stages).plans[0]
    best.save(options.out / "plan.json")
    here = Path(__file__).resolve()
    stagewright.run(
        options.out / "plan.json",
        f"{here}:train",
        out=options.out,
        checkpoint=options.out / "checkpoints",
        held_out=f"{here}:held_out",
    )

    folder = options.out / "checkpoints" / f"step-{options.steps:06d}"
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    items = [held_out()[index] for index in range(256)]
    with torch.no_grad():
        found = model(torch.stack([item["pixel_values"] for item in items])).logits.argmax(-1)
    right = (found == torch.stack([item["labels"] for item in items])).float().mean()
    print(f"accuracy on held-out images: {right:.1%}")


if __name__ == "__main__":
    main()
