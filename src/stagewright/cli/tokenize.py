"""`stagewright tokenize`: tokenises documents once, for many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import Json, TextField, TokenizerPath
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress
from stagewright.errors import InputError
from stagewright.text import plural


def tokenize(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Text, .jsonl, .parquet, a datasets folder, or a folder of such files.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="A new folder for the tokens.")],
    tokenizer: TokenizerPath = None,
    text_field: TextField = None,
    held_out: Annotated[
        float | None, typer.Option("--held-out", metavar="SHARE",
            help="Divide the documents: this share of them into FOLDER/held-out, the others into FOLDER/train.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Tokenise documents once, for many runs.

    `run --data FOLDER` trains on the result. The folder is written whole or not at all. A run can also tokenise by itself
    and caches the tokens.

    Example:
        stagewright tokenize texts.jsonl --tokenizer tokenizer.json -o tokens
    """
    from stagewright.execution.data.prepared import tokenised_in_parts

    if held_out is not None and not 0 < held_out < 1:
        raise InputError(f"--held-out {held_out:g}: give a share between 0 and 1, e.g. 0.05")
    with Progress(f"tokenising {data}") as progress:
        parts = tokenised_in_parts(data, tokenizer, text_field, output, held_out, progress)
    stores = [store for store in parts if store is not None]
    documents = [{"path": str(store.path), **store.manifest.model_dump()} for store in stores]
    if as_json:
        print_document(
            documents[0] if held_out is None else {"train": documents[0], "held_out": documents[1]}
        )
        return
    for store in stores:
        manifest = store.manifest
        learnt = f", {manifest.num_learnt:,} of them with a loss" if manifest.is_masked else ""
        show(
            f"Wrote {store.path}: {plural(manifest.num_documents, 'document')} of "
            f"{plural(manifest.num_tokens, 'token')}{learnt}; the longest has "
            f"{manifest.longest:,}."
        )
