"""`stagewright probe`: measurement of this machine, described as a cluster."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.options import Json, warn
from stagewright.cli.output import check_writable, print_document, show
from stagewright.cli.progress import Progress
from stagewright.cli.refuse import refuse
from stagewright.errors import InputError
from stagewright.units import format_seconds

if TYPE_CHECKING:
    from stagewright.cluster import Cluster

_USUAL_S = 15.0
"""Seconds that a probe takes on an idle machine."""

_TIMEOUT_S, _CLUSTER_TIMEOUT_S = 180.0, 600.0
"""Default time limits: of all measurements of this machine, and of each one between a launcher's ranks."""

Processes = Annotated[int, typer.Option("--processes", "-n", min=1, help="Processes that run at once.")]


def probe(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The cluster file to write.")] = None,
    processes: Processes = 1,
    device: Annotated[str, typer.Option(help="cpu (each process a share of the cores) or cuda.")] = "cpu",
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Under a launcher such as torchrun: measure all its hosts.")] = False,
    base: Annotated[
        str | None, typer.Option(metavar="CLUSTER", help="With --cluster: use its devices and nodes, measure only links.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=1.0, metavar="SECONDS",
            help="Limit for all measurements, default 180, extended on progress; with --cluster for each, default 600.")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure this machine, as a cluster to plan for.

    Takes about fifteen seconds; all processes run at once, so that contention shows. With --cluster, under a launcher, every
    pair of ranks of all hosts is measured in both directions, and the first rank writes the file and its matrices (CSV).

    Example:
        stagewright probe --processes 2 -o local.toml
    """
    if base is not None and not cluster:
        raise InputError("--base describes a launcher's hosts: give it with --cluster")
    if cluster:
        refuse(
            ["processes"], "with --cluster the launcher sets the number of processes",
            "probe this machine without --cluster",
        )  # fmt: skip
        measured = _probe_hosts(output, device, base, timeout or _CLUSTER_TIMEOUT_S)
        if measured is None:
            return
        comment, matrices = (
            "Measured by `stagewright probe --cluster` on the hosts it describes.",
            " and its matrices",
        )
    else:
        check_writable(output)
        measured = _probe_here(device, processes, timeout or _TIMEOUT_S)
        comment, matrices = "Measured by `stagewright probe` on the machine it describes.", ""
    if output is not None:
        from stagewright.cluster import save_cluster

        save_cluster(measured, output, comment)
    if as_json:
        print_document(measured.model_dump(mode="json", exclude_none=True))
        return
    from stagewright.report.clusters import cluster_summary, links_summary

    show(cluster_summary(measured), *([links_summary(measured)] if cluster else []))
    if output is not None:
        show(f"\nWrote {output}{matrices}; plan for it with `--cluster {output}`.")


def _slow(seconds: float) -> list[str]:
    """Return a warning if a probe of this machine took much longer than usual.

    >>> _slow(16.0), len(_slow(60.0))
    ([], 1)
    """
    if seconds < 2 * _USUAL_S:
        return []
    return [
        f"the probe took {format_seconds(seconds)}, but takes about {_USUAL_S:g} s on an idle machine: its figures may be "
        "those of a busy machine; probe again when nothing else runs"
    ]


def _probe_here(device: str, processes: int, timeout: float) -> Cluster:
    began = time.monotonic()
    with Progress("importing torch") as progress:
        from stagewright.execution.probe import probe

        def report(what: str, fraction: float) -> None:
            progress(f"measuring: {what}", fraction)

        cluster = probe(device, processes, report, time_limit_s=timeout)
    warn([*cluster.cautions, *_slow(time.monotonic() - began)])
    return cluster


def _probe_hosts(output: Path | None, device: str, base: str | None, timeout: float) -> Cluster | None:
    """Probe the cluster on each rank of a launcher; return the cluster on the first rank, else None."""
    from stagewright.cluster import load_cluster

    base_cluster = None if base is None else load_cluster(base)
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        check_writable(output)
    from stagewright.execution import cluster_probe

    with cluster_probe.joined(device, timeout) as target, Progress("probing the cluster") as progress:
        report = progress if is_first else lambda what, fraction: None
        return cluster_probe.probe_cluster(target, base_cluster, progress=report)
