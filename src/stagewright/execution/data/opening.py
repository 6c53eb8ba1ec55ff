"""Prepared data on a rank: opened where its stages need inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stagewright.execution.data.batches import Batches
from stagewright.execution.data.own import own_samples
from stagewright.execution.data.prepared import PreparedData, PreparedSource
from stagewright.execution.data.samples import Packs, Samples, Windows
from stagewright.execution.data.store import open_store
from stagewright.execution.data_identity import tokens_of
from stagewright.planning.job import Job


def open_batches(data: PreparedData, job: Job, is_once: bool = False) -> Batches:
    """The microbatches of a job, or with `is_once` every sample once, for evaluation. Raises `InputError` where what was
    prepared is not there any more."""
    samples = [_samples_of(source, data.is_apart, job.seed) for source in data.sources]
    return Batches(samples, [source.weight for source in data.sources], job, is_once)


def _samples_of(source: PreparedSource, is_apart: bool, seed: int) -> Callable[[int], Samples]:
    """Of each length. Documents with prompts are kept whole; all others are cut where samples end."""
    if source.kind == "factory":
        return lambda length: own_samples(source.path, length, seed)
    if source.kind == "tokens":
        tokens = tokens_of(Path(source.path))
        return lambda length: Windows(tokens, length)
    store = open_store(Path(source.path))
    if store.manifest.is_masked:
        return lambda length: Packs(store, length, seed)
    return lambda length: Windows(store.tokens, length, store.ends if is_apart else None)
