"""The model of a checkpoint in a folder of its own, as Hugging Face's libraries read it: whole, with adapters merged or
beside it, or the adapters alone. Computed from files, by one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from stagewright.cluster.strict import validated
from stagewright.errors import InputError, RunError
from stagewright.execution.base_model import BaseModelIdentity
from stagewright.execution.checkpoint_folder import UNFINISHED, newest
from stagewright.execution.loading import StoredWeights
from stagewright.execution.manifest import MANIFEST, Checkpoint, check_contents, read_checkpoint
from stagewright.execution.model_files import described_config, lasting_names, write_documents
from stagewright.execution.tensor_files import write_tensors
from stagewright.execution.weight_files import CONFIG, INDEX, base_model_of
from stagewright.planning.job import Job
from stagewright.planning.plan import ModelSection
from stagewright.tracing.models.adapter_names import (
    ADAPTER,
    ADAPTER_CONFIG,
    adapter_names_of,
    base_name,
    is_adapter,
    peft_name,
)
from stagewright.tracing.models.adapters import is_transposed
from stagewright.tracing.models.build import DeferredModel
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.reference import ModelReference

BESIDE = "adapter"
"""The folder of adapters beside a whole model."""
_FILE_BYTES = 4 * 2**30
_OF_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""What else is read from a model's folder, which training does not change."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What was written: files by their names in the folder `path`, and the step that the checkpoint is of."""

    path: Path
    step: int
    files: dict[str, int]
    is_adapter: bool
    is_merged: bool


def export(
    folder: Path,
    out: Path,
    *,
    merges: bool = False,
    adapter_only: bool = False,
    base: str | None = None,
    report: Report = lambda text: None,
) -> Exported:
    """Write the model of a checkpoint to the new folder `out`.

    Args:
        folder: of the checkpoint, or of a run's, whose newest is taken.
        merges: whether adapters are added to the weights; else they are in the folder ``adapter`` beside them.
        adapter_only: whether only adapters are written.
        base: where the model lies that adapters were trained for; default where it lay then.

    Raises:
        InputError: there is no checkpoint, or it is damaged; it has no adapters; their model has changed; `out` is there.
    """
    found = _checkpoint(folder)
    has_adapter = ADAPTER in found.manifest.files
    if merges and adapter_only:
        raise InputError(
            "--merge and --adapter: adapters that are merged are no longer alone; give one of the two"
        )
    if not has_adapter and (merges or adapter_only or base is not None):
        option = "--merge" if merges else "--adapter" if adapter_only else "--base"
        raise InputError(
            f"{option}: checkpoint '{found.path}' has no adapters, since all of its model was trained: leave it out"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"'{out}' is there already: name a new folder")
    scratch = out.parent / f".{out.name}{UNFINISHED}"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        if adapter_only:
            _copy(found, scratch, (ADAPTER, ADAPTER_CONFIG))
        elif has_adapter:
            _write_adapted(found, scratch, out, merges, base, report)
        else:
            names = [
                name for name in found.manifest.files if name in (INDEX, CONFIG) or name.startswith("model-")
            ]
            report("copying the model's files")
            _copy(found, scratch, names)
        if out.exists():
            out.rmdir()
        scratch.rename(out)
    except OSError as error:
        raise RunError(f"'{out}' cannot be written ({error.strerror or error}): make room there") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    files = {
        str(path.relative_to(out)): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()
    }
    return Exported(out, found.manifest.step, files, has_adapter, merges)


def _checkpoint(folder: Path) -> Checkpoint:
    if (folder / MANIFEST).exists():
        return read_checkpoint(folder)
    found = newest(folder) if folder.is_dir() else None
    if found is None:
        raise InputError(
            f"there is no checkpoint in '{folder}': name the folder of one, or that --checkpoint was given"
        )
    return found


def _copy(found: Checkpoint, scratch: Path, names: list[str] | tuple[str, ...]) -> None:
    check_contents(found.path, found.manifest, names)
    for name in names:
        shutil.copyfile(found.path / name, scratch / name)


# -- a model with adapters --------------------------------------------------------------------------------------------


