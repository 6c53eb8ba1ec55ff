"""Conversion of a whole model on fake tensors into the model of one tensor parallel rank.

Plans determine which layers are split, and how: transformers' published ones, or ours if it publishes none. A plan maps
module or parameter paths, in which ``*`` stands for a layer's number, to the name of a style. The half of a low-rank adapter
next to split features is split likewise; the other half is whole on every rank.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from stagewright.errors import InputError, nearest
from stagewright.graph.tensor_parallel import GROUP, TensorParallel, TensorShard, even
from stagewright.tracing.experts import are_sharded, around
from stagewright.tracing.models.adapter_names import BASE, INTO, OUT_OF
from stagewright.tracing.models.losses import (
    IGNORED,
    LanguageModel,
    cross_entropy_as_logits,
)
from stagewright.tracing.tensor_parallel.layers import (
    ColumnLinear,
    RowLinear,
    VocabularyCrossEntropy,
    VocabularyEmbedding,
)
from stagewright.tracing.tensor_parallel.operators import all_gather, all_reduce, enter, reduce_scatter
from stagewright.tracing.tensor_parallel.sequence import entering, split_sequence

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
    """Return the plan for `net`, with paths below it.

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
    """Return whether a path of the model matches a plan's pattern.

    >>> matches("model.layers.*.mlp.up_proj", "model.layers.11.mlp.up_proj")
    True
    """
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path) is not None


def parallelise(
    model: nn.Module,
    size: int,
    sequence: bool = False,
    splits_experts: bool = False,
    embedding: Literal["split", "whole"] = "split",
    head: Literal["split", "gathered", "whole"] = "split",
    copies_inputs: bool = False,
) -> TensorParallel:
    """Change `model` (a loss around ``net``) into that of one of `size` ranks; all ranks have the same.

    With `sequence`, what lies between its split layers works on parts of the sequence; so do sharded experts, which then are
    whole, unless it `splits_experts`. An `embedding` and a `head` that are ``split`` are so by tokens, with the loss; of a
    ``gathered`` head every rank has the logits of all before the loss; what is ``whole`` every rank has and computes whole.
    Where both are one parameter and one is to be whole, both are. With `copies_inputs` every column-parallel layer saves a
    copy of a whole input.

    Raises:
        InputError: no plan is known, or heads or features do not divide.
    """
    surgeon = _Surgeon(model, size, sequence, splits_experts, embedding, head)
    plan = surgeon.operate()
    for module in model.modules():
        if isinstance(module, ColumnLinear):
            module.copies = copies_inputs
    if sequence:
        split_sequence(surgeon.net, plan, size)
    return TensorParallel(size, sequence, surgeon.shards())


