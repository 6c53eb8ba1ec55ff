"""Work of operators: arithmetic and memory traffic, from the layouts of their arguments.

FLOP follow `torch.utils.flop_counter` where it has a formula (a multiply-add is two, attention counts every
score whether masked or not); `arithmetic` is the FLOP that the device really computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from stagewright.cluster.attention import Scores
from stagewright.cluster.matmul import MatmulShape
from stagewright.graph import Node, Ref, TensorMeta
from stagewright.graph.added_nodes import ACCUMULATE, HOST_COPIES
from stagewright.graph.fusion import HELD, is_kernel
from stagewright.graph.graph import short_name
from stagewright.graph.views import Lookup

ALIGNMENT = 16
"""Bytes that a thread loads or stores at once."""


class Kernel(Enum):
    """The efficiency of the device that bounds an operator."""

    VIEW = "view"  # no kernel runs
    MEMORY = "memory"
    NORM = "norm"
    MATMUL = "matmul"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention backward"
    DEPTHWISE = "depthwise convolution"


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one operator call; `has_rule` is false if its cost is that of its bytes because there is no rule."""

    kernel: Kernel
    dtype: str
    flop: float = 0.0
    arithmetic: float = 0.0
    bytes_moved: float = 0.0
    has_rule: bool = True
    serial_accesses: float = 0.0
    """Sequential memory accesses of one thread that the device waits for."""
    num_functions: float = 0.0
    """Transcendental functions to evaluate; `num_random`: random numbers to draw."""
    num_random: float = 0.0
    num_scattered: float = 0.0
    """Elements that a CPU adds to a table row by row, on one thread."""
    in_blocks: float | None = None
    """Arithmetic of an attention kernel for CPUs, which skips only whole blocks of masked scores."""
    shapes: tuple[MatmulShape, ...] = ()
    """Shapes of its matmuls; empty if unknown."""
    scores: Scores | None = None
    """Scores of fused attention."""
    is_aligned: bool = True
    """Whether every row of the operands and results of a batched matmul, and every batch member, begins at a multiple of
    `ALIGNMENT`, as tensor cores prefer."""
    grouped: bool = False
    """Whether one kernel computes the matmuls of all experts, whose numbers of rows only the device knows."""


KERNELS: dict[str, str] = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
    "grouped_mm_fallback": "_grouped_mm",
    "grouped_mm_fallback_backward": "_grouped_mm_backward",
}
"""Kernels of a CPU trace and the kernels that run in their place on a GPU."""

_FREE = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})

CPU_BLOCK = 512
"""Keys that PyTorch's attention for CPUs processes at once. Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp."""

_STREAMING_NAMES = """
_native_batch_norm_legit _native_batch_norm_legit_functional _safe_softmax _softmax _softmax_backward_data
_log_softmax _log_softmax_backward_data _to_copy abs add addcmul all amax amin any arange argmax avg_pool2d
avg_pool2d_backward bernoulli bitwise_and bitwise_not bitwise_or cat ceil clamp clamp_min clone constant_pad_nd copy
cos cumsum div elu elu_backward eq erf exp expm1 fill flip floor floor_divide full full_like gather ge gelu
gelu_backward gt hardswish hardswish_backward histc isinf le leaky_relu leaky_relu_backward linalg_vector_norm log
log1p logical_and logical_not logical_or lt masked_fill max max_pool2d_with_indices max_pool2d_with_indices_backward
maximum mean min minimum mish mish_backward mul native_batch_norm native_batch_norm_backward native_dropout
native_dropout_backward ne neg new_full new_ones new_zeros nll_loss2d_backward nll_loss2d_forward nll_loss_backward
nll_loss_forward ones ones_like pow prod reciprocal relu remainder repeat roll rsqrt rsub scalar_tensor scatter
scatter_add select_backward select_scatter sgn sigmoid sigmoid_backward sign silu silu_backward sin slice_backward
slice_scatter softplus softplus_backward sqrt stack sub sum tan tanh tanh_backward threshold_backward tril
tril_indices triu unfold_backward unpermute_rows upsample_bilinear2d upsample_nearest2d upsample_nearest2d_backward
var var_mean where zeros zeros_like block_scales dequantise_4bit dequantise_rows
"""
_STREAMING = frozenset(_STREAMING_NAMES.split())
"""Operators whose time is that of reading and writing each tensor once."""


