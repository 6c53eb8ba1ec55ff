"""Attention as one logical operator, whatever the device that traces, and as runtimes without fused kernels compute it.

A graph for GPUs has `ATTENTION` wherever the model calls `scaled_dot_product_attention`: with its dropout, with the layouts
and saved values of a GPU's fused kernel, and with one operator for all input gradients. Which kernel computes it, the device
that runs it decides: a graph traced on a laptop names the operators of the run.

Source: `torch.nn.functional.scaled_dot_product_attention`, and the conditions of its kernels
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp); FlashAttention-2 (arXiv 2307.08691) for what is saved.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stagewright.errors import InputError
from stagewright.tracing.context_parallel import like_queries, over_all_parts
from stagewright.tracing.private import with_autograd
from stagewright.tracing.tensor_parallel.operators import define

ATTENTION = "stagewright.attention.default"


@contextlib.contextmanager
def attention_of(kind: str, cp: int, target: str) -> Iterator[None]:
    """Make `scaled_dot_product_attention` inside compute as the target does.

    * ``traced``: the kernels of a CPU for the target ``cpu``; for others one logical operator.
    * ``fused``: one operator for every target. It is costed.
    * ``explicit``: scores, scale with mask and softmax, dropout and weighted values, each an operator in the type of its
      operands. It is costed.
    * In `cp` parts of the sequence, as `stagewright.tracing.context_parallel` says. It is costed.
    """
    if kind == "explicit" and cp > 1:
        raise InputError(
            "context parallelism needs fused attention, and this runtime stores scores: leave out --cp"
        )
    original = functional.scaled_dot_product_attention
    if kind == "explicit":
        stand_in: Callable[..., Tensor] = _explicit
    elif kind == "fused" or cp > 1:
        stand_in = _fused(cp)
    else:
        stand_in = original if target == "cpu" else attention
    functional.scaled_dot_product_attention = stand_in  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `scaled_dot_product_attention` as one logical operator.

    Raises:
        ValueError: there is a mask and `is_causal`, or the numbers of heads do not divide.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attention has a mask and is_causal: give one of them")
    given = [query, key, value]
    batch = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in given))
    heads = [tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in given]
    if not enable_gqa:
        heads = [max(heads)] * 3
    query, key, value = (
        tensor.expand(*batch, count, *tensor.shape[-2:]).reshape(-1, count, *tensor.shape[-2:])
        for tensor, count in zip(given, heads, strict=True)
    )
    bias = None if attn_mask is None else _bias(attn_mask, query, batch)
    is_trained = bias is not None and bias.requires_grad
    used = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    out: Tensor = torch.ops.stagewright.attention(
        query, key, value, bias, float(dropout_p), is_causal, used, is_trained
    )[0]
    whole = (*batch, *out.shape[1:]) if given[0].dim() > 2 else out.shape[2:]
    return out if out.shape == whole else out.reshape(whole)


def _bias(mask: Tensor, query: Tensor, batch: Sequence[int]) -> Tensor:
    """Return the bias that is added to the scores of `query`, in four dimensions."""
    if mask.dtype == torch.bool:
        # From the mask only, so that all layers share it.
        hidden = torch.full(mask.shape, -math.inf, dtype=query.dtype, device=mask.device)
        mask = hidden.masked_fill(mask, 0.0)
    if mask.dim() < 4:
        return mask[(None,) * (4 - mask.dim())]
    if mask.dim() > 4:
        return mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    return mask


def _explicit(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=-3) for tensor in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1)) * (scale or 1 / math.sqrt(query.shape[-1]))
    if attn_mask is not None:
        is_mask = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -1e4) if is_mask else scores + attn_mask
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(functional.dropout(weights, dropout_p) if dropout_p else weights, value)


def _fused(cp: int) -> Callable[..., Tensor]:
    """Return attention as one kernel over all `cp` parts of a sequence."""

    def fused(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if cp > 1 and (attn_mask is not None or query.shape[-2] != key.shape[-2]):
            raise InputError(
                "context parallelism needs attention that is causal or sees all tokens, and this model's has a mask of its "
                "own: leave out --cp"
            )
        if cp > 1:
            return over_all_parts(cp, query, key, value, is_causal, scale)
        if query.shape[-1] != value.shape[-1]:
            # Values must not be a view of the base of the keys.
            value = value.transpose(-3, -2).contiguous().transpose(-3, -2)
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return fused


# -- kernels ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _AttentionCall:
    """The arguments of one call of the logical operator, of four dimensions each."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float
    is_trained: bool

    @property
    def repeats(self) -> int:
        """Heads of queries per head of keys and values."""
        return self.query.shape[1] // self.key.shape[1]


