"""Fine-tunes a model of a folder, such as GPT-2, on records with low-rank adapters, and loads these with peft.

    hf download openai-community/gpt2 --local-dir models/gpt2
    stagewright probe --processes 2 -o local.toml
    python examples/finetune_lora.py models/gpt2 pairs.jsonl --steps 100

A line of the records is `{"prompt": ..., "completion": ...}`, and only completions are learnt. The log-probability of the
first one is printed, before and after.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import stagewright
from stagewright.execution.data.request import DataRequest
from stagewright.execution.model_export import export
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.reference import resolve


def log_probability(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> float:
    """Of a completion behind its prompt."""
    tokens = torch.tensor([prompt + completion])
    with torch.no_grad():
        scores = model(input_ids=tokens).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    return float(scores.gather(1, torch.tensor(completion)[:, None]).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "model", type=Path, help="folder of a model and its tokenizer in Hugging Face's layout"
    )
    parser.add_argument("records", type=Path, help="JSON Lines with prompt and completion")
    parser.add_argument(
        "--cluster", default="local.toml", help="a file of `stagewright probe`, or a catalog name"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/finetune-lora"))
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    adapted = resolve(str(options.model)).adapted(Lora.of(options.rank, targets="all-linear"))
    job = stagewright.Job(
        global_batch=8,
        sequence_length=options.length,
        dtype="fp32",
        learning_rate=options.learning_rate,
        num_steps=options.steps,
    )
    cluster = stagewright.load_cluster(options.cluster)
    best = stagewright.plan(adapted, cluster, job, pp=options.processes).plans[0]
    best.save(options.out / "plan.json")
    records = DataRequest.of(options.records, tokenizer=options.model)
    checkpoints = options.out / "checkpoints"
    stagewright.run(options.out / "plan.json", records, out=options.out, checkpoint=checkpoints)
    export(checkpoints, options.out / "adapter", adapter_only=True)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    first = json.loads(options.records.read_text().partition("\n")[0])
    prompt, completion = (
        tokenizer.encode(first[key], add_special_tokens=False) for key in ("prompt", "completion")
    )
    base = AutoModelForCausalLM.from_pretrained(options.model).eval()
    print(f"before: {log_probability(base, prompt, completion):.3f}")
    tuned = PeftModel.from_pretrained(base, str(options.out / "adapter")).eval()
    print(f"after: {log_probability(tuned, prompt, completion):.3f}")


if __name__ == "__main__":
    main()