_FUNCTIONS = frozenset({
    "_log_softmax", "_safe_softmax", "_softmax", "cos", "elu", "erf", "exp", "expm1", "gelu", "gelu_backward", "log",
    "log1p", "mish", "sigmoid", "silu", "silu_backward", "sin", "softplus", "softplus_backward", "tan", "tanh",
})  # fmt: skip
_RANDOM = frozenset({"bernoulli", "native_dropout"})
"""Operators that evaluate a transcendental function, or draw a random number, for every element of their first result."""

_NORMS = frozenset({
    "native_group_norm", "native_group_norm_backward", "native_layer_norm", "native_layer_norm_backward",
})  # fmt: skip
"""Operators that stream rows or groups and need their statistics before they can write the first element."""


def work(node: Node, value: Lookup) -> Work:
    """Return the work of `node`; `value` describes a value by its id.

    Source: `torch.utils.flop_counter` for FLOP; FlashAttention-2 (arXiv 2307.08691) for the traffic of attention. Ignores:
    arithmetic of memory-bound operators; caches.
    """
    name = short_name(node.op)
    outputs = [value(output) for output in node.outputs if output is not None]
    dtype = _dtype(node, value)
    if node.op == ACCUMULATE:
        gradient = value(node.inputs[0])
        # Empty if a matmul accumulates the gradient, or the one that it is a view of, instead of returning it.
        if not value(gradient.storage).meta.num_elements:
            return Work(Kernel.VIEW, dtype)
        return Work(Kernel.MEMORY, dtype, bytes_moved=gradient.meta.payload_bytes * 3.0)
    if is_kernel(node.op):
        return _fused(node, value, dtype)
    if (
        node.op in HOST_COPIES
        or name in _FREE
        or (outputs and all(output.storage != output.id for output in outputs))
    ):
        return Work(Kernel.VIEW, dtype)
    rule = _RULES.get(name) or _RULES.get(KERNELS.get(name, name))
    if rule is not None:
        return rule(_OperatorCall(node, value, dtype))
    if name in _NORMS:
        return Work(Kernel.NORM, dtype, bytes_moved=_moved(node, value))
    elements = float(outputs[0].meta.num_elements) if outputs else 0.0
    return Work(
        Kernel.MEMORY,
        dtype,
        bytes_moved=_moved(node, value),
        has_rule=name in _STREAMING,
        num_functions=elements if name in _FUNCTIONS else 0.0,
        num_random=elements if name in _RANDOM else 0.0,
    )


def _fused(node: Node, value: Lookup, dtype: str) -> Work:
    """Return the work of a fused kernel: every tensor once, or the bytes that its rule states."""
    stated = dict(node.kwargs)
    moved = stated.get("bytes_moved")
    if stated["kind"] == "matmul":
        flop, bytes_moved = stated["flop"], _once(node, value)
        if _accumulates(node, value):
            bytes_moved += _ACCUMULATED_BYTES * stated["weights"]
        return Work(Kernel.MATMUL, dtype, flop, flop, bytes_moved, shapes=(MatmulShape(1, *stated["shape"]),))
    kernel = Kernel.NORM if stated["kind"] == "norm" else Kernel.MEMORY
    return Work(kernel, dtype, bytes_moved=_once(node, value) if moved is None else moved)


_ACCUMULATED_BYTES = 8
"""Bytes read and written per float32 of the buffer that a matmul accumulates into."""


