"""Settings for torchtitan, Megatron-Bridge and DeepSpeed: of fields that these have, and read as the same configuration."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.export.differences import (
    PlanDifference,
    with_fields,
    with_layers,
    with_level,
    with_policy,
    with_predicted_time,
    with_schedule,
)
from stagewright.export.megatron import STACK as MEGATRON
from stagewright.export.reading import Reading, read_configuration
from stagewright.export.settings import settings_files
from stagewright.export.torchtitan import STACK as TITAN_STACK
from stagewright.export.torchtitan import known_keys
from stagewright.export.translation import Translation, translate
from stagewright.graph.split import split_graph
from stagewright.planning.estimate import estimate, graph_of
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.plan_stages import configuration_of, cut_names, stage_cuts, stage_program
from stagewright.schedule import read_torch_csv
from stagewright.tracing.models.reference import resolve

SMALL = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
JOB: dict[str, Any] = {"global_batch": 64, "sequence_length": 512}


@cache
def plan(runtime: str = "stagewright", dtype: Any = "bf16", model: str = "llama-3-8b", **widths: Any) -> Plan:
    host = widths.pop("host", False)
    job = Job(**JOB, runtime=runtime, dtype=dtype, compiled=widths.pop("compiled", False))
    options: Any = {"tp": 1, "pp": 4, "dp": 4, "zero": 1, "microbatch": 2} | widths
    cluster = load_cluster("2x8x-h100")
    found = estimate(resolve(model, SMALL), cluster, job, **options)
    return (
        estimate(found.model_copy(update={"host_optimizer": tuple(range(found.pp))}), cluster)
        if host
        else found
    )


def read(folder: Path, files: dict[str, str], name: str) -> Reading:
    for file, text in files.items():
        (folder / file).write_text(text)
    return read_configuration(folder / name)


TITAN: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"schedule": "interleaved-1f1b", "chunks": 2, "recompute": "full"},
    "uneven": {"layers_per_stage": (1, 3, 3, 1)},
    "one rank, sharded": {"pp": 1, "dp": 16, "zero": 3, "compiled": True, "recompute": "selective"},
    "groups": {"pp": 1, "dp": 16, "zero": 2, "shard_size": 8},
    "tensor": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "looped breadth first": {"schedule": "breadth-first", "chunks": 2},
    "V": {"schedule": "zb-v"},
    "copies": {"zero": None},
}


@pytest.mark.parametrize("way", TITAN)
def test_torchtitan_has_the_fields_and_they_are_read_as_the_same(tmp_path: Path, way: str) -> None:
    asked = plan("torch-fsdp", **TITAN[way])
    files, found = settings_files("torchtitan-0.2", asked)
    assert found.cost is None and files.keys() == {"train.toml"}
    check_fields(tomllib.loads(files["train.toml"]))
    back = read(tmp_path, files, "train.toml")
    assert back.notes == () and back.runtime == "torch-fsdp"
    assert back.job == {**JOB, "dtype": "bf16", "compiled": asked.job.compiled}
    assert vars(back.configuration) == {**vars(found.configuration), "dp": found.configuration.dp}


def check_fields(table: dict[str, Any]) -> None:
    """Every key is one of torchtitan's, with a value of its type."""
    types = {"str": str, "int": int, "float": float, "bool": bool}
    for section, keys in table.items():
        for key, value in keys.items():
            kind = known_keys()[section][key]
            names = [name.strip() for name in kind.split("|")] if kind[:7] != "Literal" else []
            if names and names[0] in types:
                assert type(value) in {types[name] for name in names if name in types}, (section, key, value)
            elif kind.startswith("Literal"):
                assert repr(value) in kind.replace('"', "'"), (section, key, value)
            else:
                assert kind.startswith("list") and isinstance(value, list), (section, key, value)


@pytest.mark.parametrize("to", ["torchtitan", "torchtitan-0.2"])
def test_breadth_first_order_of_one_stage_a_rank_is_a_file(to: str) -> None:
    single = plan(schedule="breadth-first", chunks=1, layers_per_stage=(2, 2, 2, 2))
    files, translation = settings_files(to, single)
    assert single.num_stages == 4
    assert not any("schedule" in difference for difference in translation.differences)
    order = stage_program(single).compute_only()
    assert read_torch_csv(files["schedule.csv"]).ranks == order.ranks