@dataclass(frozen=True)
class _Saved:
    """Values saved by a kernel's forward for its backward: result, log-sum-exp, and the random state of dropout."""

    out: Tensor
    sums: Tensor
    state: Tensor | None


class _FlashOnCpu:
    """The CPU's fused kernel."""

    @staticmethod
    def forward(call: _AttentionCall) -> _Saved:
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            call.query, call.key, call.value, 0.0, call.is_causal, attn_mask=call.bias, scale=call.scale
        )
        return _Saved(out, sums.contiguous(), None)

    @staticmethod
    def backward(
        call: _AttentionCall, saved: _Saved, cotangent: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            cotangent, call.query, call.key, call.value, saved.out, saved.sums, 0.0, call.is_causal,
            attn_mask=call.bias, scale=call.scale,
        )  # fmt: skip
        return [*gradients, None]


class _Flash:
    """FlashAttention with one head dimension: narrower queries, keys or values are padded with zeros, without effect."""

    @staticmethod
    def forward(call: _AttentionCall) -> _Saved:
        out, sums, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention.default(
            *_of_one_width(call), call.dropout_p, call.is_causal, scale=call.scale
        )
        return _Saved(
            out[..., : call.value.shape[-1]], sums, _packed(seed, offset) if call.dropout_p else None
        )

    @staticmethod
    def backward(
        call: _AttentionCall, saved: _Saved, cotangent: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        query, key, value = _of_one_width(call)
        width = value.shape[-1]
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
            _padded(cotangent, width), query, key, value, _padded(saved.out, width), saved.sums, None, None,
            query.shape[2], key.shape[2], call.dropout_p, call.is_causal, *_Flash._state(saved, query), scale=call.scale,
        )  # fmt: skip
        return [*gradients, None]

    @staticmethod
    def _state(saved: _Saved, query: Tensor) -> tuple[Tensor, Tensor]:
        if saved.state is None:
            return query.new_empty(2, dtype=torch.uint64), query.new_empty(0, dtype=torch.uint64)
        if torch.version.hip:
            return saved.state[0], saved.state[1]
        return saved.state.view(torch.uint64), query.new_empty(0, dtype=torch.uint64)


class _Efficient:
    """The memory-efficient kernel, which supports a bias, values of another head dimension, and float32."""

    @staticmethod
    def forward(call: _AttentionCall) -> _Saved:
        out, sums, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention.default(
            *_aligned(call), _aligned_bias(call), True, call.dropout_p, call.is_causal, scale=call.scale
        )
        sums = sums[..., : call.query.shape[2]].contiguous()
        return _Saved(
            out[..., : call.value.shape[-1]], sums, _packed(seed, offset) if call.dropout_p else None
        )

    @staticmethod
    def backward(
        call: _AttentionCall, saved: _Saved, cotangent: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        query, key, value = _aligned(call)
        state = torch.zeros(2, dtype=torch.int64) if saved.state is None else saved.state
        if (
            state.device.type != "cpu"
            and not torch.get_device_module(state.device).is_current_stream_capturing()
        ):
            state = state.cpu()  # as the kernel has it outside of CUDA graphs
        sums = functional.pad(saved.sums, (0, -query.shape[2] % _SUMS_ALIGNMENT), value=math.inf)
        width = value.shape[-1]
        of_query, of_key, of_value, of_bias = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
            _padded(cotangent, width), query, key, value, _aligned_bias(call), _padded(saved.out, width), sums,
            state[0], state[1], call.dropout_p, [True, True, True, wanted[3]], call.is_causal, scale=call.scale,
        )  # fmt: skip
        if call.repeats > 1:
            of_key, of_value = (
                gradient.unflatten(1, (-1, call.repeats)).sum(2) for gradient in (of_key, of_value)
            )
        if wanted[3]:
            assert call.bias is not None
            of_bias = of_bias[..., : call.bias.shape[-1]].sum_to_size(call.bias.shape)
        return [of_query, of_key, of_value, of_bias if wanted[3] else None]


