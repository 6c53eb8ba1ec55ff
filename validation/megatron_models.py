"""Models of Megatron-LM that transformers does not have: GPT with parts as its arguments choose them, BERT and T5.

Source: Megatron-LM, megatron/core/models and megatron/core/transformer, at d98e8a64. Ignores: initial weights, and how a
sinkhorn router assigns tokens, which no prediction reads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.tracing.models.losses import CausalLanguageModel, MaskedLanguageModel, SequenceToSequence

_LAYER = {
    "attention.qkv": "colwise_qkv",
    "attention.query": "colwise",
    "attention.kv": "packed_colwise",
    "attention.out": "rowwise",
    "attention.query_norm": "replicated_with_grad_allreduce",
    "attention.key_norm": "replicated_with_grad_allreduce",
    "mlp.up": "colwise",
    "mlp.gate_up": "packed_colwise",
    "mlp.down": "rowwise",
    "mlp.experts.up_proj": "colwise",
    "mlp.experts.gate_up_proj": "packed_colwise",
    "mlp.experts.down_proj": "rowwise",
    "mlp.experts": "moe_tp_experts",
}
"""Styles of tensor parallelism, by the path in a layer."""


class Attention(nn.Module):
    """Self-attention, or with `crosses` attention to the encoder's output."""

    def __init__(
        self, hidden: int, heads: int, dropout: float, biases: bool, normed: bool = False, crosses: bool = False,
        causal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.width, self.dropout, self.causal, self.crosses = hidden // heads, dropout, causal, crosses
        if crosses:
            self.query = nn.Linear(hidden, hidden, biases)
            self.kv = nn.Linear(hidden, 2 * hidden, biases)
        else:
            self.qkv = nn.Linear(hidden, 3 * hidden, biases)
        self.out = nn.Linear(hidden, hidden, biases)
        if normed:
            self.query_norm, self.key_norm = nn.LayerNorm(self.width), nn.LayerNorm(self.width)
        self.normed = normed

    def forward(self, hidden_states: Tensor, encoded: Tensor | None = None) -> Tensor:
        if self.crosses:
            assert encoded is not None
            query = self._heads(self.query(hidden_states))
            key, value = (self._heads(part) for part in self.kv(encoded).chunk(2, -1))
        else:
            query, key, value = (self._heads(part) for part in self.qkv(hidden_states).chunk(3, -1))
        if self.normed:
            query, key = self.query_norm(query), self.key_norm(key)
        scores = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
        )
        return self.out(scores.transpose(1, 2).flatten(2))

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (-1, self.width)).transpose(1, 2)


class Mlp(nn.Module):
    """A feed-forward layer with GELU, or gated with SiLU."""

    def __init__(self, hidden: int, inner: int, gated: bool, biases: bool) -> None:
        super().__init__()
        self.gated = gated
        if gated:
            self.gate_up = nn.Linear(hidden, 2 * inner, biases)
        else:
            self.up = nn.Linear(hidden, inner, biases)
        self.down = nn.Linear(inner, hidden, biases)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self.gated:
            return self.down(functional.gelu(self.up(hidden_states), approximate="none"))
        gate, up = self.gate_up(hidden_states).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class Experts(nn.Module):
    """Experts without biases, stacked as in transformers: with GELU, or gated with SiLU."""

    has_bias = False
    is_transposed = False

    def __init__(self, hidden: int, inner: int, num_experts: int, gated: bool) -> None:
        super().__init__()
        self.num_experts, self.has_gate = num_experts, gated
        if gated:
            self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        else:
            self.up_proj = nn.Parameter(torch.empty(num_experts, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, inner))

    def act_fn(self, x: Tensor) -> Tensor:
        return functional.gelu(x)

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise NotImplementedError("experts are grouped by the runtime (experts = 'grouped' or 'split')")


class Mixture(nn.Module):
    """A router and its experts; one expert alone is weighed by the sigmoid of its logit, as with sinkhorn routing."""

    def __init__(self, hidden: int, inner: int, num_experts: int, chosen: int, gated: bool) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.experts = Experts(hidden, inner, num_experts, gated)

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.flatten(0, -2)
        logits = self.router(tokens)
        if self.chosen == 1:
            weights, index = torch.sigmoid(logits).topk(1, -1)
        else:
            weights, index = logits.topk(self.chosen, -1)
            weights = torch.softmax(weights, -1, dtype=torch.float32).to(logits.dtype)
        return self.experts(tokens, index, weights).view_as(hidden_states)