def test_pipelines_of_qwen3_are_of_version_3() -> None:
    pipelined = estimate(
        resolve("qwen3-8b", SMALL),
        load_cluster("2x8x-h100"),
        Job(**JOB, runtime="torch-fsdp"),
        pp=4,
        dp=4,
        tp=1,
        zero=1,
    )
    with pytest.raises(
        InputError, match=r"torchtitan-0\.2: it has no pipelines of Qwen3.*export to torchtitan"
    ):
        settings_files("torchtitan-0.2", pipelined)
    assert "torchtitan.models.qwen3 import" in settings_files("torchtitan", pipelined)[0]["train_config.py"]


def test_torchtitan_runs_an_order_as_it_is_written(tmp_path: Path) -> None:
    asked = plan(schedule="zb-h1", layers_per_stage=(2, 2, 2, 2))
    files, found = settings_files("torchtitan-0.2", asked)
    assert [one for one in found.differences if "order" in one] == []
    order = stage_program(asked).compute_only()
    assert read_torch_csv(files["schedule.csv"]).ranks == order.ranks
    back = read(tmp_path, files, "train.toml")
    assert back.configuration.program is not None and back.configuration.program.ranks == order.ranks
    again = estimate(asked.model.reference(), load_cluster("2x8x-h100"), found.plan.job, back.configuration)
    assert again.predictions.step_seconds == pytest.approx(found.plan.predictions.step_seconds)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("parallelism.pipeline_parallel_degree", "0", "pipeline_parallel_degree = 0: give a number of ranks"),
        ("parallelism.pipeline_parallel_degree", '"4"', "pipeline_parallel_degree = '4'"),
        ("parallelism.pipeline_parallel_schedule", '"1F1"', "did you mean '1F1B'"),
        ("parallelism.fsdp_reshard_after_forward", '"alway"', "did you mean 'always'"),
        ("activation_checkpoint.mode", '"some"', "give none, full, selective"),
        ("parallelism.module_fqns_per_model_part", '[["layers.0"]]', "1 stages, not a multiple"),
    ],
)
def test_what_is_wrong_with_a_toml_is_said_by_its_key(tmp_path: Path, key: str, value: str, why: str) -> None:
    files, _ = settings_files("torchtitan-0.2", plan("torch-fsdp"))
    table = tomllib.loads(files["train.toml"])
    section, _, name = key.partition(".")
    table[section][name] = tomllib.loads(f"value = {value}")["value"]
    lines = [
        f"[{one}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items())
        for one, keys in table.items()
    ]
    with pytest.raises(InputError, match=why):
        read(tmp_path, {"train.toml": "".join(lines)}, "train.toml")


def test_unknown_and_unpredicted_keys_of_a_toml_are_named(tmp_path: Path) -> None:
    text = "[training]\nseq_length = 4\nseq_len = 8\nenable_cpu_offload = true\n[metrics]\nlog_freq = 1\n"
    found = read(tmp_path, {"a.toml": text}, "a.toml")
    assert "training.seq_length is not known (did you mean 'training.seq_len'?)" in found.notes
    assert "training.enable_cpu_offload is not in the prediction" in found.notes
    assert (found.job["sequence_length"], found.num_without_influence) == (8, 1)


