"""Random samples: sample `index` of `step` is the same under every plan, and made by each rank separately."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from stagewright.execution.random import key
from stagewright.graph import OperatorGraph
from stagewright.tracing.arguments import DTYPES


class SyntheticBatches:
    """Batches of random numbers in the range of the model's first example input, which microbatches of every size have."""

    def __init__(self, examples: Mapping[str, torch.Tensor], seed: int) -> None:
        integers = {name: tensor for name, tensor in examples.items() if not tensor.is_floating_point()}
        self.bounds = {name: int(tensor[0].max()) + 1 for name, tensor in integers.items()}
        self.seed = seed

    def open(self, step: int) -> None:
        """Do nothing: samples are made one by one."""

    def microbatch(
        self, step: int, first: int, graph: OperatorGraph, names: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the inputs with these `names`, or all inputs, from sample `first` of the step on."""
        batch = {}
        for place, (name, value) in enumerate(sorted(graph.inputs.items())):
            if names is not None and name not in names:
                continue
            meta = graph.values[value].meta
            dtype = DTYPES[meta.dtype]
            rows, shape = [], meta.shape[1:]
            for row in range(meta.shape[0]):
                generator = torch.Generator().manual_seed(key(self.seed, step, first + row, place))
                if dtype.is_floating_point:
                    rows.append(torch.randn(shape, generator=generator, dtype=torch.float64))
                else:
                    bound = max(self.bounds.get(name, 2), 1)
                    rows.append(torch.randint(0, bound, shape, generator=generator))
            batch[name] = torch.stack(rows).to(dtype)
        return batch
