"""Preparation of the requested data: every source is identified by its contents, tokenised, and checked against the model.

This happens before any process is started. Nothing here imports torch, except for models that were never traced.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from stagewright.cluster.schema import StrictModel
from stagewright.errors import InputError
from stagewright.execution.data.documents import (
    Document,
    data_files,
    documents_of,
    has_records,
    refuse_no_text,
)
from stagewright.execution.data.encoding import Encoded, encoded
from stagewright.execution.data.request import DataRequest, SourceRequest
from stagewright.execution.data.store import (
    VERSION,
    TokenStore,
    divide,
    is_store,
    open_store,
    verified,
    write_store,
)
from stagewright.execution.data.tokenizers import Tokenizer, load_tokenizer
from stagewright.execution.data_identity import DataIdentity, contents_digest, identity_of, tokens_of
from stagewright.files import cache_folder
from stagewright.graph.tensor import TensorMeta
from stagewright.planning.plan import Plan
from stagewright.text import say
from stagewright.tracing.cache import inputs_of
from stagewright.tracing.models.overrides import of_text
from stagewright.tracing.models.reference import ModelReference
from stagewright.tracing.models.source import factory_source, split_factory

LABELS = "labels"
_RULES = 3
"""Version of the rules by which documents become tokens."""
_BYTES_WORTH = 1024
"""Vocabulary size above which a model is not one of bytes and a few special tokens."""

_OF_TOKENS = ("input_ids", LABELS, "decoder_input_ids", "position_ids")


class PreparedSource(StrictModel):
    """A source as ranks open it: a file of tokens (the bytes of a text, or ``.npy``), a store of documents, or a dataset's
    factory."""

    kind: Literal["tokens", "store", "factory"]
    path: str
    weight: float = 1.0


class PreparedData(StrictModel):
    """The sources that ranks open, their identity, whether some tokens are masked in the loss, and inputs of the model
    besides its own."""

    sources: tuple[PreparedSource, ...]
    identity: DataIdentity
    is_masked: bool = False
    is_apart: bool = False
    """Whether documents of a sample are separated."""
    further_inputs: tuple[str, ...] = ()


Data = PreparedData | DataRequest | str | Path | Sequence[str | Path] | None
"""Training data of a run, prepared or as requested; None is synthetic samples."""


def ready(data: Data, plan: Plan) -> PreparedData | None:
    """Return `data` prepared for the model of a plan."""
    return data if isinstance(data, PreparedData) else prepared(DataRequest.of(data), plan)


def held_out_data(data: Data, trained: PreparedData | None, plan: Plan) -> PreparedData | None:
    """Return held-out data, prepared. Raises `InputError` where it needs inputs of the model that the training data
    `trained` does not give."""
    held_out = ready(data, plan)
    given = () if trained is None else trained.further_inputs
    if held_out is not None and set(held_out.further_inputs) - set(given):
        raise InputError(
            f"the held-out data ({held_out.identity}) has tokens that are masked in the loss, and the training data has "
            "none: hold out text alone, or evaluate a checkpoint with `stagewright evaluate`"
        )
    return held_out


def prepared(request: DataRequest | None, plan: Plan) -> PreparedData | None:
    """Return the requested data prepared for the model of a plan, or None without a request.

    Raises:
        InputError: the data cannot be read, holds too little or tokens outside the model's vocabulary, or the model does not
            take tokens.
    """
    if request is None:
        return None
    model = plan.model.resolved()
    inputs = inputs_of(model, {"microbatch_size": plan.microbatch_size, **plan.traced()})
    if not all(is_factory(source.path) for source in request.sources):
        _check_takes_tokens(inputs, request)
        _check_makes_labels(inputs, model, plan)
    tokenizer = load_tokenizer(request.tokenizer)
    _say_bytes(request, model)
    sources = [
        _prepared_source(source, request, tokenizer, plan, model, inputs) for source in request.sources
    ]
    masked = next((source.path for source, _, is_masked in sources if is_masked), None)
    is_causal = model.kind == "config" and set(inputs) == {"input_ids"}  # which makes its labels itself
    if masked is not None and LABELS not in inputs and not is_causal:
        raise InputError(
            f"'{model.name}' takes no labels, so that no token of '{masked}' can be masked in its loss: let its factory "
            "return labels among the inputs, or give texts alone"
        )
    return PreparedData(
        sources=tuple(source for source, *_ in sources),
        identity=_together([identity for _, identity, _ in sources], request.sources),
        is_masked=masked is not None or plan.job.documents_apart,
        is_apart="position_ids" in inputs,
        further_inputs=(LABELS,) if masked is not None and is_causal else (),
    )


# -- sources ------------------------------------------------------------------------------------------------------------


def is_factory(path: str) -> bool:
    """Return whether a source is code that makes a dataset."""
    return split_factory(path) is not None and not Path(path).expanduser().exists()


def _prepared_source(
    source: SourceRequest,
    request: DataRequest,
    tokenizer: Tokenizer,
    plan: Plan,
    model: ModelReference,
    inputs: dict[str, TensorMeta],
) -> tuple[PreparedSource, DataIdentity, bool]:
    """Return a prepared source, its identity, and whether some of its tokens are masked in the loss."""
    path = Path(source.path).expanduser()
    if is_factory(source.path):
        identity, is_masked = _checked_factory(source.path, plan, model, inputs)
        return PreparedSource(kind="factory", path=source.path, weight=source.weight), identity, is_masked
    if has_tokens(path, request):
        prepared = PreparedSource(kind="tokens", path=str(path.resolve()), weight=source.weight)
        return prepared, _checked_tokens(path, plan, model), False
    store = _whole(path) if is_store(path) else tokenised(path, tokenizer, request.text_field)
    _check_store(store, source, plan, model)
    prepared = PreparedSource(kind="store", path=str(store.path.resolve()), weight=source.weight)
    return prepared, _identity_of_store(store), store.manifest.is_masked


def has_tokens(path: Path, request: DataRequest) -> bool:
    """Return whether a file is trained on as it is: token ids, or a text by its bytes."""
    return path.suffix == ".npy" or (request.tokenizer is None and not has_records(path))


def tokenised(
    path: Path,
    tokenizer: Tokenizer,
    field: str | None,
    folder: Path | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> TokenStore:
    """Return the token store of a file or folder: in `folder`, or in the cache, which may already have it.

    Raises:
        InputError: the data cannot be read, or the store cannot be written.
    """
    files = data_files(path)
    documents = _reported(files, field, report)

    def write(target: Path) -> TokenStore:
        say(f"tokenising '{path}' with {tokenizer.name}")
        return write_store(target, _some(encoded(documents, tokenizer), path), tokenizer, path.name)

    if folder is not None:
        return write(folder)
    try:
        contents = [
            (str(file.relative_to(path)) if path.is_dir() else "", contents_digest(file)) for file in files
        ]
    except OSError as error:
        raise InputError(f"data file '{path}' cannot be read: {error.strerror or error}") from None
    facts = json.dumps([VERSION, _RULES, contents, tokenizer.digest, field])
    target = cache_folder("tokens") / hashlib.sha256(facts.encode()).hexdigest()[:32]
    with _alone(target):
        if os.path.lexists(target):
            try:
                return _whole(target)
            except InputError as damage:
                say(f"tokenising again: {damage}")
                shutil.rmtree(target, ignore_errors=True)
        return write(target)


def tokenised_in_parts(
    path: Path,
    tokenizer_path: Path | None,
    field: str | None,
    folder: Path,
    held_out: float | None,
    report: Callable[[str], None],
) -> tuple[TokenStore, TokenStore | None]:
    """Write the tokens of a file or folder to `folder`, divided as `divide` does if a share is to be `held_out`; return the
    stores to train on and of held-out documents. Raises as `tokenised` and `divide`."""
    tokenizer = load_tokenizer(None if tokenizer_path is None else str(tokenizer_path))
    if held_out is None:
        return tokenised(path, tokenizer, field, folder, report), None
    return divide(tokenised(path, tokenizer, field, None, report), folder, held_out)


def _whole(path: Path) -> TokenStore:
    """Open the store in a folder; one of the processes that a launcher starts on this machine verifies all of it."""
    store = open_store(path)
    is_first = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"
    return verified(store) if is_first else store


def _reported(files: Sequence[Path], field: str | None, report: Callable[[str], None]) -> Iterator[Document]:
    """Yield the documents of all files, one file after another, with progress reports."""
    count = 0
    for number, file in enumerate(files):
        which = f" of files, {number} of {len(files)} done" if len(files) > 1 else ""
        for document in documents_of(file, field):
            if count % _REPORTED == 0:
                report(f"tokenising: {count:,} documents{which}")
            count += 1
            yield document


_REPORTED = 100
"""Number of documents between two reports."""


def _some(documents: Iterable[Encoded], path: Path) -> Iterator[Encoded]:
    """Yield all documents. Raises `InputError` where there is none."""
    count = 0
    for document in documents:
        count += 1
        yield document
    if not count:
        raise InputError(f"data '{path}' holds no documents: give data with at least one")


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Lock `target` against other processes of this user: one of them tokenises, and the others wait for its result."""
    handle = os.open(target.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise InputError(
            f"'{target.parent}' cannot be used ({error.strerror or error}): set STAGEWRIGHT_CACHE"
        ) from None
    finally:
        os.close(handle)


# -- checks against the model -------------------------------------------------------------------------------------------


def _check_takes_tokens(inputs: dict[str, TensorMeta], request: DataRequest) -> None:
    for name, meta in inputs.items():
        if name not in _OF_TOKENS or meta.dtype not in ("int64", "int32") or len(meta.shape) != 2:
            raise InputError(
                f"'{request.sources[0].path}' gives tokens, but the model's input '{name}' ({meta}) is not made of tokens: "
                "give your own dataset as package.module:factory, or leave --data out for random samples"
            )


def _check_makes_labels(inputs: dict[str, TensorMeta], model: ModelReference, plan: Plan) -> None:
    """Raise `InputError` for masked and sequence-to-sequence language models, which would learn to copy a text."""
    if model.kind == "config" and LABELS in inputs and not plan.job.documents_apart:
        raise InputError(
            f"'{model.name}' takes labels that differ from its input_ids, which this data does not have: give a dataset "
            "that has both as package.module:factory"
        )


def _checked_factory(
    text: str, plan: Plan, model: ModelReference, inputs: dict[str, TensorMeta]
) -> tuple[DataIdentity, bool]:
    """Check that a factory's first sample fits the model; return its identity, by its source and number of samples, and
    whether its samples have labels of tokens, some of which may be masked."""
    from stagewright.execution.data.batches import row_of
    from stagewright.execution.data.user_dataset import user_samples

    samples = user_samples(text, plan.job.sequence_length, plan.job.seed)
    first = samples[0]
    for name in inputs:
        row_of(first, name, inputs)
    has_labels = model.kind == "config" and "input_ids" in inputs and (LABELS in inputs or first.has(LABELS))
    if has_labels:
        row_of(first, LABELS, {LABELS: inputs["input_ids"], **inputs})
    digest = hashlib.sha256(factory_source(text).encode()).hexdigest()
    return DataIdentity(kind="factory", name=text, sha256=digest, num_documents=samples.size), has_labels


def _checked_tokens(path: Path, plan: Plan, model: ModelReference) -> DataIdentity:
    if path.suffix != ".npy" and path.is_file():
        refuse_no_text(path)
    tokens = tokens_of(path)
    _check_length(len(tokens), f"data file '{path}'", plan)
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0:
        raise InputError(
            f"data file '{path}' holds token {least}, but token ids begin at 0: leave such tokens out"
        )
    _check_vocabulary(largest, f"data file '{path}'", model)
    return identity_of(path)


def _check_store(store: TokenStore, source: SourceRequest, plan: Plan, model: ModelReference) -> None:
    manifest, what = store.manifest, f"data '{source.path}'"
    _check_vocabulary(manifest.largest, what, model)
    if not manifest.is_masked:
        _check_length(manifest.num_tokens, what, plan)
    elif not manifest.num_learnt:
        raise InputError(
            f"{what} has no token that counts in the loss: give records with a completion, or an assistant's turns"
        )


def _check_length(num_tokens: int, what: str, plan: Plan) -> None:
    if num_tokens < plan.job.sequence_length:
        raise InputError(
            f"{what} holds {num_tokens} tokens, fewer than one sample of {plan.job.sequence_length}: give a longer text or "
            "a smaller sequence length"
        )


def _vocabulary(model: ModelReference) -> int | None:
    """Return the size of the model's vocabulary, or None where its configuration does not have it."""
    size = of_text(model.config or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _say_bytes(request: DataRequest, model: ModelReference) -> None:
    """Warn once if bytes are the tokens of a model with a far larger vocabulary, which is rarely intended."""
    vocabulary = _vocabulary(model)
    if request.tokenizer is not None or vocabulary is None or vocabulary <= _BYTES_WORTH:
        return
    if os.environ.get("RANK", "0") != "0":
        return
    for source in request.sources:
        path = Path(source.path).expanduser()
        if not (is_factory(source.path) or is_store(path) or path.suffix == ".npy"):
            say(
                f"warning: no --tokenizer is given, so the bytes of '{source.path}' are the tokens: 256 of the "
                f"{vocabulary:,} that '{model.name}' has; give the model's tokenizer with --tokenizer PATH"
            )


def _check_vocabulary(largest: int, what: str, model: ModelReference) -> None:
    vocabulary = _vocabulary(model)
    if vocabulary is not None and largest >= vocabulary:
        raise InputError(
            f"{what} holds token {largest}, but the model's vocabulary has {vocabulary}: give the model's tokenizer with "
            "--tokenizer, or plan with --set vocab_size=N"
        )


# -- identity -----------------------------------------------------------------------------------------------------------


def _identity_of_store(store: TokenStore) -> DataIdentity:
    manifest = store.manifest
    return DataIdentity(
        kind="store",
        name=manifest.source,
        sha256=manifest.sha256,
        dtype=manifest.dtype,
        num_tokens=manifest.num_tokens,
        num_documents=manifest.num_documents,
    )


def _together(identities: list[DataIdentity], sources: tuple[SourceRequest, ...]) -> DataIdentity:
    if len(identities) == 1:
        return identities[0]
    total = sum(source.weight for source in sources)
    shares = (source.weight / total for source in sources)
    parts = (
        identity.model_copy(update={"weight": share})
        for identity, share in zip(identities, shares, strict=True)
    )
    return DataIdentity(kind="mixture", parts=tuple(parts))
