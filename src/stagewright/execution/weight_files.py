"""The files of a model's weights, with checks that they are complete, inside their folder and of a supported format.

`check_weights` makes the checks before a process is started; nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError, safe_open

from stagewright.documents import read_json
from stagewright.errors import InputError
from stagewright.execution.base_model import BaseFile, BaseModelIdentity
from stagewright.execution.manifest import MANIFEST, Manifest, check_contents, read_manifest
from stagewright.files import inside
from stagewright.planning.plan import Plan
from stagewright.text import say
from stagewright.tracing.models.adapter_names import ADAPTER, ADAPTER_CONFIG
from stagewright.tracing.models.lora import NF4
from stagewright.tracing.models.quantised import BITSANDBYTES, NEEDS_BITSANDBYTES, method_of, refuse_quantised
from stagewright.tracing.models.reference import OTHER_FORMATS, ModelReference, bundled_names

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_WHOLE = "model.safetensors"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_MAX_NAMED = 4
_SEED = "run with --random-weights to start from the seed"


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a model folder: `where` has the file of each tensor, by the index or the files themselves.

    If a run wrote them with a checkpoint, `manifest` has their digests.
    """

    folder: Path
    where: Mapping[str, str]
    manifest: Manifest | None = None

    @classmethod
    def of(cls, folder: Path) -> WeightFiles:
        """Return the files in `folder`. Raises `InputError` where files are missing, outside the folder or cannot be read,
        or two of them have the same tensor."""
        manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
        index = folder / INDEX
        if manifest is not None:
            _compare(folder, manifest, sorted({INDEX, CONFIG} & manifest.files.keys()))
        if index.exists():
            where = _read_index(index)
            alone = folder / _WHOLE
            if alone.exists() and _WHOLE not in where.values():
                raise InputError(
                    f"'{folder}' has two sets of weights, '{_WHOLE}' and the files of '{INDEX}': move one away"
                )
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
            _refuse_incomplete(folder, names)
            where = _listed(folder, names)
        files = cls(folder, where, manifest)
        if absent := [name for name in files.names if not files.path(name).exists()]:
            raise InputError(
                f"'{index}' names files that are missing: {some_of(absent)}; copy or download them, or {_SEED}"
            )
        return files

    @property
    def names(self) -> list[str]:
        """Sorted names of the files."""
        return sorted(set(self.where.values()))

    def path(self, name: str) -> Path:
        """Return the path of a file, which may not be a link out of the folder; links in the hub's cache must stay within
        their model's folder."""
        return _path(self.folder, name)

    def verified(self, name: str) -> Path:
        """Return the path of a file after comparing it with its digest, if that is known. Raises `InputError` where it has
        changed."""
        if self.manifest is not None:
            _compare(self.folder, self.manifest, [name])
        return self.path(name)

    def types(self) -> dict[str, str]:
        """Return the type of each stored tensor, such as ``F32``, ``BF16`` or ``I8``. Raises `InputError` where a file
        cannot be read, or lacks tensors of the index."""
        types: dict[str, str] = {}
        for name in self.names:
            path = self.path(name)
            reader = open_weights(path, "np")
            wanted = [tensor for tensor, file in self.where.items() if file == name]
            if lacking := sorted(set(wanted) - set(reader.keys())):
                raise InputError(
                    f"'{INDEX}' lists {some_of(lacking)} in '{path}', which lacks them: the files do not belong together; "
                    "copy or download all of them again"
                )
            types |= {tensor: reader.get_slice(tensor).get_dtype() for tensor in wanted}
        return types


def check_weights(plan: Plan, random_weights: bool, is_resumed: bool) -> None:
    """Check, before any process is started, that a run can start from the weights of its model, if there are any.

    If there are none and random weights were not requested, the first rank or launcher prints on stderr that they are drawn.
    Raises `InputError` where the model has changed, files are missing, damaged, outside the folder, or in an unsupported
    format, or a package to read them is missing."""
    reference = plan.model.resolved()
    is_nf4 = reference.lora is not None and reference.lora.base == NF4
    if not random_weights and reference.config is not None:
        is_nf4 |= method_of(reference.config) == BITSANDBYTES
    if is_nf4 and find_spec("bitsandbytes") is None:
        raise InputError(NEEDS_BITSANDBYTES)
    if random_weights or reference.kind == "factory":
        return
    if reference.lora is not None and reference.lora.folder is not None and not is_resumed:
        _check_adapters(Path(reference.lora.folder), reference, plan.job.seed)
    if reference.weights is None:
        if not is_resumed and os.environ.get("RANK", "0") == "0":
            say(
                f"there are no weights next to the config of '{reference.text}': they are drawn from seed {plan.job.seed}"
            )
        return
    folder = str(reference.weights)
    refuse_quantised(WeightFiles.of(reference.weights).types(), method_of(reference.config or {}), folder)


def adapter_file(folder: Path) -> Path:
    """Return the path of the adapters in a folder that peft, or a run as a checkpoint, has written; a checkpoint's are
    compared with their digests. Raises `InputError` where they are missing or changed."""
    if not (folder / ADAPTER).is_file():
        unreadable = sorted(path.name for path in folder.glob("adapter_model*"))
        fault = "is missing"
        if unreadable:
            fault += f"; the folder has {some_of(unreadable)}, and only safetensors files are supported"
        raise InputError(
            f"'{folder / ADAPTER}' {fault}: give --lora-from a folder that save_pretrained() of peft has written"
        )
    check_adapter_contents(folder)
    return folder / ADAPTER