class Layer(nn.Module):
    """Attention and a feed-forward layer or mixture, each behind a norm; of decoders of T5 with attention to the encoder."""

    def __init__(
        self, attention: Attention, mlp: nn.Module, norms: list[nn.Module], dropout: float, cross: Attention | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention, self.mlp, self.dropout = attention, mlp, dropout
        self.attention_norm, self.mlp_norm = norms[:2]
        if cross is not None:
            self.cross, self.cross_norm = cross, norms[2]

    def forward(self, hidden_states: Tensor, encoded: Tensor | None = None) -> Tensor:
        hidden_states = hidden_states + self._dropped(self.attention(self.attention_norm(hidden_states)))
        if encoded is not None:
            hidden_states = hidden_states + self._dropped(self.cross(self.cross_norm(hidden_states), encoded))
        return hidden_states + self._dropped(self.mlp(self.mlp_norm(hidden_states)))

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Model(nn.Module):
    """What `stagewright` asks of a model whose layers are shared: its plan, its embedding and its head."""

    word: nn.Embedding
    head: nn.Linear

    def __init__(self, heads: int, lists: tuple[str, ...], layer: dict[str, str]) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=heads)
        self.config.get_text_config = lambda: self.config
        self.tp_plan = {f"{name}.*.{path}": style for name in lists for path, style in layer.items()}

    def get_input_embeddings(self) -> nn.Embedding:
        return self.word

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


class Gpt(Model):
    def __init__(
        self, hidden: int, heads: int, layers: list[Layer], norm: nn.Module, vocabulary: int, positions: int,
        dropout: float, tied: bool,
    ) -> None:  # fmt: skip
        super().__init__(heads, ("layers",), _LAYER)
        self.word, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.layers, self.norm, self.dropout = nn.ModuleList(layers), norm, dropout
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.word.weight

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_states = self.word(input_ids) + self.position(places)
        hidden_states = functional.dropout(hidden_states, self.dropout, self.training)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return SimpleNamespace(logits=self.head(self.norm(hidden_states)))


class Bert(Model):
    """An encoder whose head transforms before it multiplies; the pooled first token and its two classes have no loss."""

    def __init__(
        self, hidden: int, heads: int, layers: list[Layer], vocabulary: int, positions: int, dropout: float
    ) -> None:
        super().__init__(heads, ("layers",), _LAYER)
        self.word, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.kind = nn.Embedding(2, hidden)
        self.layers, self.norm, self.dropout = nn.ModuleList(layers), nn.LayerNorm(hidden), dropout
        self.transform, self.transform_norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.pooler, self.classes = nn.Linear(hidden, hidden), nn.Linear(hidden, 2)
        self.head = nn.Linear(hidden, vocabulary)
        self.head.weight = self.word.weight

    def forward(self, input_ids: Tensor) -> Any:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_states = self.word(input_ids) + self.position(places) + self.kind(torch.zeros_like(input_ids))
        hidden_states = functional.dropout(hidden_states, self.dropout, self.training)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        hidden_states = self.norm(hidden_states)
        classes = self.classes(torch.tanh(self.pooler(hidden_states[:, 0])))
        hidden_states = self.transform_norm(functional.gelu(self.transform(hidden_states)))
        logits = self.head(hidden_states)
        return SimpleNamespace(
            logits=logits,
            aux_loss=functional.cross_entropy(
                classes.float(), classes.new_zeros(len(classes), dtype=torch.long)
            ),
        )


