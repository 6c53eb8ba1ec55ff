"""What stages start with, as files that other runtimes read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save

from stagewright.execution.loading import StoredWeights
from stagewright.files import write_whole
from stagewright.planning.plan import Plan
from stagewright.tracing.models.build import DeferredModel


def write_initial_weights(plan: Plan, names: Sequence[Sequence[str]], folder: Path) -> None:
    """``stage-N.safetensors`` in `folder`: the tensors of each stage that `names` has, by the model's own names, as its
    files have them, or from the seed where it has none.

    Raises:
        InputError: a tensor is in none of the files, or cannot be read.
    """
    reference, job = plan.model.resolved(), plan.job
    model = DeferredModel(reference, plan.microbatch_size, job.sequence_length, job.torch_name, seed=job.seed)
    stored = None
    if reference.weights is not None:
        stored = StoredWeights(reference.weights, model.module, reference.config or {})
    for stage, wanted in enumerate(names):
        made = {
            name: (
                stored.read(name) if stored is not None and stored.has(name) else model.tensors((name,))[name]
            )
            for name in wanted
        }
        found = {name: tensor.detach().clone().contiguous() for name, tensor in made.items()}
        write_whole(folder / f"stage-{stage}.safetensors", save(found))
