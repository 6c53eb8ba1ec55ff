"""`stagewright models`, `clusters` and `schema`: bundled models and devices, and the format of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.cli.options import Json
from stagewright.cli.output import print_document, show


def models(as_json: Json = False) -> None:
    """List the bundled models, their families and sizes.

    Example:
        stagewright models
    """
    from stagewright.report.tables import table
    from stagewright.tracing.models.reference import bundled_names, resolve

    names = bundled_names()
    sizes = {name: _described(resolve(name).config or {}) for name in names}
    if as_json:
        print_document({"models": names, "sizes": sizes})
        return
    rows = [(name, *described.values()) for name, described in sizes.items()]
    show(table("", ("model", "family", *_SIZES), rows, text=2))


def _described(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return family and sizes; of a configuration of several parts, those of the text part."""
    from stagewright.tracing.models.overrides import of_text

    text = of_text(config)
    return {"family": config["model_type"], **{size: _first(text, keys) for size, keys in _SIZES.items()}}


_SIZES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "vocabulary": ("vocab_size",),
}
"""Keys of configurations by column."""


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> object:
    """Return the value of the first of `keys` that is there, or None."""
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def clusters(as_json: Json = False) -> None:
    """List the devices of the catalog and their prices.

    Any number of them is a cluster: 8x-h100, 2x4x-a100-40, 4x-v100-32+4x-t4.

    Example:
        stagewright clusters
    """
    from stagewright.cluster import load_cluster
    from stagewright.cluster.catalog import device_names
    from stagewright.cluster.prices import list_prices
    from stagewright.report.clusters import device_table, prices_line

    devices = {name: load_cluster(f"1x-{name}").nodes[0].device for name in device_names()}
    if as_json:
        documents = [
            device.model_dump(mode="json", exclude={"sources"})
            | {"prices": {terms: vars(price) for terms, price in list_prices(name).items()}}
            for name, device in devices.items()
        ]
        print_document({"devices": documents})
    else:
        show(device_table(devices), prices_line(devices))


def schema() -> None:
    """Print the JSON schema of plan.json."""
    from stagewright.planning.plan import Plan

    print_document(Plan.json_schema())
