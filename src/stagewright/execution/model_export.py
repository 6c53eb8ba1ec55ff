"""Export of a checkpoint's model to a separate folder in Hugging Face's layout: whole, with adapters merged or in a
subfolder, or the adapters alone; or as a state dict of `torch.distributed.checkpoint` with the optimizer's state. Computed
from files, by one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stagewright.cluster.schema import validated
from stagewright.errors import InputError, RunError
from stagewright.execution.checkpoint_folder import newest_in
from stagewright.execution.conversions import as_published
from stagewright.execution.data.tokenizers import TOKENIZER_FILES
from stagewright.execution.loading import StoredWeights
from stagewright.execution.manifest import MANIFEST, Checkpoint, check_contents, read_checkpoint
from stagewright.execution.model_files import described_config, lasting_names, write_documents
from stagewright.execution.model_import import STATE
from stagewright.execution.state import OF_REPLICA
from stagewright.execution.state_dict_folder import write_state_dict
from stagewright.execution.tensor_files import Stored, in_files, write_tensors
from stagewright.execution.weight_files import CONFIG, INDEX, WeightFiles, base_model_of
from stagewright.files import whole_folder
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
from stagewright.tracing.models.quantised_base import Packed, packed_weights
from stagewright.tracing.models.reference import ModelReference, resolve

BESIDE = "adapter"
"""Name of the subfolder of adapters in the folder of a whole model."""
_BESIDE_WEIGHTS = (
    *TOKENIZER_FILES, "generation_config.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Other files of a model's folder, which training does not change."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """The result of an export: sizes of files by their names in the folder `path`, and the step of the checkpoint."""

    path: Path
    step: int
    files: dict[str, int]


def export(
    folder: Path,
    out: Path,
    *,
    merges: bool = False,
    adapter_only: bool = False,
    base: str | None = None,
    is_state_dict: bool = False,
    report: Report = lambda text: None,
) -> Exported:
    """Write the model of a checkpoint to the new folder `out`, completely or not at all.

    Args:
        folder: folder of the checkpoint, or of a run's checkpoints, whose newest is taken.
        merges: whether to add adapters to the weights; otherwise they go to the subfolder ``adapter``.
        adapter_only: whether to write only adapters.
        is_state_dict: whether to write a folder of `torch.distributed.checkpoint` instead of Hugging Face's layout.
        base: location of the adapters' base model; default is its location at training.

    Raises:
        InputError: there is no checkpoint, or it is damaged; it has no adapters; their model has changed; `out` exists.
        RunError: `out` cannot be written.
    """
    checkpoint = read_checkpoint(folder) if (folder / MANIFEST).exists() else newest_in(folder)
    _check(checkpoint, out, merges, adapter_only, base)
    if is_state_dict and checkpoint.manifest.base is not None:
        raise InputError(
            f"checkpoint '{checkpoint.path}' has only adapters, which are not a model's state dict: export them with "
            "--merge, in Hugging Face's layout"
        )
    try:
        with whole_folder(out) as scratch:
            if is_state_dict:
                _write_state_dict(checkpoint, scratch, report)
            elif adapter_only:
                _copy(checkpoint, scratch, (ADAPTER, ADAPTER_CONFIG))
            elif checkpoint.manifest.base is not None:
                _write_adapted(checkpoint, scratch, out, merges, base, report)
            elif CONFIG in checkpoint.manifest.files:
                _write(_whole(checkpoint, resolve(str(checkpoint.path)), False), scratch, report)
            else:  # of a factory, with arbitrary names and adapters
                names = [
                    name for name in checkpoint.manifest.files if name == INDEX or name.startswith("model-")
                ]
                _copy(checkpoint, scratch, names)
    except OSError as error:
        raise RunError(f"'{out}' cannot be written ({error.strerror or error}): make room there") from None
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return Exported(
        out, checkpoint.manifest.step, {str(path.relative_to(out)): path.stat().st_size for path in files}
    )


def _check(checkpoint: Checkpoint, out: Path, merges: bool, adapter_only: bool, base: str | None) -> None:
    if merges and adapter_only:
        raise InputError(
            "--merge and --adapter contradict each other: merged adapters are not exported alone; leave one of the two out"
        )
    given = {"--adapter": adapter_only, "--merge": merges, "--base": base is not None}
    if ADAPTER not in checkpoint.manifest.files and any(given.values()):
        option = next(option for option, value in given.items() if value)
        raise InputError(
            f"{option}: checkpoint '{checkpoint.path}' has no adapters, since its whole model was trained; leave it out"
        )
    if checkpoint.manifest.base is None and (merges or base is not None):
        raise InputError(
            f"checkpoint '{checkpoint.path}' is of a factory, which itself adds adapters to its model: leave out "
            "--merge and --base, and merge them by peft's merge_and_unload"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"'{out}' exists already: name a new folder")


def _copy(checkpoint: Checkpoint, scratch: Path, names: Sequence[str]) -> None:
    check_contents(checkpoint.path, checkpoint.manifest, names)
    for name in names:
        shutil.copyfile(checkpoint.path / name, scratch / name)


def _write(whole: _Whole, scratch: Path, report: Report) -> None:
    """Write a model's files, its config and the tokenizer's files in the folder of its weights, if any."""
    files = whole.files()
    for number, names in enumerate(files, 1):
        report(f"writing file {number} of {len(files)}")
        held = {name: tensor for group in names for name, tensor in whole.published(group).items()}
        write_tensors(scratch / f"model-{number:05d}-of-{len(files):05d}.safetensors", held)
    write_documents(scratch, {CONFIG: whole.config()})
    for name in _BESIDE_WEIGHTS:
        if whole.folder is not None and (whole.folder / name).is_file():
            shutil.copyfile(whole.folder / name, scratch / name)


def _write_state_dict(checkpoint: Checkpoint, scratch: Path, report: Report) -> None:
    """Write weights by the model's own names, as the optimizer has them, a tied one under each of its names; buffers; and
    the optimizer's state under ``optimizer.state``."""
    check_contents(checkpoint.path, checkpoint.manifest, checkpoint.manifest.files)
    stored, files = Stored(checkpoint), WeightFiles.of(checkpoint.path)
    readers = {name: safe_open(str(files.path(name)), framework="pt") for name in files.names}
    sources: dict[str, str] = {}
    for name in stored.index.names:
        parameter, part = name.removeprefix("net.").rpartition(":")[::2]
        if OF_REPLICA not in name:
            sources[parameter if part == "weight" else f"optimizer.{STATE}{parameter}.{part}"] = name
    layouts = {key: stored.layout(name) for key, name in sources.items()}
    for name, file in files.where.items():
        layouts.setdefault(name, readers[file].get_tensor(name).to("meta"))
    if CONFIG in checkpoint.manifest.files:
        for alias, first in _tied(resolve(str(checkpoint.path))).items():
            layouts[alias] = layouts[first]
            sources[alias] = sources[first]

    def tensor_of(key: str) -> torch.Tensor:
        report(f"writing '{key}'")
        return stored.whole(sources[key]) if key in sources else readers[files.where[key]].get_tensor(key)

    write_state_dict(scratch, layouts, tensor_of)


