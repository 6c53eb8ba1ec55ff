"""`stagewright models`, `clusters` and `schema`: what there is to choose from, and what a plan is written as."""

from __future__ import annotations

import typer

from stagewright.cli.options import Json
from stagewright.cli.output import print_document, show


def models(as_json: Json = False) -> None:
    """List the bundled model configurations."""
    from stagewright.tracing.models.reference import bundled_names

    names = bundled_names()
    if as_json:
        print_document({"models": names})
    else:
        typer.echo("\n".join(names))


def clusters(as_json: Json = False) -> None:
    """List the devices of the catalog.

    Any number of one is a cluster: 8x-h100, 2x4x-a100-40, 4x-v100-32+4x-t4.
    """
    from stagewright.cluster import load_cluster
    from stagewright.cluster.catalog import device_names
    from stagewright.report.clusters import device_table

    found = {name: load_cluster(f"1x-{name}").nodes[0].device for name in device_names()}
    if as_json:
        documents = [device.model_dump(mode="json", exclude={"sources"}) for device in found.values()]
        print_document({"devices": documents})
    else:
        show(device_table(found))


def schema() -> None:
    """Print the JSON schema of plan.json."""
    from stagewright.planning.plan import Plan

    print_document(Plan.json_schema())
