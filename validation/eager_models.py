"""The four models of the published eager steps, with the losses that their libraries computed at that time."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import (
    CLIPConfig,
    CLIPModel,
    ConvNextV2Config,
    ConvNextV2ForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.initialization import no_init_weights
from transformers.models.convnextv2 import modeling_convnextv2
from transformers.models.t5 import modeling_t5

from stagewright.graph import OperatorGraph
from stagewright.tracing.arguments import DTYPES

Made = tuple[nn.Module, dict[str, Tensor]]


class CausalLoss(nn.Module):
    """Logits in the model's type, shifted by a copy."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.net(input_ids=input_ids, use_cache=False).logits
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
        return functional.cross_entropy(self.net(pixel_values=pixel_values).logits, labels)


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


def gpt2(microbatch_size: int, sequence_length: int) -> Made:
    """gpt2-large. Attention's dropout is inside the fused kernel and leaves no mask, so it is off here."""
    config = GPT2Config(n_embd=1280, n_layer=36, n_head=20, attn_pdrop=0.0, attn_implementation="sdpa")
    tokens = torch.zeros(microbatch_size, sequence_length, dtype=torch.int64)
    return CausalLoss(GPT2LMHeadModel(config)), {"input_ids": tokens, "labels": tokens.clone()}


def t5(microbatch_size: int, sequence_length: int) -> Made:
    """t5-large, whose attention has a bias of its own and is computed step by step."""
    modeling_t5.eager_attention_forward = _attention_in_single_precision
    config = T5Config(
        d_model=1024,
        d_ff=4096,
        d_kv=64,
        num_layers=24,
        num_heads=16,
        vocab_size=32128,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    tokens = torch.zeros(microbatch_size, sequence_length, dtype=torch.int64)
    inputs = {name: tokens.clone() for name in ("input_ids", "decoder_input_ids", "labels")}
    return SequenceLoss(T5ForConditionalGeneration(config)), inputs


def _attention_in_single_precision(
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
    """T5's attention as transformers computed it until 2025: its softmax in float32, cast back."""
    scores = torch.matmul(query, key.transpose(3, 2))
    if position_bias is not None:
        scores = scores + (position_bias if attention_mask is None else position_bias + attention_mask)
    weights = functional.softmax(scores.float(), dim=-1).type_as(scores)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def clip(microbatch_size: int, sequence_length: int, image: int = 336) -> Made:
    """CLIP ViT-L/14-336."""
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    vision = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 336, "patch_size": 14,
    }  # fmt: skip
    config: Any = CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)
    config._attn_implementation = "sdpa"
    inputs = {
        "input_ids": torch.zeros(microbatch_size, sequence_length, dtype=torch.int64),
        "pixel_values": torch.zeros(microbatch_size, 3, image, image),
    }
    return ContrastiveLoss(CLIPModel(config)), inputs


def convnext(microbatch_size: int, image: int = 224) -> Made:
    """ConvNeXtV2-huge with 1,000 classes."""
    config = ConvNextV2Config(
        depths=[3, 3, 27, 3], hidden_sizes=[352, 704, 1408, 2816], image_size=image, num_labels=1000
    )
    inputs = {
        "pixel_values": torch.zeros(microbatch_size, 3, image, image),
        "labels": torch.zeros(microbatch_size, dtype=torch.int64),
    }
    with _real_linspace():
        net = ConvNextV2ForImageClassification(config)
    for module in net.modules():
        if type(module) is modeling_convnextv2.ConvNextV2GRN:
            module.__class__ = ResponseNorm
    return ClassLoss(net), inputs


class ResponseNorm(modeling_convnextv2.ConvNextV2GRN):
    """Global response normalisation as timm computes it: one fused multiplication and addition."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        norms = hidden_states.norm(p=2, dim=(1, 2), keepdim=True)
        relative = norms / (norms.mean(dim=-1, keepdim=True) + 1e-6)
        return hidden_states + torch.addcmul(self.bias, self.weight, hidden_states * relative)


class _Numbers(list[float]):
    """What ConvNeXt's constructor needs of a one-dimensional tensor."""

    def split(self, sizes: list[int]) -> list[_Numbers]:
        ends = list(itertools.accumulate(sizes))
        return [_Numbers(self[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    def tolist(self) -> list[float]:
        return list(self)


@contextlib.contextmanager
def _real_linspace() -> Iterator[None]:
    """The model's constructor reads numbers out of a tensor, which a fake one does not have."""
    original = torch.linspace
    torch.linspace = lambda start, end, steps, **_: _Numbers(
        start + (end - start) * step / max(steps - 1, 1) for step in range(steps)
    )
    try:
        yield
    finally:
        torch.linspace = original


@dataclass(frozen=True)
class Family:
    """How a measured model is built, from its batch and then its sequence length or image size (or both), and the paths
    of the modules that its runs with activation checkpointing computed twice."""

    build: Callable[..., Made]
    layer: str


MODELS = {
    "hf_GPT2": Family(gpt2, r"net\.transformer\.h\.\d+"),
    "hf_T5": Family(t5, r"net\..*(encoder\.block\.\d+\.layer\.1|decoder\.block\.\d+\.layer\.2|layer_norm)$"),
    "hf_clip": Family(clip, r"net\.(text|vision)_model\.encoder\.layers\.\d+"),
    "timm_convnext_v2": Family(convnext, r"net\.convnextv2\.encoder\.stages\.\d+\.layers\.\d+"),
}


def make(name: str, batch: int, sequence_length: int | None, image: int | None, dtype: str) -> Made:
    """The model of a measured row and its inputs, on fake tensors, with parameters and images of `dtype`.

    Raises:
        SystemExit: a name that is not among `MODELS`.
    """
    if name not in MODELS:
        raise SystemExit(f"no model '{name}': one of {', '.join(MODELS)}")
    sizes = [size for size in (sequence_length, image) if size is not None]
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
            module, inputs = MODELS[name].build(batch, *sizes)
            if hasattr(module.net, "tie_weights"):
                module.net.tie_weights()  # left out together with the initialisation
    finally:
        torch.set_default_dtype(before)
    return module.train(), inputs


def layers(name: str, graph: OperatorGraph) -> tuple[str, ...]:
    """Paths of the modules that the runs with activation checkpointing computed twice."""
    pattern = re.compile(MODELS[name].layer)
    found = (pattern.match(node.module) for node in graph.nodes)
    return tuple(dict.fromkeys(match[0] for match in found if match))
