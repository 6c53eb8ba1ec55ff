"""Options of low-rank adapters (LoRA), without torch or peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from stagewright.cluster.schema import StrictModel, validated
from stagewright.documents import read_json
from stagewright.errors import InputError
from stagewright.limits import MOST_SIZE
from stagewright.tracing.models.adapter_names import ADAPTER_CONFIG

NF4, INT8 = "nf4", "int8"
"""Numbers that a frozen base may be stored in, besides `FP8`: of 4 bits, spaced as a normal distribution, and of 8 bits."""
ALL_LINEAR = "all-linear"
"""Targets: every linear layer but the head."""
_MOST_CONFIG_BYTES = 2**20
_TAKEN = (
    "peft_type", "r", "lora_alpha", "target_modules", "lora_dropout", "fan_in_fan_out", "init_lora_weights", "bias",
)  # fmt: skip
"""Keys of a config of peft that are looked at."""
_OF_NO_EFFECT = (
    "task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version",
    "megatron_core", "qalora_group_size",
)  # fmt: skip
"""Options that change no adapter, or only with others that are rejected."""


class Lora(StrictModel):
    """Low-rank adapters of some linear layers (LoRA): only they are trained; the model itself is frozen.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685), as `peft` has it.
    """

    rank: int = Field(ge=1, le=MOST_SIZE)
    alpha: float = Field(gt=0)
    """Scale of the adapters' output, as alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] | None = None
    """Names of the layers that get one, or ends of their paths; None are those that peft has for the kind of model."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the adapters' input."""
    is_drawn: bool = False
    """Whether B is drawn too instead of zeros, so that no gradient is zero: for verification."""
    base: Literal["nf4", "int8", "fp8"] | None = None
    """Numbers that the weights of frozen linear layers and experts are stored in (QLoRA); None: in the job's type."""
    folder: str | None = None
    """Folder of adapters, written by peft, that a run starts from; None draws new ones."""

    @property
    def structure(self) -> dict[str, Any]:
        """All but where the adapters lie."""
        absent = {"base"} if self.base is None else set()
        return self.model_dump(mode="json", exclude={"folder", *absent})

    def check_degrees(self, tp: int, ep: int) -> None:
        """Raise `InputError` where ranks would have to divide weights that are packed."""
        if self.base is not None and tp * ep > 1:
            raise InputError(
                f"a base of {self.base} is packed weight by weight, so no weight can be split over ranks: leave out "
                f"--{'tp' if tp > 1 else 'ep'}, or --lora-base"
            )

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
        cls,
        rank: int,
        alpha: float | None = None,
        targets: str | None = None,
        dropout: float = 0.0,
        base: str | None = None,
    ) -> Lora:
        """Return adapters from the options of the command line: `alpha` defaults to twice the rank, `targets` has commas.

        Raises:
            InputError: a number is out of range, or a target has no name.

        >>> Lora.of(8, targets="v_proj,q_proj")
        Lora(rank=8, alpha=16.0, targets=('q_proj', 'v_proj'), dropout=0.0, is_drawn=False, base=None, folder=None)
        """
        names = ALL_LINEAR if targets == ALL_LINEAR else None if targets is None else targets.split(",")
        given = {
            "rank": rank,
            "alpha": 2 * rank if alpha is None else alpha,
            "targets": tuple(name.strip() for name in names) if isinstance(names, list) else names,
            "dropout": dropout,
            "base": base,
        }
        return validated(cls, given, "--lora")

    @classmethod
    def stored_in(cls, folder: Path, base: str | None = None) -> Lora:
        """Return the adapters in `folder`, written by peft, to continue from, on a base of this type.

        Raises:
            InputError: there are none, or their kind or form is not supported.
        """
        path = folder / ADAPTER_CONFIG
        config = read_json(path, "config of adapters", "name a folder written by peft", _MOST_CONFIG_BYTES)
        if not isinstance(config, dict):
            raise InputError(f"'{path}' holds no JSON object: name a folder written by peft")
        _refuse_other_forms(config, path)
        given = {
            "rank": config.get("r"),
            "alpha": config.get("lora_alpha"),
            "targets": config.get("target_modules"),
            "dropout": config.get("lora_dropout", 0.0),
            "base": base,
            "folder": str(folder.resolve()),
        }
        return validated(cls, given, f"'{path}'")


def _refuse_other_forms(config: dict[str, Any], path: Path) -> None:
    """Raise `InputError` for settings other than rank and alpha of adapters of named layers."""
    expected = {"peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": (True, False, None)}
    wrong = [key for key, values in expected.items() if config.get(key) not in values]
    wrong += [key for key in sorted(config) if key not in (*_TAKEN, *_OF_NO_EFFECT) and config[key]]
    if not isinstance(config.get("target_modules"), list):
        wrong.append("target_modules")
    if wrong:
        raise InputError(
            f"'{path}' has {wrong[0]} = {config.get(wrong[0])!r}, but only LoRA adapters of one rank, for layers in "
            "a list, are supported: merge these into the model with peft's merge_and_unload and start new ones with --lora "
            "RANK"
        )
