"""The models of the published eager steps, with the losses that their libraries computed at that time."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from eager_vision import ConvNeXtV2, VisionTransformer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import (
    CLIPConfig,
    CLIPModel,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.initialization import no_init_weights
from transformers.integrations import sdpa_attention
from transformers.models.gemma import modeling_gemma
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.t5 import modeling_t5

from stagewright.graph import OperatorGraph
from stagewright.tracing.arguments import DTYPES

Made = tuple[nn.Module, dict[str, Tensor]]


class CausalLoss(nn.Module):
    """Logits in the model's type or, with `upcast`, in float32, shifted by a copy."""

    def __init__(self, net: nn.Module, upcast: bool = False) -> None:
        super().__init__()
        self.net = net
        self.upcast = upcast

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        with _as_measured():
            logits = self.net(input_ids=input_ids, use_cache=False).logits
        logits = logits.float() if self.upcast else logits
        shifted = logits[..., :-1, :].contiguous()
        return functional.cross_entropy(shifted.flatten(0, 1), labels[..., 1:].contiguous().flatten())


class SequenceLoss(nn.Module):
    """Logits in the model's type against labels of the decoder."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, labels: Tensor) -> Tensor:
        found = self.net(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False)
        return functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())


class ClassLoss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(pixel_values), labels)


class ContrastiveLoss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        found = self.net(input_ids=input_ids, pixel_values=pixel_values, return_loss=False)
        per_text = found.logits_per_text
        targets = torch.arange(per_text.shape[0], device=per_text.device)
        return (
            functional.cross_entropy(per_text, targets) + functional.cross_entropy(per_text.t(), targets)
        ) / 2


def gpt2(attention: str, microbatch_size: int, sequence_length: int) -> Made:
    """gpt2-large. Attention's dropout is inside the fused kernel and leaves no mask, so it is off here."""
    config: Any = GPT2Config(n_embd=1280, n_layer=36, n_head=20, attn_pdrop=0.0)
    config._attn_implementation = attention
    tokens = torch.zeros(microbatch_size, sequence_length, dtype=torch.int64)
    return CausalLoss(GPT2LMHeadModel(config)), {"input_ids": tokens, "labels": tokens.clone()}


def t5(attention: str, microbatch_size: int, sequence_length: int) -> Made:
    """t5-large, whose attention has a bias of its own and is computed step by step."""
    modeling_t5.eager_attention_forward = _attention_with_bias
    config: Any = T5Config(
        d_model=1024,
        d_ff=4096,
        d_kv=64,
        num_layers=24,
        num_heads=16,
        vocab_size=32128,
    )
    config.decoder_start_token_id = 0
    config._attn_implementation = attention
    tokens = torch.zeros(microbatch_size, sequence_length, dtype=torch.int64)
    inputs = {name: tokens.clone() for name in ("input_ids", "decoder_input_ids", "labels")}
    net = T5ForConditionalGeneration(config)
    for module in net.modules():
        if type(module) is modeling_t5.T5Attention and module.has_relative_attention_bias:
            module.__class__ = MaskedBias
            module.mask_shape = (microbatch_size, 1, 1, sequence_length)  # type: ignore[assignment]
    return SequenceLoss(net), inputs


class MaskedBias(modeling_t5.T5Attention):
    """Positions' bias with the mask added once for all layers, which makes it as large as the scores."""

    mask_shape: tuple[int, ...]

    def compute_bias(self, *args: Any, **kwargs: Any) -> Tensor:
        bias = super().compute_bias(*args, **kwargs)
        return bias + torch.zeros(self.mask_shape, dtype=bias.dtype, device=bias.device)


def _attention_with_bias(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """T5's attention as transformers computed it until 2025: its softmax in float32, cast back; the mask is in the bias."""
    scores = torch.matmul(query, key.transpose(3, 2))
    if position_bias is not None:
        scores += position_bias
    weights = functional.softmax(scores.float(), dim=-1).type_as(scores)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def clip(attention: str, microbatch_size: int, sequence_length: int, image: int = 336) -> Made:
    """CLIP ViT-L/14-336."""
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    vision = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 336, "patch_size": 14,
    }  # fmt: skip
    config: Any = CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)
    config._attn_implementation = attention
    inputs = {
        "input_ids": torch.zeros(microbatch_size, sequence_length, dtype=torch.int64),
        "pixel_values": torch.zeros(microbatch_size, 3, image, image),
    }
    return ContrastiveLoss(CLIPModel(config)), inputs


def llama(attention: str, microbatch_size: int, sequence_length: int) -> Made:
    """Llama-3.2-1B."""
    config: Any = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
    )
    config._attn_implementation = attention
    return _causal(LlamaForCausalLM(config), microbatch_size, sequence_length, upcast=True)


def gemma(attention: str, microbatch_size: int, sequence_length: int) -> Made:
    """Gemma-2B."""
    config: Any = GemmaConfig(
        vocab_size=256000,
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
    )
    config._attn_implementation = attention
    return _causal(GemmaForCausalLM(config), microbatch_size, sequence_length, upcast=True)


def _no_mask(*_: Any, **__: Any) -> None:
    """The measured runs gave no mask, so that the fused kernel itself is causal; a tracer would be given an explicit one."""


