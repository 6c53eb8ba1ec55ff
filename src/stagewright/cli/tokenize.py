"""`stagewright tokenize`: makes token ids of documents once, for many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import Json, TextField, TokenizerPath
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress


def tokenize(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Text, .jsonl, .parquet, a datasets folder, or a folder of such files.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="A new folder for the tokens.")],
    tokenizer: TokenizerPath = None,
    text_field: TextField = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make the tokens of documents once, for many runs.

    `run --data FOLDER` trains on what is written. The folder is there whole or not at all. A run tokenises by itself, too,
    and keeps the tokens in the cache.

    Example:
        stagewright tokenize texts.jsonl --tokenizer tokenizer.json -o tokens
    """
    from stagewright.execution.data.prepared import tokenised
    from stagewright.execution.data.tokenizers import load_tokenizer

    with Progress(f"tokenising {data}") as progress:
        made = tokenised(
            data, load_tokenizer(None if tokenizer is None else str(tokenizer)), text_field, output, progress
        ).manifest
    if as_json:
        print_document({"path": str(output), **made.model_dump()})
        return
    learnt = f", {made.num_learnt:,} of them to be learnt" if made.is_masked else ""
    show(
        f"Wrote {output}: {made.num_documents:,} documents of {made.num_tokens:,} tokens{learnt}; the longest has "
        f"{made.longest:,}."
    )