class T5(Model):
    """An encoder and a decoder that share embeddings; the head, tied to them, has biases."""

    def __init__(
        self, hidden: int, heads: int, encoder: list[Layer], decoder: list[Layer], vocabulary: int, positions: int,
        dropout: float,
    ) -> None:  # fmt: skip
        crossing = {path.replace("attention", "cross"): style for path, style in _LAYER.items()}
        super().__init__(heads, ("encoder", "decoder"), _LAYER | crossing)
        self.word, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.encoder, self.encoder_norm = nn.ModuleList(encoder), nn.LayerNorm(hidden)
        self.decoder, self.decoder_norm = nn.ModuleList(decoder), nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)
        self.head.weight = self.word.weight
        self.dropout = dropout

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, use_cache: bool = False) -> Any:
        encoded = self._embedded(input_ids)
        for layer in self.encoder:
            encoded = layer(encoded)
        encoded = self.encoder_norm(encoded)
        hidden_states = self._embedded(decoder_input_ids)
        for layer in self.decoder:
            hidden_states = layer(hidden_states, encoded)
        return SimpleNamespace(logits=self.head(self.decoder_norm(hidden_states)))

    def _embedded(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return functional.dropout(self.word(tokens) + self.position(places), self.dropout, self.training)


def gpt(
    microbatch_size: int, sequence_length: int, *, hidden: int, heads: int, layers: int, inner: int, vocabulary: int,
    positions: int, hidden_dropout: float = 0.0, attention_dropout: float = 0.0, biases: bool = True, gated: bool = False,
    rms: bool = False, normed: bool = False, tied: bool = True, num_experts: int = 0, chosen: int = 1,
) -> tuple[nn.Module, dict[str, Tensor]]:  # fmt: skip
    """Return a GPT with learned positions; `normed` is whether queries and keys are, `chosen` the experts of a token."""
    norm = nn.RMSNorm if rms else nn.LayerNorm
    stack = [
        Layer(
            Attention(hidden, heads, attention_dropout, biases, normed),
            Mixture(hidden, inner, num_experts, chosen, gated) if num_experts else Mlp(hidden, inner, gated, biases),
            [norm(hidden), norm(hidden)],
            hidden_dropout,
        )
        for _ in range(layers)
    ]  # fmt: skip
    net = Gpt(hidden, heads, stack, norm(hidden), vocabulary, positions, hidden_dropout, tied)
    tokens = torch.randint(0, vocabulary, (microbatch_size, sequence_length))
    return CausalLanguageModel(net), {"input_ids": tokens}


def bert(
    microbatch_size: int, sequence_length: int, *, hidden: int, heads: int, layers: int, inner: int, vocabulary: int,
    hidden_dropout: float = 0.0, attention_dropout: float = 0.0,
) -> tuple[nn.Module, dict[str, Tensor]]:  # fmt: skip
    """Return a BERT with a norm in front of every part of a layer."""
    stack = [
        Layer(
            Attention(hidden, heads, attention_dropout, True, causal=False), Mlp(hidden, inner, False, True),
            [nn.LayerNorm(hidden), nn.LayerNorm(hidden)], hidden_dropout,
        )
        for _ in range(layers)
    ]  # fmt: skip
    net = Bert(hidden, heads, stack, vocabulary, sequence_length, hidden_dropout)
    tokens = torch.randint(0, vocabulary, (microbatch_size, sequence_length))
    return MaskedLanguageModel(net), {"input_ids": tokens, "labels": tokens}


def t5(
    microbatch_size: int, sequence_length: int, *, hidden: int, heads: int, layers: int, inner: int, vocabulary: int,
    target_length: int, hidden_dropout: float = 0.0, attention_dropout: float = 0.0,
) -> tuple[nn.Module, dict[str, Tensor]]:  # fmt: skip
    """Return a T5 with as many layers in its decoder as in its encoder, and learned positions."""

    def layer(crosses: bool) -> Layer:
        attention, cross = (
            Attention(hidden, heads, attention_dropout, True, crosses=source, causal=crosses and not source)
            for source in (False, True)
        )
        norms: list[nn.Module] = [nn.LayerNorm(hidden) for _ in range(2 + crosses)]
        mlp = Mlp(hidden, inner, False, True)
        return Layer(attention, mlp, norms, hidden_dropout, cross if crosses else None)

    net = T5(
        hidden, heads, [layer(False) for _ in range(layers)], [layer(True) for _ in range(layers)], vocabulary,
        sequence_length, hidden_dropout,
    )  # fmt: skip
    source = torch.randint(0, vocabulary, (microbatch_size, sequence_length))
    target = torch.randint(0, vocabulary, (microbatch_size, target_length))
    return SequenceToSequence(net, 0), {"input_ids": source, "labels": target}
