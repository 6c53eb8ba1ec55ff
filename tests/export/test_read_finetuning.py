"""Fine-tunings that people have: what axolotl, LLaMA-Factory, TRL and unsloth were told is what `finetune` is asked for."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.errors import InputError
from stagewright.export.read_finetuning import FinetuneReading, read_finetuning

ALL = "gate_proj,down_proj,up_proj,q_proj,v_proj,k_proj,o_proj"
_AXOLOTL = {
    "model_type": "AutoModelForCausalLM", "adapter": "lora", "lora_dropout": 0.05, "val_set_size": 0.05,
    "sequence_len": 4096, "sample_packing": True, "lora_target_linear": True, "gradient_accumulation_steps": 4,
    "micro_batch_size": 2, "optimizer": "adamw_torch", "lr_scheduler": "cosine", "learning_rate": 0.0002, "bf16": "auto",
    "warmup_ratio": 0.1, "weight_decay": 0.0, "gradient_checkpointing": True, "wandb_project": None, "saves_per_epoch": 1,
    "output_dir": "./outputs/out", "special_tokens": {"pad_token": "<pad>"}, "flash_attention": True, "lora_r": 32,
    "lora_alpha": 16,
}  # fmt: skip
_FACTORY = {
    "trust_remote_code": True, "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8,
    "lora_target": "all",
    "dataset": "identity", "cutoff_len": 2048, "preprocessing_num_workers": 16, "output_dir": "saves", "logging_steps": 10,
    "plot_loss": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": "1.0e-4",
    "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True, "ddp_timeout": 180000000,
    "packing": True, "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507",
}  # fmt: skip
_OF_FACTORY = {
    "lora": 8, "lora_alpha": 16, "lora_targets": "all-linear", "sequence_length": 2048, "global_batch": 8, "epochs": 3,
    "learning_rate": 1e-4, "lr_schedule": "cosine", "warmup_ratio": 0.1, "base": "bf16", "held_out": 0,
}  # fmt: skip


def axolotl(model: str, kind: str = "alpaca", **settings: Any) -> dict[str, Any]:
    return {"base_model": model, "datasets": [{"path": "data.jsonl", "type": kind}], **_AXOLOTL, **settings}


def factory(**settings: Any) -> dict[str, Any]:
    return {**_FACTORY, **settings}


READ: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "axolotl llama-3/lora-1b": (
        axolotl(
            "NousResearch/Llama-3.2-1B",
            lora_r=16,
            lora_alpha=32,
            lora_target_linear=None,
            lora_target_modules=ALL.split(","),
            sequence_len=2048,
            val_set_size=0.1,
            gradient_accumulation_steps=2,
            num_epochs=1,
            optimizer="adamw_8bit",
            loss_watchdog_threshold=5.0,
        ),
        {
            "lora": 16,
            "lora_alpha": 32,
            "lora_targets": ALL,
            "sequence_length": 2048,
            "held_out": 0.1,
            "global_batch": 4,
            "epochs": 1,
            "base": "bf16",
        },
        ["optimizer"],
    ),
    "axolotl llama-3/qlora": (
        axolotl(
            "NousResearch/Meta-Llama-3-8B",
            adapter="qlora",
            load_in_4bit=True,
            load_in_8bit=False,
            val_set_size=0,
            num_epochs=4,
            optimizer="paged_adamw_32bit",
        ),
        {
            "lora": 32,
            "lora_alpha": 16,
            "lora_targets": "all-linear",
            "held_out": 0,
            "base": "nf4",
            "epochs": 4,
            "global_batch": 8,
        },
        [],
    ),
    "axolotl llama-3/instruct-lora-8b": (
        axolotl(
            "NousResearch/Meta-Llama-3-8B-Instruct",
            "chat_template",
            load_in_8bit=True,
            sample_packing=False,
            chat_template="llama3",
            num_epochs=4,
            optimizer="adamw_bnb_8bit",
        ),
        {"base": "int8", "global_batch": 8, "sequence_length": 4096, "lora_dropout": 0.05},
        ["sample_packing", "chat template", "optimizer"],
    ),
    "axolotl mistral/lora": (
        axolotl(
            "mistralai/Mistral-7B-v0.1",
            load_in_8bit=True,
            sequence_len=8192,
            num_epochs=1,
            lora_target_modules=ALL.split(","),
        ),
        {"sequence_length": 8192, "lora_targets": "all-linear", "base": "int8", "epochs": 1},
        [],
    ),
    "axolotl qwen3/32b-qlora": (
        axolotl(
            "Qwen/Qwen3-32B",
            adapter="qlora",
            load_in_4bit=True,
            lora_r=16,
            lora_alpha=32,
            lora_target_linear=None,
            lora_target_modules=["q_proj", "k_proj"],
            micro_batch_size=1,
            gradient_accumulation_steps=2,
            num_epochs=1,
            optimizer="adamw_torch_4bit",
            plugins=["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
            lora_mlp_kernel=True,
            tf32=True,
            lora_dropout=None,
            gradient_checkpointing="offload",
            datasets=[
                {
                    "path": "data.jsonl",
                    "type": "chat_template",
                    "split": "train[:20%]",
                    "field_messages": "conversations",
                    "message_property_mappings": {"role": "from", "content": "value"},
                }
            ],
        ),
        {"lora_targets": "q_proj,k_proj", "base": "nf4", "global_batch": 2, "lora_dropout": 0},
        ["optimizer", "plugins", "datasets[0].split"],
    ),
    "axolotl gemma3/gemma-3-1b-qlora": (
        axolotl(
            "google/gemma-3-1b-it",
            "chat_template",
            adapter="qlora",
            load_in_4bit=True,
            micro_batch_size=1,
            num_epochs=4,
            unfrozen_parameters=["^lm_head.*"],
            eot_tokens=["<end_of_turn>"],
            ddp_find_unused_parameters=True,
        ),
        {"base": "nf4", "global_batch": 4},
        ["unfrozen_parameters"],
    ),
    "axolotl gpt-oss-20b-sft-lora-singlegpu": (
        axolotl(
            "openai/gpt-oss-20b",
            "chat_template",
            lora_r=8,
            gradient_accumulation_steps=8,
            micro_batch_size=1,
            bf16=True,
            lr_scheduler="constant_with_warmup",
            learning_rate="2e-4",
            activation_offloading=True,
            num_epochs=1,
            model_quantization_config="Mxfp4Config",
            val_set_size=0,
        ),
        {
            "lora": 8,
            "lora_alpha": 16,
            "lr_schedule": "constant",
            "warmup_ratio": 0.1,
            "learning_rate": 2e-4,
            "global_batch": 8,
        },
        ["model_quantization_config"],
    ),
    "axolotl with a text": (
        axolotl(
            "meta-llama/Llama-3.1-8B",
            max_steps=100,
            warmup_steps=10,
            adam_beta2=0.95,
            max_grad_norm=0.5,
            seed=7,
            fp16=True,
            bf16=False,
            cosine_min_lr_ratio=0.1,
            datasets=[{"path": "data.jsonl", "type": "completion", "field": "body"}, {"path": "b.jsonl"}],
        ),
        {"steps": 100, "warmup_steps": 10, "text_field": "body", "seed": 7, "base": "fp16"},
        ["datasets[1]"],
    ),
    "LLaMA-Factory train_lora/qwen3_lora_sft": (
        factory(dataset="identity,alpaca_en_demo", template="qwen3_nothink", max_samples=1000, packing=None),
        _OF_FACTORY,
        ["packing", "dataset", "chat template", "max_samples"],
    ),
    "LLaMA-Factory train_lora/qwen3_lora_pretrain": (factory(stage="pt"), _OF_FACTORY, []),
    "LLaMA-Factory train_lora/qwen3_lora_sft_ds3": (
        factory(deepspeed="examples/deepspeed/ds_z3_config.json", gradient_accumulation_steps=2),
        {**_OF_FACTORY, "global_batch": 2},
        [],
    ),
    "LLaMA-Factory train_qlora/qwen3_lora_sft_otfq": (
        factory(quantization_bit=4, quantization_method="bnb"),
        {**_OF_FACTORY, "base": "nf4"},
        [],
    ),
    "LLaMA-Factory extras/fsdp_qlora/llama3_lora_sft": (
        factory(quantization_bit=8, val_size=0.1),
        {**_OF_FACTORY, "base": "int8", "held_out": 0.1},
        [],
    ),
    "LLaMA-Factory extras/loraplus/llama3_lora_sft": (
        factory(loraplus_lr_ratio=16.0),
        _OF_FACTORY,
        ["loraplus_lr_ratio"],
    ),
    "LLaMA-Factory extras/pissa/llama3_lora_sft": (
        factory(pissa_init=True, pissa_iter=16),
        _OF_FACTORY,
        ["pissa_init", "pissa_iter"],
    ),
    "LLaMA-Factory with names of layers": (
        factory(
            lora_target="q_proj, v_proj",
            lora_alpha=64,
            num_train_epochs=None,
            learning_rate=None,
            lr_scheduler_type=None,
        ),
        {
            "lora_targets": "q_proj,v_proj",
            "lora_alpha": 64,
            "epochs": 3,
            "learning_rate": 5e-5,
            "lr_schedule": "linear",
        },
        [],
    ),
    "TRL's sft.yaml": (
        {
            "model_name_or_path": "Qwen/Qwen2-0.5B",
            "dataset_name": "data.jsonl",
            "use_peft": True,
            "lora_r": 32,
            "lora_alpha": 16,
            "packing": True,
            "max_length": 512,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "max_steps": 30,
            "load_in_4bit": True,
        },
        {
            "lora": 32,
            "lora_alpha": 16,
            "sequence_length": 512,
            "global_batch": 16,
            "steps": 30,
            "base": "nf4",
            "learning_rate": 2e-5,
            "lr_schedule": "linear",
            "lora_dropout": 0.05,
        },
        [],
    ),
}
UNSLOTH = """
    from unsloth import FastLanguageModel
    max_seq_length = 1024
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name="unsloth/Llama-3.2-1B", max_seq_length=max_seq_length, dtype=None, load_in_4bit=True)
    model = FastLanguageModel.get_peft_model(
        model, r=64, target_modules=["q_proj", "k_proj"], lora_alpha=128, lora_dropout=0, use_rslora=True)
    trainer = SFTTrainer(
        model=model, train_dataset=dataset, dataset_text_field="body", packing=True,
        args=SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, warmup_steps=5, max_steps=60,
                       learning_rate=2e-4, optim="adamw_8bit", weight_decay=0.01, lr_scheduler_type="linear", seed=3407))
