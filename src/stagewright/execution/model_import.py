"""Import of weights as a checkpoint from which a run can resume: from a folder in Hugging Face's layout, or from a plain
state dict that `torch.distributed.checkpoint` wrote. Computed from files, by one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from stagewright.errors import InputError, RunError
from stagewright.execution.checkpoint_folder import folder_name, identity, steps_of
from stagewright.execution.data_identity import DataIdentity
from stagewright.execution.folder_lock import in_use
from stagewright.execution.loading import StoredWeights
from stagewright.execution.manifest import FileRecord, Manifest, write_manifest
from stagewright.execution.model_files import described_config, lasting_names, write_documents
from stagewright.execution.optimizer import Updater
from stagewright.execution.regions import Region
from stagewright.execution.state import OF_REPLICA, key_of
from stagewright.execution.state_dict_folder import DESCRIPTION, StateDictFolder, same_names
from stagewright.execution.tensor_files import in_files, rank_file, write_tensors
from stagewright.execution.weight_files import CONFIG
from stagewright.files import whole_folder
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import DeferredModel
from stagewright.tracing.models.reference import OTHER_FORMATS, resolve
from stagewright.version import __version__

STATE = "state."
"""Prefix of a parameter's name in the state dict of an optimizer."""


@dataclass(frozen=True)
class Imported:
    """An imported checkpoint: its folder, the steps that count as done, whether it has the optimizer's state, and the sizes
    of its files by name."""

    path: Path
    step: int
    has_optimizer_state: bool
    files: dict[str, int]


