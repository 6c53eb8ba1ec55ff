"""`stagewright.Trainer` beside Hugging Face's `Trainer`, `accelerate` and a plain loop, each on one process.

    python benchmarks/trainer.py [--steps 100] [--threads 1] [--output FILE] [--json]

The same small Llama from the same weights, on the same batches of the bundled text in the same order, with the same AdamW,
clipping and learning rates, in fp32 on this machine's processor. All four take turns step by step in one process, in an
order that changes; the first steps (which make the optimizer's state, and one of ours counts memory) are left out of times.
Prints the largest relative difference of losses from the plain loop's, and the median of our seconds per step over each
other's in the same round, with a 95 % bootstrap interval.

A step of Hugging Face's `Trainer` is what passes from the end of one to the end of the next: sampler, collator and
callbacks are in it. Ours has the batch handed over, as in a loop of one's own, and writes `steps.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from figures import interval, machine, write
from local_cluster import local

BATCH, LENGTH = 8, 64
LEFT_OUT = 5
OURS, PLAIN = "stagewright.Trainer", "plain loop"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.steps <= LEFT_OUT:
        parser.error(f"--steps {options.steps}: the first {LEFT_OUT} are left out of times; give more")
    with tempfile.TemporaryDirectory() as folder:
        losses, seconds = compared(options.steps, options.threads, Path(folder))
    apart = {
        name: max(abs(one - other) / other for one, other in zip(found, losses[PLAIN], strict=True))
        for name, found in losses.items()
    }
    ratios = {
        name: [one / other for one, other in zip(seconds[OURS], found, strict=True)][LEFT_OUT:]
        for name, found in seconds.items()
        if name != OURS
    }
    medians = {name: statistics.median(found[LEFT_OUT:]) for name, found in seconds.items()}
    if options.json:
        told = {
            name: {"ratio": statistics.median(found), "interval": interval(found)}
            for name, found in ratios.items()
        }
        print(json.dumps({"machine": machine(), "apart": apart, "step_seconds": medians, "ratios": told}))
        return
    write(report(options.steps, options.threads, losses, apart, medians, ratios), options.output)


def report(
    steps: int,
    threads: int,
    losses: dict[str, list[float]],
    apart: dict[str, float],
    medians: dict[str, float],
    ratios: dict[str, list[float]],
) -> list[str]:
    import accelerate
    import transformers

    versions = (
        {"machine": platform.machine()}
        | machine()
        | {"transformers": transformers.__version__, "accelerate": accelerate.__version__}
    )
    lines = [
        f"# One process beside other trainers, {date.today()}", "",
        f"`python benchmarks/trainer.py --steps {steps} --threads {threads}`: the bundled tiny-llama on the bundled text, "
        f"batches of {BATCH} x {LENGTH} bytes, fp32, fused AdamW; {json.dumps(versions)}", "",
        "| | loss at the start | at the end | largest difference from the plain loop | ms a step | ours over it, 95 % |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for name, found in losses.items():
        ratio = "-"
        if name in ratios:
            low, high = interval(ratios[name])
            ratio = f"{statistics.median(ratios[name]):.3f} [{low:.3f}, {high:.3f}]"
        shown = f"{found[0]:.4f} | {found[-1]:.4f} | {apart[name]:.1e} | {medians[name] * 1e3:.1f}"
        lines.append(f"| {name} | {shown} | {ratio} |")
    return lines


def compared(
    num_steps: int, threads: int, folder: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Losses and seconds of all steps, of each."""
    import torch

    import stagewright

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    job = stagewright.Job(
        global_batch=BATCH, sequence_length=LENGTH, dtype="fp32", learning_rate=1e-3, num_steps=num_steps,
        lr_schedule="cosine", warmup_steps=10,
    )  # fmt: skip
    model, data = first_model(folder / "model"), samples(num_steps)
    others = {PLAIN: plain(model, job, data), "accelerate": accelerated(model, job, data)}
    theirs = hugging_face(model, job, data, folder)
    plan = stagewright.plan(str(model), local(1), job, microbatch=BATCH).plans[0]
    with stagewright.Trainer(plan, out=folder / "ours", device="cpu") as ours:
        torch.set_num_threads(threads)
        others = {OURS: lambda step: ours.step({"input_ids": data[step]}).loss, **others}
        return in_turn(others, theirs)


