"""MODEL arguments: a bundled config, a `config.json`, a Hugging Face id or a factory.

Nothing here imports torch or transformers, so a plan that is already traced is found again in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from stagewright.documents import parse_json, read_json
from stagewright.errors import InputError, nearest
from stagewright.tracing.models.hub import hub_config
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.overrides import apply_overrides, check_sizes, of_text
from stagewright.tracing.models.quantised import FP8, refuse_fp8, refuse_method
from stagewright.tracing.models.source import factory_source, split_factory, takes_sequence_length

_NOT_STRUCTURE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
OTHER_FORMATS = (
    "pytorch_model*.bin*", "tf_model*.h5", "flax_model*.msgpack", "consolidated*.pth", "model.ckpt.*", "*.gguf",
)  # fmt: skip
"""Files that hold weights in formats that no run reads."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", *OTHER_FORMATS)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MOST_CONFIG_BYTES = 2**22
NUM_EXPERTS = "num_experts", "n_routed_experts", "num_local_experts"
"""Keys of configs that give the number of experts of a layer."""


@dataclass(frozen=True)
class ModelReference:
    """A model the user named, resolved as far as is possible without torch.

    `config` is the content of the config.json with `overrides` in place (None for a factory, which receives
    them as keyword arguments); `weights` is the directory of the config where a file in it has weights, in
    whatever format, or an index speaks of them; `digest` is a SHA-256 over everything that determines the
    model's structure; `unconfirmed` are the overridden keys that the config does not mention, which only the
    model's config class can judge; `lora` are the adapters that are trained in place of the model.
    """

    text: str
    kind: Literal["config", "factory"]
    config: Mapping[str, Any] | None
    name: str
    weights: Path | None
    digest: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    unconfirmed: frozenset[str] = frozenset()
    lora: Lora | None = None

    @property
    def has_sequence(self) -> bool:
        """Whether samples are sequences of tokens, as far as is known without running code; images, for one, are not."""
        if self.config is None:
            return takes_sequence_length(self.text)
        is_of_images = self.config.keys() & {"image_size", "num_channels"}
        return not is_of_images or bool(self.config.keys() & {"vocab_size", "text_config"})

    @property
    def names_experts(self) -> bool:
        """Whether the config names a number of experts; False for a factory, whose layers are not known before it is run."""
        config = of_text(self.config or {})
        return any(config.get(key) for key in NUM_EXPERTS)

    def adapted(self, lora: Lora | None) -> ModelReference:
        """Return this model with adapters, which alone are trained; unchanged if `lora` is None.

        Raises:
            InputError: the factory's code says itself what is trained, or the base is one of fp8 and the weights are stored
                in another kind of fp8.
        """
        if lora is None:
            return self
        if self.kind == "factory":
            raise InputError(
                f"'{self.text}' is a factory, whose model is trained as it returns it: call peft.get_peft_model in it, and "
                "leave out --lora"
            )
        if lora.base == FP8:
            refuse_fp8(self.config or {}, self.text)
        return replace(self, lora=lora, digest=_digest([self.digest, lora.structure]))

    def on_plain_base(self) -> ModelReference:
        """Return this model with adapters, if it has any, on weights in the job's type."""
        return self if self.lora is None else replace(self, lora=self.lora.model_copy(update={"base": None}))


def bundled_names() -> list[str]:
    """Return the names of the configs that ship with Stagewright, sorted.

    >>> "llama-3-8b" in bundled_names()
    True
    """
    return sorted(
        path.name.removesuffix(".json") for path in _bundled().iterdir() if path.name.endswith(".json")
    )


@cache
def bundled_sources() -> Mapping[str, Mapping[str, Any]]:
    """Return where the bundled configs come from by name: `parameters`, their number, and `model`, the published one; those
    for tests and demonstrations have no `model`.

    >>> bundled_sources()["llama-3-8b"]["parameters"]
    8030261248
    """
    return tomllib.loads((_bundled() / "sources.toml").read_text(encoding="utf-8"))


