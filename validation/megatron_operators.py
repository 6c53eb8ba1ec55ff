"""The operators of a Megatron GPT layer as the kernels it launches, forward and backward of the input.

Shapes of one rank of a tensor-parallel group. The backward of a product computes the gradient of its input, and that of
its weight where `Geometry.weight_gradients` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fragment import Fragment


@dataclass(frozen=True)
class Geometry:
    """Sizes of one rank: `heads`, `inner` (feed-forward) and `vocabulary` are its share."""

    batch: int
    sequence: int
    hidden: int
    heads: int
    head_width: int
    inner: int
    vocabulary: int
    weight_gradients: bool
    splits_vocabulary: bool

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def projected(self) -> int:
        return self.heads * self.head_width

    @property
    def scores(self) -> tuple[int, int, int]:
        return self.batch * self.heads, self.sequence, self.sequence


Maker = Callable[[Geometry, bool], Fragment]


def _product(inner: Callable[[Geometry], int], outer: Callable[[Geometry], int], bias: bool = False) -> Maker:
    def make(g: Geometry, backward: bool) -> Fragment:
        made = Fragment()
        if backward:
            shapes = (g.tokens, outer(g)), (outer(g), inner(g))
        else:
            shapes = (g.tokens, inner(g)), (inner(g), outer(g))
        if backward and g.weight_gradients:
            made.call(
                "mm",
                made.tensor(inner(g), g.tokens),
                made.tensor(g.tokens, outer(g)),
                makes=((inner(g), outer(g)),),
            )
        factors = [made.tensor(*shape) for shape in shapes]
        result = (shapes[0][0], shapes[1][1])
        if bias and not backward:
            made.call("addmm", made.tensor(result[1]), *factors, makes=(result,))
        else:
            made.call("mm", *factors, makes=(result,))
        return made

    return make


def _layer_norm(final: bool) -> Maker:
    """Pre-norm, whose input is also passed on beside the result: the backward adds the two gradients.

    The final one instead turns (sequence, batch, hidden) into (batch, sequence, hidden): a copy of larger batches.
    """

    def make(g: Geometry, backward: bool) -> Fragment:
        made, shape, width = Fragment(), (g.tokens, g.hidden), [g.hidden]
        source, weight, bias = made.tensor(*shape), made.tensor(g.hidden), made.tensor(g.hidden)
        statistics, wide = ((g.tokens, 1),) * 2, ("float32",) * 2
        if not backward:
            made.call(
                "native_layer_norm", source, width, weight, bias, 1e-5,
                makes=(shape, *statistics), dtypes=(made.dtype, *wide),
            )  # fmt: skip
            if final and g.batch > 1:
                made.call("clone", made.tensor(*shape), makes=(shape,))
            return made
        cotangent = made.tensor(*shape)
        mean, deviation = (made.tensor(g.tokens, 1, dtype="float32") for _ in range(2))
        arguments = (cotangent, source, width, mean, deviation, weight, bias)
        gradient = made.call("native_layer_norm_backward", *arguments, [True, False, False], makes=(shape,))
        made.call(
            "native_layer_norm_backward", *arguments, [False, True, True], makes=((g.hidden,), (g.hidden,))
        )
        if not final:
            made.call("add", gradient, made.tensor(*shape), makes=(shape,))
        elif g.batch > 1:
            made.call("clone", cotangent, makes=(shape,))
        return made

    return make


def _attention_product(context: bool) -> Maker:
    """Scores (queries times keys) or context (probabilities times values); backward of both factors."""

    def make(g: Geometry, backward: bool) -> Fragment:
        made = Fragment()
        narrow = (g.scores[0], g.sequence, g.head_width)
        turned = (g.scores[0], g.head_width, g.sequence)
        wide = g.scores
        if backward and context:  # of probabilities: cotangent x values; of values: probabilities x cotangent
            made.call("bmm", made.tensor(*narrow), made.tensor(*turned), makes=(wide,))
            made.call("bmm", made.tensor(*wide), made.tensor(*narrow), makes=(narrow,))
        elif backward:
            made.call("bmm", made.tensor(*wide), made.tensor(*narrow), makes=(narrow,))
            made.call("bmm", made.tensor(*wide), made.tensor(*narrow), makes=(narrow,))
        elif context:
            made.call("bmm", made.tensor(*wide), made.tensor(*narrow), makes=(narrow,))
        else:
            made.call("bmm", made.tensor(*narrow), made.tensor(*turned), makes=(wide,))
        return made

    return make


_CAUSAL_KEYS = 2048


def _softmax(g: Geometry, backward: bool) -> Fragment:
    """The fused causal kernel: of the scores it reads the half that is not masked, and fills the other half.

    It took rows of at most 2,048 keys; longer ones went to the fused kernel with an explicit mask.
    """
    made = Fragment()
    if g.sequence > _CAUSAL_KEYS:
        kernel = "_softmax_backward_data" if backward else "_softmax"
        other = made.tensor(*g.scores) if backward else made.tensor(g.sequence, g.sequence, dtype="bool")
        made.call(kernel, made.tensor(*g.scores), other, makes=(g.scores,))
        return made
    half = (g.scores[0], g.sequence, g.sequence // 2)
    if backward:
        made.call("_softmax_backward_data", made.tensor(*half), made.tensor(*half), makes=(half,))
    else:
        made.call("_softmax", made.tensor(*half), -1, False, makes=(half,))
    made.call("zeros", half, makes=(half,))
    return made


def _dropout(made: Fragment, shape: tuple[int, ...], backward: bool) -> None:
    if backward:
        made.call(
            "native_dropout_backward", made.tensor(*shape), made.tensor(*shape, dtype="bool"), makes=(shape,)
        )
    else:
        made.call(
            "native_dropout",
            made.tensor(*shape),
            0.1,
            True,
            makes=(shape, shape),
            dtypes=(made.dtype, "bool"),
        )


def _attention_dropout(g: Geometry, backward: bool) -> Fragment:
    made = Fragment()
    _dropout(made, g.scores, backward)
    return made


def _bias_dropout_add(g: Geometry, backward: bool) -> Fragment:
    """Bias, dropout and residual one after the other; the backward multiplies by the mask, then by the scale."""
    made, shape = Fragment(), (g.tokens, g.hidden)
    if backward:
        masked = made.call("mul", made.tensor(*shape), made.tensor(*shape, dtype="bool"), makes=(shape,))
        made.call("mul", masked, 1.1, makes=(shape,))
        return made
    made.call("add", made.tensor(*shape), made.tensor(g.hidden), makes=(shape,))
    _dropout(made, shape, False)
    made.call("add", made.tensor(*shape), made.tensor(*shape), makes=(shape,))
    return made


def _gelu(g: Geometry, backward: bool) -> Fragment:
    """Bias and GeLU in one kernel; the backward also sums the gradient of the bias."""
    made, shape = Fragment(), (g.tokens, g.inner)
    if backward:
        gradient = made.call("gelu_backward", made.tensor(*shape), made.tensor(*shape), makes=(shape,))
        made.call("sum", gradient, [0], makes=((g.inner,),))
    else:
        made.call("gelu", made.tensor(*shape), makes=(shape,))
    return made


def _embedding(g: Geometry, backward: bool) -> Fragment:
    made, shape = Fragment(), (g.tokens, g.hidden)
    tokens = made.tensor(g.tokens, dtype="int64")
    if backward:
        _dropout(made, shape, True)
        if (
            g.splits_vocabulary
        ):  # rows of tokens that another rank holds are zeroed in a copy of the cotangent
            copied = made.call("clone", made.tensor(*shape), makes=(shape,))
            made.call("index_put", copied, tokens, makes=(shape,))
        for rows in (g.vocabulary, g.sequence):
            table = (rows, g.hidden)
            made.call(
                "embedding_dense_backward", made.tensor(*shape), tokens, rows, -1, False, makes=(table,)
            )
            made.accumulate(*table)
        return made
    for rows in (g.vocabulary, g.sequence):
        made.call("embedding", made.tensor(rows, g.hidden), tokens, makes=(shape,))
    made.call("add", made.tensor(*shape), made.tensor(*shape), makes=(shape,))
    _dropout(made, shape, False)
    return made


def _head(g: Geometry, backward: bool) -> Fragment:
    """Logits and their cross entropy in float32, as the vocabulary-parallel one computes it: step by step."""
    made, shape, wide = Fragment(), (g.tokens, g.vocabulary), ("float32",)
    logits = made.tensor(*shape)
    if backward:
        probabilities = made.tensor(*shape, dtype="float32")
        made.call(
            "mul", probabilities, made.tensor(g.tokens, 1, dtype="float32"), makes=(shape,), dtypes=wide
        )
        made.call("_to_copy", probabilities, makes=(shape,))
        made.call("mm", logits, made.tensor(g.vocabulary, g.hidden), makes=((g.tokens, g.hidden),))
        if g.weight_gradients:
            turned, hidden = made.tensor(g.vocabulary, g.tokens), made.tensor(g.tokens, g.hidden)
            made.call("mm", turned, hidden, makes=((g.vocabulary, g.hidden),))
        return made
    made.call("mm", made.tensor(g.tokens, g.hidden), made.tensor(g.hidden, g.vocabulary), makes=(shape,))
    single = made.call("_to_copy", logits, makes=(shape,), dtypes=wide)
    per_token = made.call("amax", single, [-1], makes=((g.tokens, 1),), dtypes=wide)
    shifted = made.call("sub", single, per_token, makes=(shape,), dtypes=wide)
    powers = made.call("exp", shifted, makes=(shape,), dtypes=wide)
    made.call("sum", powers, [-1], makes=((g.tokens, 1),), dtypes=wide)
    made.call("div", powers, per_token, makes=(shape,), dtypes=wide)
    return made


CLASSES: dict[str, tuple[str, Maker]] = {
    "encoder-embedding": ("embedding", _embedding),
    "enc-1st-layernorm": ("layer norm", _layer_norm(final=False)),
    "enc-2nd-layernorm": ("layer norm", _layer_norm(final=False)),
    "final-layernorm": ("layer norm", _layer_norm(final=True)),
    "enc-attention-qkv": ("product", _product(lambda g: g.hidden, lambda g: 3 * g.projected, bias=True)),
    "enc-attention-dense": ("product", _product(lambda g: g.projected, lambda g: g.hidden)),
    "enc-MLP-GEMM-1": ("product", _product(lambda g: g.hidden, lambda g: g.inner)),
    "enc-MLP-GEMM-2": ("product", _product(lambda g: g.inner, lambda g: g.hidden)),
    "enc-attention-score": ("batched product", _attention_product(context=False)),
    "enc-attention-context": ("batched product", _attention_product(context=True)),
    "enc-attention-softmax": ("softmax", _softmax),
    "enc-attention-dropout": ("dropout", _attention_dropout),
    "enc-post-attention-dropout": ("bias, dropout, residual", _bias_dropout_add),
    "enc-post-MLP-dropout": ("bias, dropout, residual", _bias_dropout_add),
    "enc-MLP-gelu": ("gelu", _gelu),
    "gpt-post-process": ("logits and loss", _head),
}
"""Operator of the profiles -> its class and how its kernels are made."""
