"""`TraceSettings`: what, besides the model, decides the operator graph of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from stagewright.errors import InputError, nearest


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Size, precision and parallel degrees of a graph, and how its attention, experts, embedding and loss are computed."""

    microbatch_size: int
    """Samples per microbatch."""
    sequence_length: int
    """Tokens per sample."""
    dtype: str = "float32"
    """Element type of parameters and activations."""
    device: str = "cpu"
    """Type of device to trace on. A graph for another `target` has the same names and operators on each, and plans and runs
    trace it on the CPU."""
    target: str | None = None
    """Type of device the graph is for, ``cpu`` or ``cuda``: its autocast rules hold. None: `device`."""
    autocast: str | None = None
    """Element type of an autocast around the whole model; None leaves it to the model's code."""
    training: bool = True
    """Whether the model is in training mode; otherwise it has no dropout and updates no statistics."""
    tp: int = 1
    """Tensor parallel degree; the graph is that of one rank, with collectives as operators."""
    splits_sequence: bool = False
    """Whether to use sequence parallelism."""
    cp: int = 1
    """Context parallel degree; the graph is that of one rank, in which attention gathers the keys and values of all. It is
    costed, not run."""
    ep: int = 1
    """Expert parallel degree; the graph is that of one rank, which receives as many tokens as it sends. It is costed, not
    run."""
    loss_pieces: int = 1
    """Slices of the microbatch's tokens for which head and loss are computed one after the other."""
    attention: Literal["traced", "fused", "explicit"] = "traced"
    """As it runs on the `target`, by a CPU's kernels or as one logical operator (`stagewright.tracing.attention`), or as one
    operator on every target (``fused``), or with separate operators for its scores (``explicit``), as in runtimes without
    fused kernels; the last two are costed, not run."""
    experts: Literal["traced", "grouped", "split"] = "traced"
    """As the model computes them, or ``grouped`` as in `stagewright.tracing.experts`, or grouped and ``split`` over the
    tensor parallel ranks under sequence parallelism too; the last two are costed, not run."""
    embedding: Literal["split", "whole"] = "split"
    """Whether each tensor parallel rank has the rows of some tokens (``split``) or of all."""
    head: Literal["split", "gathered", "whole"] = "split"
    """Likewise; with ``gathered`` each rank computes the logits of some tokens, and gathers all before the loss."""
    column_inputs: Literal["shared", "copied"] = "shared"
    """Whether column-parallel layers save the input they share (``shared``), or each a copy of it, where it is whole."""
    loss: Literal["float32", "as logits"] = "float32"
    """In float32, whatever the type of the logits, or ``as logits``."""
    further_inputs: tuple[str, ...] = ()
    """Inputs of a causal language model besides ``input_ids``: ``labels``, which otherwise come from these, and
    ``position_ids``, which restart at every document."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> TraceSettings:
        """Return the settings among the arguments of `stagewright.tracing.cache.trace`.

        Raises:
            InputError: no such setting.
        """
        names = [field.name for field in fields(cls)]
        for name in arguments:
            if name not in names and name != "expand":
                raise InputError(
                    f"a trace has no setting '{name}'{nearest(name, names)}; it has {', '.join(names)}"
                )
        given = {name: value for name, value in arguments.items() if name != "expand"}
        if "further_inputs" in given:
            given["further_inputs"] = tuple(given["further_inputs"])
        return cls(**given)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the graph, without those at their defaults that not every graph has."""
        facts: dict[str, Any] = {name: getattr(self, name) for name in _ALWAYS}
        facts |= {
            "target": self.target or self.device,
            "splits_sequence": self.splits_sequence and self.tp > 1,
        }
        for field in fields(self):
            is_of_ranks = field.name in ("embedding", "head", "column_inputs")
            if field.name not in facts and (value := getattr(self, field.name)) != field.default:
                facts |= {field.name: value} if self.tp > 1 or not is_of_ranks else {}
        return facts


_ALWAYS = ("microbatch_size", "sequence_length", "dtype", "device", "autocast", "training", "tp")
