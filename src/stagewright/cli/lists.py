"""`stagewright models`, `clusters` and `schema`: bundled models and devices, and the format of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from stagewright.cli.options import Json
from stagewright.cli.output import print_document, show
from stagewright.errors import InputError, nearest

ModelName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Show this bundled model; default: list all.")
]
ClusterName = Annotated[
    str | None,
    typer.Argument(
        metavar="CLUSTER",
        help="Show this cluster, a catalog name, device or cluster.toml; default: list the devices.",
    ),
]


def models(name: ModelName = None, as_json: Json = False) -> None:
    """List the bundled models and their sizes, or show one.

    Example:
        stagewright models llama-3-8b
    """
    from stagewright.report.tables import facts, table
    from stagewright.tracing.models.reference import bundled_names, resolve
    from stagewright.units import format_count

    names = bundled_names()
    if name is not None and name not in names:
        raise InputError(
            f"'{name}' is no bundled model{nearest(name, names)}: `stagewright models` lists them, and `stagewright trace "
            "MODEL` says how large any other is"
        )
    if name is not None:
        config = resolve(name).config or {}
        described = _described(name, config) | _details(name, config)
        if as_json:
            print_document({"model": name, **described, "config": config})
        else:
            count = described["parameters"]
            shown = described | {"parameters": f"{format_count(count)} ({count:,})"}
            pairs = ((key.replace("_", " "), value) for key, value in shown.items() if value is not None)
            show(facts([("model", name), *pairs]))
        return
    sizes = {name: _described(name, resolve(name).config or {}) for name in names}
    if as_json:
        print_document({"models": names, "sizes": sizes})
        return
    rows = [
        (name, size["family"], format_count(size["parameters"]), *(size[key] for key in _SIZES))
        for name, size in sizes.items()
    ]
    show(table("", ("model", "family", "parameters", *_SIZES), rows, text=2))


def _described(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return family and sizes; of a configuration of several parts, those of the text part."""
    from stagewright.tracing.models.overrides import of_text
    from stagewright.tracing.models.reference import bundled_sources

    sizes = {size: _first(of_text(config), keys) for size, keys in _SIZES.items()}
    return {"family": config["model_type"], "parameters": bundled_sources()[name]["parameters"], **sizes}


def _details(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what only the view of one model has."""
    from stagewright.tracing.models.overrides import of_text
    from stagewright.tracing.models.reference import bundled_sources

    sizes = {size: _first(of_text(config), keys) for size, keys in _DETAILS.items()}
    ours = "Stagewright's own, for tests and demonstrations"
    return {**sizes, "source": bundled_sources()[name].get("model", ours)}


_SIZES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "vocabulary": ("vocab_size",),
}
"""Keys of configurations by column."""
_DETAILS = {
    "key_value_heads": ("num_key_value_heads",),
    "head_width": ("head_dim", "d_kv"),
    "intermediate_width": ("intermediate_size", "n_inner", "d_ff"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_width": ("moe_intermediate_size",),
    "context_length": ("max_position_embeddings", "n_positions"),
    "attention_window": ("sliding_window",),
}
"""The same, of what only the view of one model has."""


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> object:
    """Return the value of the first of `keys` that is there, or None."""
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def clusters(cluster: ClusterName = None, as_json: Json = False) -> None:
    """List devices and their prices, or show a cluster.

    A cluster is shown with all its figures and their sources. Any number of devices is one: 8x-h100, 2x4x-a100-40,
    4x-v100-32+4x-t4.

    Example:
        stagewright clusters 64x-h100
    """
    from stagewright.cluster import load_cluster
    from stagewright.cluster.catalog import catalog_node, device_names
    from stagewright.cluster.prices import list_prices
    from stagewright.report.clusters import cluster_document, cluster_tables, device_table, prices_line

    if cluster is not None:
        is_device = cluster in device_names()
        loaded = load_cluster(
            f"{catalog_node(cluster)['devices_per_node']}x-{cluster}" if is_device else cluster
        )
        if as_json:
            print_document(cluster_document(loaded))
        else:
            show(*cluster_tables(loaded))
        return
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
