"""Model files: the weights of a model by their own names, in Hugging Face's layout.

Each pipeline rank's first replica writes ``model-00001-of-00002.safetensors`` with the parameters and lasting buffers of its
stages, gathered where replicas or tensor parallel ranks hold parts of them; ``model.safetensors.index.json`` maps tensors
to files. A tied parameter is written once, by its first name.

For a model with adapters, only the adapters are written, all of them by the first rank, as peft does; the model itself is
frozen and stays in its folder.

Source: the layout of sharded checkpoints in the documentation of transformers, "Sharded checkpoints".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from stagewright.execution.collectives import exchange
from stagewright.execution.loading import StoredWeights, unused_tensors
from stagewright.execution.weight_files import CONFIG, INDEX, lasting_text
from stagewright.files import write_whole
from stagewright.graph.stage import Stage
from stagewright.graph.tensor_parallel import GROUP, TensorShard, parallelism
from stagewright.tracing.arguments import DTYPES
from stagewright.tracing.models.adapter_names import ADAPTER, ADAPTER_CONFIG
from stagewright.tracing.models.adapters import adapter_config, peft_names
from stagewright.tracing.models.build import DeferredModel
from stagewright.tracing.models.reference import ModelReference
from stagewright.tracing.tensor_parallel.operators import group_of

if TYPE_CHECKING:
    from stagewright.execution.session import Session

_OF_STORAGE = ("torch_dtype", "dtype", "quantization_config")
"""Keys of a config that describe how the original files store the weights."""


@dataclass(frozen=True)
class ModelFiles:
    """The model files that a rank writes.

    `name` is the name of its pipeline rank's file, `names` are the tensors in it as the graph names them, `unused` those
    among them that no stage uses, so that the model has all its tensors. `adapters` has the names of adapters in peft's
    file; where `is_adapter`, the model itself is not written. `documents` are the files that describe the others, by name:
    the model's config, if it has one, and peft's config of adapters.
    """

    name: str
    names: frozenset[str]
    unused: Mapping[str, torch.Tensor]
    adapters: Mapping[str, str]
    is_adapter: bool
    documents: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(
        cls,
        model: DeferredModel,
        reference: ModelReference,
        stages: Sequence[Stage],
        placement: Sequence[int],
        rank: int,
        stored: StoredWeights | None,
    ) -> ModelFiles:
        """Return the files of pipeline rank `rank`; `stored` are the run's initial weights, None if drawn from the seed."""
        is_adapter = reference.lora is not None
        adapters = peft_names(model.module)
        lasting = set(adapters) if is_adapter else lasting_names(model.module)
        documents: dict[str, Mapping[str, Any]] = {}
        if adapters:
            documents[ADAPTER_CONFIG] = adapter_config(model.module, lasting_text(reference))
        if reference.config is not None and not is_adapter:
            documents[CONFIG] = described_config(reference.config)
        owners: dict[str, int] = {}
        for stage in stages:
            here = placement[stage.index]
            for value in (*stage.parameters, *stage.buffers):
                name = stage.value(value).name
                owners[name] = min(here, owners.get(name, here))
        unused = lasting - owners.keys()
        owners = {name: owner for name, owner in owners.items() if name in lasting} | dict.fromkeys(unused, 0)
        writers = sorted(set(owners.values()))
        number = writers.index(rank) + 1 if rank in writers else 0
        return cls(
            f"model-{number:05d}-of-{len(writers):05d}.safetensors",
            frozenset(name for name, owner in owners.items() if owner == rank),
            unused_tensors(model, unused, stored) if rank == 0 else {},
            adapters,
            is_adapter,
            documents,
        )

    def written(self, session: Session) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors of every file that this rank writes, on the CPU. Every rank must call this."""
        tensors = self._tensors(session)
        files = {} if self.is_adapter else {self.name: {_own_name(n): t for n, t in tensors.items()}}
        if self.adapters:
            adapters = {self.adapters[n]: t for n, t in tensors.items() if n in self.adapters}
            files[ADAPTER] = _on_first_rank(session, adapters)
        return files

    def whole(self, session: Session) -> dict[str, torch.Tensor]:
        """Return copies of the model's tensors, or of the adapters alone if only they are written, on the CPU of the first
        rank; empty on other ranks. Every rank must call this."""
        tensors = self._tensors(session)
        called = self.adapters.__getitem__ if self.is_adapter else _own_name
        return _on_first_rank(session, {called(name): tensor for name, tensor in tensors.items()})

    def _tensors(self, session: Session) -> dict[str, torch.Tensor]:
        """Return the tensors that this rank writes, on the CPU: empty except on the first replica and tensor rank."""
        mesh, tensors = session.mesh, dict(self.unused)
        is_writer = mesh.replica == 0 and mesh.tensor_rank == 0
        parallel = parallelism(session.graph)
        for name, held in _tensors(session):
            if mesh.replica != 0 or name not in self.names:
                continue
            how = parallel.shards.get(name) if parallel else None
            whole = held if how is None else _merged(held, how, mesh.tp)
            if is_writer:
                tensors[name] = whole.detach().to("cpu")
        return tensors if is_writer else {}


def _on_first_rank(session: Session, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors that all ranks have `held`, on the CPU of the first rank; every rank must call this."""
    device = session.device
    by_rank = exchange(
        [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in held.items()]
    )
    if session.mesh.rank:
        for tensor in held.values():
            dist.send(tensor.to(device).contiguous(), 0)
        return {}
    gathered = {
        name: tensor.clone() for name, tensor in held.items()
    }  # on a CPU, training goes on with the original
    for rank, described in enumerate(by_rank[1:], 1):
        for name, shape, dtype in described:
            arrived = torch.empty(shape, dtype=DTYPES[dtype], device=device)
            dist.recv(arrived, rank)
            gathered[name] = arrived.cpu()
    return gathered