def import_weights(
    plan: Plan,
    source: Path,
    folder: Path,
    step: int | None = None,
    weights_only: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> Imported:
    """Write the weights of `source`, and its optimizer state if any, as a checkpoint to the new or empty `folder`,
    completely or not at all.

    Args:
        plan: plan of the run that will resume, under it or any other plan of its model.
        source: folder of a model's files, or of a state dict of `torch.distributed.checkpoint`.
        step: number of steps that count as done; None takes the optimizer's count, or 0.
        weights_only: whether to leave out the optimizer's state.

    Raises:
        InputError: the weights cannot be read, or do not fit the plan's model; `folder` has checkpoints.
        RunError: `folder` cannot be written.
    """
    if plan.model.lora is not None:
        raise InputError(
            "the plan trains adapters, which start from a folder that peft wrote: plan with --lora-from FOLDER"
        )
    with in_use(folder, "checkpoint"):
        if checkpoints := steps_of(folder):
            raise InputError(
                f"'{folder}' holds checkpoints (the newest is {checkpoints[0].name}): name a new folder"
            )
        report("building the model without weights")
        model = _Model(plan)
        is_state_dict = (source / DESCRIPTION).exists()
        stored = _StateDict(source, model, weights_only) if is_state_dict else _Files(source, model)
        if step is None:
            step = stored.num_steps
        written = folder / folder_name(step)
        try:
            with whole_folder(written) as scratch:
                manifest = _written(plan, model, stored, step, scratch, report)
        except OSError as error:
            raise RunError(
                f"'{folder}' cannot be written ({error.strerror or error}): make room there"
            ) from None
    sizes = {name: record.bytes for name, record in manifest.files.items()}
    return Imported(written, step, manifest.has_optimizer_state, sizes)


class _Model:
    """The tensors of a plan's model: the first name of each parameter (`aliases`, by all of its names), the dtype in which
    the optimizer updates it (`types`), the `trained` parameters, and the buffers that the forward changes (`changed`)."""

    def __init__(self, plan: Plan) -> None:
        job, reference = plan.job, plan.model.resolved()
        self.reference = reference
        graph = trace(reference, plan.microbatch_size, **plan.traced())
        self.deferred = DeferredModel(reference, 1, job.sequence_length, job.torch_name, seed=job.seed)
        module = self.deferred.module
        self.layouts = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        self.lasting = sorted(lasting_names(module))
        self.aliases = {name: graph.values[value].name for name, value in graph.parameters.items()}
        self.changed = {graph.values[value].name for value, _ in graph.mutations}
        trained = {graph.values[value].name for value in graph.gradients}
        self.trained = sorted(trained & set(self.aliases.values()))
        wide = torch.float32 if job.dtype in ("bf16", "fp16") else None
        self.types = {
            name: wide if wide is not None and name in trained else self.layouts[name].dtype
            for name in dict.fromkeys(self.aliases.values())
        }


class _Files:
    """Weights in Hugging Face's layout, without optimizer state."""

    num_steps = 0
    parts: Mapping[str, Mapping[str, str]] = {}

    def __init__(self, folder: Path, model: _Model) -> None:
        reference = model.reference
        if (folder / CONFIG).exists() and reference.kind == "config":
            resolved = resolve(str(folder), reference.overrides)
            if resolved.digest != reference.digest:
                raise InputError(
                    f"'{folder / CONFIG}' is of another model than the plan, which is for '{reference.text}': plan for the "
                    "model in this folder"
                )
        if not any(True for pattern in ("*.safetensors", *OTHER_FORMATS) for _ in folder.glob(pattern)):
            raise InputError(
                f"'{folder}' has neither weights nor the '{DESCRIPTION}' of torch.distributed.checkpoint: name the folder "
                "of a model, or of a state dict"
            )
        self._stored = StoredWeights(folder, model.deferred.module, reference.config or {})

    def has(self, name: str) -> bool:
        return self._stored.has(name)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._stored.read(name).to(dtype)


class _StateDict:
    """A state dict that `torch.distributed.checkpoint` wrote; `parts` has the stored name of each part of a parameter's
    optimizer state."""

    def __init__(self, folder: Path, model: _Model, weights_only: bool) -> None:
        self._folder, self._layouts = StateDictFolder(folder), model.layouts
        names = {name.removeprefix("net."): name for name in model.layouts}
        prefix = same_names((name.removeprefix("net.") for name in model.aliases), self._folder.shapes)
        if prefix is None:
            raise InputError(
                f"'{folder}' has no tensor '{next(iter(names))}': it is of another model than the plan"
            )
        self._stored = {names[key]: prefix + key for key in names if prefix + key in self._folder.shapes}
        for name, first in model.aliases.items():  # one name of a tied parameter is enough
            if name in self._stored:
                self._stored.setdefault(first, self._stored[name])
        self.parts: dict[str, dict[str, str]] = {}
        for stored in () if weights_only else self._folder.shapes:
            key, _, part = f".{stored}".partition(f".{STATE}")[2].rpartition(".")
            name = names.get(key) or names.get(key.removeprefix(prefix))
            if name is not None and name in model.aliases:
                self.parts.setdefault(model.aliases[name], {})[part] = stored

    @cached_property
    def num_steps(self) -> int:
        steps = (parts["step"] for parts in self.parts.values() if "step" in parts)
        return max((int(self._folder.read(name)) for name in steps), default=0)

    def has(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._stored:
            raise InputError(
                f"'{self._folder.folder}' has no tensor '{name.removeprefix('net.')}': it is of another model than the plan"
            )
        stored, layout = self._stored[name], self._layouts[name]
        if self._folder.shapes[stored] != tuple(layout.shape):
            raise InputError(
                f"tensor '{stored}' in '{self._folder.folder}' has shape {list(self._folder.shapes[stored])}, expected "
                f"{list(layout.shape)}: it is of another model than the plan"
            )
        return self._folder.read(stored).to(dtype)

    def part(self, stored: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Read a part of the state of a parameter of this shape, which the optimizer updates as `dtype`."""
        tensor = self._folder.read(stored)
        return tensor.to(dtype) if tensor.shape == shape and tensor.is_floating_point() else tensor


_Source = _Files | _StateDict


def _written(
    plan: Plan, model: _Model, stored: _Source, step: int, folder: Path, report: Callable[[str], None]
) -> Manifest:
    _check_state(plan.job, model, stored)
    records: dict[str, FileRecord] = {}
    sizes = {name: _bytes(model.layouts[name]) for name in model.lasting}
    files = in_files(sizes)
    for number, names in enumerate(files, 1):
        report(f"writing file {number} of {len(files)} of the model")
        held = {name.removeprefix("net."): _tensor(model, stored, name) for name in names}
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        records[name] = write_tensors(folder / name, held)
    widened = {
        name: _bytes(model.layouts[name]) * 2 * (1 + len(stored.parts.get(name, ()))) for name in model.types
    }
    groups = in_files({**widened, **{name: sizes.get(name, 0) for name in sorted(model.changed)}})
    for number, names in enumerate(groups):
        report(f"writing file {number + 1} of {len(groups)} of the state")
        held = dict(entry for name in names for entry in _state(model, stored, name))
        records[rank_file(number)] = write_tensors(folder / rank_file(number), held)
    config = model.reference.config
    described = write_documents(folder, {} if config is None else {CONFIG: described_config(config)})
    records |= {path.name: FileRecord.of(path) for path in described}
    manifest = Manifest(
        stagewright=__version__,
        step=step,
        plan=identity(plan),
        data=DataIdentity(kind="elsewhere"),
        loss_scale=plan.job.loss_scale if plan.job.dtype == "fp16" else None,
        has_optimizer_state=bool(stored.parts),
        files=records,
    )
    write_manifest(folder, manifest)
    return manifest


def _check_state(job: Job, model: _Model, stored: _Source) -> None:
    """Raise `InputError` where there is optimizer state, but not all that the plan's optimizer keeps of every parameter."""
    kept: dict[str | int, set[str]] = {}
    for name in model.trained if stored.parts else ():
        dims = model.layouts[name].dim()
        kind = name if job.has_factory else dims
        if kind not in kept:
            kept[kind] = _parts_kept(job, name, dims)
        if lacking := sorted(kept[kind] - stored.parts.get(name, {}).keys()):
            raise InputError(
                f"optimizer '{job.optimizer}' keeps {', '.join(lacking)} of '{name.removeprefix('net.')}', which is "
                "missing: plan with the optimizer that wrote the state, or leave the state out with --weights-only"
            )


def _parts_kept(job: Job, name: str, dims: int) -> set[str]:
    """Return torch's names of the state that the optimizer keeps of a parameter with `dims` dimensions."""
    small = Updater({0: torch.zeros((2,) * dims)}, job, None, names={0: name})
    ((_, parts),) = small.states(lambda value: True)
    return parts.keys() - {"weight"}


def _state(model: _Model, stored: _Source, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's entries for a parameter or a buffer that the forward changes, by their keys in its files."""
    if name in model.changed:
        tensor = _tensor(model, stored, name)
        yield key_of(f"{name}{OF_REPLICA}0.0", Region.whole(tensor.shape)), tensor
        return
    weight = stored.read(name, model.types[name])
    yield key_of(f"{name}:weight", Region.whole(weight.shape)), weight
    for part, key in stored.parts.get(name, {}).items():
        assert isinstance(stored, _StateDict), "files have no state"
        tensor = stored.part(key, weight.shape, weight.dtype)
        yield key_of(f"{name}:{part}", Region.whole(tensor.shape)), tensor


def _tensor(model: _Model, stored: _Source, name: str) -> torch.Tensor:
    """Return a tensor of the model in the model's dtype; a buffer that is not stored starts as in a new model."""
    if name in model.types or stored.has(name):
        return stored.read(name, model.layouts[name].dtype)
    return model.deferred.tensors((name,))[name]


def _bytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()
