"""Small models whose attention PyTorch computes by other kernels on a GPU than on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS = 6


class Attending(nn.Module):
    """Two residual layers of attention with 4 heads of queries, 8 wide.

    Args:
        heads: of keys and values.
        width: of a head's values.
        mask: none but `causal`, a boolean mask, a bias, or a bias that is a `trained` function of a parameter.
    """

    def __init__(self, heads: int = 4, width: int = 8, dropout: float = 0.0, mask: str = "causal") -> None:
        super().__init__()
        self.heads, self.dropout, self.mask = heads, dropout, mask
        self.distances = nn.Embedding(TOKENS, 4) if mask == "trained" else None
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "query": nn.Linear(16, 4 * 8),
                    "key": nn.Linear(16, heads * 8),
                    "value": nn.Linear(16, heads * width),
                    "out": nn.Linear(4 * width, 16),
                }
            )
            for _ in range(2)
        )

    def attn_mask(self, x: Tensor) -> Tensor | None:
        places = torch.arange(TOKENS)
        distance = (places[:, None] - places).abs()
        if self.distances is not None:
            return self.distances(distance).permute(2, 0, 1).unsqueeze(0)
        if self.mask == "bias":
            return -distance.to(x.dtype).expand(x.shape[0], 1, TOKENS, TOKENS)
        return distance < 3 if self.mask == "boolean" else None

    def forward(self, x: Tensor) -> Tensor:
        mask = self.attn_mask(x)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            query, key, value = (
                layer[name](x).unflatten(-1, (heads, -1)).transpose(1, 2)
                for name, heads in (("query", 4), ("key", self.heads), ("value", self.heads))
            )
            mixed = functional.scaled_dot_product_attention(
                query, key, value, mask, self.dropout, is_causal=mask is None, enable_gqa=self.heads < 4
            )
            x = x + layer["out"](mixed.transpose(1, 2).reshape(*x.shape[:2], -1))
        return x.square().mean()


ATTENDING: Mapping[str, Callable[[], Attending]] = {
    "causal": Attending,
    "dropout": partial(Attending, dropout=0.2),
    "grouped heads": partial(Attending, heads=2, dropout=0.2),
    "narrow values": partial(Attending, width=6),
    "narrow values, dropout": partial(Attending, width=6, dropout=0.2),
    "boolean mask": partial(Attending, mask="boolean"),
    "bias, dropout": partial(Attending, mask="bias", dropout=0.2),
    "trained bias": partial(Attending, mask="trained"),
}


def microbatch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"x": torch.randn(2, TOKENS, 16, dtype=dtype)}
