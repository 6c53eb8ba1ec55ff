"""Tokenizers, records and plans for tests of data: made in a moment, and small."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cells import SMALL_LLAMA
from plans import make_plan

from stagewright.planning.plan import Plan

WORDS = "the whale and the sea; the ship, a captain and his men: call me what you will, some years ago"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END = 0


def tokenizer_file(folder: Path) -> Path:
    """A byte-level BPE of 300 tokens whose first ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([WORDS] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def tokenizer_folder(folder: Path, template: str | None = CHATML) -> Path:
    """The same as transformers saves it, with marks of turns and a template for chats."""
    from transformers import PreTrainedTokenizerFast

    made: Any = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file(folder)), eos_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    made.save_pretrained(str(folder))
    return folder


def write_lines(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def small_plan(folder: Path, model: str = "tiny-llama", vocabulary: int = 310, **options: Any) -> Plan:
    overrides = {**dict(SMALL_LLAMA), "num_hidden_layers": 2, "vocab_size": vocabulary}
    if model != "tiny-llama":
        overrides = {}
    defaults = {"overrides": overrides, "sequence_length": 16, "num_microbatches": 2}
    folder.mkdir(parents=True, exist_ok=True)
    return make_plan(folder / "plan.json", model, **{**defaults, **options})