def _write_adapted(
    found: Checkpoint, scratch: Path, out: Path, merges: bool, base: str | None, report: Report
) -> None:
    check_contents(found.path, found.manifest, (ADAPTER, ADAPTER_CONFIG))
    job = validated(Job, found.manifest.plan["job"], f"'{found.path / MANIFEST}'")
    report("building the model without weights")
    reference, is_drawn = _base(found, job, base)
    model = DeferredModel(reference, 1, job.sequence_length, job.torch_name, seed=job.seed)
    stored = None
    if reference.weights is not None and not is_drawn:
        stored = StoredWeights(reference.weights, model.module, reference.config or {})
        for name in _OF_TOKENIZER:
            if (reference.weights / name).is_file():
                shutil.copyfile(reference.weights / name, scratch / name)
    tensors = _Whole(model, stored, found.path if merges else None, reference.lora)
    files = list(tensors.files())
    for number, names in enumerate(files, 1):
        report(f"writing file {number} of {len(files)}")
        held = {base_name(name).removeprefix("net."): tensors.read(name) for name in names}
        write_tensors(scratch / f"model-{number:05d}-of-{len(files):05d}.safetensors", held)
    write_documents(scratch, {CONFIG: described_config(reference.config or {})})
    if not merges:
        (scratch / BESIDE).mkdir()
        shutil.copyfile(found.path / ADAPTER, scratch / BESIDE / ADAPTER)
        described = json.loads((found.path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        described["base_model_name_or_path"] = str(out.resolve())
        write_documents(scratch / BESIDE, {ADAPTER_CONFIG: described})


def _base(found: Checkpoint, job: Job, given: str | None) -> tuple[ModelReference, bool]:
    """The model that the adapters of a checkpoint are for, and whether it is drawn from a seed. Raises `InputError` where it
    is no longer what it was."""
    was = found.manifest.base
    assert was is not None, "adapters are of a model"
    section = validated(
        ModelSection,
        {**found.manifest.plan["model"], "text": given or was.text},
        f"'{found.path / MANIFEST}'",
    )
    hint = "" if given else "; name where it lies now with --base"
    try:
        reference = section.reference()
    except InputError as error:
        raise InputError(f"the model that the adapters are for is not there: {error}{hint}") from None
    is_drawn = was.seed is not None
    now: BaseModelIdentity | None = None
    if reference.digest == section.digest:
        now = base_model_of(reference, job.seed, is_drawn)
    if now is None or not was.is_same(now):
        raise InputError(
            f"the adapters of '{found.path}' were trained for {was}, and '{section.text}' is another model or has other "
            f"weights{hint}"
        )
    return reference, is_drawn


class _Whole:
    """The tensors of a model without adapters, which are added to its weights if they are given.

    Args:
        model: with adapters, as it was built for training.
        stored: its weights; None where it was drawn from a seed.
        adapters: the folder of those that are added.
    """

    def __init__(
        self, model: DeferredModel, stored: StoredWeights | None, adapters: Path | None, lora: Lora | None
    ) -> None:
        assert lora is not None
        self._model, self._stored = model, stored
        self._scale = lora.alpha / lora.rank
        self._adapters = None if adapters is None else safe_open(str(adapters / ADAPTER), framework="pt")
        self.names = [name for name in sorted(lasting_names(model.module)) if not is_adapter(name)]
        self._layers: Mapping[str, torch.nn.Module] = dict(model.module.named_modules())
        state = model.module.state_dict(keep_vars=True)
        self._bytes = {name: state[name].numel() * state[name].element_size() for name in self.names}

    def files(self) -> Iterator[list[str]]:
        """The names of all tensors, in files of a few GiB."""
        held: list[str] = []
        size = 0
        for name in self.names:
            if held and size + self._bytes[name] > _FILE_BYTES:
                yield held
                held, size = [], 0
            held.append(name)
            size += self._bytes[name]
        if held:
            yield held

    def read(self, name: str) -> torch.Tensor:
        """A tensor as the model has it without adapters, or with what they add."""
        if self._stored is not None and self._stored.has(name):
            whole = self._stored.read(name)
        else:
            whole = self._model.tensors((name,))[name]
        names = adapter_names_of(name)
        if self._adapters is None or names is None or names[0] not in self._layers:
            return whole
        wide = torch.float64 if whole.dtype == torch.float64 else torch.float32
        into, out_of = (self._adapters.get_tensor(peft_name(f"{one}.weight")).to(wide) for one in names)
        added = self._scale * (out_of @ into)
        layer = self._layers[name.rpartition(".")[0]]
        return (whole.to(wide) + (added.t() if is_transposed(layer) else added)).to(whole.dtype)
