"""Initial weights of stages, as files for other runtimes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save

from stagewright.execution.loading import StoredWeights
from stagewright.files import write_whole
from stagewright.planning.plan import Plan
from stagewright.tracing.models.build import DeferredModel


def write_initial_weights(plan: Plan, names: Sequence[Sequence[str]], folder: Path) -> None:
    """Write ``stage-N.safetensors`` in `folder`: the tensors in `names` of each stage, by the model's own names, from the
    model's files, or drawn from the seed where it has none.

    Raises:
        InputError: a tensor is in none of the files, or cannot be read.
    """
    reference, job = plan.model.resolved(), plan.job
    model = DeferredModel(reference, plan.microbatch_size, job.sequence_length, job.torch_name, seed=job.seed)
    stored = None
    if reference.weights is not None:
        stored = StoredWeights(reference.weights, model.module, reference.config or {})
    for stage, wanted in enumerate(names):
        tensors = {
            name: (
                stored.read(name) if stored is not None and stored.has(name) else model.tensors((name,))[name]
            )
            for name in wanted
        }
        copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        write_whole(folder / f"stage-{stage}.safetensors", save(copies))
