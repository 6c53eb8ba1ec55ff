"""What of a model is trained by low-rank adapters: the choice alone, without torch or peft."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from stagewright.cluster.strict import StrictModel, validated
from stagewright.limits import MOST_SIZE

ALL_LINEAR = "all-linear"
"""As targets: every linear layer but the head."""


class Lora(StrictModel):
    """Adapters of low rank beside some linear layers: they alone are trained, and all of the model itself is frozen.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685), as `peft` has it.
    """

    rank: int = Field(ge=1, le=MOST_SIZE)
    alpha: float = Field(gt=0)
    """What an adapter adds is multiplied by alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] | None = None
    """Names of the layers that get one, or ends of their paths; None are those that peft has for the kind of model."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of what enters an adapter."""
    is_drawn: bool = False
    """Whether B is drawn too, in place of zeros, so that no gradient is zero: for verification."""

    @field_validator("targets")
    @classmethod
    def _are_names(cls, targets: Any) -> Any:
        if isinstance(targets, tuple) and not all(targets):
            raise ValueError("give names of layers, such as q_proj, or all-linear")
        if isinstance(targets, tuple):
            return tuple(sorted(dict.fromkeys(targets)))
        return targets

    @classmethod
    def of(
        cls, rank: int, alpha: float | None = None, targets: str | None = None, dropout: float = 0.0
    ) -> Lora:
        """As the command line says it: `alpha` is twice the rank where it is not given, `targets` has commas between.

        Raises:
            InputError: a number is out of range, or a target has no name.

        >>> Lora.of(8, targets="v_proj,q_proj")
        Lora(rank=8, alpha=16.0, targets=('q_proj', 'v_proj'), dropout=0.0, is_drawn=False)
        """
        names = ALL_LINEAR if targets == ALL_LINEAR else None if targets is None else targets.split(",")
        given = {
            "rank": rank,
            "alpha": 2 * rank if alpha is None else alpha,
            "targets": tuple(name.strip() for name in names) if isinstance(names, list) else names,
            "dropout": dropout,
        }
        return validated(cls, given, "--lora")
