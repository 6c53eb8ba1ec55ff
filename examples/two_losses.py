"""Trains a module of one's own with two losses: the next byte, and from the same layers the byte after the next.

    stagewright probe --processes 2 -o local.toml
    stagewright plan examples/two_losses.py:build --cluster local.toml --pp 2 --global-batch 16 --sequence-length 128 \
        --dtype fp32 -o plan.json
    stagewright launch plan.json examples/two_losses.py -- --steps 50

`build` is the factory that the plan names: it returns the module, its inputs and what makes one loss of the module's output.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import stagewright

TEXT = Path(stagewright.__file__).parent / "data" / "moby_dick.txt"
FURTHER = 0.3
"""What the second loss counts beside the first."""


class Mixer(nn.Module):
    """A residual block that sees earlier bytes through a causal convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.back = nn.Conv1d(width, 2 * width, 8, padding=7)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        seen, gate = (
            self.back(self.norm(hidden).transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2).chunk(2, -1)
        )
        return hidden + self.out(seen * torch.sigmoid(gate))


class TwoHeads(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Mixer(width) for _ in range(depth)))
        self.next, self.after = nn.Linear(width, 256), nn.Linear(2 * width, 256)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embed(input_ids)
        hidden = self.blocks(embedded)
        known = torch.cat(
            [hidden[:, :-2], embedded[:, 1:-1]], dim=-1
        )  # with the byte between; skips all stages
        first = cross_entropy(self.next(hidden[:, :-1]).flatten(0, 1), input_ids[:, 1:].flatten())
        return first, cross_entropy(self.after(known).flatten(0, 1), input_ids[:, 2:].flatten())


def build(
    microbatch_size: int, sequence_length: int, width: int = 128, depth: int = 6
) -> tuple[nn.Module, dict[str, Tensor], object]:
    tokens = torch.zeros(microbatch_size, sequence_length, dtype=torch.int64)
    return TwoHeads(width, depth), {"input_ids": tokens}, lambda losses: losses[0] + FURTHER * losses[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default="runs/two-losses")
    options = parser.parse_args()

    rates = {"learning_rate": 5e-3, "lr_schedule": "linear"}
    with stagewright.Trainer(data=TEXT, steps=options.steps, out=options.out, rates=rates) as trainer:
        before = trainer.weights()
        while trainer.step_number < options.steps and not trainer.is_stopping:
            trainer.step()
        after = trainer.weights()
    if trainer.is_first:
        sample = torch.tensor([list(TEXT.read_bytes()[: trainer.plan.job.sequence_length])])
        module, _, _ = build(1, sample.shape[1], **trainer.plan.model.overrides)
        for when, weights in (("before", before), ("after", after)):
            module.load_state_dict({name.removeprefix("net."): tensor for name, tensor in weights.items()})
            first, second = (float(loss) for loss in module(sample))
            print(f"{when}: next byte {first:.3f}, the one after {second:.3f}", flush=True)


if __name__ == "__main__":
    main()
