"""Which layers of a model are split, and how: transformers' published plans, and ours where it publishes none.

A plan maps module or parameter paths, in which ``*`` stands for a layer's number, to the name of a style.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from stagewright.errors import InputError

FUSED_QKV = "colwise_qkv"
"""A projection whose features are those of query, key and value one after the other; not one of transformers' names."""

_GPT2 = {
    "transformer.h.*.attn.c_attn": FUSED_QKV,
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}
_BERT = {
    "bert.encoder.layer.*.attention.self.query": "colwise",
    "bert.encoder.layer.*.attention.self.key": "colwise",
    "bert.encoder.layer.*.attention.self.value": "colwise",
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
}
_OWN = {"gpt2": _GPT2, "bert": _BERT}

DIVIDED: Mapping[str, tuple[str, ...]] = {"GPT2Attention": ("split_size",)}
"""Attributes that count features of a whole layer, by the name of the class that reads them."""


def plan_of(net: nn.Module) -> dict[str, str]:
    """The plan for `net`, with paths below it.

    Raises:
        InputError: none is known.
    """
    config: Any = getattr(net, "config", None)
    kind = str(getattr(config, "model_type", type(net).__name__))
    plan = dict(_OWN.get(kind) or getattr(net, "tp_plan", None) or {})
    if not any(style.startswith(("colwise", "packed")) for style in plan.values()):
        raise InputError(
            f"no tensor-parallel plan is known for '{kind}': run it with --tp 1, or use a model for which transformers "
            f"publishes one, or {' or '.join(sorted(_OWN))}"
        )
    return plan


def matches(pattern: str, path: str) -> bool:
    """Whether a path of the model is one that a plan's path means.

    >>> matches("model.layers.*.mlp.up_proj", "model.layers.11.mlp.up_proj")
    True
    """
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path) is not None