class _Math:
    """Scores, their softmax and its dropout, one after the other; the backward computes them again."""

    @staticmethod
    def forward(call: _AttentionCall) -> _Saved:
        state = None
        if call.dropout_p:
            seed = _generator(call.query.device).initial_seed()
            state = torch.tensor((seed, 0))
            _generator(call.query.device).manual_seed(seed)
        sums = call.query.new_empty(call.query.shape[:-1], dtype=_sums_type(call.query))
        return _Saved(_Math._compute(call), sums, state)

    @staticmethod
    def backward(
        call: _AttentionCall, saved: _Saved, cotangent: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        if saved.state is not None:
            _generator(call.query.device).manual_seed(int(saved.state[0]))
        given = (call.query, call.key, call.value, call.bias)
        with with_autograd():
            leaves = [
                tensor.detach().requires_grad_(is_wanted) if tensor is not None else None
                for tensor, is_wanted in zip(given, wanted, strict=True)
            ]
            tracked = _AttentionCall(*leaves, call.dropout_p, call.is_causal, call.scale, call.is_trained)  # type: ignore[arg-type]
            out = _Math._compute(tracked)
        inputs = [
            leaf for leaf, is_wanted in zip(leaves, wanted, strict=True) if is_wanted and leaf is not None
        ]
        gradients = iter(torch.autograd.grad(out, inputs, cotangent))
        return [next(gradients) if is_wanted else None for is_wanted in wanted]

    @staticmethod
    def _compute(call: _AttentionCall) -> Tensor:
        return torch.ops.aten._scaled_dot_product_attention_math.default(
            call.query, call.key, call.value, call.bias, call.dropout_p, call.is_causal, scale=call.scale,
            enable_gqa=call.repeats > 1,
        )[0]  # fmt: skip


_Kernel = type[_FlashOnCpu] | type[_Flash] | type[_Efficient] | type[_Math]


def _kernel(call: _AttentionCall) -> _Kernel:
    """Return the kernel for a call on its device: on a CPU PyTorch's own; on a GPU the first of FlashAttention, the
    memory-efficient kernel and single operators that supports it. cuDNN's is excluded: it is chosen on some devices only,
    and saves other values."""
    if call.query.device.type == "cpu":
        bias = call.bias
        if bias is not None and call.is_trained:
            return _Math
        choice = torch.ops.aten._fused_sdp_choice.default(
            call.query, call.key, call.value, bias, call.dropout_p, call.is_causal, scale=call.scale,
            enable_gqa=call.repeats > 1,
        )  # fmt: skip
        return _FlashOnCpu if choice == _FLASH else _Math
    cuda = torch.backends.cuda
    given = [tensor for tensor in (call.query, call.key, call.value, call.bias) if tensor is not None]
    known_by = (
        call.query.device, call.query.dtype, *((tensor.shape, tensor.stride()) for tensor in given), call.dropout_p > 0,
        call.is_causal, cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(),
    )  # fmt: skip
    if known_by not in _ON_GPU:
        _ON_GPU[known_by] = _kernel_on_gpu(call)
    return _ON_GPU[known_by]


_FLASH = 1
"""Number of FlashAttention in `torch.nn.attention.SDPBackend`."""

_ON_GPU: dict[Any, _Kernel] = {}
"""Kernels by the layouts of what they are given."""


def _kernel_on_gpu(call: _AttentionCall) -> _Kernel:
    cuda = torch.backends.cuda
    if call.bias is None:
        # Some devices lack the backward for some head dimensions: check it if gradients are needed.
        query, key, value = (tensor.detach().requires_grad_() for tensor in _of_one_width(call))
        flash = cuda.SDPAParams(query, key, value, None, call.dropout_p, call.is_causal, call.repeats > 1)
        if cuda.can_use_flash_attention(flash):
            return _Flash
    query, key, value = (tensor.detach().requires_grad_() for tensor in _aligned(call))
    efficient = cuda.SDPAParams(query, key, value, _aligned_bias(call), call.dropout_p, call.is_causal, False)
    return _Efficient if cuda.can_use_efficient_attention(efficient) else _Math


def _padded(tensor: Tensor, width: int) -> Tensor:
    """Return `tensor` padded to contiguous rows of `width` elements."""
    short = width - tensor.shape[-1]
    padded = functional.pad(tensor, (0, short)) if short else tensor
    return padded if padded.stride(-1) == 1 else padded.contiguous()


def _rounded(width: int, tensor: Tensor) -> int:
    """Round up to a multiple of 16 bytes, as tensor cores load."""
    multiple = 16 // tensor.element_size()
    return -(-width // multiple) * multiple


def _of_one_width(call: _AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    width = _rounded(max(call.query.shape[-1], call.value.shape[-1]), call.query)
    return _padded(call.query, width), _padded(call.key, width), _padded(call.value, width)


def _aligned(call: _AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with equal numbers of heads."""
    of_keys, of_values = (_rounded(tensor.shape[-1], tensor) for tensor in (call.key, call.value))
    key, value = _padded(call.key, of_keys), _padded(call.value, of_values)
    if call.repeats > 1:
        key, value = (tensor.repeat_interleave(call.repeats, 1) for tensor in (key, value))
    return _padded(call.query, of_keys), key, value


_SUMS_ALIGNMENT = 32
"""The memory-efficient kernel has log-sum-exps of a multiple of so many rows; they are infinite beyond the last query."""

_BIAS_ALIGNMENT = 16
"""Alignment of the rows of a bias in elements. Source: `pad_bias` in aten/src/ATen/native/transformers/attention.cpp."""


def _aligned_bias(call: _AttentionCall) -> Tensor | None:
    """Return the bias of every head, its rows at aligned places."""
    if call.bias is None:
        return None
    num_keys = call.key.shape[2]
    bias = call.bias.to(call.query.dtype).expand(*call.bias.shape[:-1], num_keys)
    if num_keys % _BIAS_ALIGNMENT:
        bias = functional.pad(bias, (0, -num_keys % _BIAS_ALIGNMENT))[..., :num_keys]
    return bias.expand(*call.query.shape[:3], num_keys)


def _packed(seed: Tensor, offset: Tensor) -> Tensor:
    """Return seed and offset, which some kernels return as one tensor, as two integers."""
    return seed.view(torch.int64) if seed.numel() == 2 else torch.stack((seed, offset))


def _generator(device: torch.device) -> Any:
    """Return the module that gets and sets the random seed of a device."""
    return torch.default_generator if device.type == "cpu" else torch.get_device_module(device)


def _sums_type(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _laid_out(tensor: Tensor) -> Tensor:
    """Return `tensor` in the layout that the logical operator declares."""
    _, heads, tokens, width = tensor.shape
    if tensor.stride() == (tokens * heads * width, width, heads * width, 1):
        return tensor
    return like_queries(tensor, width).copy_(tensor)


# -- the operator -------------------------------------------------------------------------------------------------------


def _lay_out(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, *_: Any
) -> Any:
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise ValueError(
            f"attention has {query.shape[1]} heads of queries, {key.shape[1]} of keys and {value.shape[1]} of values: the "
            "last two must be equal and divide the first"
        )
    return (
        like_queries(query, value.shape[-1]),
        query.new_empty(query.shape[:-1], dtype=_sums_type(query)),
        query.new_empty(2 if dropout_p else 0, dtype=torch.int64),
    )


def _run(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _AttentionCall(*given)
    saved = _kernel(call).forward(call)
    state = (
        torch.empty(0, dtype=torch.int64, device=call.query.device) if saved.state is None else saved.state
    )
    return _laid_out(saved.out), saved.sums, state


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, dropout_p, is_causal, scale, is_trained = inputs
    out, sums, state = output
    ctx.save_for_backward(*tensors, out, sums, state if dropout_p else None)
    ctx.settings = (dropout_p, is_causal, scale, is_trained)


def _backward(ctx: Any, cotangent: Tensor, *_: Any) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:4])
    gradients = torch.ops.stagewright.attention_backward(cotangent, *ctx.saved_tensors, *ctx.settings, wanted)
    used = (gradient if is_wanted else None for gradient, is_wanted in zip(gradients, wanted, strict=True))
    return (*used, *(None for _ in ctx.settings))


def _run_backward(cotangent: Tensor, *given: Any) -> tuple[Tensor, ...]:
    query, key, value, bias, out, sums, state, *settings, output_mask = given
    call = _AttentionCall(query, key, value, bias, *settings)
    gradients = _kernel(call).backward(call, _Saved(out, sums, state), cotangent, output_mask)
    widths = [tensor.shape[-1] for tensor in (query, key, value)]
    of_inputs = [
        cotangent.new_empty(0) if gradient is None or not is_wanted else _laid_out(gradient[..., :width])
        for gradient, width, is_wanted in zip(gradients, widths, output_mask, strict=False)
    ]
    of_bias = gradients[3]
    return (*of_inputs, cotangent.new_empty(0) if of_bias is None else of_bias.contiguous())


def _lay_out_backward(cotangent: Tensor, *given: Any) -> tuple[Tensor, ...]:
    query, key, value, bias, *_, output_mask = given
    layouts = [like_queries(tensor, tensor.shape[-1]) for tensor in (query, key, value)]
    layouts.append(cotangent.new_empty(0) if bias is None else bias.new_empty(bias.shape))
    pairs = zip(layouts, output_mask, strict=True)
    return tuple(layout if is_wanted else cotangent.new_empty(0) for layout, is_wanted in pairs)


define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? bias, float dropout_p, bool is_causal, float scale, "
    "bool is_trained) -> (Tensor, Tensor, Tensor)",
    run=_run,
    lay_out=_lay_out,
    backward=_backward,
    keep=_keep,
    draws=True,
)
define(
    "attention_backward(Tensor cotangent, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor out, Tensor sums, "
    "Tensor? state, float dropout_p, bool is_causal, float scale, bool is_trained, bool[4] output_mask) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    run=_run_backward,
    lay_out=_lay_out_backward,
)
