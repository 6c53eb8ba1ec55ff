"""The graph of one rank at every width, against closed formulas of published decoders."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.estimation.operators import work
from stagewright.execution.preflight import refuse_what_is_not_run
from stagewright.graph import OperatorGraph
from stagewright.graph.expert_parallel import ALL_TO_ALL
from stagewright.graph.tensor_parallel import ALL_GATHER, COLLECTIVES, CONTEXT_GROUP, GROUP, group_of
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

SIZE, TOKENS, LAYERS, BYTES = 2, 256, 2, 2
WIDTHS = [(1, False, 1), (2, False, 1), (8, True, 1), (1, False, 2), (2, True, 2), (8, True, 2)]
# The larger ones differ from the second in sizes alone.
DECODERS_AND_WIDTHS = [
    *product(["llama-2-7b", "llama-3-8b", "qwen3-8b"], WIDTHS),
    *product(["llama-3-70b", "llama-3-405b"], WIDTHS[-1:]),
]


@cache
def traced(model: str, tp: int, splits: bool, cp: int) -> OperatorGraph:
    return trace(
        model, SIZE, TOKENS, "bfloat16", {"num_hidden_layers": LAYERS}, target="cuda", tp=tp, splits_sequence=splits, cp=cp
    )  # fmt: skip


def sizes(model: str) -> dict[str, Any]:
    config = resolve(model).config
    assert config is not None
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width = config.get("head_dim") or hidden // heads
    return {
        "hidden": hidden,
        "inner": config["intermediate_size"],
        "queries": heads * width,
        "keys": (config.get("num_key_value_heads") or heads) * width,
        "vocabulary": config["vocab_size"],
        "head_norms": 2 * width if config["model_type"].startswith("qwen3") else 0,
    }


@pytest.mark.parametrize(("model", "widths"), DECODERS_AND_WIDTHS)
def test_parameters_flop_and_collectives_of_a_rank_follow_closed_formulas(
    model: str, widths: tuple[int, bool, int]
) -> None:
    tp, splits, cp = widths
    graph, of = traced(model, *widths), sizes(model)
    hidden, queries, keys = of["hidden"], of["queries"], of["keys"]
    vocabulary = -(-of["vocabulary"] // tp)
    products = LAYERS * (hidden * (2 * queries + 2 * keys) + 3 * hidden * of["inner"]) // tp
    norms = LAYERS * (2 * hidden + of["head_norms"]) + hidden
    assert graph.num_parameters == products + norms + 2 * vocabulary * hidden
    tokens = SIZE * TOKENS // cp
    scores = SIZE * TOKENS * TOKENS // cp * queries // tp
    flop = 6 * tokens * (products + vocabulary * hidden) + LAYERS * 14 * scores
    assert sum(work(node, graph.values.__getitem__).flop for node in graph.nodes) == flop
    assert graph.facts["num_tokens"] == tokens

    moved: dict[str, list[int]] = {GROUP: [], CONTEXT_GROUP: []}
    for node in graph.nodes:
        if node.op in COLLECTIVES and "layers.1." in node.module:
            whole = node.outputs[0] if node.op == ALL_GATHER else node.inputs[0]
            assert whole is not None
            moved[group_of(node)[0]].append(graph.values[whole].meta.payload_bytes)
    residual, shared = BYTES * tokens * hidden, BYTES * SIZE * TOKENS * keys // tp
    large = [num_bytes for num_bytes in moved[GROUP] if num_bytes > BYTES * hidden]
    # Gathers in front of both halves of a layer, sums behind them, and the same for their gradients.
    assert large == ([residual] * (8 if splits else 4) if tp > 1 else [])
    assert moved[CONTEXT_GROUP] == ([shared] * 4 if cp > 1 else [])


MIXTURE_WIDTHS = [
    (1, False, 1, 1), (2, False, 1, 1), (1, False, 1, 4), (1, False, 2, 4), (2, False, 1, 4), (2, True, 1, 4),
    (4, True, 2, 8),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "widths", "way"),
    [
        *product(["mixtral-8x7b"], MIXTURE_WIDTHS, ["grouped"]),
        *product(["qwen3-30b-a3b"], MIXTURE_WIDTHS[2::2], ["grouped"]),
        *product(["mixtral-8x7b"], [(2, False, 1, 4), (2, True, 1, 1), (2, True, 1, 4)], ["split"]),
    ],
)
def test_experts_of_a_rank_follow_closed_formulas(
    model: str, widths: tuple[int, bool, int, int], way: str
) -> None:
    tp, splits, cp, ep = widths
    config, of = resolve(model).config, sizes(model)
    assert config is not None
    graph = trace(
        model, SIZE, TOKENS, "bfloat16", {"num_hidden_layers": LAYERS}, target="cuda", tp=tp, splits_sequence=splits, cp=cp,
        ep=ep, experts=way,
    )  # fmt: skip
    hidden, queries, keys = of["hidden"], of["queries"], of["keys"]
    num = config.get("num_experts") or config["num_local_experts"]
    active, inner = config["num_experts_per_tok"], config.get("moe_intermediate_size", of["inner"])
    splits_experts = ep == 1 or not splits or way == "split"
    shared = tp if splits_experts else 1  # ranks that hold a part of the features of every expert
    gathers = splits and ep == 1 and way == "grouped"  # for the router too
    vocabulary = -(-of["vocabulary"] // tp)
    attention = hidden * (2 * queries + 2 * keys) // tp
    norms = 2 * hidden + of["head_norms"]
    experts = num * 3 * hidden * inner // ep // shared
    layer = attention + norms + num * hidden + experts
    assert graph.num_parameters == LAYERS * layer + hidden + 2 * vocabulary * hidden

    tokens = SIZE * TOKENS // cp
    decided = tokens if gathers or not splits else tokens // tp
    routed = tokens if splits_experts else tokens // tp
    scores = SIZE * TOKENS * TOKENS // cp * queries // tp
    products = tokens * attention + decided * num * hidden + routed * active * 3 * hidden * inner // shared
    flop = LAYERS * (6 * products + 14 * scores) + 6 * tokens * vocabulary * hidden
    assert sum(work(node, graph.values.__getitem__).flop for node in graph.nodes) == flop

    sent = [
        graph.values[node.inputs[0]].meta.payload_bytes
        for node in graph.nodes
        if node.op == ALL_TO_ALL and "layers.1." in node.module
    ]
    copies = routed * active
    # Copies of tokens there and back, and their gradients, besides a weight and a number for each copy.
    assert sorted(sent)[-4:] == ([BYTES * copies * hidden] * 4 if ep > 1 else [])
    assert all(num_bytes <= 8 * copies for num_bytes in sorted(sent)[:-4])


def test_whoever_has_the_same_experts_shares_out_their_state() -> None:
    reference, cluster = resolve("tiny-mixtral"), load_cluster("8x-h100")
    job = Job(global_batch=8, sequence_length=64, runtime="megatron-core+te")

    def categories(ep: int, zero: int) -> Mapping[str, int]:
        return estimate(reference, cluster, job, pp=1, dp=8, ep=ep, zero=zero).predictions.ranks[0].categories

    graph = trace("tiny-mixtral", 1, 64, "bfloat16", target="cuda", experts="grouped")
    experts = sum(
        graph.values[value].meta.num_elements
        for name, value in graph.parameters.items()
        if ".experts." in name
    )
    rest = graph.num_parameters - experts
    near = pytest.approx
    for ep in (1, 2, 4):
        whole, shared = categories(ep, 0), categories(ep, 1)
        assert whole["parameters"] == near(BYTES * (rest + experts / ep), rel=0.01)
        assert whole["optimizer"] == near(8 * (rest + experts / ep), rel=0.01)
        # Eight ranks hold the rest, and every one in `ep` the same experts: all of it is in eight parts.
        assert shared["optimizer"] == near((rest + experts), rel=0.02)


def test_widths_that_cannot_share_experts_out_are_refused() -> None:
    cluster, job = load_cluster("8x-h100"), Job(global_batch=8, sequence_length=64)
    for model, widths, said in (
        ("tiny-llama", {"ep": 2, "dp": 2}, "no layer stores its experts"),
        ("tiny-mixtral", {"ep": 3, "dp": 4}, "ep 3 does not divide the 4 ranks"),
        ("tiny-mixtral", {"ep": 8, "dp": 8}, "does not divide the 4 experts"),
        ("tiny-mixtral", {"ep": 4, "dp": 2, "tp": 2}, "ep 4 does not divide the 2 ranks"),
        ("tiny-mixtral", {"ep": 1, "dp": 1, "tp": 1, "cp": 1}, None),
    ):
        if said is None:
            estimate(model, cluster, job, pp=1, **widths)
            continue
        with pytest.raises(InputError, match=said):
            estimate(model, cluster, job, pp=1, **widths)
    with pytest.raises(InputError, match="not a multiple of tp 4"):
        estimate("tiny-mixtral", cluster, job, pp=1, dp=2, tp=4, sequence_parallel=True, ep=2)
    split = estimate("tiny-mixtral", cluster, job, pp=1, dp=1, tp=2, sequence_parallel=True, ep=2)
    with pytest.raises(ValueError, match="ep 4 does not divide the 2 ranks of dp x cp x tp"):
        Plan.model_validate(split.model_dump() | {"ep": 4})
    found = estimate("tiny-mixtral", cluster, job, pp=1, dp=2, ep=2)
    with pytest.raises(InputError, match="expert parallelism is predicted, not run"):
        refuse_what_is_not_run(found, "plan.json")


@pytest.mark.parametrize("model", ["gpt2", "mixtral-8x7b", "qwen3-30b-a3b", "tiny-deepseek-v3"])
def test_ranks_that_divide_a_sequence_share_the_work_of_all_of_it(model: str) -> None:
    key = "n_layer" if model == "gpt2" else "num_hidden_layers"
    one, half = (
        trace(model, SIZE, TOKENS, "bfloat16", {key: 4}, target="cuda", cp=cp, attention="fused")
        for cp in (1, 2)
    )
    whole, part = (
        sum(work(node, graph.values.__getitem__).flop for node in graph.nodes) for graph in (one, half)
    )
    assert part * 2 == whole
    assert half.num_parameters == one.num_parameters


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("tiny-nemotron-h", {}, "outside of attention"),
        ("gemma-3-1b", {"num_hidden_layers": 3, "sequence_length": 1024}, "a window of 512"),
        ("tiny-llama", {"sequence_length": 250}, "choose a multiple"),
        ("tiny-gpt2", {"sequence_length": 1024}, "learned positions"),
        ("vit-huge", {"num_hidden_layers": 2}, "outside of attention"),
    ],
)
def test_sequences_that_cannot_be_divided_are_refused(model: str, changes: dict[str, Any], said: str) -> None:
    changes = dict(changes)
    tokens = changes.pop("sequence_length", TOKENS)
    with pytest.raises(InputError, match=said):
        trace(model, SIZE, tokens, "bfloat16", changes, target="cuda", cp=4)


def test_divided_sequences_are_estimated_with_as_many_tokens_and_less_memory() -> None:
    reference, cluster = resolve("tiny-llama"), load_cluster("4x-h100")
    job = Job(global_batch=8, sequence_length=512)
    found = {cp: estimate(reference, cluster, job, pp=2, dp=1, cp=cp, zero=1, microbatch=2) for cp in (1, 2)}
    one, two = found[1].predictions, found[2].predictions
    for made in (one, two):
        assert made.tokens_per_second * made.step_seconds == pytest.approx(8 * 512)
    assert found[2].num_ranks == 4
    saved = [max(stage.saved_bytes for stage in made.stages) for made in (one, two)]
    assert saved[1] < 0.7 * saved[0]
    assert two.ranks[0].categories["optimizer"] < 0.6 * one.ranks[0].categories["optimizer"]
    assert two.ranks[0].categories["parameters"] == pytest.approx(
        one.ranks[0].categories["parameters"], rel=0.01
    )
    with pytest.raises(InputError, match="predicted, not run"):
        refuse_what_is_not_run(found[2], "plan.json")
    with pytest.raises(InputError, match="x cp 4"):
        estimate(reference, cluster, job, pp=2, dp=1, cp=4)
    again = estimate(found[2], cluster)
    assert again.predictions.step_seconds == pytest.approx(two.step_seconds)


@pytest.mark.parametrize("splits", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks_that_share_layers_may_divide_sequences_that_attention_has_whole_on_each(splits: bool) -> None:
    def traced(tp: int, cp: int) -> OperatorGraph:
        return trace(
            "tiny-deepseek-v3", SIZE, TOKENS, "bfloat16", target="cuda", tp=tp, splits_sequence=splits, cp=cp,
            attention="fused",
        )  # fmt: skip

    def moved(graph: OperatorGraph, group: str) -> list[int]:
        calls = (node for node in graph.nodes if node.op in COLLECTIVES and group_of(node)[0] == group)
        return sorted(graph.values[node.inputs[0]].meta.payload_bytes for node in calls)

    whole, half, alone = traced(2, 1), traced(2, 2), traced(1, 2)
    flop = [sum(work(node, graph.values.__getitem__).flop for node in graph.nodes) for graph in (whole, half)]
    assert flop[0] == 2 * flop[1]
    of_tokens, of_all = ([size for size in moved(graph, GROUP) if size > 4096] for graph in (half, whole))
    assert of_tokens and [2 * size for size in of_tokens] == of_all  # gradients of norms are small
    assert moved(half, CONTEXT_GROUP) == moved(alone, CONTEXT_GROUP)
