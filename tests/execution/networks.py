"""Small networks the executor is tried on besides the bundled ones."""

from __future__ import annotations

import torch
from torch import nn


class SkipNet(nn.Module):
    """A small U-Net: convolutions, batch-free normalisation, and skip connections that jump over stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 8, 3, padding=1)
        self.down2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        first = torch.relu(self.down1(image))
        second = torch.relu(self.down2(first))
        deep = torch.relu(self.norm(self.middle(second))) + second
        joined = torch.cat([self.up(deep), first], dim=1)
        features = torch.relu(self.join(joined)).mean((2, 3)) + first.mean((2, 3))
        return nn.functional.cross_entropy(self.head(features), label)


def skip_net(microbatch_size: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    inputs = {
        "image": torch.randn(microbatch_size, 3, 8, 8),
        "label": torch.randint(0, 5, (microbatch_size,)),
    }
    return SkipNet(), inputs