def _accumulates(node: Node, value: Lookup) -> bool:
    """Whether a matmul accumulates into a buffer: its results are empty."""
    results = [value(output).meta for output in node.outputs if output is not None]
    return bool(results) and not any(meta.num_elements for meta in results)


def _once(node: Node, value: Lookup) -> float:
    """Return bytes as `_moved`, but with every part of a storage read and written once, however many views it has."""
    read: dict[int, dict[int, int]] = {}  # storage -> bytes read from each offset on, in bytes
    for number in node.inputs:
        meta = value(number).meta
        views = read.setdefault(value(number).storage, {})
        start = meta.offset * meta.item_bytes
        views[start] = max(views.get(start, 0), meta.payload_bytes)
    reads = (
        min(sum(views.values()), max(start + size for start, size in views.items()))
        for views in read.values()
    )
    results = [value(output) for output in node.outputs if output is not None]
    roots = {result.id for result in results}
    written = (
        result.meta.payload_bytes
        for result in results
        if result.storage == result.id or result.storage not in roots
    )
    return float(sum(reads) + sum(written))


def _dtype(node: Node, value: Lookup) -> str:
    """Return the type in which the operator computes: that of its floating-point arguments, or of its results."""
    for number in (*node.inputs, *(output for output in node.outputs if output is not None)):
        meta = value(number).meta
        if meta.is_differentiable:
            return meta.dtype
    return "float32"


def _moved(node: Node, value: Lookup) -> float:
    """Return the bytes read and written if every argument is read and every result written once."""
    held = [argument.value for name, argument in node.kwargs if name == HELD]
    return float(
        sum(value(number).meta.payload_bytes for number in dict.fromkeys(node.inputs) if number not in held)
        + sum(value(output).meta.payload_bytes for output in node.outputs if output is not None)
    )


@dataclass(frozen=True)
class _OperatorCall:
    node: Node
    value: Lookup
    dtype: str

    def argument(self, place: int, name: str = "", default: Any = None) -> Any:
        if place < len(self.node.args):
            return self.node.args[place]
        return dict(self.node.kwargs).get(name, default)

    def meta(self, place: int) -> TensorMeta:
        argument = self.argument(place)
        assert isinstance(argument, Ref), f"argument {place} of {self.node.op} is no tensor"
        return self.value(argument.value).meta

    def shape(self, place: int) -> tuple[int, ...]:
        return self.meta(place).shape

    def results(self) -> list[TensorMeta]:
        return [self.value(output).meta for output in self.node.outputs if output is not None]

    @property
    def moved(self) -> float:
        return _moved(self.node, self.value)

    def matmul(self, *shapes: MatmulShape, flop: float | None = None) -> Work:
        """Return the work of matmuls of these shapes; `flop` if the counter has another number."""
        arithmetic = sum(2.0 * math.prod(shape) for shape in shapes)
        counted = arithmetic if flop is None else flop
        return Work(Kernel.MATMUL, self.dtype, counted, arithmetic, self.moved, shapes=shapes)

    def accumulating(self, matmul: Work, num_results: float) -> Work:
        """Return `matmul` with the traffic of accumulating `num_results` into a buffer, if it returns no results."""
        if not _accumulates(self.node, self.value):
            return matmul
        return replace(matmul, bytes_moved=matmul.bytes_moved + _ACCUMULATED_BYTES * num_results)


def _matmul(first: int) -> Callable[[_OperatorCall], Work]:
    """Rule for (batch,) m x k times (batch,) k x n, the first operand at argument `first`: 2 b m k n FLOP."""

    def rule(call: _OperatorCall) -> Work:
        *batch_of, rows, inner = call.shape(first)
        batch, columns = math.prod(batch_of), call.shape(first + 1)[-1]
        matmul = call.accumulating(
            call.matmul(MatmulShape(batch, rows, columns, inner)), batch * rows * columns
        )
        tensors = (call.meta(first), call.meta(first + 1), *call.results())
        return replace(matmul, is_aligned=all(map(_is_aligned, tensors)))

    return rule