def check_adapter_contents(folder: Path) -> None:
    """Raise `InputError` where adapters or their config in a run's checkpoint have changed."""
    if (folder / MANIFEST).exists():
        _compare(folder, read_manifest(folder), [ADAPTER, ADAPTER_CONFIG])


def _check_adapters(folder: Path, reference: ModelReference, seed: int) -> None:
    """Check, before any process is started, the adapters in `folder` to start from. Raises `InputError` where they cannot
    be read, or are of a checkpoint for other base weights."""
    open_weights(adapter_file(folder), "np")
    was = read_manifest(folder).base if (folder / MANIFEST).exists() else None
    now = base_model_of(reference, seed, False)
    if was is not None and now is not None and not was.is_same(now):
        raise InputError(
            f"the adapters in '{folder}' are for {was}, and this plan's model starts from {now}, which has other weights: "
            "plan for the weights that the adapters were trained with"
        )


def base_model_of(reference: ModelReference, seed: int, random_weights: bool) -> BaseModelIdentity | None:
    """Return the identity of the frozen model under adapters, or None where the whole model is trained. It is drawn from
    `seed` if it has no files or with `random_weights`. Raises `InputError` where a file cannot be read."""
    if reference.lora is None:
        return None
    if reference.weights is None or random_weights:
        return BaseModelIdentity(text=lasting_text(reference), seed=seed)
    files = WeightFiles.of(reference.weights)
    try:
        base_files = {name: BaseFile.of(files.path(name)) for name in files.names}
    except OSError as error:
        raise InputError(
            f"weights in '{reference.weights}' cannot be read: {error.strerror or error}"
        ) from None
    return BaseModelIdentity(
        text=lasting_text(reference), folder=str(reference.weights.resolve()), files=base_files
    )


def lasting_text(reference: ModelReference) -> str:
    """Return a model's name in a form that is valid from every folder."""
    path = Path(reference.text).expanduser()
    is_path = reference.text not in bundled_names() and path.exists()
    return str(path.resolve()) if is_path else reference.text


def open_weights(path: Path, framework: str) -> safe_open:
    """Open a safetensors file for `framework` (``np``, ``pt``). Raises `InputError` where it does not exist or is not a
    safetensors file."""
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "is missing"
        raise InputError(f"weights '{path}' {what}: copy or download the file again, or {_SEED}")
    with reading(path):
        return safe_open(str(path), framework=framework)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise `InputError` for errors in the context when reading the safetensors file `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"weights '{path}' cannot be read ({error}): it is cut off or damaged; copy or download it again, or {_SEED}"
        ) from None


def _compare(folder: Path, manifest: Manifest, names: list[str]) -> None:
    try:
        check_contents(folder, manifest, names)
    except InputError as error:
        raise InputError(f"{error}; if it was changed on purpose, remove '{MANIFEST}' there") from None


def _read_index(index: Path) -> dict[str, str]:
    content = read_json(index, "index", "copy or download it again")
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where:
        raise InputError(f"'{index}' has no weight_map of tensors and their files: copy or download it again")
    for tensor, name in where.items():
        if not isinstance(name, str) or not name:
            raise InputError(
                f"'{index}' gives {name!r} as the file of tensor '{tensor}', which is not a name: download it again"
            )
    return where


def _listed(folder: Path, names: list[str]) -> dict[str, str]:
    """Return the files of all tensors, where there is no index."""
    where: dict[str, str] = {}
    for name in names:
        tensors = open_weights(_path(folder, name), "np").keys()
        for tensor in tensors:
            if tensor in where:
                raise InputError(
                    f"'{folder}' has tensor '{tensor}' in '{where[tensor]}' and in '{name}', and no '{INDEX}' to decide "
                    "between them: move one away"
                )
            where[tensor] = name
    return where


def _path(folder: Path, name: str) -> Path:
    resolved = folder.resolve()
    snapshots = resolved.parent
    is_cached = snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--")
    return inside(folder, name, snapshots.parent if is_cached else folder)


def _refuse_incomplete(folder: Path, names: list[str]) -> None:
    """Raise `InputError` where numbered files are missing, or no file has a supported format."""
    if not names:
        unsupported = sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern))
        raise InputError(
            f"the weights in '{folder}' are in {some_of(unsupported)}, and only safetensors files are supported: convert "
            f"them once with transformers (AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained(...)), or "
            f"{_SEED}"
        )
    parts = [part for name in names if (part := _PART.fullmatch(name))]
    wanted = {
        f"{part['stem']}-{number:05d}-of-{part['count']}.safetensors"
        for part in parts
        for number in range(1, int(part["count"]) + 1)
    }
    if missing := sorted(wanted - set(names)):
        raise InputError(
            f"'{folder}' has {some_of([part.string for part in parts])} and lacks {some_of(missing)}: copy or download "
            f"them, or {_SEED}"
        )


def some_of(names: list[str]) -> str:
    """Return the first few names, and the number of further ones.

    >>> some_of(["a", "b"]), some_of(list("abcdef"))
    ("'a', 'b'", "'a', 'b', 'c', 'd' and 2 more")
    """
    shown = ", ".join(f"'{name}'" for name in names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"
