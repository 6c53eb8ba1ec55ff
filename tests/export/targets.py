"""Reads an export with the parser of its target, in the environment of `make targets`, and prints what that read as JSON.

    .venv-targets/bin/python tests/export/targets.py megatron FOLDER 8

Only what asks a GPU for its properties is stood in for.
"""

# pyright: reportMissingImports=false
# The targets are not in the environment that the types are checked in.
from __future__ import annotations

import json
import os
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def megatron(folder: Path, world_size: int) -> dict[str, Any]:
    """Megatron-LM's arguments, as its `parse_args` and `validate_args` leave them, and its layout of layers."""
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda function: function  # type: ignore[attr-defined]
    sys.path.insert(0, str(Path(sys.prefix) / "megatron"))
    import torch

    h100 = SimpleNamespace(major=9, minor=0, total_memory=80 << 30, name="H100", multi_processor_count=132)
    torch.cuda.get_device_properties = lambda *device: h100  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *device: (9, 0)  # type: ignore[assignment]
    torch.cuda.device_count = lambda: 8
    os.environ.update(WORLD_SIZE=str(world_size), RANK="0", LOCAL_RANK="0")
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.training.arguments import parse_args, validate_args

    argv = json.loads((folder / "argv.json").read_text())
    sys.argv = ["pretrain_gpt.py", *argv, "--mock-data", "--tokenizer-type", "NullTokenizer"]
    arguments = parse_args()
    validate_args(arguments)
    layout, layers = arguments.pipeline_model_parallel_layout, None
    if layout is not None:
        ranks = PipelineParallelLayerLayout.from_str(layout, arguments.pipeline_model_parallel_size).layout
        layers = [
            ranks[rank][chunk].count(LayerType.decoder)
            for chunk in range(len(ranks[0]))
            for rank in range(len(ranks))
        ]
    names = (
        "num_layers", "position_embedding_type", "data_parallel_size", "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "micro_batch_size", "global_batch_size",
        "recompute_granularity", "use_distributed_optimizer", "lr", "weight_decay", "moe_router_load_balancing_type",
    )  # fmt: skip
    return {name: getattr(arguments, name) for name in names} | {"layers": layers}


def torchtitan(folder: Path, world_size: int) -> dict[str, Any]:
    """torchtitan's configuration, as its `ConfigManager` returns it, and how its `ParallelDims` split the ranks."""
    sys.path.insert(0, str(folder))
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    config = ConfigManager().parse_args(["--module", "train_config", "--config", "train"])
    parallelism = config.parallelism
    dims = ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree, dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree, tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree, ep=parallelism.expert_parallel_degree, world_size=world_size,
    )  # fmt: skip
    recomputation = config.activation_checkpoint
    return config.to_dict() | {
        "num_layers": len(config.model_spec.model.layers),
        "activation_checkpoint": None if recomputation is None else type(recomputation).__qualname__,
        "pp": dims.pp,
    }


def deepspeed(folder: Path, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration, as `DeepSpeedConfig` checks it for this number of processes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime import config

    config.dist.get_rank, config.dist.get_world_size = lambda: 0, lambda: world_size
    read = config.DeepSpeedConfig(str(folder / "deepspeed.json"))
    return {
        "stage": int(read.zero_config.stage), "train_batch_size": read.train_batch_size,
        "gradient_clipping": read.gradient_clipping, "bf16": read.bfloat16_config.enabled,
        "lr": read.optimizer_params["lr"],
    }  # fmt: skip


if __name__ == "__main__":
    target, folder, world_size = sys.argv[1:]
    result = globals()[target](Path(folder), int(world_size))
    print(json.dumps(result, default=str))
