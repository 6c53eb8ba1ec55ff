"""The files that the weights of a model lie in: all there, inside their folder, and of numbers that can be read.

`check_weights` finds out before a process is started; nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from stagewright.documents import read_json
from stagewright.errors import InputError
from stagewright.execution.base_model import BaseFile, BaseModelIdentity
from stagewright.execution.manifest import MANIFEST, Manifest, check_contents, read_manifest
from stagewright.execution.quantised import method_of, refuse_quantised
from stagewright.files import inside
from stagewright.planning.plan import Plan
from stagewright.text import say
from stagewright.tracing.models.adapter_names import ADAPTER, ADAPTER_CONFIG
from stagewright.tracing.models.reference import OTHER_FORMATS, ModelReference, bundled_names

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_WHOLE = "model.safetensors"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_MAX_NAMED = 4
_SEED = "run with --random-weights to start from the seed"


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a model folder: `where` has the file of each tensor, as the index or the files say.

    Where a run wrote them with a checkpoint, `manifest` has their digests.
    """

    folder: Path
    where: Mapping[str, str]
    manifest: Manifest | None = None

    @classmethod
    def of(cls, folder: Path) -> WeightFiles:
        """Those in `folder`. Raises `InputError` where files are missing, lie elsewhere or cannot be read, or two of them
        have the same tensor."""
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
                f"'{index}' names files that are not there: {some_of(absent)}; copy or download them, or {_SEED}"
            )
        return files

    @property
    def names(self) -> list[str]:
        """Of the files, sorted."""
        return sorted(set(self.where.values()))

    def path(self, name: str) -> Path:
        """Of a file, which no link leads out of the folder; those of the hub's cache stay within their model's folder."""
        return _path(self.folder, name)

    def verified(self, name: str) -> Path:
        """Of a file, which is to the last bit as it was written, where its digest is known. Raises `InputError` where it is
        not."""
        if self.manifest is not None:
            _compare(self.folder, self.manifest, [name])
        return self.path(name)

    def types(self) -> dict[str, str]:
        """How each tensor is stored: ``F32``, ``BF16``, ``I8``. Raises `InputError` where a file cannot be read, or lacks
        tensors that the index says it has."""
        found: dict[str, str] = {}
        for name in self.names:
            path = self.path(name)
            reader = open_weights(path, "np")
            wanted = [tensor for tensor, file in self.where.items() if file == name]
            if lacking := sorted(set(wanted) - set(reader.keys())):
                raise InputError(
                    f"'{INDEX}' says that '{path}' has {some_of(lacking)}, which it has not: they do not belong together; "
                    "copy or download all of them again"
                )
            found |= {tensor: reader.get_slice(tensor).get_dtype() for tensor in wanted}
        return found


def check_weights(plan: Plan, random_weights: bool, is_resumed: bool) -> None:
    """Before any process is started: whether a run can start from the weights of its model, if there are any.

    Where there are none and nothing was said of random ones, the first rank or launcher says on stderr that they are drawn.
    Raises `InputError` where the model has changed, or files are missing, damaged, outside the folder, or of numbers in a
    form that is not read."""
    reference = plan.model.resolved()
    if random_weights or reference.kind == "factory":
        return
    if reference.lora is not None and reference.lora.folder is not None and not is_resumed:
        _check_adapters(Path(reference.lora.folder), reference, plan.job.seed)
    if reference.weights is None:
        if not is_resumed and os.environ.get("RANK", "0") == "0":
            say(
                f"no weights lie beside the config of '{reference.text}': they are drawn from seed {plan.job.seed}"
            )
        return
    folder = str(reference.weights)
    method = method_of(reference.config or {}, folder)
    refuse_quantised(WeightFiles.of(reference.weights).types(), method, folder)


def adapter_file(folder: Path) -> Path:
    """Of the adapters in a folder that peft, or a run as a checkpoint, has written; then it is to the last bit as it was.
    Raises `InputError` where it is not, or not there."""
    if not (folder / ADAPTER).is_file():
        others = sorted(path.name for path in folder.glob("adapter_model*"))
        has = f"has {some_of(others)}, and only safetensors files are read" if others else "is not there"
        raise InputError(
            f"'{folder / ADAPTER}' {has}: give --lora-from a folder that save_pretrained() of peft has written"
        )
    check_adapter_contents(folder)
    return folder / ADAPTER


