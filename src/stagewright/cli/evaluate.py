"""`stagewright evaluate`: the loss of a checkpoint on data, under the pipeline of a plan."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.consent import say_what_runs
from stagewright.cli.groups import grouped
from stagewright.cli.options import Json, PlanFile, TextField, TokenizerPath
from stagewright.cli.output import print_document, show
from stagewright.errors import InputError
from stagewright.text import plural


# fmt: off
@dataclass(frozen=True)
class HeldOutOptions:
    """Data."""

    data: Annotated[
        list[str], typer.Option(metavar="PATH", help="Data as for `run --data`; every sample is evaluated once.")]
    tokenizer: TokenizerPath = None
    text_field: TextField = None
    samples: Annotated[int | None, typer.Option(min=1, metavar="N", help="Evaluate only the first N samples.")] = None
# fmt: on


@grouped
def evaluate(
    plan: PlanFile,
    data: HeldOutOptions,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A run's checkpoints; default: the model's own weights.")] = None,
    log_probabilities: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write log-probabilities of tokens, a JSON line per sample.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    start_timeout: Annotated[float, typer.Option(min=1.0, help="Seconds within which every rank must join.")] = 300.0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Evaluate a model on data.

    Computes its loss in `eval` mode under the pipeline of a plan, any plan for the checkpoint's model; nothing is trained.
    Exit code 2 if plan, checkpoint and data do not match.

    Example:
        stagewright evaluate plan.json --data held-out.jsonl --checkpoint checkpoints
    """
    from stagewright.execution.checkpoint_folder import check_base, differences, identity, newest_in
    from stagewright.execution.data.prepared import prepared
    from stagewright.execution.data.request import DataRequest
    from stagewright.execution.device import kind_of
    from stagewright.execution.launch import start_plan
    from stagewright.execution.logs import perplexity
    from stagewright.execution.preflight import refuse_what_is_not_run
    from stagewright.execution.weight_files import base_model_of, check_weights
    from stagewright.files import make_writable
    from stagewright.planning.plan import load_plan

    loaded = load_plan(plan)
    refuse_what_is_not_run(loaded, str(plan))
    if checkpoint is not None:
        stored = newest_in(checkpoint)
        was, now = ({"model": document.get("model")} for document in (stored.manifest.plan, identity(loaded)))
        if differing := list(differences(was, now)):
            raise InputError(
                f"checkpoint '{stored.path}' is of another model ({'; '.join(differing)}): give a plan for that model"
            )
        check_base(stored, base_model_of(loaded.model.resolved(), loaded.job.seed, False))
    check_weights(loaded, False, checkpoint is not None)
    if log_probabilities is not None:
        make_writable(log_probabilities.parent, "--log-probabilities")
    say_what_runs(loaded.model.text)
    request = DataRequest.of(data.data, data.tokenizer, data.text_field)
    for source in request.sources if request is not None else ():
        say_what_runs(source.path)
    prepared_data = prepared(request, loaded)
    assert prepared_data is not None, "there is data"
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome.json"
        options = {
            "plan": str(Path(plan).resolve()), "data": prepared_data.model_dump(mode="json"), "outcome": str(outcome),
            "device": kind_of(device, loaded, loaded.num_ranks), "most_samples": data.samples,
            "start_timeout": start_timeout, "checkpoint": None if checkpoint is None else str(checkpoint.resolve()),
            "log_probabilities": None if log_probabilities is None else str(log_probabilities.resolve()),
        }  # fmt: skip
        words = [json.dumps(options)]
        start_plan(loaded, "stagewright.execution.evaluation_worker", words, start_timeout, can_stop=False)
        results = json.loads(outcome.read_text())
    tokens = results["num_tokens"]
    if tokens:
        results["perplexity"] = perplexity(results["loss"])
    if as_json:
        print_document(results)
        return
    of = "the model's own weights" if checkpoint is None else f"the checkpoint after step {results['step']}"
    over = f" over {plural(tokens, 'token')} (perplexity {results['perplexity']:,.4g})" if tokens else ""
    show(f"Loss {results['loss']:.4f}{over}, of {of}.")
    if log_probabilities is not None:
        show(f"Wrote {log_probabilities}.")
