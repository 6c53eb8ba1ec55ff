"""Tensor parallel layers; parameters keep the names they have in the whole model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.graph.tensor_parallel import GROUP
from stagewright.tracing.tensor_parallel.operators import (
    all_gather,
    all_reduce,
    enter,
    group_rank,
    reduce_scatter,
    shard,
)

SEQUENCE = 1
"""The dimension of activations (batch, sequence, features) that sequence parallelism splits."""


class ColumnLinear(nn.Module):
    """A column-parallel linear layer: each rank computes some of the features.

    Args:
        weight: (features of this rank, inputs), or its transpose if `is_transposed`.
        bias: (features of this rank) or None.
        gathers: whether every rank gets all features.

    `source` is the kind of the input: "whole" and equal on all ranks, "sequence" (a part of the sequence on each rank), or
    "entered" if the module around it has already made it local. All ranks together have `num_features` without padding. If
    it `copies`, it computes with a copy of a whole input, which it saves.
    """

    source = "whole"
    copies = False
    num_features: int | None = None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        size: int,
        gathers: bool,
        is_transposed: bool,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.size, self.gathers, self.is_transposed = size, gathers, is_transposed

    def forward(self, x: Tensor) -> Tensor:
        if self.source == "whole":
            x = enter(x, GROUP, self.size)
            x = x.clone() if self.copies else x
        elif self.source == "sequence":
            x = all_gather(x, SEQUENCE, GROUP, self.size, sums=True)
        product = functional.linear(x, self.weight.t() if self.is_transposed else self.weight, self.bias)
        if not self.gathers:
            return product
        gathered = all_gather(product, product.dim() - 1, GROUP, self.size, sums=False)
        return gathered if self.num_features is None else gathered[..., : self.num_features]


class RowLinear(nn.Module):
    """A row-parallel linear layer: each rank takes some of the inputs; the sum over ranks is the result.

    Args:
        weight: (features, inputs of this rank), or its transpose if `is_transposed`.
        bias: (features) or None; added once, to the sum.
        splits: whether the input is whole on every rank.

    If it `scatters`, each rank gets a part of the sequence of the result.
    """

    scatters = False

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        size: int,
        splits: bool,
        is_transposed: bool,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.size, self.splits, self.is_transposed = size, splits, is_transposed

    def forward(self, x: Tensor) -> Tensor:
        if self.splits:
            x = shard(x, x.dim() - 1, GROUP, self.size)
        part = functional.linear(x, self.weight.t() if self.is_transposed else self.weight)
        if self.scatters:
            total = reduce_scatter(part, SEQUENCE, GROUP, self.size)
        else:
            total = all_reduce(part, GROUP, self.size)
        if self.bias is None:
            return total
        bias = enter(self.bias, GROUP, self.size) if self.scatters else self.bias
        return total + bias


class VocabularyEmbedding(nn.Embedding):
    """A vocabulary-parallel embedding: each rank has the rows of some tokens; the sum over ranks adds the others.

    `tp_size` is the number of ranks. As in `nn.Embedding`, the row of `padding_idx` gets no gradient.
    """

    tp_size: int

    def forward(self, input: Tensor) -> Tensor:
        row, is_here = own_rows(input, self.weight.shape[0])
        rows = functional.embedding(row, self.weight)
        zero = rows.new_zeros(())
        if self.padding_idx is None:
            return all_reduce(torch.where(is_here.unsqueeze(-1), rows, zero), GROUP, self.tp_size)
        is_padding = input == self.padding_idx
        part = torch.where((is_here & ~is_padding).unsqueeze(-1), rows, zero)
        fixed = torch.where((is_here & is_padding).unsqueeze(-1), rows.detach(), zero)
        return all_reduce(part + fixed, GROUP, self.tp_size)


class VocabularyCrossEntropy(nn.Module):
    """Vocabulary-parallel cross entropy: each rank has the logits of some classes.

    Nothing of the size of the logits is sent, only each rank's log-sum-exp and the logit of the label.

    Args:
        num_classes: of the whole model; classes beyond it are padding and have no probability.
        ignored: the label of positions without a loss.
        casts: whether to cast logits of half precision to float32.
    """

    def __init__(self, num_classes: int, size: int, ignored: int, casts: bool = True) -> None:
        super().__init__()
        self.num_classes, self.size, self.ignored, self.casts = num_classes, size, ignored, casts

    def forward(self, logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        if self.casts and logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        logits, labels = logits.flatten(0, -2), labels.flatten()
        held = logits.shape[-1]
        if held * self.size > self.num_classes:
            first = group_rank(GROUP, logits.device) * held
            is_padding = torch.arange(held, device=logits.device) + first >= self.num_classes
            logits = logits.masked_fill(is_padding, torch.finfo(logits.dtype).min / 2)
        per_rank = all_gather(log_sum_exp(logits).unsqueeze(0), 0, GROUP, self.size, sums=False)
        column, is_here = own_rows(labels, held)
        label_logits = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)
        chosen = all_reduce(torch.where(is_here, label_logits, label_logits.new_zeros(())), GROUP, self.size)
        counts = labels != self.ignored
        losses = torch.where(counts, log_sum_exp(per_rank.t()) - chosen, chosen.new_zeros(()))
        return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def log_sum_exp(x: Tensor) -> Tensor:
    """Return the log-sum-exp over the last dimension, one tensor per step: PyTorch's operator creates more inside."""
    largest = x.detach().amax(-1, keepdim=True)
    return (x - largest).exp().sum(-1).log() + largest.squeeze(-1)


def own_rows(tokens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return which of this rank's `num_rows` rows each token has (0 for none), and whether it has one."""
    row = tokens - group_rank(GROUP, tokens.device) * num_rows
    is_here = (row >= 0) & (row < num_rows)
    return torch.where(is_here, row, 0), is_here
