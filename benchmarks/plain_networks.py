"""Plain PyTorch models for `benchmarks/saving_in_backward.py`: a GPT whose attention has explicit scores, and a ResNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ExplicitAttention(nn.Module):
    """Attention of the scores themselves, as before fused kernels and as Korthikanti et al. describe it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self._heads(layer(x)) for layer in (self.queries, self.keys, self.values))
        scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
        context = torch.matmul(scores.softmax(-1), v)
        return self.out(context.transpose(1, 2).reshape(x.shape))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


class TransformerLayer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = ExplicitAttention(width, num_heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class ExplicitGPT(nn.Module):
    """GPT without dropout; the loss is that of the next token."""

    def __init__(self, num_layers: int, width: int, num_heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(TransformerLayer(width, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        mask = torch.full((length, length), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x, self.mask)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def explicit_gpt(
    microbatch_size: int, sequence_length: int, num_layers: int = 4, width: int = 256, num_heads: int = 4
) -> tuple[nn.Module, dict[str, Tensor]]:
    model = ExplicitGPT(num_layers, width, num_heads, 256, sequence_length)
    tokens = torch.randint(256, (microbatch_size, sequence_length))
    return model, {"tokens": tokens, "labels": tokens.clone()}


class Bottleneck(nn.Module):
    """Three convolutions around a residual, as in ResNet-50 (He et al. 2016, arXiv 1512.03385)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        inner = after // 4
        self.convolutions = nn.ModuleList([
            nn.Conv2d(before, inner, 1, bias=False),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.Conv2d(inner, after, 1, bias=False),
        ])  # fmt: skip
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (inner, inner, after))
        self.shortcut = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            if stride > 1 or before != after
            else nn.Identity()
        )

    def forward(self, image: Tensor) -> Tensor:
        x = image
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = norm(convolution(x))
            if number < 2:
                x = functional.relu(x)
        return functional.relu(x + self.shortcut(image))


class ResidualNetwork(nn.Module):
    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks: list[nn.Module] = []
        for group in range(3):
            for block in range(num_blocks):
                before = width if not blocks else 4 * width * 2 ** (group - (block == 0))
                blocks.append(Bottleneck(before, 4 * width * 2**group, 2 if group and not block else 1))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(16 * width, 10)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        x = self.enter(image)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def resnet(
    microbatch_size: int, num_blocks: int = 3, width: int = 16, size: int = 32
) -> tuple[nn.Module, dict[str, Tensor]]:
    images = torch.randn(microbatch_size, 3, size, size)
    return ResidualNetwork(num_blocks, width), {
        "image": images,
        "labels": torch.randint(10, (microbatch_size,)),
    }
