"""The kernels and collectives of a decoder's parts under one layout, as Megatron's runtimes launch them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from stagewright.estimation.megatron.fusion import Fusion
from stagewright.estimation.megatron.kernels import (
    Collective,
    Kernel,
    Pass,
    Passes,
    collectives,
    product,
    stream,
    together,
)
from stagewright.estimation.megatron.layer import Layers
from stagewright.estimation.megatron.layout import Layout
from stagewright.estimation.megatron.shape import Experts, Latent, Shape
from stagewright.estimation.megatron.stack import MegatronStack


@dataclass(frozen=True)
class Body:
    """Makes the passes of a model's parts on one device. Shapes are per microbatch."""

    shape: Shape
    layout: Layout
    stack: MegatronStack
    fusion: Fusion

    def embedding(self) -> Passes:
        """Lookup, sum over the parts of the vocabulary, dropout."""
        residual = self._residual
        drop = stream(2.5 * residual, 2.5 * residual) if self.shape.drops else Passes()
        positions = stream(3 * residual, residual) if self.shape.num_positions else Passes()
        return together([stream(2 * residual, 3 * residual), self._leaves(0), positions, drop])

    def head(self) -> Passes:
        """Final norm, logits, vocabulary-parallel cross entropy."""
        layout, shape = self.layout, self.shape
        vocabulary = Layers(shape, layout, self.stack).padded_vocabulary() / layout.tp
        logits = layout.num_tokens * vocabulary
        loss = stream(self.fusion.loss_forward * logits, self.fusion.loss_backward * logits)
        sums = [Collective("all-reduce", "tp", 4.0 * layout.num_tokens)] * 3 if layout.tp > 1 else []
        linear = product(
            layout.num_tokens, shape.hidden, vocabulary, 1, self.fusion.adding_bytes, self.stack.element_bytes,
            in_half=True,
        )  # fmt: skip
        return together([self._norm(), self._enters(), linear, loss, collectives(sums, ())])

    def layer(self, index: int) -> Passes:
        """One decoder layer."""
        return self._dense_layer if self._experts(index) is None else self._expert_layer

    @cached_property
    def core(self) -> Passes:
        """Scores, softmax and weighted values: what selective recomputation makes again."""
        return self._core(self._heads, self.shape.head_size, self.shape.head_size, self._key_value_heads)

    @cached_property
    def _dense_layer(self) -> Passes:
        return together(
            [*self._attention(), *self._before_feed_forward(), *self._dense(self.shape.feed_forward)]
        )

    @cached_property
    def _expert_layer(self) -> Passes:
        experts = self.shape.experts
        assert experts is not None
        return together([*self._attention(), *self._before_feed_forward(), *self._mixture(experts)])

    @property
    def _residual(self) -> float:
        """Bytes of the residual stream on one device."""
        return (
            self.stack.element_bytes
            * self.layout.num_tokens
            * self.shape.hidden
            / self.layout.sequence_shards
        )

    @property
    def _heads(self) -> float:
        return self.shape.num_heads / self.layout.tp

    @property
    def _key_value_heads(self) -> float:
        return max(1.0, self.shape.num_key_value_heads / self.layout.tp)

    def _experts(self, index: int) -> Experts | None:
        return self.shape.experts if index >= self.shape.num_dense else None

    def _norm(self) -> Passes:
        return stream(2 * self._residual, 3 * self._residual, "norm", for_weights=self._residual)

    def _joined(self) -> Passes:
        """Output joined with the residual stream: bias, dropout, sum; its backward also adds the branch's gradient."""
        bias = self._residual if self.shape.has_bias else 0.0
        forward, backward = (3.5, 2.5) if self.shape.drops else (3.0, 0.0)
        return stream(
            forward * self._residual, backward * self._residual + 3 * self._residual, for_weights=bias
        )

    def _linear(self, given: float, made: float, tokens: float | None = None) -> Passes:
        count = self.layout.num_tokens if tokens is None else tokens
        return self._product(count, given, made)

    def _product(self, tokens: float, given: float, made: float, count: int = 1) -> Passes:
        fusion = self.fusion
        return product(
            tokens,
            given,
            made,
            count,
            fusion.adding_bytes,
            self.stack.element_bytes,
            fusion.cast_bytes,
            at_once=fusion.expert_streams,
        )

    def _enters(self) -> Passes:
        """In front of products split by columns: gathers the sequence, or nothing; backward sums over the parts."""
        if self.layout.tp == 1:
            return Passes()
        whole = self.stack.element_bytes * self.layout.num_tokens * self.shape.hidden
        if not self.layout.sequence_parallel:
            return collectives((), [Collective("all-reduce", "tp", whole)])
        gather = Collective("all-gather", "tp", whole)
        hides = self.fusion.hidden_gathers
        backward = [
            gather._replace(hidden=hides != "none"), Collective("reduce-scatter", "tp", whole, hides != "none")
        ]  # fmt: skip
        return collectives([gather._replace(hidden=hides == "all")], backward)

    def _leaves(self, num_gathers: int = 1) -> Passes:
        """Behind products split by rows: sums over the parts, scattered along the sequence where it is split."""
        if self.layout.tp == 1:
            return Passes()
        whole = self.stack.element_bytes * self.layout.num_tokens * self.shape.hidden
        if not self.layout.sequence_parallel:
            return collectives([Collective("all-reduce", "tp", whole)], ())
        hidden = self.fusion.hidden_gathers == "all"
        scatter, gather = (Collective(kind, "tp", whole, hidden) for kind in ("reduce-scatter", "all-gather"))
        return collectives([scatter], [gather] * num_gathers)

    def _attention(self) -> Iterator[Passes]:
        yield self._norm()
        yield self._enters()
        if self.shape.latent is not None:
            yield from self._latent(self.shape.latent)
        else:
            yield from self._plain_attention()
        yield self._leaves()
        yield self._joined()

    def _plain_attention(self) -> Iterator[Passes]:
        shape, tokens = self.shape, self.layout.num_tokens
        projected = (self._heads + 2 * self._key_value_heads) * shape.head_size
        out = self._heads * shape.head_size
        moved = self.stack.element_bytes * tokens * projected
        yield self._linear(shape.hidden, projected)
        if not shape.num_positions:
            yield stream(self.fusion.rotary * moved, self.fusion.rotary * moved)
        yield stream(
            0.0, 2 * moved, for_weights=moved if shape.has_bias else 0.0
        )  # joins the three gradients
        yield self._exchanged(projected - out)
        yield self.core
        yield stream(2 * self.stack.element_bytes * tokens * out, 2 * self.stack.element_bytes * tokens * out)
        yield self._linear(out, shape.hidden)

    def _exchanged(self, elements: float) -> Passes:
        """Keys and values of all parts of the sequence, and their gradients back (context parallelism)."""
        if self.layout.cp == 1:
            return Passes()
        moved = self.stack.element_bytes * self.layout.num_tokens * self.layout.cp * elements
        return collectives([Collective("exchange", "cp", moved)], [Collective("exchange", "cp", 2 * moved)])

    def _core(self, heads: float, score_size: float, value_size: float, key_value_heads: float) -> Passes:
        layout = self.layout
        tokens, length = layout.num_tokens, layout.sequence_length
        rows = heads * tokens
        flop = 2.0 * rows * length * (score_size + value_size)
        flash = self.stack.flash_attention if layout.flash_attention is None else layout.flash_attention
        if flash:
            moved = self.stack.element_bytes * tokens * (heads + key_value_heads) * (score_size + value_size)
            forward = Kernel("attention", flop / 2, moved)  # scores above the diagonal are left out
            backward = Kernel("attention backward", 2.5 * flop / 2, 2 * moved)
            return Passes(Pass((forward,)), Pass((backward,)))
        scores = self.stack.element_bytes * rows * length
        moved = self.stack.element_bytes * rows * (score_size + value_size) / 2 + scores
        batched = Kernel("matmul", flop / 2, moved, 2)
        drops = self.shape.drops
        softmax = self.fusion.softmax_forward * scores + (2.5 * scores if drops else 0.0)
        softmax_back = self.fusion.softmax_backward * scores + (2.5 * scores if drops else 0.0)
        kernels = Kernel("memory", 0.0, softmax / 2, 2)
        back = Kernel("memory", 0.0, softmax_back / 2, 2)
        return Passes(Pass((batched, kernels)), Pass((batched, back, batched)))

    def _latent(self, latent: Latent) -> Iterator[Passes]:
        shape, layout = self.shape, self.layout
        tokens = layout.num_tokens
        down = latent.query_rank + latent.key_value_rank + latent.rotary_size
        local = tokens / layout.sequence_shards
        yield self._linear(shape.hidden, down, local)
        yield stream(
            2 * self.stack.element_bytes * local * down, 3 * self.stack.element_bytes * local * down, "norm"
        )
        score_size = latent.plain_size + latent.rotary_size
        query = self._heads * score_size
        expanded = self._heads * (latent.plain_size + latent.value_size)
        value = self._heads * latent.value_size
        yield self._linear(latent.query_rank, query)
        yield self._linear(latent.key_value_rank, expanded)
        made = self.stack.element_bytes * tokens * (query + self._heads * score_size)
        yield stream(self.fusion.latent_copies * made, self.fusion.latent_copies * made)
        yield self._exchanged(query + value)
        yield self._core(self._heads, score_size, latent.value_size, self._heads)
        yield self._linear(value, shape.hidden)

    def _before_feed_forward(self) -> Iterator[Passes]:
        yield self._norm()

    def _dense(self, size: float, joins: bool = True) -> Iterator[Passes]:
        shape, tp = self.shape, self.layout.tp
        inner = (2 if shape.gated else 1) * size / tp
        activation = self.stack.element_bytes * self.layout.num_tokens
        yield self._enters()
        yield self._linear(shape.hidden, inner)
        yield stream(
            activation * (inner + size / tp),
            activation * (2 * inner + size / tp),
            for_weights=activation * inner if shape.has_bias else 0.0,
        )
        yield self._linear(size / tp, shape.hidden)
        yield self._leaves()
        if joins:
            yield self._joined()

    def _mixture(self, experts: Experts) -> Iterator[Passes]:
        """Balanced routing; every device has experts of its own for the tokens of `tp` x `ep` devices."""
        layout, hidden = self.layout, self.shape.hidden
        tokens = layout.num_tokens / layout.sequence_shards
        copies = tokens * experts.num_active
        num_local = max(1, experts.num_experts // layout.num_expert_shards)
        rows = self.stack.element_bytes * copies * hidden
        yield product(tokens, hidden, experts.num_experts, element_bytes=self.stack.element_bytes)
        yield stream(self.fusion.routing * 4 * tokens * experts.num_experts, 4 * tokens * experts.num_experts)
        yield Passes(Pass(waits_s=self.fusion.routing_wait_s), Pass(waits_s=self.fusion.routing_wait_s))
        yield stream(2 * rows, 2 * rows)  # permuted
        if layout.num_expert_shards > 1:
            sent = self._sent(rows, experts)
            yield collectives([sent, sent], [sent, sent])
            yield stream(2 * rows, 2 * rows)  # sorted by expert
        each = copies / num_local
        yield self._product(each, hidden, 2 * experts.size, num_local)
        activation = self.stack.element_bytes * copies * experts.size
        yield stream(3 * activation, 5 * activation)
        yield self._product(each, experts.size, hidden, num_local)
        yield stream(2 * rows, 2 * rows)
        if experts.shared_size:
            yield from self._dense(experts.shared_size, joins=False)
        yield self._joined()

    def _sent(self, rows: float, experts: Experts) -> Collective:
        """Tokens on their way to their experts, or back; `rows` are the bytes of all their copies."""
        hidden = self.fusion.hides_dispatch
        if self.fusion.dispatch == "once per node":
            return Collective("dispatch", "ep", rows / experts.num_active, hidden)
        return Collective("all-to-all", "ep", rows, hidden)
