"""`stagewright clusters`: the devices of the catalog."""

from __future__ import annotations

from stagewright.cli.options import Json
from stagewright.cli.output import print_document, show


def clusters(as_json: Json = False) -> None:
    """List the devices of the catalog.

    Any number of one is a cluster: 8x-h100, 2x4x-a100-40, 4x-v100-32+4x-t4.
    """
    from stagewright.cluster import load_cluster
    from stagewright.cluster.catalog import device_names

    found = [load_cluster(f"1x-{name}").nodes[0].device for name in device_names()]
    if as_json:
        print_document({"devices": [device.model_dump(mode="json", exclude={"sources"}) for device in found]})
        return
    from stagewright.report.clusters import device_table

    show(device_table(dict(zip(device_names(), found, strict=True))))