def _tied(reference: ModelReference) -> dict[str, str]:
    """Return the first name of each parameter that has several names, by its other names."""
    net: Any = DeferredModel(reference, 1, 1).module.net
    first = {id(parameter): name for name, parameter in net.named_parameters()}
    every = net.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _whole(
    checkpoint: Checkpoint, reference: ModelReference, is_drawn: bool, adapters: Path | None = None
) -> _Whole:
    job = validated(Job, checkpoint.manifest.plan["job"], f"'{checkpoint.path / MANIFEST}'")
    sizes = 1, job.sequence_length, job.torch_name
    packed: dict[str, Packed] = {}
    if adapters is not None and reference.lora is not None and reference.lora.base is not None:
        packed = packed_weights(DeferredModel(reference, *sizes).module)
    model = DeferredModel(reference.on_plain_base(), *sizes, seed=job.seed)
    return _Whole(reference, model, None if is_drawn else reference.weights, adapters, packed)


def _write_adapted(
    checkpoint: Checkpoint, scratch: Path, out: Path, merges: bool, base: str | None, report: Report
) -> None:
    check_contents(checkpoint.path, checkpoint.manifest, (ADAPTER, ADAPTER_CONFIG))
    report("building the model without weights")
    reference, is_drawn = _base(checkpoint, base)
    _write(_whole(checkpoint, reference, is_drawn, checkpoint.path if merges else None), scratch, report)
    if not merges:
        (scratch / BESIDE).mkdir()
        shutil.copyfile(checkpoint.path / ADAPTER, scratch / BESIDE / ADAPTER)
        described = json.loads((checkpoint.path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        described["base_model_name_or_path"] = str(out.resolve())
        write_documents(scratch / BESIDE, {ADAPTER_CONFIG: described})


def _base(checkpoint: Checkpoint, given: str | None) -> tuple[ModelReference, bool]:
    """Return the base model of a checkpoint's adapters, and whether it is drawn from a seed. Raises `InputError` where it
    has changed."""
    was, place = checkpoint.manifest.base, f"'{checkpoint.path / MANIFEST}'"
    assert was is not None, "only checkpoints with a base model get here"
    section = validated(ModelSection, {**checkpoint.manifest.plan["model"], "text": given or was.text}, place)
    hint = "" if given else "; give its new location with --base"
    if given is None and section.is_code:
        raise InputError(
            f"the adapters' base model is code, {section.text}, which the export would run: look at it, and name it with "
            "--base"
        )
    try:
        reference = section.reference()
    except InputError as error:
        raise InputError(f"the adapters' base model is missing: {error}{hint}") from None
    is_drawn = was.seed is not None
    is_alike = not section.change(reference)
    now = base_model_of(reference, was.seed or 0, is_drawn) if is_alike else None
    if now is None or not was.is_same(now):
        raise InputError(
            f"the adapters of '{checkpoint.path}' were trained for {was}, and '{section.text}' is another model or has "
            f"other weights{hint}"
        )
    return reference, is_drawn


class _Whole:
    """The tensors of a model without adapters, or with adapters added to its weights.

    Args:
        model: the model as it was built for training, with adapters if it has any, before its base is quantised.
        folder: folder of its weights; None where it was drawn from a seed.
        adapters: folder of the adapters to add, or None.
        packed: how the weights were packed that the adapters were trained with; adapters are added to what these stand for.
    """

    def __init__(
        self,
        reference: ModelReference,
        model: DeferredModel,
        folder: Path | None,
        adapters: Path | None,
        packed: Mapping[str, Packed],
    ) -> None:
        self.folder = folder
        self._packed = packed
        self._reference, self._model = reference, model
        self._net: Any = model.module.net
        self._stored = None if folder is None else StoredWeights(folder, model.module, reference.config or {})
        self._adapters = None if adapters is None else safe_open(str(adapters / ADAPTER), framework="pt")
        state = model.module.state_dict(keep_vars=True)
        names = sorted(name for name in lasting_names(model.module) if not is_adapter(name))
        self._bytes = {name: state[name].numel() * state[name].element_size() for name in names}

    def config(self) -> dict[str, Any]:
        """Return the content of the model's config.json."""
        return {"architectures": [type(self._net).__name__], **described_config(self._reference.config or {})}

    def files(self) -> list[list[str]]:
        """Return the names of all tensors, grouped into files of a few GiB."""
        return in_files(self._bytes)

    def published(self, name: str) -> dict[str, torch.Tensor]:
        """Return a tensor of the model by its names in published files."""
        return as_published(self._net, base_name(name).removeprefix("net."), self._read(name))

    def _read(self, name: str) -> torch.Tensor:
        stored = self._stored if self._stored is not None and self._stored.has(name) else None
        packed = self._packed.get(name)
        if packed is not None and stored is not None:
            whole = packed.unpack(stored.read_packed(name, packed))
        else:
            whole = self._model.tensors((name,))[name] if stored is None else stored.read(name)
            whole = whole if packed is None else packed.unpack(packed.pack(whole))
        lora, names = self._reference.lora, adapter_names_of(name)
        if self._adapters is None or lora is None or names is None:
            return whole
        wide = torch.float64 if whole.dtype == torch.float64 else torch.float32
        into, out_of = (
            self._adapters.get_tensor(peft_name(f"{name_part}.weight")).to(wide) for name_part in names
        )
        added = lora.alpha / lora.rank * (out_of @ into)
        layer = self._model.module.get_submodule(name.rpartition(".")[0])
        return (whole.to(wide) + (added.t() if is_transposed(layer) else added)).to(whole.dtype)