@contextlib.contextmanager
def _as_measured() -> Iterator[None]:
    """Let transformers compute inside what it computed in the measured runs."""
    with contextlib.ExitStack() as stack:
        for module in (modeling_gpt2, modeling_llama, modeling_gemma):
            stack.enter_context(mock.patch.object(module, "create_causal_mask", _no_mask))
        stack.enter_context(mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", _copies_heads))
        yield


def _copies_heads(*_: Any) -> bool:
    """Until 2025 transformers copied keys and values for every query head instead of letting the kernel share them."""
    return False


def _causal(net: nn.Module, microbatch_size: int, sequence_length: int, upcast: bool) -> Made:
    tokens = torch.zeros(microbatch_size, sequence_length, dtype=torch.int64)
    return CausalLoss(net, upcast), {"input_ids": tokens, "labels": tokens.clone()}


def convnext(attention: str, microbatch_size: int, image: int = 224) -> Made:
    """ConvNeXtV2-huge with 1,000 classes."""
    net = ConvNeXtV2(depths=(3, 3, 27, 3), widths=(352, 704, 1408, 2816), num_classes=1000)
    return _classes(net, microbatch_size, image)


def vit(attention: str, microbatch_size: int, image: int = 224) -> Made:
    """ViT-huge/14 in the layout of CLIP's image tower, with 1,000 classes."""
    net = VisionTransformer(
        image, patch=14, width=1280, depth=32, heads=16, num_classes=1000, fused=attention == "sdpa"
    )
    return _classes(net, microbatch_size, image)


def _classes(net: nn.Module, microbatch_size: int, image: int) -> Made:
    inputs = {
        "pixel_values": torch.zeros(microbatch_size, 3, image, image),
        "labels": torch.zeros(microbatch_size, dtype=torch.int64),
    }
    return ClassLoss(net), inputs


_T5_FEED_FORWARD = r"encoder\.block\.\d+\.layer\.1|decoder\.block\.\d+\.layer\.2"


@dataclass(frozen=True)
class Family:
    """How a measured model is built, from its batch and then its sequence length or image size (or both).

    * `build`: takes the path that attention takes in front of the sizes: `sdpa`, `eager` or `none`.
    * `layer`: paths of the modules that its runs with activation checkpointing computed twice.
    * `returned`: linear layers whose results the model returns beside the loss: logits, and what makes the keys and
      values of the cache, which language models return even when they train.
    * `decays_weights`: weight decay was 1e-4, and timm's own default of none for its models.
    """

    build: Callable[..., Made]
    layer: str
    returned: str = ""
    decays_weights: bool = True


MODELS = {
    "hf_GPT2": Family(gpt2, r"net\.transformer\.h\.\d+", r"net\.lm_head|.*attn\.c_attn"),
    "hf_T5": Family(t5, rf"net\..*({_T5_FEED_FORWARD}|layer_norm)$", r"net\.lm_head|net\.decoder\..*\.[kv]"),
    "hf_clip": Family(clip, r"net\.(text|vision)_model\.encoder\.layers\.\d+"),
    "llama_v3_1b": Family(llama, r"net\..*(\.mlp|norm)(?=\.|$)", r"net\.lm_head|.*\.[kv]_proj"),
    "gemma_2b": Family(gemma, r"net\..*(\.mlp|norm)(?=\.|$)", r"net\.lm_head|.*\.[kv]_proj"),
    "timm_vit": Family(vit, r"net\.blocks\.\d+", decays_weights=False),
    "timm_convnext_v2": Family(convnext, r"net\.stages\.\d+\.\d+\.mlp", decays_weights=False),
}


ATTENTION = ("sdpa", "eager", "none")


def make(
    name: str, attention: str, batch: int, sequence_length: int | None, image: int | None, dtype: str
) -> Made:
    """The model of a measured row and its inputs, on fake tensors, with parameters and images of `dtype`.

    Raises:
        SystemExit: a name that is not among `MODELS`, or a path of attention that is not among `ATTENTION`.
    """
    if name not in MODELS:
        raise SystemExit(f"no model '{name}': one of {', '.join(MODELS)}")
    if attention not in ATTENTION:
        raise SystemExit(f"attention '{attention}' of {name}: one of {', '.join(ATTENTION)}")
    sizes = [size for size in (sequence_length, image) if size is not None]
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
            module, inputs = MODELS[name].build(attention, batch, *sizes)
            net: Any = module.net
            if hasattr(net, "tie_weights"):
                net.tie_weights()  # left out together with the initialisation
    finally:
        torch.set_default_dtype(before)
    return module.train(), inputs


def layers(name: str, graph: OperatorGraph) -> tuple[str, ...]:
    """Paths of the modules that the runs with activation checkpointing computed twice, outer ones in front."""
    pattern = re.compile(MODELS[name].layer)
    found = (pattern.match(node.module) for node in graph.nodes)
    return tuple(sorted({match[0] for match in found if match}, key=len))


def returned(name: str, graph: OperatorGraph) -> tuple[str, ...]:
    """Paths of the modules whose results the model returns beside the loss."""
    pattern = re.compile(MODELS[name].returned)
    return tuple(dict.fromkeys(node.module for node in graph.nodes if pattern.fullmatch(node.module)))
