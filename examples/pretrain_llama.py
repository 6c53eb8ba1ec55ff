"""Pre-trains a small Llama on the text of Moby-Dick: plans, trains what was planned, and lets the model write on.

    stagewright probe --processes 2 -o local.toml
    python examples/pretrain_llama.py --steps 200

A tenth of the text is held out and evaluated; the learning rate warms up and falls as a cosine. Transformers loads the
checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import stagewright
from stagewright.tracing.models.reference import resolve

TEXT = Path(stagewright.__file__).parent / "data" / "moby_dick.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cluster", default="local.toml", help="a file of `stagewright probe`, or a catalog name"
    )
    parser.add_argument("--stages", type=int, default=2, help="processes, each with a part of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain-llama"))
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    text = TEXT.read_bytes()
    (options.out / "train.txt").write_bytes(text[: len(text) * 9 // 10])
    (options.out / "held-out.txt").write_bytes(text[len(text) * 9 // 10 :][:32_768])

    job = stagewright.Job(
        global_batch=16,
        sequence_length=128,
        dtype="fp32",
        num_steps=options.steps,
        learning_rate=2e-3,
        lr_schedule="cosine",
        warmup_steps=options.steps // 10,
        final_fraction=0.1,
    )
    model = resolve("tiny-llama", {"num_hidden_layers": options.layers})
    best = stagewright.plan(model, stagewright.load_cluster(options.cluster), job, pp=options.stages).plans[0]
    best.save(options.out / "plan.json")
    record = stagewright.run(
        options.out / "plan.json",
        options.out / "train.txt",
        out=options.out,
        checkpoint=options.out / "checkpoints",
        held_out=options.out / "held-out.txt",
    )
    assert record is not None, "started by no launcher, this process has the record"
    print(f"{best.schedule} over {best.pp} stages; loss {record.losses[0]:.3f} -> {record.losses[-1]:.3f}")

    trained = AutoModelForCausalLM.from_pretrained(options.out / "checkpoints" / f"step-{options.steps:06d}")
    prompt = torch.tensor([list(b"The captain ")])
    torch.manual_seed(0)
    written = trained.generate(
        prompt, max_new_tokens=60, do_sample=True, temperature=0.7, eos_token_id=None, pad_token_id=0
    )
    print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