def _is_aligned(meta: TensorMeta) -> bool:
    """Whether one operand or result is aligned, as in `Work.is_aligned`."""
    steps = (step for size, step in zip(meta.shape, meta.stride, strict=True) if size > 1 and step > 1)
    return all(start * meta.item_bytes % ALIGNMENT == 0 for start in (meta.offset, *steps))


def _grouped(call: _OperatorCall) -> Work:
    """One matmul per expert, with equal parts of the rows."""
    a, b = call.shape(0), call.shape(1)
    if call.argument(2) is None:
        return call.accumulating(call.matmul(MatmulShape(a[0], a[-2], b[-1], a[-1])), a[0] * a[-2] * b[-1])
    experts = math.prod(call.shape(2))
    if len(b) == 3:
        shape = MatmulShape(experts, a[0] / experts, b[-1], a[-1])
    else:  # Gradients of weights are (outer, rows) x (rows, inner).
        shape = MatmulShape(experts, a[0], b[-1], a[-1] / experts)
    return replace(call.accumulating(call.matmul(shape), experts * a[-2] * b[-1]), grouped=True)


def _grouped_backward(call: _OperatorCall) -> Work:
    """Gradients of a grouped matmul: each is as much work as the matmul, given (cotangent, rows, weights)."""
    shapes = [call.value(number).meta.shape for number in call.node.inputs]
    num_rows = next(shape[0] for shape in shapes if len(shape) == 2)
    experts, inner, outer = next(shape[-3:] for shape in shapes if len(shape) == 3)
    gradients = [
        MatmulShape(experts, inner, outer, num_rows / experts)
        if len(result.shape) == 3
        else MatmulShape(experts, num_rows / experts, inner, outer)
        for result in call.results()
    ]
    return replace(call.matmul(*gradients), grouped=True)


def _convolution(call: _OperatorCall) -> Work:
    """Convolution as a matmul of (places) x (filter elements) x (filters); arguments: input, weight, bias, stride, padding,
    dilation, transposed, ..."""
    is_transposed, groups = bool(call.argument(6, "transposed", False)), int(call.argument(8, "groups", 1))
    source, weight, result = call.shape(0), call.shape(1), call.results()[0].shape
    return _of_channels(call.matmul(_filtered(source, weight, result, groups, is_transposed)), weight, groups)


def _of_channels(convolution: Work, weight: Sequence[int], groups: int) -> Work:
    """Mark depthwise convolutions, with a separate filter per channel: they do not use matrix units."""
    return replace(convolution, kernel=Kernel.DEPTHWISE) if groups > 1 and weight[1] == 1 else convolution


def _convolution_backward(call: _OperatorCall) -> Work:
    """Gradients of a convolution selected by `output_mask`; arguments: cotangent, input, weight, bias sizes, stride,
    padding, dilation, transposed, output padding, groups, mask."""
    cotangent, source, weight = call.shape(0), call.shape(1), call.shape(2)
    transposed, groups, mask = bool(call.argument(7)), int(call.argument(9)), call.argument(10)
    shapes: list[MatmulShape] = []
    flop = 0.0
    if mask[0]:
        shapes.append(_filtered(cotangent, weight, source, groups, not transposed))
        flop += 2.0 * math.prod(shapes[-1])
    if mask[1]:
        places = math.prod((source if transposed else cotangent)[2:])
        weight_grad = MatmulShape(groups, weight[0] / groups, math.prod(weight[1:]), places * source[0])
        shapes.append(weight_grad)
        flop += 2.0 * math.prod(weight_grad) * groups  # the counter takes every channel with every other
    if not shapes:
        return Work(Kernel.MEMORY, call.dtype, bytes_moved=call.moved)
    return _of_channels(call.matmul(*shapes, flop=flop), weight, groups)


