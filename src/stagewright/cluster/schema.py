"""Base classes of input documents: unknown keys are errors that name the nearest known one; figures can name sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from stagewright.errors import InputError, nearest
from stagewright.units import parse_bytes


def parse_amount(value: Any) -> Any:
    """Convert a text such as ``80 GB`` to bytes; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except InputError as error:
        raise ValueError(str(error)) from None  # so that it is reported with its file and key


class StrictModel(BaseModel):
    """A frozen pydantic model that rejects unknown keys and suggests the nearest one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy as pydantic does, without cached properties of the old fields."""
        copied = super().model_copy(update=update, deep=deep)
        attributes = vars(copied)
        for name in set(attributes) - set(type(self).model_fields):
            attributes.pop(name)
        return copied

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    names = ", ".join(cls.model_fields)
                    hint = nearest(str(key), cls.model_fields) or f"; the keys here are {names}"
                    raise ValueError(f"unknown key '{key}'{hint}")
        return data


class SourcedModel(StrictModel):
    """A strict model whose figures carry their provenance in a parallel `sources` table.

    A key of `sources` is the name of a figure, or a dotted name inside a nested table (`peak_flops.bf16`); the name of a
    table applies to all its figures.
    """

    not_figures: ClassVar[frozenset[str]] = frozenset()

    sources: dict[str, str] = {}

    @model_validator(mode="after")
    def _sources_name_figures(self) -> SourcedModel:
        names = set(self.figures()) | set(type(self).model_fields)
        for key in self.sources:
            if key not in names:
                raise ValueError(f"sources.{key} names no figure{nearest(key, names)}")
        return self

    def figures(self) -> list[str]:
        """Return dotted names of the figures of this model; nested sourced models have their own."""
        names: list[str] = []
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name == "sources" or name in self.not_figures or value is None:
                continue
            if isinstance(value, SourcedModel):
                continue
            if isinstance(value, StrictModel):
                names += [f"{name}.{key}" for key, item in value if item is not None]
            else:
                names.append(name)
        return names

    def source_of(self, figure: str) -> str | None:
        """Return the source of `figure` (a name from `figures()`), or None."""
        return self.sources.get(figure, self.sources.get(figure.split(".")[0]))


ModelT = TypeVar("ModelT", bound=BaseModel)


class RefusedValues(InputError, ValueError):
    """Invalid values of a model constructed in Python. Also a ValueError, so that an enclosing document reports the
    place."""

    def __init__(self, error: ValidationError) -> None:
        super().__init__("; ".join(_refusals(error)))
        self.error = error


def validated(model: type[ModelT], data: Any, origin: str) -> ModelT:
    """Return `data` as a `model`; raise `InputError` naming `origin`, the key, the value and the rule it breaks."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{origin}: " + "; ".join(_refusals(error))) from None


def _refusals(error: ValidationError, within: tuple[int | str, ...] = ()) -> Iterator[str]:
    """Yield key, value and rule of every error."""
    items = error.errors(include_url=False)
    for item in items:
        if item["type"] == "too_short" and len(items) > 1:
            continue  # pydantic counts the refused items of a list as absent; their own errors say why
        where = (*within, *item["loc"])
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, RefusedValues):
            yield from _refusals(inner.error, where)
            continue
        key = ".".join(f"[{part}]" if isinstance(part, int) else str(part) for part in where)
        key = key.replace(".[", "[")
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            yield f"{key} is missing: add it"
        elif item["type"] in ("list_type", "tuple_type") and isinstance(item["input"], dict):
            yield f"{key}: must be a list: in TOML [[{key}]] begins each of its tables"
        elif item["type"] in ("list_type", "tuple_type", "set_type", "frozen_set_type"):
            yield f"{key} = {item['input']!r}: must be a list"
        elif isinstance(item["input"], dict | list | tuple | BaseModel):
            yield f"{key}: {message}" if key else message
        else:
            message = message.removeprefix("Input ").replace("should", "must")
            yield f"{key} = {item['input']!r}: {message}"
