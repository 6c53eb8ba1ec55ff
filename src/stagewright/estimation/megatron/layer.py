"""What a layer leaves for its backward, step by step, and what each step's backward needs for a moment.

A stage is a chain of steps. The forward leaves what each step keeps; the backward goes through them in reverse, and each
makes the gradient of its input beside that of its output, then frees what it kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stagewright.estimation.megatron.layout import Layout
from stagewright.estimation.megatron.shape import Experts, Latent, Shape
from stagewright.estimation.megatron.stack import MegatronStack


@dataclass(frozen=True)
class Step:
    """One operation with its backward; bytes on one device.

    Args:
        kept: what the forward leaves.
        incoming, outgoing: gradients of the output and of the input.
        beside: what else is there during the backward.
        for_weights: what the gradients of weights still need once that of the input is made (split backward).
    """

    name: str
    kept: int
    incoming: int
    outgoing: int
    beside: int = 0
    for_weights: int = 0


@dataclass(frozen=True)
class Layers:
    """Makes the steps of a model's parts on one device."""

    shape: Shape
    layout: Layout
    stack: MegatronStack

    @property
    def _flash(self) -> bool:
        chosen = self.layout.flash_attention
        return self.stack.flash_attention if chosen is None else chosen

    @property
    def _residual(self) -> int:
        """The residual stream, split over the sequence."""
        return (
            self.stack.element_bytes
            * self.layout.num_tokens
            * self.shape.hidden
            // self.layout.sequence_shards
        )

    def _split(self, elements: float) -> int:
        """Bytes of so many elements per token that tensor parallelism splits."""
        return int(self.stack.element_bytes * self.layout.num_tokens * elements) // self.layout.tp

    def embedding(self) -> list[Step]:
        """Token ids, and the mask of the dropout that follows."""
        ids = 8 * self.layout.num_tokens
        return [Step("embedding", ids + self._mask(), self._residual, 0)]

    def head(self) -> list[Step]:
        """Final norm, logits and loss."""
        logits = self.layout.num_tokens * self.padded_vocabulary() // self.layout.tp
        at_once = (self.stack.logit_bytes - self.stack.saved_logit_bytes) * logits
        residual = self._residual
        return [
            Step("final norm", residual, residual, residual),
            self._linear("logits", residual, self.stack.element_bytes * logits, gathers=True),
            Step("loss", self.stack.saved_logit_bytes * logits, 0, at_once),
        ]

    def layer(self, index: int, whole_again: bool) -> list[Step]:
        """One layer; with `whole_again` it keeps its input only."""
        steps = [*self._attention(), *self._feed_forward(index)]
        return [_again("layer", steps, self._residual)] if whole_again else steps

    def parameters(self, index: int) -> tuple[int, int]:
        """Parameters of a layer on one device: those of its experts, and the others."""
        shape, tp = self.shape, self.layout.tp
        norms = 2 * shape.hidden * (2 if shape.has_bias else 1)
        experts = self._experts(index)
        dense = (3 if shape.gated else 2) * shape.hidden * shape.feed_forward
        own = 0
        if experts is not None:
            dense = 3 * shape.hidden * experts.shared_size
            own = 3 * shape.hidden * experts.size * experts.num_experts // self.layout.num_expert_shards
            norms += shape.hidden * experts.num_experts  # the router
        biases = 0
        if shape.has_bias:
            split = self._projected + shape.feed_forward * (2 if shape.gated else 1)
            biases = split // tp + 2 * shape.hidden
        return own, norms + biases + (self._attention_weights() + dense // tp)

    def edge_parameters(self, first: bool, last: bool) -> int:
        """Parameters on one device of what surrounds the layers."""
        shape = self.shape
        table = self.padded_vocabulary() * shape.hidden // self.layout.tp
        count = 0
        if first:
            count += table + shape.num_positions * shape.hidden
        if last:
            shared = first and shape.tied
            count += shape.hidden * (2 if shape.has_bias else 1) + (0 if shared else table)
        return count

    def padded_vocabulary(self) -> int:
        """Rounded up to a multiple of 128 on every device. Source: Megatron's --make-vocab-size-divisible-by."""
        multiple = 128 * self.layout.tp
        return -(-self.shape.vocabulary // multiple) * multiple

    def _mask(self) -> int:
        """A dropout mask of the residual stream, a byte per element."""
        return self._residual // self.stack.element_bytes if self.shape.drops else 0

    def _linear(self, name: str, given: int, made: int, gathers: bool = False) -> Step:
        """A product. With sequence parallelism its input is gathered again for the weight's gradient.

        Source: Megatron's LinearWithGradAccumulationAndAsyncCommunication.
        """
        gathered = given * (self.layout.sequence_shards - 1) if gathers else 0
        return Step(name, given, made, given, beside=2 * gathered, for_weights=given + made)

    def _attention(self) -> Iterator[Step]:
        residual = self._residual
        yield Step("attention norm", residual, residual, residual)
        if self.shape.latent is not None:
            yield from self._inside(self._latent(self.shape.latent))
            return
        shape = self.shape
        projected = self._split(self._projected)
        out = self._split(shape.num_heads * shape.head_size)
        steps = [
            self._linear("query, key, value", residual, projected, gathers=True),
            self._core(projected, projected + (out if self._rotates else 0)),
            self._linear("attention output", out, residual),
        ]
        yield from self._inside(steps)
        if self.shape.drops:
            yield Step("attention dropout", self._mask(), residual, residual)

    @property
    def _rotates(self) -> bool:
        return self.stack.rotates_copies and not self.shape.num_positions

    def _core(self, projected: int, kept: int) -> Step:
        """Scores, softmax and weighted values; a fused kernel also saves its output, counted with the next product."""
        shape, layout = self.shape, self.layout
        heads = layout.microbatch_size * shape.num_heads // layout.tp * (layout.sequence_length // layout.cp)
        out = self._split(shape.num_heads * shape.head_size)
        if self._flash:
            return Step("attention", kept + 4 * heads, out, projected)
        scores = heads * layout.sequence_length
        saved = self.stack.element_bytes * scores + (
            scores + self.stack.element_bytes * scores if shape.drops else 0
        )
        made_again = saved if layout.recompute == "selective" else 0
        in_passing = (
            2 * self.stack.element_bytes * scores
        )  # gradients of the weights behind and in front of the softmax
        return Step("attention", kept + saved - made_again, out, projected, beside=made_again + in_passing)

    def _latent(self, latent: Latent) -> list[Step]:
        """Source: Megatron-Core's MLASelfAttention with a joint norm and product for both upward projections."""
        shape, tokens = (
            self.shape,
            self.stack.element_bytes * self.layout.num_tokens // self.layout.sequence_shards,
        )
        residual = self._residual
        query = self._split(shape.num_heads * (latent.plain_size + latent.rotary_size))
        value = self._split(shape.num_heads * latent.value_size)
        expanded = self._split(shape.num_heads * (latent.plain_size + latent.value_size))
        down_query, down_value = tokens * latent.query_rank, tokens * latent.key_value_rank
        rotary = tokens * latent.rotary_size
        return [
            self._linear("downward projections", residual, down_query + down_value + rotary),
            Step("query norm", down_query, down_query, down_query),
            self._linear("query", down_query, query, gathers=True),
            Step("key and value norm", down_value, down_value, down_value),
            self._linear("key, value", down_value, expanded, gathers=True),
            self._core(2 * query + value, 2 * query + expanded),
            self._linear("attention output", value, residual),
        ]

    def _feed_forward(self, index: int) -> Iterator[Step]:
        residual, experts = self._residual, self._experts(index)
        yield Step("feed-forward norm", residual, residual, residual)
        inside = self._dense(self.shape.feed_forward, residual) if experts is None else self._mixture(experts)
        yield from self._inside(inside)
        if self.shape.drops:
            yield Step("feed-forward dropout", self._mask(), residual, residual)

    def _dense(self, size: int, given: int) -> list[Step]:
        before, after = self._split((2 if self.shape.gated else 1) * size), self._split(size)
        return [
            self._linear("feed-forward in", given, before, gathers=True),
            Step("activation", before, after, before),
            self._linear("feed-forward out", after, self._residual),
        ]

    def _mixture(self, experts: Experts) -> list[Step]:
        """Router in fp32; every token's copies in front of its experts; balanced routing."""
        tokens = self.layout.num_tokens // self.layout.sequence_shards
        copies = self.stack.element_bytes * tokens * experts.num_active
        hidden, size = copies * self.shape.hidden, copies * experts.size
        logits = 4 * tokens * experts.num_experts
        steps = [
            Step("router", self._residual + 2 * logits, logits, self._residual),
            Step("dispatch", 8 * tokens * experts.num_active, hidden, self._residual),
            self._linear("experts in", hidden, 2 * size),
            Step("experts' activation", 2 * size, size, 2 * size),
            self._linear("experts out", size, hidden),
            Step("combine", 0, self._residual, hidden),
        ]
        if experts.shared_size:
            shared = self._dense(experts.shared_size, 0)  # its input is the router's
            steps[1:1] = shared
        return steps

    def _experts(self, index: int) -> Experts | None:
        return self.shape.experts if index >= self.shape.num_dense else None

    @property
    def _projected(self) -> int:
        """Elements per token of queries, keys and values on all devices together; each has a head of keys and values."""
        copied = max(0, self.layout.tp - self.shape.num_key_value_heads)
        return self.shape.projected + 2 * copied * self.shape.head_size

    def _attention_weights(self) -> int:
        shape, tp = self.shape, self.layout.tp
        latent = shape.latent
        if latent is None:
            return shape.hidden * (self._projected + shape.num_heads * shape.head_size) // tp
        down = shape.hidden * (latent.query_rank + latent.key_value_rank + latent.rotary_size)
        norms = latent.query_rank + latent.key_value_rank
        up = latent.query_rank * (latent.plain_size + latent.rotary_size)
        up += latent.key_value_rank * (latent.plain_size + latent.value_size)
        split = shape.num_heads * (up + latent.value_size * shape.hidden)
        return down + norms + split // tp

    def _inside(self, steps: list[Step]) -> list[Step]:
        """Steps within a branch: the gradient of the residual stream waits beside all but the last."""
        waiting = [replace(step, beside=step.beside + self._residual) for step in steps[:-1]]
        return [*waiting, steps[-1]]


def saved_bytes(steps: list[Step]) -> int:
    """What the forward of `steps` leaves."""
    return sum(step.kept for step in steps)


def backward_peak(steps: list[Step]) -> int:
    """The most that is alive during the backward of `steps`, with all that they kept."""
    kept, highest = saved_bytes(steps), 0
    for step in reversed(steps):
        highest = max(highest, kept + step.incoming + step.outgoing + step.beside)
        kept -= step.kept
    return highest


def weight_bytes(steps: list[Step]) -> int:
    """What a split backward leaves for the gradients of the weights."""
    return sum(step.for_weights for step in steps)


def _again(name: str, steps: list[Step], given: int) -> Step:
    """`steps` as one that keeps its input and makes the rest again."""
    inside = backward_peak(steps)
    return Step(name, given, given, given, beside=max(0, inside - 3 * given), for_weights=weight_bytes(steps))