def _filtered(
    source: Sequence[int], weight: Sequence[int], result: Sequence[int], groups: int, transposed: bool
) -> MatmulShape:
    """Return filters at every place of a batch of samples, as a matmul for each group of channels."""
    places = source[0] * math.prod((source if transposed else result)[2:])
    filters = weight[1] if transposed else weight[0] / groups
    return MatmulShape(groups, places, filters, math.prod(weight) / groups / filters)


def _attention(query: int, causal: int) -> Callable[[_OperatorCall], Work]:
    """Rule for fused attention: (query, key, value) from argument `query` on; argument `causal` says whether it is
    causal."""

    def rule(call: _OperatorCall) -> Work:
        is_causal = call.argument(causal, "is_causal", False) is True
        num_queries, num_keys = _lengths(call, query)
        # With a causal mask query i sees keys 0 to i: none sees keys beyond the last query; later queries see all keys.
        num_seen_keys = min(num_queries, num_keys) if is_causal else num_keys
        num_later = max(0, num_queries - num_keys)
        num_scores = num_seen_keys * (num_seen_keys + 1) / 2 + num_later * num_keys
        mean_keys = num_scores / num_queries if is_causal else num_keys
        attention = _attended(
            call, query, Scores(1, num_queries, num_seen_keys, 0, mean_keys, int(is_causal))
        )
        return replace(attention, in_blocks=attention.flop * _unskipped(call, query, is_causal))

    return rule


def _shared_attention(query: int) -> Callable[[_OperatorCall], Work]:
    """Rule for attention to the keys and values of all parts of a sequence; with a causal mask all ranks see equally many
    scores."""

    def rule(call: _OperatorCall) -> Work:
        num_queries, num_keys = _lengths(call, query)
        is_causal = next(argument for argument in call.node.args if isinstance(argument, bool))
        mean_keys = (num_keys + 1) / 2 if is_causal else num_keys
        return _attended(call, query, Scores(1, num_queries, num_keys, 0, mean_keys, int(is_causal)))

    return rule


def _attended(call: _OperatorCall, query: int, of_head: Scores) -> Work:
    """Return the work of attention, or of its backward, which has a cotangent before the query; `of_head` are a head's
    scores.

    The forward has two matmuls with scores: with the width of the keys, and with that of the values. The backward has three
    with the width of the keys, one of which recomputes the scores, and two with that of the values.
    """
    kernel, matmuls = (Kernel.ATTENTION_BACKWARD, (3, 2)) if query else (Kernel.ATTENTION, (1, 1))
    *batch, num_queries, width = call.shape(query)
    num_keys, value_width = call.shape(query + 1)[-2], call.shape(query + 2)[-1]
    scores = of_head._replace(
        batch=math.prod(batch), flop=2.0 * (matmuls[0] * width + matmuls[1] * value_width)
    )
    flop = scores.flop * scores.batch * num_queries * num_keys
    return Work(kernel, call.dtype, flop, flop * (scores.seen / num_keys), call.moved, scores=scores)


def _lengths(call: _OperatorCall, query: int) -> tuple[int, int]:
    """Return the numbers of queries and keys of a head."""
    return call.shape(query)[-2], call.shape(query + 1)[-2]


def _unskipped(call: _OperatorCall, query: int, is_causal: bool) -> float:
    """Return the fraction of scores in blocks of `CPU_BLOCK` keys that a causal mask does not leave out completely."""
    if not is_causal:
        return 1.0
    num_queries, num_keys = _lengths(call, query)
    starts = range(0, num_queries, CPU_BLOCK)
    seen = sum(min(start + CPU_BLOCK, num_keys) * min(CPU_BLOCK, num_queries - start) for start in starts)
    return seen / (num_queries * num_keys)