def first_model(folder: Path) -> Path:
    """The folder of a model that all start from."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from stagewright.tracing.models.reference import resolve

    torch.manual_seed(0)
    config = AutoConfig.for_model(**(resolve("tiny-llama").config or {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def samples(num_steps: int) -> Any:
    """Batches of the bundled text, ``[steps, BATCH, LENGTH]``."""
    import torch

    import stagewright

    text = (Path(stagewright.__file__).parent / "data" / "moby_dick.txt").read_bytes()
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(0)
    firsts = torch.randint(len(whole) - LENGTH, (num_steps * BATCH,), generator=random)
    return torch.stack([whole[first : first + LENGTH] for first in firsts]).long().view(-1, BATCH, LENGTH)


def model_in(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).train()


def adamw(model: Any, job: Any) -> Any:
    import torch

    groups = [
        {"params": [one for one in model.parameters() if one.dim() >= 2], "weight_decay": job.weight_decay},
        {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=job.learning_rate, betas=job.betas, eps=job.eps, fused=True)


def plain(folder: Path, job: Any, data: Any) -> Callable[[int], float]:
    import torch

    model = model_in(folder)
    optimizer = adamw(model, job)

    def step(number: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = job.rate_of(number)
        loss = model(input_ids=data[number], labels=data[number]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def accelerated(folder: Path, job: Any, data: Any) -> Callable[[int], float]:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = model_in(folder)
    optimizer = adamw(model, job)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: job.rate_of(step) / job.learning_rate)
    loader = torch.utils.data.DataLoader(data.flatten(0, 1), batch_size=BATCH)
    model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, rates)
    batches = iter(loader)

    def step(number: int) -> float:
        tokens = next(batches)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def hugging_face(folder: Path, job: Any, data: Any, out: Path) -> tuple[Any, list[float]]:
    """Its `Trainer`, and a list that gets the loss of every step."""
    import torch
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(range(data.shape[0] * BATCH))

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(*arguments, **keywords)
            losses.append(loss.item())
            return loss

    given = TrainingArguments(
        output_dir=str(out / "theirs"), use_cpu=True, max_steps=data.shape[0], per_device_train_batch_size=BATCH,
        learning_rate=job.learning_rate, weight_decay=job.weight_decay, adam_beta1=job.betas[0], adam_beta2=job.betas[1],
        adam_epsilon=job.eps, max_grad_norm=job.clip_norm, optim="adamw_torch_fused", save_strategy="no", report_to="none",
        disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in data.flatten(0, 1)]
    trainer = InOrder(model_in(folder), given, train_dataset=rows)  # type: ignore[arg-type]
    optimizer = trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: job.rate_of(step) / job.learning_rate
    )
    return trainer, losses


def in_turn(
    others: dict[str, Callable[[int], float]], theirs: tuple[Any, list[float]]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Steps of all, those of `others` at the end of each step of `theirs`, in an order that turns."""
    from transformers import TrainerCallback

    name = "transformers.Trainer"
    losses: dict[str, list[float]] = {one: [] for one in others}
    seconds: dict[str, list[float]] = {one: [] for one in (*others, name)}
    names = list(others)

    class Turn(TrainerCallback):
        began = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds[name].append(time.perf_counter() - self.began)
            step = len(seconds[name]) - 1
            for one in names[step % len(names) :] + names[: step % len(names)]:
                start = time.perf_counter()
                losses[one].append(others[one](step))
                seconds[one].append(time.perf_counter() - start)
            self.began = time.perf_counter()

    trainer, losses[name] = theirs
    trainer.add_callback(Turn())
    trainer.train()
    return losses, seconds


if __name__ == "__main__":
    main()
