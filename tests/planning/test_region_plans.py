"""Plans of models whose code checkpoints: by default they recompute what it says, and name just that."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.graph.split import split_graph
from stagewright.planning.estimate import estimate, graph_of, staged_model_of
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.plan_stages import stage_cuts, stage_policies
from stagewright.planning.prediction.regions import default_policies
from stagewright.planning.search import plan
from stagewright.report.graphs import graph_document, graph_summary
from stagewright.report.saved_values import saving_tables
from stagewright.tracing.models.reference import ModelReference, resolve

CLUSTER = load_cluster("8x-h100")
TWO = load_cluster("2x-h100")
ONE = load_cluster("1x-h100")
JOB = Job(global_batch=8, sequence_length=64, dtype="fp32")


def model(checkpointed: bool = True, **keys: object) -> ModelReference:
    return resolve("tiny-llama", {"num_hidden_layers": 4, "gradient_checkpointing": checkpointed, **keys})


def peaks(found: Plan) -> list[int]:
    return [rank.allocated_peak_bytes for rank in found.predictions.ranks]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_what_a_plan_names_is_what_was_predicted(pp: int) -> None:
    """The names lead to the same stages as the regions of the graph."""
    found = estimate(model(), CLUSTER, JOB, pp=pp, dp=1)
    graph = graph_of(found)
    cuts = stage_cuts(found, graph)
    assert split_graph(graph, cuts, stage_policies(found, graph)) == split_graph(
        graph, cuts, default_policies(graph, cuts)
    )
    assert peaks(estimate(found, CLUSTER)) == peaks(found)
    staged = staged_model_of(found, CLUSTER)
    assert [stage.recompute_seconds for stage in found.predictions.stages] == [
        summary.rebuild_s + summary.recompute_s for summary in staged.summaries
    ]


def test_what_the_user_says_goes_before_what_the_model_says() -> None:
    said = {
        how: estimate(model(), CLUSTER, JOB, pp=2, dp=1, recompute=how) for how in ("none", "model", "full")
    }  # type: ignore[arg-type]
    assert said["none"].memory_policy == ("keep", "keep")
    assert said["full"].memory_policy == ("layers", "layers")
    default = estimate(model(), CLUSTER, JOB, pp=2, dp=1)
    assert default.memory_policy == said["model"].memory_policy
    assert all(isinstance(policy, StagePolicy) for policy in default.memory_policy)
    assert max(peaks(default)) < max(peaks(said["none"]))
    plain = estimate(model(checkpointed=False), CLUSTER, JOB, pp=2, dp=1)
    assert plain.memory_policy == ("keep", "keep") and peaks(plain) == peaks(said["none"])


def test_the_search_keeps_to_the_model_unless_it_is_told_otherwise() -> None:
    fixed = {"pp": 2, "dp": 1, "microbatch": 2, "schedules": ("1f1b", "gpipe")}
    found = plan(model(), TWO, JOB, **fixed).plans
    assert all(isinstance(policy, StagePolicy) for one in found for policy in one.memory_policy)
    free = plan(model(), TWO, JOB, recompute="auto", **fixed).plans
    assert all(set(one.memory_policy) == {"keep"} for one in free)


def test_a_model_that_checkpoints_nothing_has_nothing_to_say() -> None:
    for ask in (plan, estimate):
        with pytest.raises(
            InputError, match=r"calls torch\.utils\.checkpoint nowhere: use auto, none or full"
        ):
            ask(model(checkpointed=False), TWO, JOB, pp=2, dp=1, recompute="model")


def test_where_the_models_checkpoints_do_not_fit_auto_is_named() -> None:
    (found,) = plan(model(), ONE, JOB, pp=1, dp=1, microbatch=8, schedules=("1f1b",)).plans
    limit = int(0.7 * peaks(found)[0])
    tight = JOB.model_copy(update={"memory_limit": limit})
    with pytest.raises(PlanError, match="--recompute auto may need less memory"):
        plan(model(), ONE, tight, pp=1, dp=1, microbatch=8, schedules=("1f1b",))


def test_sharded_units_and_split_backwards_recompute_what_the_model_says() -> None:
    for keys in ({"pp": 2, "dp": 4, "zero": 3}, {"pp": 2, "dp": 1, "schedule": "zb-h1"}):
        found = estimate(model(), CLUSTER, JOB, **keys)  # type: ignore[arg-type]
        graph = graph_of(found)
        cuts = stage_cuts(found, graph)
        named = stage_policies(found, graph)
        assert split_graph(graph, cuts, named) == split_graph(graph, cuts, default_policies(graph, cuts))
        assert peaks(estimate(found, CLUSTER)) == peaks(found)


def test_reports_say_how_many_regions_there_are_and_what_is_recomputed() -> None:
    found = estimate(model(), CLUSTER, JOB, pp=2, dp=1)
    graph = graph_of(found)
    assert graph_document(graph, 1.0)["num_regions"] == 4
    assert "4 regions by the model's own code" in text_of(graph_summary(graph_document(graph, 1.0)))
    stages, peaks_of_ranks = map(text_of, saving_tables(found))
    assert "with 1 microbatch in flight" in stages and "net.model" in peaks_of_ranks


def text_of(shown: object) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]
