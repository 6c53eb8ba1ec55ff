"""`stagewright probe`: this machine, measured and described as a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import Json
from stagewright.cli.output import check_writable, print_document, show
from stagewright.cli.progress import Progress

Processes = Annotated[int, typer.Option("--processes", "-n", min=1, help="Processes that work at once.")]


def probe(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The cluster file to write.")
    ] = None,
    processes: Processes = 1,
    device: Annotated[str, typer.Option(help="cpu (each process a share of the cores) or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure this machine as a cluster to plan for.

    Takes about ten seconds; all processes work at once, so that what they share shows.
    """
    check_writable(output)
    with Progress("importing torch") as progress:
        from stagewright.execution import probe as prober

        cluster = prober.probe(
            device, processes, lambda what, fraction: progress(f"measuring: {what}", fraction)
        )
    if output is not None:
        from stagewright.cluster import save_cluster

        save_cluster(cluster, output, "Measured by `stagewright probe` on the machine it describes.")
    if as_json:
        print_document(cluster.model_dump(mode="json", exclude_none=True))
        return
    from stagewright.report.clusters import cluster_summary

    show(cluster_summary(cluster))
    if output is not None:
        show(f"\nWrote {output}; plan for it with `--cluster {output}`.")
