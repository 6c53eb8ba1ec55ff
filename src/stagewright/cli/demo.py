"""`stagewright demo`: plans a large model for a cluster, then plans and trains a small one on this machine."""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.options import warn
from stagewright.cli.output import show
from stagewright.cli.progress import Progress
from stagewright.units import format_seconds

if TYPE_CHECKING:
    from rich.text import Text

    from stagewright.cluster import Cluster
    from stagewright.planning.job import Job
    from stagewright.planning.plan import Plan
    from stagewright.planning.search_result import SearchResult

_LARGE = "llama-3-8b"
_SMALL = "tiny-llama"
_PROCESSES = 2
_STEPS = 12


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write its files.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Plan a large model, then train a small one here.

    Llama-3-8B for 8 GPUs, and a small Llama on this machine. Takes about a minute on two cores, and half a minute more
    the first time; needs neither weights nor a GPU.

    Example:
        stagewright demo
    """
    begun = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    show("This takes about a minute on two idle cores, and half a minute more the first time.\n")
    _plan_large(out)
    cluster = _probe(out)
    plan = _plan_small(cluster, out)
    _train(plan, out)
    seconds = format_seconds(time.perf_counter() - begun)
    show(f"\nDone in {seconds}. Files in {out}: plan.json, local.toml, small.json, record.json, steps.jsonl.")


def _heading(bold: str, text: str) -> Text:
    from rich.text import Text

    return Text.assemble((bold, "bold"), text)


def _plan_large(out: Path) -> None:
    from stagewright.cluster import load_cluster
    from stagewright.planning.job import Job
    from stagewright.report.configurations import configurations_table, considered_line, legend
    from stagewright.report.plans import answer_line

    show(
        _heading("1. Planning Llama-3-8B for a node of eight H100", ", from its config.json alone."),
        "The model is traced into a graph of forward, input-gradient and weight-gradient operators. Every",
        "pipeline degree, microbatch size and schedule is cut out of that graph, costed and simulated:",
        "128 samples of 8,192 tokens a step, bf16, AdamW.",
    )
    job = Job(global_batch=128, sequence_length=8192, dtype="bf16")
    search_result = _search(_LARGE, load_cluster("8x-h100"), job)
    path = out / "plan.json"
    search_result.plans[0].save(path)
    show(
        configurations_table(search_result.plans[:5]),
        *legend(search_result.plans[:5]),
        answer_line(search_result.plans[0]),
        considered_line(search_result),
        f"The best is in {path}.\n",
    )


def _probe(out: Path) -> Cluster:
    from stagewright.cluster import save_cluster
    from stagewright.report.clusters import cluster_summary

    show(_heading("2. Probing this machine", f" with {_PROCESSES} processes running at once."))
    with Progress("importing torch") as progress:
        from stagewright.execution.probe import probe

        cluster = probe("cpu", _PROCESSES, lambda what, fraction: progress(f"measuring: {what}", fraction))
    warn(cluster.cautions)
    path = out / "local.toml"
    save_cluster(cluster, path, "Measured by `stagewright demo` on the machine it describes.")
    show(cluster_summary(cluster), f"The description is in {path}.\n")
    return cluster


def _plan_small(cluster: Cluster, out: Path) -> Plan:
    from stagewright.planning.job import Job
    from stagewright.report.configurations import configurations_table
    from stagewright.report.plans import stage_table

    show(
        _heading(f"3. Planning a small Llama for a pipeline of {_PROCESSES} processes here", ":"),
        "16 samples of 256 bytes a step, fp32.",
    )
    job = Job(global_batch=16, sequence_length=256, dtype="fp32", learning_rate=1e-3, num_steps=_STEPS)
    search_result = _search(_SMALL, cluster, job, pp=_PROCESSES)
    path = out / "small.json"
    search_result.plans[0].save(path)
    show(
        configurations_table(search_result.plans[:3]),
        stage_table(search_result.plans[0]),
        f"The best is in {path}.\n",
    )
    return search_result.plans[0]


def _train(plan: Plan, out: Path) -> None:
    from stagewright.cluster.cluster import measurement_cautions
    from stagewright.execution.launch import run
    from stagewright.execution.machine_use import watch_others
    from stagewright.report.runs import run_document, run_summary

    show(_heading(f"4. Training it for {_STEPS} steps", " on Moby-Dick, whose bytes are the tokens."))
    measure_others = watch_others()
    with resources.as_file(resources.files("stagewright") / "data" / "moby_dick.txt") as text:
        record = run(out / "small.json", data=text, steps=_STEPS, out=out, device="cpu")
    warn(measurement_cautions(measure_others()))
    if record is not None:
        show(run_summary(run_document(plan, record, str(out / "record.json"))))


def _search(model: str, cluster: Cluster, job: Job, pp: int | None = None) -> SearchResult:
    from stagewright.planning.search import plan

    with Progress(f"planning {model}") as progress:
        return plan(model, cluster, job, report=progress, pp=pp)