def check_adapter_contents(folder: Path) -> None:
    """Raises `InputError` where adapters and their config, of a run's checkpoint, are not what was written."""
    if (folder / MANIFEST).exists():
        _compare(folder, read_manifest(folder), [ADAPTER, ADAPTER_CONFIG])


def _check_adapters(folder: Path, reference: ModelReference, seed: int) -> None:
    """Before any process is started: whether adapters in `folder` can be gone on with. Raises `InputError` where they cannot
    be read, or are of a checkpoint beside other weights."""
    open_weights(adapter_file(folder), "np")
    was = read_manifest(folder).base if (folder / MANIFEST).exists() else None
    now = base_model_of(reference, seed, False)
    if was is not None and now is not None and not was.is_same(now):
        raise InputError(
            f"the adapters in '{folder}' are for {was}, and this plan's model starts from {now}, which has other weights: "
            "plan for those that they were trained with"
        )


def base_model_of(reference: ModelReference, seed: int, random_weights: bool) -> BaseModelIdentity | None:
    """Of the frozen model under adapters; None where all of the model is trained. `seed` is what it is drawn from where it
    has no files, or `random_weights` are asked for. Raises `InputError` where a file cannot be read."""
    if reference.lora is None:
        return None
    if reference.weights is None or random_weights:
        return BaseModelIdentity(text=lasting_text(reference), seed=seed)
    files = WeightFiles.of(reference.weights)
    try:
        found = {name: BaseFile.of(files.path(name)) for name in files.names}
    except OSError as error:
        raise InputError(
            f"weights in '{reference.weights}' cannot be read: {error.strerror or error}"
        ) from None
    return BaseModelIdentity(
        text=lasting_text(reference), folder=str(reference.weights.resolve()), files=found
    )


def lasting_text(reference: ModelReference) -> str:
    """A model's name as it is called from every folder."""
    path = Path(reference.text).expanduser()
    is_path = reference.text not in bundled_names() and path.exists()
    return str(path.resolve()) if is_path else reference.text


def open_weights(path: Path, framework: str) -> safe_open:
    """A reader of a safetensors file, for `framework` (``np``, ``pt``). Raises `InputError` where there is no such file, or
    it is no safetensors file."""
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "is not there"
        raise InputError(f"weights '{path}' {what}: copy or download the file again, or {_SEED}")
    with reading(path):
        return safe_open(str(path), framework=framework)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises `InputError` for what goes wrong inside with the safetensors file `path`."""
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
        raise InputError(f"{error}; if that was changed on purpose, remove '{MANIFEST}' there") from None


def _read_index(index: Path) -> dict[str, str]:
    content = read_json(index, "index", "copy or download it again")
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where:
        raise InputError(f"'{index}' has no weight_map of tensors and their files: copy or download it again")
    for tensor, name in where.items():
        if not isinstance(name, str) or not name:
            raise InputError(
                f"'{index}' gives {name!r} as the file of tensor '{tensor}': a name is wanted; download it again"
            )
    return where


def _listed(folder: Path, names: list[str]) -> dict[str, str]:
    """The tensors of files that no index describes."""
    where: dict[str, str] = {}
    for name in names:
        tensors = open_weights(_path(folder, name), "np").keys()
        for tensor in tensors:
            if tensor in where:
                raise InputError(
                    f"'{folder}' has tensor '{tensor}' in '{where[tensor]}' and in '{name}', and no '{INDEX}' that says "
                    "which counts: move one away"
                )
            where[tensor] = name
    return where


def _path(folder: Path, name: str) -> Path:
    resolved = folder.resolve()
    snapshots = resolved.parent
    is_cached = snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--")
    return inside(folder, name, snapshots.parent if is_cached else folder)


def _refuse_incomplete(folder: Path, names: list[str]) -> None:
    """Of numbered files, all must be there; and of some format that is read."""
    if not names:
        others = sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern))
        raise InputError(
            f"the weights in '{folder}' are in {some_of(others)}, and only safetensors files are read: convert them once "
            f"with transformers (AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained(...)), or {_SEED}"
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
    """The first few of many.

    >>> some_of(["a", "b"]), some_of(list("abcdef"))
    ("'a', 'b'", "'a', 'b', 'c', 'd' and 2 more")
    """
    shown = ", ".join(f"'{name}'" for name in names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"