class _Surgeon:
    def __init__(
        self, model: nn.Module, size: int, sequence: bool, splits_experts: bool, embedding: str, head: str
    ) -> None:
        net = model.net
        assert isinstance(net, nn.Module), "a model is a loss around its net"
        self.embedding, self.head = embedding, head
        self.model, self.net, self.size = model, net, size
        self.sequence, self.splits_experts = sequence, splits_experts
        self.holders: dict[int, list[tuple[nn.Module, str]]] = {}  # parameter -> all modules that have it
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.holders.setdefault(id(parameter), []).append((module, name))
        self.cut: dict[int, TensorShard] = {}  # shard -> how it was cut
        self.whole = dict(model.named_parameters(remove_duplicate=False))  # keeps their ids alive
        self.styles: dict[str, Callable[[str], None]] = {
            "colwise": self._column,
            "colwise_gather_output": functools.partial(self._column, gathers=True),
            "colwise_rep": functools.partial(self._column, gathers=True),
            FUSED_QKV: functools.partial(self._column, num_blocks=3),
            "packed_colwise": functools.partial(self._column, num_blocks=2),
            "rowwise": self._row,
            "rowwise_split_input": functools.partial(self._row, splits=True),
            "rowwise_rep": functools.partial(self._row, splits=True),
            "embedding_rowwise": self._embedding,
            "replicated_with_grad_allreduce": self._used_locally,
            "moe_tp_experts": self._experts,
        }

    def shards(self) -> dict[str, TensorShard]:
        """Shards of the parameters of the changed model, by name."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: self.cut[id(parameter)] for name, parameter in named if id(parameter) in self.cut}

    def operate(self) -> dict[str, str]:
        """Split the layers; returns the plan followed."""
        plan = plan_of(self.net)
        self._check_heads(plan)
        done = self._vocabulary() if isinstance(self.model, LanguageModel) else []
        paths = [path for path, _ in (*self.net.named_modules(), *self.net.named_parameters())]
        for path in paths:
            style = next((style for pattern, style in plan.items() if matches(pattern, path)), None)
            if style is None or path in done or self._is_whole(path):
                continue
            if style not in self.styles:
                raise InputError(
                    f"'{path}' is to be split in the style '{style}'{nearest(style, self.styles)}, which is not known: "
                    f"run this model with --tp 1"
                )
            self.styles[style](path)
        for module in self.net.modules():
            for name in DIVIDED.get(type(module).__name__, ()):
                setattr(module, name, even(name, getattr(module, name), self.size))
        return plan

    def _is_whole(self, path: str) -> bool:
        """Return whether `path` belongs to sharded experts, which get the tokens of each rank's part of the sequence."""
        if not self.sequence or self.splits_experts:
            return False
        owner, name = self._owner(path)
        return are_sharded(owner) or are_sharded(getattr(owner, name))

    def _check_heads(self, plan: dict[str, str]) -> None:
        """Check that heads split over ranks are whole on each."""
        if not any("attn" in path or "attention" in path for path in plan):
            return
        config: Any = self.net.config
        text = config.get_text_config()
        heads = {"num_attention_heads": "attention heads", "num_key_value_heads": "key-value heads"}
        for key, what in heads.items():
            amount = getattr(text, key, None)
            if isinstance(amount, int):
                even(f"the number of {what}", amount, self.size)

    # -- parameters -------------------------------------------------------------------------------------------------

    def _split(self, module: nn.Module, name: str, dim: int, num_blocks: int = 1, padding: int = 0) -> None:
        """Replace a parameter by a rank's shard of it, with all who hold it."""
        whole = module._parameters.get(name)
        if whole is None or id(whole) in self.cut:
            return
        dim = dim % whole.dim()
        block = even(f"dimension {dim} of {tuple(whole.shape)}", whole.shape[dim], num_blocks)
        shape = list(whole.shape)
        shape[dim] = num_blocks * even(f"a parameter's dimension {dim}", block + padding, self.size)
        part = nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad)
        self.cut[id(part)] = TensorShard(dim, (block,) * num_blocks, padding)
        for holder, held in self.holders[id(whole)]:
            holder._parameters[held] = part

    def _put(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        module.train(self.net.training)
        setattr(self.net.get_submodule(parent), name, module)

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        parent, _, name = path.rpartition(".")
        return self.net.get_submodule(parent), name

    # -- styles -----------------------------------------------------------------------------------------------------

    def _column(self, path: str, num_blocks: int = 1, gathers: bool = False, padding: int = 0) -> None:
        owner, name = self._owner(path)
        if name in owner._parameters:
            self._split(owner, name, -2 if owner._parameters[name].dim() > 1 else 0, num_blocks)  # type: ignore[union-attr]
            return
        linear = self.net.get_submodule(path)
        if _is_adapted(linear):
            self._beside(f"{path}.{INTO}")
            for part in (BASE, OUT_OF):
                self._column(f"{path}.{part}", num_blocks, gathers, padding)
            return
        is_transposed = _is_transposed(linear, path)
        self._split(linear, "weight", 1 if is_transposed else 0, num_blocks, padding)
        self._split(linear, "bias", 0, num_blocks, padding)
        weight, bias = linear._parameters["weight"], linear._parameters.get("bias")
        assert weight is not None
        self._put(path, ColumnLinear(weight, bias, self.size, gathers=gathers, is_transposed=is_transposed))

    def _row(self, path: str, splits: bool = False) -> None:
        owner, name = self._owner(path)
        if name in owner._parameters:
            self._split(owner, name, -1)
            return
        linear = self.net.get_submodule(path)
        if _is_adapted(linear):
            self._beside(f"{path}.{OUT_OF}")
            for part in (BASE, INTO):
                self._row(f"{path}.{part}", splits)
            return
        is_transposed = _is_transposed(linear, path)
        self._split(linear, "weight", 0 if is_transposed else 1)
        weight, bias = linear._parameters["weight"], linear._parameters.get("bias")
        assert weight is not None
        self._put(path, RowLinear(weight, bias, self.size, splits=splits, is_transposed=is_transposed))

    def _beside(self, path: str) -> None:
        """Prepare the low-rank half of an adapter of a split layer, which is whole on every rank."""
        self.net.get_submodule(path).is_beside_split = True  # type: ignore[assignment]

    def _embedding(self, path: str) -> None:
        module = self.net.get_submodule(path)
        if not isinstance(module, nn.Embedding):
            raise InputError(
                f"'{path}' is not an embedding, so it cannot be split by tokens: run with --tp 1"
            )
        padding = -module.num_embeddings % self.size
        self._split(module, "weight", 0, padding=padding)
        self._change(module, _by_tokens(type(module)))

    def _used_locally(self, path: str) -> None:
        """Sum the gradients of whole parameters that are used within local work."""
        module = self.net.get_submodule(path)
        self._change(module, entering(type(module), tuple(module._parameters)))

    def _experts(self, path: str) -> None:
        module = self.net.get_submodule(path)
        self._change(module, around(_Experts, type(module)))
        module.gathers_tokens = self.sequence and self.splits_experts  # type: ignore[assignment]

    def _change(self, module: nn.Module, kind: type) -> None:
        module.__class__, module.tp_size = kind, self.size  # type: ignore[assignment]

    # -- vocabulary -------------------------------------------------------------------------------------------------

    def _vocabulary(self) -> list[str]:
        """Split embedding, head and loss by tokens, as far as they are to be; returns the paths that are done."""
        paths = {id(module): path for path, module in self.net.named_modules()}
        embedding, head = self.net.get_input_embeddings(), self.net.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
            return []
        done = [paths[id(embedding)], paths[id(head)]]
        is_whole = [self.embedding == "whole", self.head == "whole"]
        if embedding.weight is head.weight:
            is_whole = [any(is_whole)] * 2
        if not is_whole[0]:
            self._embedding(done[0])
        if is_whole[1]:
            return done
        padding, gathers = -head.out_features % self.size, self.head == "gathered"
        self._column(done[1], padding=padding, gathers=gathers)
        if gathers:
            if padding:
                self.net.get_submodule(done[1]).num_features = head.out_features  # type: ignore[assignment]
            return done
        casts = self.model.cross_entropy is not cross_entropy_as_logits
        self.model.cross_entropy = VocabularyCrossEntropy(head.out_features, self.size, IGNORED, casts)
        return done


def _is_adapted(layer: nn.Module) -> bool:
    """Return whether a layer has a low-rank adapter."""
    return isinstance(getattr(layer, BASE, None), nn.Module) and hasattr(layer, "lora_A")


def _is_transposed(linear: nn.Module, path: str) -> bool:
    """Return whether a linear layer stores (inputs, features), as GPT-2's do."""
    if type(linear).__name__ == "Conv1D":
        return True
    if isinstance(linear, nn.Linear):
        return False
    raise InputError(
        f"'{path}' is a {type(linear).__name__}, not a linear layer that can be split: run with --tp 1"
    )


class _Experts:
    """Tensor parallel experts: each rank has some features of every expert; their inputs are used locally.

    Ranks with a part of the tokens each gather them before, and reduce-scatter the results.
    """

    tp_size: int
    gathers_tokens: bool

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.gathers_tokens:
            hidden_states, top_k_weights = (
                all_gather(tensor, 0, GROUP, self.tp_size, sums=True)
                for tensor in (hidden_states, top_k_weights)
            )
            top_k_index = all_gather(top_k_index, 0, GROUP, self.tp_size, sums=False)
            part = super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]
            return reduce_scatter(part, 0, GROUP, self.tp_size)
        hidden_states = enter(hidden_states, GROUP, self.tp_size)
        top_k_weights = enter(top_k_weights, GROUP, self.tp_size)
        part = super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]
        return all_reduce(part, GROUP, self.tp_size)


@functools.cache
def _by_tokens(base: type) -> type:
    """Return a kind of embedding that looks up its rows among those of this rank."""
    if base is nn.Embedding:
        return VocabularyEmbedding
    return type(f"Parallel{base.__name__}", (base, VocabularyEmbedding), {})