# Fields of Megatron-Bridge v0.6.0 and the Megatron-Core that it comes with.
BRIDGE = {
    "model": {
        "tensor_model_parallel_size", "sequence_parallel", "context_parallel_size", "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout", "expert_model_parallel_size",
        "expert_tensor_parallel_size", "seq_length", "recompute_granularity", "recompute_method", "recompute_num_layers",
        "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    },
    "dataset": {"seq_length"},
    "train": {"micro_batch_size", "global_batch_size", "train_iters"},
    "ddp": {
        "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32",
        "num_distributed_optimizer_instances",
    },
    "optimizer": {
        "lr", "min_lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad", "use_distributed_optimizer",
    },
    "scheduler": {
        "lr_warmup_iters", "lr_decay_style", "lr_wsd_decay_style", "lr_wsd_decay_iters", "start_weight_decay",
        "end_weight_decay",
    },
    "rng": {"seed"},
    "checkpoint": {"load"},
    "tokenizer": {"tokenizer_type", "vocab_size"},
}  # fmt: skip


def recipe(text: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the recipe makes, with modules in the place of Megatron-Bridge's."""
    config = SimpleNamespace(**{name: SimpleNamespace() for name in BRIDGE})
    bridge = SimpleNamespace(to_megatron_provider=lambda load_weights: SimpleNamespace())
    contents: dict[str, dict[str, Any]] = {
        "megatron": {},
        "megatron.bridge": {"AutoBridge": SimpleNamespace(from_hf_config=lambda config: bridge)},
        "megatron.bridge.recipes": {},
        "megatron.bridge.recipes.common": {"_pretrain_common": lambda: config},
        "megatron.bridge.training": {},
        "megatron.bridge.training.config": {"ConfigContainer": object},
        "megatron.bridge.training.gpt_step": {"forward_step": None},
        "megatron.bridge.training.pretrain": {"pretrain": None},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(text, "recipe.py", "exec"), names)
    return names["recipe"]()


@pytest.mark.parametrize(
    "widths",
    [
        {},
        {"schedule": "interleaved-1f1b", "chunks": 2, "recompute": "full"},
        {"layers_per_stage": (1, 3, 3, 1)},
    ],
)
def test_a_recipe_of_megatron_bridge_sets_the_plan(
    widths: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = plan("megatron-core+te", tp=2, dp=2, sequence_parallel=True, **widths)
    found = recipe(settings_files("megatron-bridge", asked)[0]["recipe.py"], monkeypatch)
    for section, fields in BRIDGE.items():
        assert set(vars(getattr(found, section))) <= fields, section
    model = vars(found.model)
    assert (model["tensor_model_parallel_size"], model["pipeline_model_parallel_size"]) == (2, 4)
    assert model.get("virtual_pipeline_model_parallel_size") == widths.get("chunks")
    assert model.get("pipeline_model_parallel_layout") == (
        "Et|(t*3|)*2tL" if "layers_per_stage" in widths else None
    )
    assert model.get("recompute_granularity") == widths.get("recompute")
    assert (found.train.micro_batch_size, found.train.global_batch_size) == (2, 64)
    assert found.ddp.use_distributed_optimizer and found.mixed_precision == "bf16_mixed"
    decay = (
        found.optimizer.weight_decay,
        found.scheduler.start_weight_decay,
        found.scheduler.end_weight_decay,
    )
    assert decay == (asked.job.weight_decay,) * 3
    assert found.rng.seed == 1 and found.checkpoint.load is None


def test_exports_to_megatron_balance_experts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"num_hidden_layers": 4, "num_experts": 8, "hidden_size": 256, "vocab_size": 1024}
    for extra, balancing in (({}, ("none", 0.0)), ({"output_router_logits": True}, ("aux_loss", 0.001))):
        mixture = estimate(
            resolve("qwen3-30b-a3b", experts | extra), load_cluster("2x8x-h100"),
            Job(**JOB, runtime="megatron-core+te"), pp=4, dp=4, tp=1, zero=1,
        )  # fmt: skip
        files, translation = settings_files("megatron", mixture)
        options = json.loads(files["argv.json"])
        assert options[options.index("--moe-router-load-balancing-type") + 1] == balancing[0]
        assert ("--moe-aux-loss-coeff" in options) == bool(extra)
        assert any("no loss balances the experts" in note for note in translation.notes) != bool(extra)
        model = recipe(settings_files("megatron-bridge", mixture)[0]["recipe.py"], monkeypatch).model
        assert (model.moe_router_load_balancing_type, model.moe_aux_loss_coeff) == balancing


@pytest.mark.parametrize(
    "widths",
    [{"zero": 3}, {"zero": None}, {"recompute": "full"}, {"reduce_dtype": "fp32"}],
)
def test_deepspeeds_json_is_read_as_the_same(tmp_path: Path, widths: dict[str, Any]) -> None:
    planned = plan(**{"pp": 1, "dp": 16, **widths})
    files, _ = settings_files("deepspeed", planned)
    reading = read(tmp_path, files, "deepspeed.json")
    assert (
        reading.notes == ()
        and reading.job == {"global_batch": 64, "dtype": "bf16"}
        and reading.runtime is None
    )
    # What is recomputed is in the model's code: DeepSpeed reads nothing of it.
    assert vars(reading.configuration) == {
        **vars(configuration_of(planned)), "layers_per_stage": None, "recompute": "none",
    }  # fmt: skip
    document = json.loads(files["deepspeed.json"])
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert document["train_batch_size"] == planned.dp * document[sizes[0]] * document[sizes[1]]
    assert ("gradient_checkpointing_enable" in files["README.md"]) == ("recompute" in widths)
    assert "number of steps and seed are the script's: 20 and 0" in files["README.md"]


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"train_batch_size": 0}, "train_batch_size = 0"),
        (
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            "not a multiple",
        ),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4"),
        ({"train_batch_size": 8, "bf16": True}, "bf16 = True: give a table"),
    ],
)
def test_what_is_wrong_with_a_json_is_said_by_its_key(
    tmp_path: Path, document: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        read(tmp_path, {"ds.json": json.dumps(document)}, "ds.json")


def test_what_deepspeed_has_beside_is_named(tmp_path: Path) -> None:
    document = {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto", "optimizer": {}, "autotuning": {},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "moe": {}, "pipeline": {"stages": 2},
    }  # fmt: skip
    found = read(tmp_path, {"ds.json": json.dumps(document)}, "ds.json")
    assert found.notes == (
        "train_micro_batch_size_per_gpu: auto, which the training script decides: microbatches of 1 are assumed",
        "pipeline.stages 2 is predicted with even layers; DeepSpeed takes it from the script's PipelineModule alone",
        "zero_optimization.offload_optimizer is not in the prediction",
        "moe is not in the prediction",
    )
    assert (found.configuration.zero, found.configuration.dp, found.num_without_influence) == (2, 0, 2)


def test_deepspeeds_blocks_of_false_and_auto_switch_nothing_on(tmp_path: Path) -> None:
    off = {
        "train_batch_size": 32,
        "bf16": {"enabled": False}, "fp16": False, "communication_data_type": None, "compression": None,
        "zero_optimization": {"stage": 1, "cpu_offload": False, "offload_param": {"device": "none"}},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None, "profile": False},
        "data_efficiency": {"enabled": False, "seed": 1}, "pipeline": {"activation_checkpoint_interval": 0},
    }  # fmt: skip
    reading = read(tmp_path, {"ds.json": json.dumps(off)}, "ds.json")
    assert reading.notes == () and reading.job["dtype"] == "fp32"
    assert (reading.configuration.recompute, reading.configuration.zero) == ("none", 1)
    auto = {
        "train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"},
        "pipeline": {"activation_checkpoint_interval": "auto"}, "activation_checkpointing": {"cpu_checkpointing": True},
    }  # fmt: skip
    reading = read(tmp_path, {"ds.json": json.dumps(auto)}, "ds.json")
    assert reading.job == {"dtype": "fp32"} and reading.configuration.zero is None
    assert [note.split(" ")[0] for note in reading.notes] == [
        "train_batch_size:", "zero_optimization.stage", "pipeline.activation_checkpoint_interval",
        "activation_checkpointing.cpu_checkpointing", "bf16.enabled",
    ]  # fmt: skip