"""
TRL = """
    from trl import SFTConfig, SFTTrainer
    RANK = 4
    trainer = SFTTrainer(
        "Qwen/Qwen3-0.6B", train_dataset=load_dataset("data.jsonl"),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"),
        args=SFTConfig(max_length=256, num_train_epochs=2, bf16=True, packing=True))
"""


def read(path: Path, settings: dict[str, Any]) -> FinetuneReading:
    path.write_text(yaml.safe_dump(settings))
    (path.parent / "data.jsonl").write_text("{}")
    return read_finetuning(path)


def left_out(reading: FinetuneReading) -> set[str]:
    """By the names of their settings, but for what every file has: its batch, and a data set that is not here."""
    names = {
        note.partition(" ")[0] if "chat template" not in note else "chat template" for note in reading.notes
    }
    return names - {"micro_batch_size", "per_device_train_batch_size"}


@pytest.mark.parametrize("name", READ)
def test_model_adapters_data_batch_and_training_are_read_and_the_rest_is_named(
    name: str, tmp_path: Path
) -> None:
    settings, wanted, missing = READ[name]
    reading = read(tmp_path / "config.yaml", settings)
    assert reading.what in name
    assert reading.model == settings.get("base_model", settings.get("model_name_or_path"))
    assert {key: reading.options[key] for key in wanted} == wanted
    assert left_out(reading) == {*missing, *({"dataset"} if "LLaMA-Factory" in name else ())}
    if "axolotl" in name:
        assert reading.options["data"] == str(tmp_path / "data.jsonl")
    assert reading.job["betas"] == (0.9, settings.get("adam_beta2", 0.999))
    assert reading.job["clip_norm"] == settings.get("max_grad_norm", 1.0)


def test_registered_data_of_llama_factory_is_found(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}}')
    (tmp_path / "data" / "mine.json").write_text("[]")
    (tmp_path / "examples").mkdir()
    reading = read(tmp_path / "examples" / "a.yaml", factory(dataset="mine"))
    assert reading.options["data"] == str(tmp_path / "data" / "mine.json") and left_out(reading) == set()


def test_scripts_are_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "unsloth.py").write_text(dedent(UNSLOTH) + "raise SystemExit(3)\n")
    reading = read_finetuning(tmp_path / "unsloth.py")
    assert (reading.what, reading.model) == ("unsloth", "unsloth/Llama-3.2-1B")
    wanted = {
        "lora": 64, "lora_alpha": 128, "lora_targets": "q_proj,k_proj", "sequence_length": 1024, "global_batch": 8,
        "steps": 60, "warmup_steps": 5, "learning_rate": 2e-4, "weight_decay": 0.01, "seed": 3407, "base": "nf4",
        "text_field": "body", "lr_schedule": "linear",
    }  # fmt: skip
    assert {key: reading.options[key] for key in wanted} == wanted
    assert left_out(reading) == {"use_rslora", "optimizer"}
    (tmp_path / "fp8.py").write_text(dedent(UNSLOTH).replace("load_in_4bit=True", "load_in_fp8='block'"))
    assert read_finetuning(tmp_path / "fp8.py").options["base"] == "fp8"
    (tmp_path / "trl.py").write_text(dedent(TRL))
    (tmp_path / "data.jsonl").write_text("{}")
    reading = read_finetuning(tmp_path / "trl.py")
    assert (reading.what, reading.model) == ("TRL", "Qwen/Qwen3-0.6B")
    assert reading.options["lora"] == 4 and reading.options["lora_targets"] == "all-linear"
    assert reading.options["data"] == str(tmp_path / "data.jsonl") and reading.options["epochs"] == 2


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (axolotl("m", rl="dpo"), "has rl = 'dpo', and finetune trains adapters by the loss of texts alone"),
        (axolotl("m", adapter=None), "has adapter = None, .* plan the whole model"),
        (factory(stage="rm"), "has stage = 'rm'"),
        (factory(finetuning_type="full"), "has finetuning_type = 'full', .* plan the whole model"),
        (axolotl("m", lora_r="many"), "setting of another kind .*many"),
        ({"model": "m"}, "names no model as axolotl, LLaMA-Factory or TRL do"),
        ([1], "holds no settings"),
    ],
)
def test_what_is_trained_otherwise_is_refused_by_name(content: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=match):
        read(tmp_path / "a.yaml", content)


def test_yaml_with_aliases_or_faults_is_refused(tmp_path: Path) -> None:
    for text, match in (
        ("a: &b [1]\nc: *b\n", "has aliases"),
        ("a: [", "not valid YAML"),
        ("a: !!python/object:x {}", "YAML"),
    ):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(InputError, match=match):
            read_finetuning(tmp_path / "a.yaml")
    (tmp_path / "a.py").write_text("def (")
    with pytest.raises(InputError, match="is not Python"):
        read_finetuning(tmp_path / "a.py")
    (tmp_path / "a.py").write_text("print('hello')")
    with pytest.raises(InputError, match="calls nothing of TRL or unsloth"):
        read_finetuning(tmp_path / "a.py")


def test_a_file_fills_in_what_the_command_line_leaves_open(tmp_path: Path) -> None:
    read(tmp_path / "a.yaml", axolotl("tiny-llama", max_steps=9, sequence_len=32))
    (tmp_path / "data.jsonl").write_text('{"text": "some words to learn"}\n' * 40)
    words = [
        "finetune", "--from", tmp_path / "a.yaml", "--dry-run", "--cluster", "2x-rtx3090", "--lora", "2", "--base", "bf16",
        "--out", tmp_path / "out", "--steps", "7",
    ]  # fmt: skip
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.stderr
    assert (
        "LoRA of rank 2 on all-linear" in done.stdout
        and "7 steps" in done.stdout
        and "of 32 tokens" in done.stdout
    )
    job = (tmp_path / "out" / "job.toml").read_text()
    assert "betas = [0.9, 0.999]" in job and "global_batch = 8" in job