def resolve(text: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelReference:
    """Return the model that `text` names: `package.module:factory`, `file.py:factory`, a bundled name, a config.json
    or its directory, or a Hugging Face id; in this order.

    `overrides` replaces keys of the config (`{"num_hidden_layers": 2}`; `dropout` stands for every dropout
    probability) or is passed to the factory. Raises `InputError` when nothing fits, a file is malformed, or the config says
    that the weights are quantised by a method that no run reads.

    >>> resolve("llama-3-8b", {"num_hidden_layers": 2}).config["num_hidden_layers"]
    2
    """
    text = str(text) if isinstance(text, Path) else text
    if not isinstance(text, str):
        raise InputError(
            f"a model is given by its name, not as {type(text).__name__}: the ranks of a run create it again, each in "
            "its own process. Name a bundled model, a config.json or its folder, or the function that creates it, as "
            "'path/to/file.py:function' or 'package.module:function'"
        )
    overrides = dict(overrides or {})
    if (parts := split_factory(text)) is not None:
        source = factory_source(text)
        module = Path(parts.module).name if parts.is_file else parts.module  # wherever it is called from
        digest = _digest([f"{module}:{parts.function}", source, overrides])
        return ModelReference(text, "factory", None, parts.function, None, digest, overrides)
    name, path, config = _find_config(text)
    changed = apply_overrides(config, overrides)
    check_sizes(changed, name)
    refuse_method(changed, text)
    unconfirmed = frozenset(changed) - frozenset(config)
    weights = path.parent if path is not None and _speaks_of_weights(path.parent) else None
    structure = {key: value for key, value in changed.items() if key not in _NOT_STRUCTURE}
    digest = _digest([structure, overrides])
    return ModelReference(text, "config", changed, name, weights, digest, overrides, unconfirmed)


def _find_config(text: str) -> tuple[str, Path | None, dict[str, Any]]:
    """Return short name, path (None for bundled configs) and content of the config that `text` names."""
    if text in bundled_names():
        content = (_bundled() / f"{text}.json").read_text(encoding="utf-8")
        return text, None, _config(parse_json(content, text), f"bundled config '{text}'")
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):
        path = path / "config.json"
        if not os.path.isfile(path):
            raise InputError(
                f"directory '{text}' holds no config.json: "
                "name a Hugging Face model directory or the config file itself"
            )
    if os.path.isfile(path) and path.suffix == ".py":
        raise InputError(
            f"'{text}' is a Python file: name the function in it that creates the model, as {text}:FUNCTION"
        )
    if os.path.isfile(path):
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return name, path, _config(_read(path), str(path))
    if _HUB_ID.fullmatch(text) and not text.endswith((".json", ".py")) and not text.startswith("."):
        path = hub_config(text, bundled_names())
        return text.rsplit("/", 1)[1], path, _config(_read(path), f"{text}/config.json")
    raise InputError(_not_found(text))


def _speaks_of_weights(folder: Path) -> bool:
    return any(True for pattern in _WEIGHTS for _ in folder.glob(pattern))


def _read(path: Path) -> Any:
    fix = "name the model's config.json, not its weights, or export it again with config.save_pretrained()"
    # Some configurations have no end to a range, such as the time steps of Falcon-H1.
    return read_json(path, "config", fix, _MOST_CONFIG_BYTES, allows_infinity=True)


def _config(config: Any, origin: str) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise InputError(
            f"{origin} holds a JSON {type(config).__name__}, not an object: give a Hugging Face config.json"
        )
    if not isinstance(config.get("model_type"), str):
        raise InputError(
            f"{origin} has no 'model_type', which says what kind of model it describes: "
            'add one, e.g. "model_type": "llama"'
        )
    if not isinstance(config.get("architectures") or [], list):
        raise InputError(
            f"{origin} has architectures = {str(config['architectures'])[:40]!r}: give a list of names, or leave it out"
        )
    return config


def _not_found(text: str) -> str:
    if text.endswith((".json", "/")) or text.startswith((".", "/", "~")):
        return (
            f"there is no file or directory '{text}': check the path (the current directory is {Path.cwd()})"
        )
    hint = nearest(text, bundled_names())
    listing = "" if hint else f"; bundled configs are {', '.join(bundled_names())}"
    return (
        f"'{text}' is no bundled config{hint} and no existing path, and has neither the form of a "
        f"Hugging Face id (owner/name) nor that of a factory (package.module:factory){listing}"
    )


def _digest(content: object) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _bundled() -> Traversable:
    return resources.files("stagewright.tracing.models") / "configs"