def test_types_that_deepspeed_keeps_and_other_optimizers_are_named(tmp_path: Path) -> None:
    document = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "fp16": {"loss_scale": 0, "hysteresis": 2},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": False},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}},
    }  # fmt: skip
    reading = read(tmp_path, {"ds.json": json.dumps(document)}, "ds.json")
    assert reading.notes == (
        "bf16.bf16_master_weights_and_grads is not in the prediction",
        "optimizer OneBitAdam is predicted as AdamW",
    )
    assert reading.samples_per_replica == 8 and "global_batch" not in reading.job


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        (
            "a.yaml",
            "base_model: m/l\nsequence_len: 4096\nmicro_batch_size: 2\n",
            "a configuration of axolotl, which is not",
        ),
        (
            "a.yml",
            "model_name_or_path: m/l\nstage: sft\nfinetuning_type: full\n",
            "a configuration of LLaMA-Factory",
        ),
        (
            "a.yaml",
            "recipe: x\nmodel:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM\n",
            "a recipe of NeMo Automodel",
        ),
        (
            "a.yaml",
            "model:\n  seq_length: 8\ntrain:\n  train_iters: 2\n",
            "a configuration of Megatron-Bridge",
        ),
        (
            "a.py",
            "from megatron.bridge.recipes.llama import llama3_8b_pretrain_config\n",
            "a recipe of Megatron-Bridge",
        ),
        (
            "a.py",
            "from torchtitan.trainer import Trainer\n",
            "a configuration of torchtitan 0.3.*export to torchtitan-0.2",
        ),
        (
            "a.yaml",
            "x: 1\n",
            "YAML, which is not among the formats that are read: write its degrees as options",
        ),
    ],
)
def test_files_of_others_are_refused_by_name(tmp_path: Path, name: str, text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read(tmp_path, {name: text}, name)


@pytest.mark.parametrize("to", ["torchtitan", "megatron-bridge"])
def test_exports_that_are_not_read_back_say_so(tmp_path: Path, to: str) -> None:
    files, _ = settings_files(to, plan("torch-fsdp" if to == "torchtitan" else "megatron-core+te"))
    (name,) = files
    with pytest.raises(InputError, match="not among the formats that are read: give the plan"):
        read(tmp_path, files, name)


def test_options_of_our_own_are_read(tmp_path: Path) -> None:
    text = 'pp = 2\nlayers-per-stage = [3, 5]\nzero = 0\nglobal_batch = 8\nruntime = "torch-fsdp"\n'
    found = read(tmp_path, {"mine.toml": text}, "mine.toml")
    asked = found.configuration
    assert (asked.pp, asked.layers_per_stage, asked.zero) == (2, (3, 5), 0)
    assert found.runtime == "torch-fsdp" and found.job == {"global_batch": 8}
    for wrong, why in (
        ("ppp = 2", "unknown key 'ppp'"),
        ("pp = 0", "pp = 0: give a whole"),
        ("recompute = 1", "one of none"),
    ):
        with pytest.raises(InputError, match=why):
            read(tmp_path, {"mine.toml": wrong}, "mine.toml")


def test_what_a_stack_has_not_is_priced_as_estimate_does() -> None:
    asked = plan(schedule="zb-h1", layers_per_stage=(2, 2, 2, 2))
    found = translate(asked, MEGATRON)
    assert found.configuration.schedule in ("1f1b", "interleaved-1f1b") and found.cost is not None
    there = Job(**{**asked.job.model_dump(), "runtime": "megatron-core+te"})
    again = estimate(asked.model.reference(), load_cluster("2x8x-h100"), there, found.configuration)
    assert again.predictions == found.plan.predictions
    ratio = again.predictions.step_seconds / asked.predictions.step_seconds - 1
    assert f"({ratio:+.1%})" in found.cost


def changes(asked: Plan, change: Any, *arguments: Any) -> Plan:
    """`asked` with one thing otherwise, predicted."""
    changed = change(asked, graph_of(asked), *arguments)
    assert changed is not None
    return estimate(changed, load_cluster("2x8x-h100"))


LAYERS = (2, 2, 2, 2)


def in_whole_stages(widths: dict[str, Any]) -> Plan:
    """A plan, whose replicas gather stages as they are."""
    units = {"shard_units": 1} if widths.get("zero") in (2, 3) else {}
    return plan(**({"layers_per_stage": LAYERS} | widths | units))


@pytest.mark.parametrize(
    ("asked", "change", "given", "wanted"),
    [
        ({"schedule": "zb-h1"}, with_schedule, ("1f1b",), {"schedule": "1f1b"}),
        ({"schedule": "zb-h1", "zero": 3}, with_schedule, ("1f1b",), {"schedule": "1f1b", "zero": 3}),
        ({"layers_per_stage": (1, 3, 3, 1)}, with_layers, LAYERS, {}),
        ({"layers_per_stage": (1, 3, 3, 1), "recompute": "full"}, with_layers, LAYERS, {"recompute": "full"}),
        ({"zero": 2}, with_level, 1, {"zero": 1}),
        ({"zero": 0}, with_level, 3, {"zero": 3}),
        ({"zero": 3}, with_policy, "full", {"zero": 3, "recompute": "full"}),
        ({"recompute": "full"}, with_policy, "none", {}),
    ],
)  # fmt: skip
def test_a_plan_with_one_thing_otherwise_is_the_plan_of_that(
    asked: dict[str, Any], change: Any, given: Any, wanted: dict[str, Any]
) -> None:
    found = changes(in_whole_stages(asked), change, given)
    same = in_whole_stages(wanted)
    assert found.predictions.step_seconds == pytest.approx(same.predictions.step_seconds)
    assert (found.cuts, found.program, found.sharding) == (same.cuts, same.program, same.sharding)


def test_tensors_are_recomputed_by_the_stage_that_has_them_then() -> None:
    whole = plan(layers_per_stage=(1, 3, 3, 1), recompute="full")
    graph = graph_of(whole)
    stages = split_graph(graph, stage_cuts(whole, graph))
    names = [[graph.nodes[graph.values[value].node].name for value in stage.saved][:4] for stage in stages]
    names = [
        [name for name in own if name in {graph.nodes[node].name for node in graph.forward_ids}]
        for own in names
    ]
    policies = tuple(StagePolicy(recompute=tuple(own)) for own in names)
    found = with_layers(whole.model_copy(update={"memory_policy": policies}), graph, LAYERS)
    assert found is not None
    moved = [policy.recompute for policy in found.memory_policy if isinstance(policy, StagePolicy)]
    assert sorted(name for own in moved for name in own) == sorted(name for own in names for name in own)
    stage_program(found)


def test_each_difference_has_its_own_price() -> None:
    asked = plan(schedule="zb-h1", layers_per_stage=(1, 3, 3, 1), host=True, reduce_dtype="bf16", zero=None)
    found = translate(asked, MEGATRON)
    alone = {one.partition(":")[0]: one.partition(": alone ")[2] for one in found.differences}
    assert len(alone) == 2 and all(alone.values()), found.differences
    host = estimate(asked.model_copy(update={"host_optimizer": ()}), load_cluster("2x8x-h100"))
    ratio = host.predictions.step_seconds / asked.predictions.step_seconds - 1
    (told,) = (price for what, price in alone.items() if "on the host" in what)
    assert told.endswith(f"a step ({ratio:+.1%})")


def test_what_does_not_run_alone_has_no_price() -> None:
    asked = plan()
    assert (
        with_predicted_time(PlanDifference("something is otherwise"), asked, lambda stage: None)
        == "something is otherwise"
    )
    lost = with_fields(asked, cuts=("none:0",) * 3)
    assert (
        with_predicted_time(PlanDifference("it is cut elsewhere", lost), asked, lambda stage: None)
        == "it is cut elsewhere"
    )


def test_stages_without_a_whole_layer_are_what_differs() -> None:
    asked = plan(schedule="zb-v")
    graph = graph_of(asked)
    cuts = list(stage_cuts(asked, graph))
    cuts[2] = cuts[1] + 1
    found = translate(asked.model_copy(update={"cuts": cut_names(graph, cuts)}), TITAN_STACK)
    assert "some of the 8 stages have no whole layer under the plan, and there all have" in found.notes


def test_a_configuration_that_does_not_fit_is_refused_with_the_command_that_plans_for_it() -> None:
    roomy = plan(pp=1, dp=16, zero=3)
    limit = translate(roomy, MEGATRON).plan.predictions.reserved_peak_bytes - 1
    tight = roomy.model_copy(update={"job": roomy.job.model_copy(update={"memory_limit": limit})})
    with pytest.raises(InputError) as refused:
        translate(tight, MEGATRON)
    message = str(refused.value)
    assert (
        message.startswith("megatron: the nearest configuration that it runs needs ") and "%" not in message
    )
    words = shlex.split(message.partition("instead: ")[2])
    assert words[:3] == ["stagewright", "plan", "llama-3-8b"]
    options = dict(pairwise(words[3:]))
    assert (options["--cluster"], options["--runtime"]) == ("2x8x-h100", "megatron-core+te")
    assert (options["--global-batch"], options["--sequence-length"]) == ("64", "512")
    assert options["--memory-limit"] == str(limit) and "hidden_size=256" in words


def test_orders_of_stages_in_a_v_are_not_torchtitans() -> None:
    folded = plan(schedule="zb-v", layers_per_stage=(1,) * 8)
    searched = folded.model_copy(update={"schedule": "joint"})
    (difference,) = (one for one in translate(searched, TITAN_STACK).differences if "schedule" in one)
    assert difference.startswith("the schedule joint places stages otherwise than round the ranks")
    assert not any("schedule" in one for one in translate(folded, TITAN_STACK).differences)


def test_a_plan_that_goes_along_whole_costs_nothing() -> None:
    found = translate(plan("megatron-core+te"), MEGATRON)
    assert isinstance(found, Translation) and found.notes == () and found.plan == plan("megatron-core+te")


@pytest.mark.parametrize(
    ("to", "widths", "why"),
    [
        ("deepspeed", {"tp": 2, "dp": 8, "pp": 1}, "deepspeed: tp 2 has no counterpart"),
        ("deepspeed", {}, "deepspeed: pp 4 has no counterpart in its configuration: plan with --pp 1"),
        ("megatron", {"dtype": "fp32"}, "megatron-core.*does not train in fp32"),
        ("torchtitan", {"model": "mixtral-8x7b"}, "no 'mixtral' models"),
        (
            "megatron-bridge",
            {"model": "mixtral-8x7b"},
            "no bridge for model_type 'mixtral'; it has llama, mistral, ",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_with_the_reason(
    to: str, widths: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        settings_files(to, plan(**widths))
