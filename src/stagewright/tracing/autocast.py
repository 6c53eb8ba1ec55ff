"""Autocast as the target device applies it, whatever device the model is traced on.

torch casts by rules of the device its tensors are on: a CPU keeps softmax, layer norm, pow and sum in half precision
where CUDA makes them float32. A graph for a GPU is traced on a CPU, so while it is, CUDA's rules stand in for the
CPU's, in the dispatcher itself; everything above (regions, nesting, export) stays torch's.

Source: PyTorch documentation, "Automatic Mixed Precision: autocast op reference"; the names are those for which torch
registers a kernel of CUDA's autocast (a test compares them with the installed version).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from stagewright.tracing.private import has_autocast_kernel, operator_names, run_parts, without_cpu_autocast


class CastPolicy(Enum):
    """Treatment of an operator's floating-point inputs by autocast; float64 is never cast."""

    LOWER = auto()  # to the element type of autocast
    FLOAT32 = auto()  # to float32
    FLOAT32_RESULT = auto()  # computed and returned in float32, unless the call names a dtype
    WIDEST = auto()  # to the widest among them
    BANNED = auto()  # an error: its result would overflow in half precision


_LOWER = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm
mv linalg_vecdot linalg_multi_dot linear addbmm baddbmm bmm chain_matmul _thnn_fused_lstm_cell _thnn_fused_gru_cell
lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
_FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm group_norm rms_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim
"""
_FLOAT32_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
_COMPOSITE = """
cross_entropy_loss nll_loss_nd square float_power.Tensor_Scalar float_power.Tensor_Tensor float_power.Scalar linalg_norm
linalg_norm.ord_str pairwise_distance conv1d.padding conv2d.padding conv3d.padding thnn_conv2d _convolution_mode inner
linalg_matmul matrix_power linalg_matrix_power kron cov corrcoef special_softmax special_log_softmax special_logsumexp
special_log1p special_expm1 special_erfinv special_exp2 arccos arcsin arctan2 arcsinh arccosh arctanh nanmean
rnn_tanh.input rnn_relu.input lstm.input gru.input upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec
_upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec upsample_linear1d.vec
upsample_bilinear2d.vec _upsample_bilinear2d_aa.vec upsample_trilinear3d.vec upsample_bicubic2d.vec
_upsample_bicubic2d_aa.vec
"""

CUDA_RULES: dict[str, CastPolicy] = {
    **dict.fromkeys(_LOWER.split(), CastPolicy.LOWER),
    **dict.fromkeys(_FLOAT32.split(), CastPolicy.FLOAT32),
    **dict.fromkeys(_FLOAT32_RESULT.split(), CastPolicy.FLOAT32_RESULT),
    **dict.fromkeys(_WIDEST.split(), CastPolicy.WIDEST),
    "binary_cross_entropy": CastPolicy.BANNED,
}
"""Policies of CUDA's autocast by operator and overload, as ``aten`` names them."""


@contextlib.contextmanager
def autocast_of(target: str) -> Iterator[None]:
    """Make autocast on the CPU cast as on `target` inside, and ``autocast(target)`` mean the CPU's."""
    if target == "cpu":
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*other operators may also be overridden", UserWarning)
        for name in operator_names():
            if name in CUDA_RULES and has_autocast_kernel(name, "CUDA"):
                library.impl(name, _kernel(name, CUDA_RULES[name]), "AutocastCPU", allow_override=True)
            elif name in _COMPOSITE.split():
                library.impl(name, _in_parts(name), "AutocastCPU", allow_override=True)
            elif has_autocast_kernel(name, "CPU"):  # a rule of the CPU alone
                library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
    try:
        with _entered_on_cpu(target):
            yield
    finally:
        library._destroy()


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_parts(name: str) -> Callable[..., Any]:
    """Return a kernel that calls the parts of an operator without a rule, so that autocast sees them.

    Eager execution does so by itself; an exporter decomposes such operators below autocast.
    """
    operator = _operator(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run_parts(operator, *args, **kwargs)

    return kernel


def _kernel(name: str, policy: CastPolicy) -> Callable[..., Any]:
    operator = _operator(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_cpu_autocast():
            cast_args, cast_kwargs = _cast(name, policy, args, kwargs)
            return operator(*cast_args, **cast_kwargs)

    return kernel


def _cast(
    name: str, policy: CastPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    lower = torch.get_autocast_dtype("cpu")
    match policy:
        case CastPolicy.LOWER:
            dtype = lower
        case CastPolicy.FLOAT32:
            dtype = torch.float32
        case CastPolicy.FLOAT32_RESULT:
            return _with_float32_result(name, args, kwargs)
        case CastPolicy.WIDEST:
            widest = any(
                _is_cast(leaf) and leaf.dtype is torch.float32 for leaf in tree_leaves((args, kwargs))
            )
            dtype = torch.float32 if widest else lower
        case CastPolicy.BANNED:
            raise RuntimeError(
                f"{name} is unsafe under autocast: use binary_cross_entropy_with_logits, which takes the logits"
            )
    return tree_map(lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, (args, kwargs))


def _with_float32_result(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    place = _dtype_place(name)
    given = kwargs.get("dtype") if place is None or len(args) <= place else args[place]
    if given is not None or not _is_cast(args[0]):
        return args, kwargs
    if place is not None and len(args) > place:
        return (*args[:place], torch.float32, *args[place + 1 :]), kwargs
    return args, {**kwargs, "dtype": torch.float32}


@functools.cache
def _dtype_place(name: str) -> int | None:
    """Return the index of the positional argument with the dtype of the result; None if only a keyword has it."""
    arguments = _operator(name)._schema.arguments
    places = [
        number
        for number, argument in enumerate(arguments)
        if argument.name == "dtype" and not argument.kwarg_only
    ]
    return places[0] if places else None


def _is_cast(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


@contextlib.contextmanager
def _entered_on_cpu(target: str) -> Iterator[None]:
    """Make ``torch.autocast(target, ...)`` in a model's code enter the CPU's autocast, with the target's default dtype."""
    original = torch.autocast.__init__

    @functools.wraps(original)
    def on_cpu(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == target:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(target)
        original(self, device_type, dtype, enabled, cache_enabled)

    torch.autocast.__init__ = on_cpu
    try:
        yield
    finally:
        torch.autocast.__init__ = original