def _gathered(call: _OperatorCall) -> Work:
    """Rows read from a table: the bytes of the result, and the indices."""
    results = sum(meta.payload_bytes for meta in call.results())
    indices = sum(
        call.value(number).meta.payload_bytes
        for number in call.node.inputs
        if not call.value(number).meta.is_differentiable
    )
    return Work(Kernel.MEMORY, call.dtype, bytes_moved=2.0 * results + indices)


def _scattered(call: _OperatorCall) -> Work:
    """Rows added to a new table: the table is written, then every row is read, added and written."""
    return Work(Kernel.MEMORY, call.dtype, bytes_moved=call.moved + 2.0 * call.meta(0).payload_bytes)


_LONG_TABLE_INDEX = 1000
_ROWS_PER_THREAD = 10


def _embedding_backward(call: _OperatorCall) -> Work:
    """Gradient of an embedding; arguments: cotangent, indices, number of rows. Few threads sum the rows of a short table.

    Source: aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu: partial sums of ten indices each, then one thread per row
    and column adds those of its row one after the other. If there are more than a thousand times as many indices as rows
    (buckets of relative positions, of which all distant ones share one) half of them are assumed to be the same row. On a
    CPU (aten/src/ATen/native/Embedding.cpp) rows are added one after the other.
    """
    indices, rows = call.meta(1).num_elements, int(call.argument(2))
    skewed = indices > _LONG_TABLE_INDEX * rows
    run = indices * (0.5 if skewed else 1.0 / rows) / _ROWS_PER_THREAD
    return replace(_scattered(call), serial_accesses=run, num_scattered=float(call.meta(0).num_elements))


def _sorted(call: _OperatorCall) -> Work:
    """Radix sort: one pass over keys and indices per byte of the key."""
    return Work(Kernel.MEMORY, call.dtype, bytes_moved=call.moved * call.meta(0).item_bytes)


def _copied(call: _OperatorCall) -> Work:
    """Copies of a collective besides sending: its argument is copied, and parts are packed or unpacked."""
    return Work(Kernel.MEMORY, call.dtype, bytes_moved=call.moved)


_FLOP_RULES: dict[str, Callable[[_OperatorCall], Work]] = {
    "mm": _matmul(0),
    "bmm": _matmul(0),
    "addmm": _matmul(1),
    "baddbmm": _matmul(1),
    "_grouped_mm": _grouped,
    "_grouped_mm_backward": _grouped_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "attention": _attention(0, causal=5),
    "attention_backward": _attention(1, causal=9),
    "shared_attention": _shared_attention(0),
    "shared_attention_backward": _shared_attention(1),
    "_scaled_dot_product_flash_attention": _attention(0, causal=4),
    "_scaled_dot_product_efficient_attention": _attention(0, causal=6),
    "_scaled_dot_product_cudnn_attention": _attention(0, causal=6),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, causal=7),
    "_scaled_dot_product_flash_attention_backward": _attention(1, causal=11),
    "_scaled_dot_product_efficient_attention_backward": _attention(1, causal=11),
    "_scaled_dot_product_cudnn_attention_backward": _attention(1, causal=14),
}

COUNTED = frozenset(_FLOP_RULES)
"""Operators with FLOP."""

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "shard", "group_rank", "all_to_all")


def _dequantised_blocks(call: _OperatorCall) -> Work:
    """Numbers are converted into the weight, which is read and written again by the multiplication with the scales."""
    again = 2.0 * sum(result.payload_bytes for result in call.results())
    return Work(Kernel.MEMORY, call.dtype, bytes_moved=call.moved + again)


_RULES = {
    **_FLOP_RULES,
    "dequantise_blocks": _dequantised_blocks,
    **dict.fromkeys(_COLLECTIVES, _copied),
    **dict.fromkeys(("embedding", "index", "index_select", "permute_rows"), _gathered),
    **dict.fromkeys(("index_put", "index_add"), _scattered),
    **dict.fromkeys(("sort", "topk"), _sorted),
    "embedding_dense_backward": _embedding_backward,
}
