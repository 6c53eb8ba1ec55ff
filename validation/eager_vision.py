"""Vision models with the shapes, memory layouts and module paths of timm's: ConvNeXtV2 and ViT.

Source: the architectures of ConvNeXt V2 (arXiv 2301.00808) and ViT (arXiv 2010.11929), with the operators that
github.com/huggingface/pytorch-image-models computes them by.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class ConvNeXtV2(nn.Module):
    def __init__(self, depths: Sequence[int], widths: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 4, stride=4), ChannelNorm(widths[0]))
        stages: list[nn.Module] = []
        for index, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            blocks: list[nn.Module] = [ConvolutionBlock(width) for _ in range(depth)]
            if index:
                before = widths[index - 1]
                shrink = nn.Sequential(ChannelNorm(before), nn.Conv2d(before, width, 2, stride=2))
                blocks.insert(0, shrink)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.norm = ChannelNorm(widths[-1])
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.stages(self.stem(images)).mean(dim=(2, 3), keepdim=True)
        return self.fc(self.norm(pooled).flatten(1))


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of N C H W, whose result has its channels last in memory."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvolutionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = ResponseMLP(width, 4 * width)

    def forward(self, images: Tensor) -> Tensor:
        found = self.norm(self.conv_dw(images).permute(0, 2, 3, 1))
        return self.mlp(found).permute(0, 3, 1, 2) + images


class ResponseMLP(nn.Module):
    """Two linear layers with GELU and global response normalisation between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.weight = nn.Parameter(torch.zeros(inner))
        self.bias = nn.Parameter(torch.zeros(inner))
        self.fc2 = nn.Linear(inner, width)

    def forward(self, rows: Tensor) -> Tensor:
        inner = functional.gelu(self.fc1(rows))
        norms = inner.norm(p=2, dim=(1, 2), keepdim=True)
        relative = norms / (norms.mean(dim=-1, keepdim=True) + 1e-6)
        scaled = torch.addcmul(self.bias.view(1, 1, 1, -1), self.weight.view(1, 1, 1, -1), inner * relative)
        return self.fc2(inner + scaled)


class VisionTransformer(nn.Module):
    """Patches, a class token and positions, a norm in front of the blocks, the class token's norm and classifier behind."""

    def __init__(
        self, image: int, patch: int, width: int, depth: int, heads: int, num_classes: int, fused: bool
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.norm_pre = nn.LayerNorm(width, eps=1e-5)
        self.blocks = nn.Sequential(*(AttentionBlock(width, heads, fused) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.patches(images).flatten(2).transpose(1, 2)
        rows = torch.cat([self.first.expand(rows.shape[0], -1, -1), rows], dim=1) + self.positions
        return self.head(self.norm(self.blocks(self.norm_pre(rows)))[:, 0])


def _stepwise(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    return scores.softmax(dim=-1) @ value


class AttentionBlock(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.mix = functional.scaled_dot_product_attention if fused else _stepwise
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-5)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        batch, length, width = rows.shape
        parts = self.qkv(self.norm1(rows)).reshape(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.mix(query, key, value)
        rows = rows + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return rows + self.fc2(functional.gelu(self.fc1(self.norm2(rows))))
