"""Ranks that share layers learn what the plain model learns: losses, gradients and updates, over real processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cells import SMALL_LLAMA
from plans import make_plan

from multiprocess import run_ranks
from stagewright.tracing.models.lora import Lora

pytestmark = pytest.mark.multiprocess

TOLERANCES = {"fp64": 1e-12, "fp32": 2e-5}


@dataclass(frozen=True)
class Case:
    """A model on tp x pp x dp ranks."""

    model: str
    tp: int
    pp: int = 1
    dp: int = 1
    dtype: str = "fp64"
    overrides: tuple[tuple[str, object], ...] = ()
    sequence_parallel: bool = False
    zero: int | None = None
    lora: Lora | None = None

    def __str__(self) -> str:
        return f"{self.model} tp {self.tp} pp {self.pp} dp {self.dp}{self.extras} {self.dtype}"

    @property
    def extras(self) -> str:
        zero = "" if self.zero is None else f" zero {self.zero}"
        lora = "" if self.lora is None else f" lora {self.lora.targets}"
        return (" sp" if self.sequence_parallel else "") + zero + lora

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def plan(self, folder: Path) -> Path:
        path = folder / f"{str(self).replace(' ', '-')}.json"
        make_plan(
            path, self.model, "1f1b", self.pp, self.dp, 2, self.dtype, overrides=dict(self.overrides),
            microbatch_size=2, sequence_length=16, tp=self.tp,
            sequence_parallel=self.sequence_parallel, sharding=self.zero, lora=self.lora,
        )  # fmt: skip
        return path


LLAMA = (*SMALL_LLAMA[1:], ("num_hidden_layers", 2))
QWEN = (*LLAMA, ("tie_word_embeddings", True))
MIXTRAL = (
    ("num_hidden_layers", 2), ("hidden_size", 32), ("intermediate_size", 64), ("vocab_size", 97),
    ("output_router_logits", True),
)  # fmt: skip
GPT2 = (("num_hidden_layers", 2), ("hidden_size", 32), ("vocab_size", 101), ("dropout", 0))
BERT = (("num_hidden_layers", 2), ("hidden_size", 32), ("intermediate_size", 64), ("dropout", 0))
DRAWN = Lora(rank=4, alpha=8, targets="all-linear", is_drawn=True)
SOME = Lora(rank=4, alpha=8, targets=("q_proj", "o_proj", "up_proj"), is_drawn=True)

TWO = [
    Case("tiny-gpt2", 2, overrides=GPT2, sequence_parallel=True),
    Case("tiny-mixtral", 2, dtype="fp32", overrides=MIXTRAL, sequence_parallel=True),
    Case("tiny-llama", 2, overrides=LLAMA, lora=SOME, sequence_parallel=True),
]
ADAPTED = [
    Case("tiny-llama", 2, overrides=LLAMA, lora=DRAWN),
    Case("tiny-gpt2", 2, overrides=GPT2, lora=DRAWN, sequence_parallel=True),
    Case("tiny-bert", 2, overrides=BERT, lora=DRAWN),
    Case("tiny-mixtral", 2, dtype="fp32", overrides=MIXTRAL, lora=DRAWN, sequence_parallel=True),
]
MORE = [
    Case("tiny-llama", 2, overrides=LLAMA),
    Case("qwen3-8b", 2, overrides=QWEN),
    Case("tiny-gpt2", 2, overrides=GPT2),
    Case("tiny-mixtral", 2, dtype="fp32", overrides=MIXTRAL),
    Case("tiny-llama", 2, overrides=LLAMA, sequence_parallel=True),
    Case("tiny-bert", 2, overrides=BERT, sequence_parallel=True),
    Case("tiny-bert", 2, overrides=BERT),
    Case("tiny-gpt2", 2, overrides=GPT2, lora=DRAWN),
]
FOUR = [
    Case("tiny-llama", 4, overrides=(*LLAMA, ("num_key_value_heads", 4), ("vocab_size", 97))),
    Case("tiny-gpt2", 2, pp=2, overrides=GPT2),
    Case("tiny-llama", 2, dp=2, overrides=LLAMA),
    Case("tiny-llama", 2, dp=2, overrides=LLAMA, zero=3),
]


@pytest.mark.parametrize("cases", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_shared_layers_equal_whole_ones(cases: list[Case], tmp_path: Path) -> None:
    check(cases, tmp_path)


@pytest.mark.slow
def test_more_shared_layers_equal_whole_ones(tmp_path: Path) -> None:
    check(MORE, tmp_path)


@pytest.mark.slow
def test_more_adapters_of_shared_layers_equal_whole_ones(tmp_path: Path) -> None:
    check(ADAPTED, tmp_path)


@pytest.mark.slow
def test_layers_stages_and_replicas_at_once(tmp_path: Path) -> None:
    """Eight processes: two ranks to a layer, two stages, two replicas."""
    check(
        [
            Case("tiny-llama", 2, 2, 2, overrides=LLAMA),
            Case("tiny-gpt2", 2, 2, 2, overrides=GPT2),
            *(Case("tiny-llama", 2, 2, 2, overrides=LLAMA, zero=level) for level in (1, 2, 3)),
        ],
        tmp_path,
    )


def check(cases: list[Case], folder: Path) -> None:
    paths = [str(case.plan(folder)) for case in cases]
    found = run_ranks(train_all, cases[0].num_ranks, paths, timeout=180)
    for case, ranks in zip(cases, zip(*found, strict=True), strict=True):
        tolerance = TOLERANCES[case.dtype]
        for rank in ranks:
            assert rank["loss"] <= tolerance, str(case)
            off = {name: off for name, off in rank["gradients"].items() if not off <= tolerance}
            assert off == {}, str(case)
            assert rank["norm"] <= tolerance, str(case)
        assert {name for rank in ranks for name in rank["gradients"]} == set(ranks[0]["trained"])


def train_all(rank: int, num_ranks: int, paths: list[str]) -> list[dict[str, Any]]:
    """One batch of each plan on this rank, compared with what the plain model finds."""
    import torch.distributed as dist

    from stagewright.planning.plan import load_plan

    dist.init_process_group("gloo")
    found = []
    for path in paths:
        found.append(_train_one(load_plan(path)))
        dist.barrier()
    dist.destroy_process_group()
    return found


def _train_one(plan: Any) -> dict[str, Any]:
    import torch
    from cells import Plain

    from stagewright.execution.session import Session

    session = Session(plan, torch.device("cpu"), None, random_weights=True)
    plain = Plain(plan)
    loss, wanted_loss = session.accumulate(0), plain.loss
    wanted = plain.gradients(tuple(range(plan.num_microbatches)))
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    differences = {
        name: _difference(gradient, session.part(name, wanted[name]), largest)
        for name, gradient in session.gradients().items()
    }
    norm = session.train_step(0).gradient_norm
    wanted_norm = float(torch.stack([gradient.norm().double() for gradient in wanted.values()]).norm())
    return {
        "loss": abs(loss - wanted_loss) / abs(wanted_loss),
        "gradients": differences,
        "norm": abs(norm - wanted_norm) / wanted_norm,
        "trained": list(wanted),
    }


def _difference(found: Any, wanted: Any, largest: float) -> float:
    """Relative to the tensor's own largest element, or none where all of it is rounding (a key's bias has no gradient)."""
    from stagewright.execution.verification import largest_difference

    if max(float(found.abs().max()), float(wanted.abs().max())) < 1e-14 * largest:
        return 0.0
    return largest_difference(found, wanted)