def lasting_names(module: torch.nn.Module) -> set[str]:
    """Return the names of parameters, tied ones by their first name, and of buffers in the module's state."""
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name for name, _ in module.named_parameters()} | (
        buffers & module.state_dict(keep_vars=True).keys()
    )


def described_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config without the keys that describe the storage of its original files."""
    return {key: value for key, value in config.items() if key not in _OF_STORAGE}


def write_documents(folder: Path, documents: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Write `documents` to `folder`, and an index of the model files there if there are any; return the paths."""
    index = _index(folder)
    every = {**documents, **({INDEX: index} if index["weight_map"] else {})}
    for name, document in every.items():
        write_whole(folder / name, json.dumps(document, indent=2, sort_keys=True) + "\n")
    return [folder / name for name in every]


def _index(folder: Path) -> dict[str, Any]:
    where: dict[str, str] = {}
    total = 0
    for file in sorted(folder.glob("model-*.safetensors")):
        with safe_open(str(file), framework="pt") as reader:
            where.update(dict.fromkeys(reader.keys(), file.name))
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
        total += file.stat().st_size - 8 - header  # without the header and the eight bytes of its length
    return {"metadata": {"total_size": total}, "weight_map": where}


def _own_name(name: str) -> str:
    return name.removeprefix("net.")


def _tensors(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers of this rank by name, whole except for tensor parallelism; sharded ones are gathered one
    flat buffer after another, by the replicas in the first one's shard group."""
    names = session.weights.names
    for value, tensor in session.weights.tensors.items():
        yield names[value], tensor
    if session.mesh.replica < session.mesh.num_shards:
        for gathered in session.shards.whole_parameters():
            yield from gathered.items()


def _merged(part: torch.Tensor, how: TensorShard, num_ranks: int) -> torch.Tensor:
    """Return the whole of a tensor that is sharded over `num_ranks` ranks; each of them must call this with its part."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(num_ranks)]
    dist.all_gather(parts, part.contiguous(), group=group_of(GROUP))
    shape = list(part.shape)
    shape[how.dim] = sum(how.padded_blocks)
    whole = part.new_empty(shape)
    for rank, piece in enumerate(parts):
        offset = 0
        for start, stop in how.ranges(num_ranks, rank):
            whole.narrow(how.dim, start, stop - start).copy_(piece.narrow(how.dim, offset, stop - start))
            offset += stop - start
    return whole.narrow(how.dim, 0, how.whole_size)
