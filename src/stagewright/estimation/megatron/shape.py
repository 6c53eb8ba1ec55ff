"""The widths of a decoder, as Megatron's layers need them; read from a model's config without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from typing import Any

from stagewright.errors import InputError, nearest
from stagewright.limits import MOST_ENTRIES


@dataclass(frozen=True)
class Latent:
    """Attention through low-rank projections (MLA); sizes in elements per token, the last three per head."""

    query_rank: int
    key_value_rank: int
    plain_size: int
    rotary_size: int
    value_size: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer; `shared_size` of the experts every token goes through.

    A token's `num_active` experts are of `num_active_groups` of the `num_groups` equal groups that they form.
    """

    num_experts: int
    num_active: int
    size: int
    shared_size: int = 0
    num_groups: int = 1
    num_active_groups: int = 1

    def targets(self, num_parts: int) -> float:
        """Over how many of `num_parts` equal, consecutive parts of the experts those of a token are spread, on average.

        Every expert of the groups of a token is as likely as any other, and so is every group.

        >>> Experts(256, 8, 2048).targets(1), round(Experts(256, 8, 2048).targets(8), 2)
        (1.0, 5.29)
        >>> round(Experts(256, 8, 2048, num_groups=8, num_active_groups=4).targets(8), 2)
        3.63
        """
        groups, active, size = self.num_groups, self.num_active_groups, self.num_experts // self.num_groups
        part = self.num_experts // num_parts
        held = max(1, part // size)  # groups of a part, or one that it is a piece of
        among, missed = active * size, 0.0
        for met in range(max(0, active + held - groups), min(active, held) + 1):
            chance = comb(held, met) * comb(groups - held, active - met) / comb(groups, active)
            missed += (
                chance
                * comb(max(0, among - met * min(size, part)), self.num_active)
                / comb(among, self.num_active)
            )
        return num_parts * (1 - missed)


@dataclass(frozen=True)
class Shape:
    """One decoder: `hidden` and other widths in elements.

    `num_positions` of a learned position embedding, 0 with rotary ones; `gated` feed-forward layers have two input
    projections; `has_bias` covers all linear layers and norms; `num_dense` layers in front have no experts.
    """

    num_layers: int
    hidden: int
    feed_forward: int
    num_heads: int
    vocabulary: int
    num_key_value_heads: int
    head_size: int
    gated: bool = False
    has_bias: bool = True
    tied: bool = True
    num_positions: int = 0
    drops: bool = False
    """Whether activations pass dropout layers."""
    latent: Latent | None = None
    experts: Experts | None = None
    num_dense: int = 0

    @classmethod
    def gpt(
        cls, num_layers: int, hidden: int, num_heads: int, vocabulary: int, num_positions: int, **changes: Any
    ) -> Shape:
        """A GPT as Megatron builds it: learned positions, feed-forward of 4 x hidden, tied head, dropout.

        >>> Shape.gpt(24, 1024, 16, 51200, 1024).layer_parameters
        12596224
        """
        given: dict[str, Any] = {
            "feed_forward": 4 * hidden,
            "num_key_value_heads": num_heads,
            "head_size": hidden // num_heads,
            "drops": True,
        }
        return cls(
            num_layers=num_layers, hidden=hidden, num_heads=num_heads, vocabulary=vocabulary,
            num_positions=num_positions, **(given | changes),
        )  # fmt: skip

    @property
    def layer_parameters(self) -> int:
        """Parameters of a dense layer, not split."""
        projections = self.hidden * self.projected + self.num_heads * self.head_size * self.hidden
        feed_forward = (3 if self.gated else 2) * self.hidden * self.feed_forward
        norms = 2 * self.hidden * (2 if self.has_bias else 1)
        inner = self.feed_forward * (2 if self.gated else 1)
        biases = self.projected + 2 * self.hidden + inner if self.has_bias else 0
        return projections + feed_forward + norms + biases

    @property
    def projected(self) -> int:
        """Elements per token of queries, keys and values together."""
        return (self.num_heads + 2 * self.num_key_value_heads) * self.head_size


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape that a Hugging Face config describes.

    Raises:
        InputError: a kind of model that Megatron's layers do not make.

    >>> config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 10, "n_positions": 4}
    >>> shape_of(config).feed_forward
    32
    """
    kind = config["model_type"]
    if kind == "gpt2":
        return Shape.gpt(
            *(_size(config, key) for key in ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions")),
            feed_forward=_size(config, "n_inner", 0) or 4 * _size(config, "n_embd"),
            drops=bool(config.get("resid_pdrop", 0.1)),
        )  # fmt: skip
    if kind not in _GATED:
        known = ("gpt2", *_GATED)
        raise InputError(
            f"Megatron's stacks know no '{kind}' model{nearest(kind, known)}: use a model of type "
            f"{', '.join(known)}, or leave out --stack"
        )
    heads = _size(config, "num_attention_heads")
    return Shape(
        num_layers=_size(config, "num_hidden_layers"),
        hidden=_size(config, "hidden_size"),
        feed_forward=_size(config, "intermediate_size"),
        num_heads=heads,
        vocabulary=_size(config, "vocab_size"),
        num_key_value_heads=_size(config, "num_key_value_heads", 0) or heads,
        head_size=_size(config, "head_dim", 0) or _size(config, "hidden_size") // heads,
        gated=True,
        has_bias=False,
        tied=bool(config.get("tie_word_embeddings", False)),
        latent=_latent(config),
        experts=_experts(config),
        num_dense=_size(config, "first_k_dense_replace", 0),
    )


_GATED = ("llama", "mistral", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def _latent(config: Mapping[str, Any]) -> Latent | None:
    if "kv_lora_rank" not in config:
        return None
    return Latent(
        _size(config, "q_lora_rank", 0),
        _size(config, "kv_lora_rank"),
        _size(config, "qk_nope_head_dim"),
        _size(config, "qk_rope_head_dim"),
        _size(config, "v_head_dim"),
    )


def _experts(config: Mapping[str, Any]) -> Experts | None:
    keys = ("n_routed_experts", "num_local_experts", "num_experts")
    num = next((_size(config, key, 0) for key in keys if key in config), 0)
    if not num:
        return None
    size = _size(config, "moe_intermediate_size", 0) or _size(config, "intermediate_size")
    groups = _size(config, "n_group", 0) or 1
    return Experts(
        num, _size(config, "num_experts_per_tok"), size, size * _size(config, "n_shared_experts", 0),
        num_groups=groups, num_active_groups=_size(config, "topk_group", 0) or groups,
    )  # fmt: skip


def _size(config: Mapping[str, Any], key: str, absent: int | None = None) -> int:
    """A size or count of the configuration; `absent` where it has none, and must be there without that."""
    value = config.get(key)
    if value is None and absent is not None:
        return absent
    if type(value) is not int or not 0 <= value <= MOST_ENTRIES or (absent is None and value == 0):
        raise InputError(
            f"the config of a '{config['model_type']}' model has {key} = {value!r}: give a whole number of at least "
            f"{1 if absent is None else 0}"
        )
    return value
