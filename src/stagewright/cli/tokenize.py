"""`stagewright tokenize`: tokenises documents once, for many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import Json, TextField, TokenizerPath
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress
from stagewright.text import plural


def tokenize(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Text, .jsonl, .parquet, a datasets folder, or a folder of such files.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="A new folder for the tokens.")],
    tokenizer: TokenizerPath = None,
    text_field: TextField = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Tokenise documents once, for many runs.

    `run --data FOLDER` trains on the result. The folder is written whole or not at all. A run can also tokenise by itself
    and caches the tokens.

    Example:
        stagewright tokenize texts.jsonl --tokenizer tokenizer.json -o tokens
    """
    from stagewright.execution.data.prepared import tokenised
    from stagewright.execution.data.tokenizers import load_tokenizer

    with Progress(f"tokenising {data}") as progress:
        manifest = tokenised(
            data, load_tokenizer(None if tokenizer is None else str(tokenizer)), text_field, output, progress
        ).manifest
    if as_json:
        print_document({"path": str(output), **manifest.model_dump()})
        return
    learnt = f", {manifest.num_learnt:,} of them with a loss" if manifest.is_masked else ""
    show(
        f"Wrote {output}: {plural(manifest.num_documents, 'document')} of "
        f"{plural(manifest.num_tokens, 'token')}{learnt}; the longest has "
        f"{manifest.longest:,}."
    )
