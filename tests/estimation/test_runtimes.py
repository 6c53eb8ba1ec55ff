"""Other runtimes: rewritten graphs against what was published of them, and the files that describe them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.estimation.operators import Kernel, work
from stagewright.estimation.runtime import Runtime, load_runtime, runtime_names
from stagewright.estimation.stage_memory import StageMemory
from stagewright.execution.preflight import refuse_what_is_not_run
from stagewright.graph import OperatorGraph, Part
from stagewright.graph.fusion import FusionRule, fuse, is_kernel
from stagewright.graph.layers import even_layers, layer_begins, layer_cuts
from stagewright.graph.split import SplitGraph
from stagewright.graph.verify import verify_graph
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.prediction.regions import kept_policy, layers_policy, selective_policy
from stagewright.planning.search import plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

OTHERS = [name for name in runtime_names() if name != "stagewright"]
FUSED = [name for name in OTHERS if load_runtime(name).kernels]
MODELS = [
    "tiny-llama",
    "tiny-gpt2",
    "tiny-mixtral",
    "tiny-deepseek-v3",
    "tiny-gemma",
    "tiny-nemotron-h",
    "tiny-t5",
]
SIZE, TOKENS, HIDDEN, HEADS = 2, 64, 128, 4
GPT = {"n_embd": HIDDEN, "n_head": HEADS, "vocab_size": 512, "n_positions": TOKENS}


@cache
def traced(model: str, runtime: str, tp: int = 1, splits: bool = False, num_layers: int = 0) -> OperatorGraph:
    changes = dict(GPT) if num_layers else {}
    overrides = changes | {"n_layer": num_layers} if num_layers else {}
    attention = load_runtime(runtime).attention
    return trace(
        model,
        SIZE,
        TOKENS,
        "bfloat16",
        overrides,
        target="cuda",
        tp=tp,
        splits_sequence=splits,
        attention=attention,
    )


def product_flop(graph: OperatorGraph) -> float:
    found = [work(node, graph.values.__getitem__) for node in graph.nodes]
    return sum(one.flop for one in found if one.kernel is not Kernel.MEMORY)


@pytest.mark.parametrize("runtime", FUSED)
@pytest.mark.parametrize("model", MODELS)
def test_rewritten_graphs_compute_the_same_products_of_the_same_parameters(model: str, runtime: str) -> None:
    plain, profile = traced(model, runtime), load_runtime(runtime)
    found = profile.rewrite(plain)
    assert found.num_parameters == plain.num_parameters
    assert set(found.parameters) == set(plain.parameters)
    assert len(found.gradients) == len(plain.gradients)
    assert product_flop(found) == pytest.approx(product_flop(plain), rel=1e-12)
    assert sum(is_kernel(node.op) for node in found.nodes) >= 2
    assert sum(node.op.startswith("runtime.loss.") for node in found.nodes) == 2  # forward and backward
    assert len(found.nodes) < len(plain.nodes)
    verify_graph(fuse(plain, [kernel.rule for kernel in profile.kernels]))


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize(("tp", "splits"), [(1, False), (2, False), (2, True)])
def test_layers_of_megatron_keep_what_was_published(tp: int, splits: bool, how: str) -> None:
    """Korthikanti et al. 2022, table 2, and two statistics of two norms per token, in float32 as on GPUs."""

    def kept(num_layers: int) -> int:
        graph = load_runtime("megatron-lm").rewrite(traced("gpt2", "megatron-lm", tp, splits, num_layers))
        ways = {"none": kept_policy, "selective": selective_policy, "full": layers_policy}
        policy = ways[how](graph)
        return StageMemory(SplitGraph(graph, []).stages([policy])[0]).saved_bytes

    row, scores = TOKENS * SIZE * HIDDEN, 5 * HEADS * TOKENS * TOKENS * SIZE
    statistics = 16 * TOKENS * SIZE // (tp if splits else 1)
    shared = 34 / tp if splits else 10 + 24 / tp
    expected = {
        "none": shared * row + scores / tp + statistics,
        "selective": shared * row + statistics,
        "full": 2 * row / (tp if splits else 1),
    }
    assert kept(5) - kept(4) == expected[how]


def test_layers_of_megatron_core_keep_what_their_modules_save() -> None:
    """Two residuals, two norms' results and statistics, joined projections, rotated queries and keys, the results of
    attention and of the activation; every gradient is added up inside a product."""
    graph = load_runtime("megatron-core+te").rewrite(traced("tiny-llama", "megatron-core+te"))
    config = resolve("tiny-llama").config
    assert config is not None
    hidden, inner, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    width = config.get("head_dim") or hidden // heads
    keys = config["num_key_value_heads"] * width
    queries = heads * width
    each = 2 * (4 * hidden + 2 * queries + 3 * keys + queries + 3 * inner) + 2 * 4 + 4 * heads
    begins = layer_begins(graph)
    cuts = [begins[1], begins[2]]
    middle = StageMemory(SplitGraph(graph, cuts).stages()[1])
    received = 2 * hidden * SIZE * TOKENS  # the residual that enters belongs to the stage before
    assert middle.saved_bytes == each * SIZE * TOKENS - received
    assert all(
        graph.values[value].meta.num_elements == 0
        for made in graph.contributions.values()
        for node, value in made
        if graph.nodes[node].op.startswith("runtime.joined products")
    )


def test_what_would_run_in_circles_stays_apart() -> None:
    """A residual sum in front of a norm and the one behind it cannot be one kernel, as the layer between needs the norm."""
    graph = traced("tiny-llama", "stagewright")
    names = frozenset({"mul", "add", "pow", "mean", "_to_copy"})
    greedy = FusionRule("greedy", frozenset({"rsqrt"}), names, within="model")
    found = fuse(graph, [greedy])
    verify_graph(found)
    assert product_flop(found) == pytest.approx(product_flop(graph), rel=1e-12)
    kernels = [node for node in found.nodes if is_kernel(node.op) and node.part is Part.FORWARD]
    assert len(kernels) == 2 * len(layer_begins(graph)) + 1


def test_a_gated_activation_reads_both_halves_of_a_joined_product() -> None:
    graph = load_runtime("megatron-core+te").rewrite(traced("tiny-llama", "megatron-core+te"))
    config = resolve("tiny-llama").config
    assert config is not None
    size = 2 * SIZE * TOKENS * config["intermediate_size"]
    moved = {
        node.part: work(node, graph.values.__getitem__).bytes_moved
        for node in graph.nodes
        if node.op.startswith("runtime.gated activation")
    }
    assert moved == {Part.FORWARD: 3 * size, Part.INPUT_GRAD: 5 * size}


def test_stages_of_so_many_layers() -> None:
    graph = traced("tiny-llama", "stagewright")
    num_layers = len(layer_begins(graph))
    assert num_layers == 6 and even_layers(graph, 4) == (2, 2, 1, 1)
    assert layer_cuts(graph, (0, num_layers)) == (layer_begins(graph)[0],)
    last = layer_cuts(graph, (num_layers, 0))[0]
    assert not graph.nodes[graph.forward_ids[last]].module.startswith("net.model.layers")
    with pytest.raises(PlanError, match="add up"):
        layer_cuts(graph, (1, num_layers))
    with pytest.raises(PlanError, match="cannot fill"):
        even_layers(graph, num_layers + 1)


# -- files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_every_figure_of_a_bundled_runtime_has_a_source(name: str) -> None:
    found = load_runtime(name)
    unsourced = [figure for figure in found.figures() if not found.source_of(figure)]
    assert all(_is_default(found, figure) for figure in unsourced)
    assert found.about and found.dtypes


def _is_default(runtime: Runtime, figure: str) -> bool:
    first, _, rest = figure.partition(".")
    own, plain = getattr(runtime, first), getattr(Runtime(name="plain"), first)
    return (getattr(own, rest) == getattr(plain, rest)) if rest else own == plain


def test_a_file_of_ones_own_changes_a_bundled_runtime(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'based_on = "megatron-lm"\n[host]\nkernel_s = 2e-5\n[[kernels]]\nname = "gelu"\naround = ["erf"]\n'
    )
    mine, base = load_runtime(str(file)), load_runtime("megatron-lm")
    assert mine.host.kernel_s == 2e-5 and mine.host.pass_s == base.host.pass_s
    assert {kernel.name for kernel in mine.kernels} == {kernel.name for kernel in base.kernels}
    assert next(kernel for kernel in mine.kernels if kernel.name == "gelu").around == {"erf"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('based_on = "megatron-ml"', "megatron-lm"),
        ("kernel_s = 1", "unknown key 'kernel_s'"),
        ("[host]\nkernel_s = -1", "kernel_s"),
        ('transfers = "never"', "overlapped"),
        ('[[kernels]]\nname = "a"\naround = []', "at least 1"),
        ('[[kernels]]\nname = "a"\naround = ["mm"]', "FLOP"),
        ('[[kernels]]\nname = "a"\naround = ["bmm"]\nkind = "matmul"', "mm and addmm"),
        ('[[kernels]]\nname = "a"\naround = ["x"]\n[[kernels]]\nname = "a"\naround = ["y"]', "of its own"),
        ('dtypes = ["foo"]', "dtypes"),
    ],
)
def test_bad_files_are_refused_with_the_remedy(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=said):
        load_runtime(str(file))


def test_unknown_runtimes_name_the_nearest() -> None:
    with pytest.raises(InputError, match=r"did you mean 'megatron-core\+te'"):
        load_runtime("megatron-core")


# -- estimates ----------------------------------------------------------------------------------------------------------


def job(runtime: str, **changes: object) -> Job:
    return Job(global_batch=8, sequence_length=TOKENS, dtype="fp16", runtime=runtime, **changes)  # type: ignore[arg-type]


def test_a_runtime_that_waits_for_transfers_and_gradients_is_slower() -> None:
    reference = resolve("tiny-gpt2", {"n_positions": TOKENS})
    cluster = load_cluster("2x-a100-80")
    own = estimate(reference, cluster, job("stagewright"), pp=2, dp=1, recompute="full").predictions
    other = estimate(reference, cluster, job("megatron-lm"), pp=2, dp=1, recompute="full").predictions
    assert own.costs.recompute_seconds and not other.costs.recompute_seconds
    assert other.costs.transfers[0].value_seconds == 0 < own.costs.transfers[0].value_seconds
    assert other.step_seconds > own.step_seconds


def test_selective_recomputation_keeps_less_than_none_and_more_than_full() -> None:
    reference, cluster = resolve("tiny-gpt2", {"n_positions": TOKENS}), load_cluster("2x-a100-80")
    made = [
        estimate(reference, cluster, job("megatron-lm"), pp=2, dp=1, recompute=how)  # type: ignore[arg-type]
        for how in ("full", "selective", "none")
    ]
    peaks = [max(stage.saved_bytes for stage in one.predictions.stages) for one in made]
    assert peaks == sorted(set(peaks))
    for one in made:
        again = estimate(one, cluster).predictions
        assert again.step_seconds == pytest.approx(one.predictions.step_seconds)
        assert [rank.allocated_peak_bytes for rank in again.ranks] == [
            rank.allocated_peak_bytes for rank in one.predictions.ranks
        ]
    with pytest.raises(InputError, match="only for other runtimes"):
        estimate(reference, cluster, job("stagewright"), pp=2, dp=1, recompute="selective")
    with pytest.raises(InputError, match="never stores"):
        estimate(reference, cluster, job("megatron-core+te"), pp=2, dp=1, recompute="selective")


def test_gradients_and_state_have_the_runtimes_types() -> None:
    reference, cluster = resolve("tiny-gpt2", {"n_positions": TOKENS}), load_cluster("1x-a100-80")
    found = {
        name: estimate(reference, cluster, job(name), pp=1, dp=1).predictions.ranks[0].categories
        for name in ("stagewright", "megatron-lm", "megatron-core+te")
    }
    half = found["stagewright"]["parameters"]
    assert [found[name]["gradients"] // half for name in found] == [2, 1, 2]
    assert {found[name]["master"] // half for name in found} == {2}


def test_plans_of_other_runtimes_are_found_but_not_run() -> None:
    reference, cluster = resolve("tiny-gpt2", {"n_positions": TOKENS}), load_cluster("2x-a100-80")
    found = plan(reference, cluster, job("megatron-lm")).plans[0]
    with pytest.raises(InputError, match="Stagewright does not run"):
        refuse_what_is_not_run(found, "plan.json")
    with pytest.raises(InputError, match="does not train in fp32"):
        estimate(reference, cluster, job("megatron-lm").model_copy(update={"dtype": "fp32"}))
    with pytest.raises(InputError, match="leave out --compiled"):
        estimate(reference, cluster, job("megatron-lm", compiled=True))
    made = estimate(reference, cluster, job("megatron-lm"), pp=2, dp=1)
    with pytest.raises(InputError, match="Stagewright does not run"):
        refuse_what_is_not_run(made, "plan.json")


def test_given_layers_per_stage_and_chunks_are_taken() -> None:
    reference, cluster = resolve("tiny-gpt2", {"n_positions": TOKENS}), load_cluster("2x-a100-80")
    num_layers = len(layer_begins(traced("tiny-gpt2", "stagewright")))
    made = estimate(reference, cluster, job("stagewright"), pp=2, dp=1, layers_per_stage=(1, num_layers - 1))
    assert made.cuts[0].startswith("net.transformer.h.1.")
    made = estimate(reference, cluster, job("stagewright"), pp=2, dp=1, schedule="interleaved-1f1b", chunks=2)
    assert made.num_stages == 4
    with pytest.raises(PlanError, match="for 2 stages"):
        estimate(reference, cluster, job("stagewright"), pp=2, dp=1, layers_per_stage=(num_layers,))
    with pytest.raises(PlanError, match="only the first and the last"):
        layer_cuts(traced("tiny-gpt2", "stagewright"), (1, 0, num_layers - 1))


def test_what_runs_beside_computations_takes_less(tmp_path: Path) -> None:
    reference, cluster = resolve("tiny-gpt2", {"n_positions": TOKENS}), load_cluster("2x2x-a100-80")
    seconds = []
    for flags in (
        "",
        "overlaps_reduction = true",
        'overlaps_reduction = true\noverlapped_collectives = "all"',
    ):
        file = tmp_path / f"{len(seconds)}.toml"
        file.write_text(f'based_on = "megatron-core+te"\n{flags}\n')
        found = estimate(
            reference, cluster, job(str(file)), pp=1, dp=2, tp=2, sequence_parallel=True, zero=1
        ).predictions  # fmt: skip
        costs = found.costs
        seconds.append((costs.reduce_seconds[0], costs.optimizer_seconds[0], costs.forward_seconds[0]))
    plain, reduced, all_beside = seconds
    assert reduced[0] < plain[0] and reduced[1] < plain[1] and reduced[2] == plain[2]
    assert all_beside[2] <= reduced[2] and all_beside[:2] == reduced[:2]


def test_optimizers_that_check_afterwards_let_ranks_go_on() -> None:
    reference, cluster = resolve("tiny-gpt2", {"n_positions": TOKENS}), load_cluster("2x-a100-80")
    split, whole = (
        estimate(reference, cluster, job("zero-bubble"), pp=2, dp=1, schedule=name).predictions.costs
        for name in ("zb-h1", "1f1b")
    )
    assert split.checks_after and not whole.checks_after


def test_what_a_host_does_once_per_step_is_in_the_step(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text('based_on = "stagewright"\n[host]\nstep_s = 1.0\n')
    reference, cluster = resolve("tiny-gpt2", {"n_positions": TOKENS}), load_cluster("1x-a100-80")
    slow, own = (
        estimate(reference, cluster, job(name), pp=1, dp=1).predictions for name in (str(file), "stagewright")
    )
    assert slow.step_seconds == pytest.approx(own.step_seconds + 1.0, rel=0.02)


def test_a_changed_figure_loses_the_source_of_its_base(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('based_on = "megatron-lm"\n[host]\nkernel_s = 2e-5\n')
    assert load_runtime(str(file)).source_of("host.kernel_s") is None
    assert load_runtime(str(file)).source_of("host.pass_s")


def test_parameters_that_move_into_buffers_leave_holes(tmp_path: Path) -> None:
    file = tmp_path / "still.toml"
    file.write_text('based_on = "megatron-core+te"\n[optimizer]\nmoves_parameters = false\n')

    def rank(runtime: str, zero: int) -> tuple[int, int]:
        job = Job(global_batch=8, sequence_length=1024, runtime=runtime)
        made = estimate("gpt2", load_cluster("2x-h100"), job, pp=1, dp=2, zero=zero, microbatch=4)
        (found,) = made.predictions.ranks
        return found.allocated_peak_bytes, found.reserved_peak_bytes

    moved, still = rank("megatron-core+te", 1), rank(str(file), 1)
    assert moved[0] == still[0] < still[1] < moved[1] < 1.3 * still[1]
    assert rank("megatron-core+te", 0) == rank(str(file), 0)


def test_gradients_of_bf16_are_added_up_in_fp32_where_fp16_ones_are_not() -> None:
    precision = load_runtime("megatron-deepspeed").precision
    assert [precision(dtype).gradient for dtype in ("float16", "bfloat16")] == ["float16", "float32"]


def test_gradients_as_made_stay_beside_those_in_fp32() -> None:
    def gradients(runtime: str, dtype: str) -> int:
        job = Job(global_batch=4, sequence_length=64, runtime=runtime, dtype=dtype)
        made = estimate("tiny-gpt2", load_cluster("2x-a100-80"), job, pp=1, dp=2, zero=1)
        return made.predictions.ranks[0].categories["gradients"]

    megatron, deepspeed = gradients("megatron-deepspeed", "bf16"), gradients("deepspeed", "bf16")
    assert deepspeed == pytest.approx(1.5 * megatron, rel=0.02)
    assert gradients("megatron-deepspeed", "fp16") == gradients("deepspeed", "fp16")


@pytest.mark.parametrize("runtime", ["deepspeed", "torch-fsdp"])
def test_one_stage_that_recomputes_and_does_not_fit_is_predicted(runtime: str) -> None:
    cluster = load_cluster("1x-a100-80", {"device.memory_bytes": 1_000_000_000})
    job = Job(global_batch=8, sequence_length=64, dtype="bf16", runtime=runtime)
    found = estimate("tiny-gpt2", cluster, job, dp=1, pp=1, microbatch=8, recompute="full")
    assert found.memory_policy == ("layers",)
    small = estimate("gpt2", cluster, job, dp=1, pp=1, microbatch=8, recompute="full")
    assert small.predictions.ranks[0].reserved_peak_bytes > cluster.device.usable_bytes
