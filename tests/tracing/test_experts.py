"""Experts as grouped kernels: what the operators compute, and that shared ones are predicted only."""

from __future__ import annotations

import pytest
import torch

from stagewright.errors import RunError
from stagewright.tracing.experts import group_experts, permute_rows, unpermute_rows
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve


def test_rows_are_copied_into_an_order_and_their_copies_added_up() -> None:
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(10)
    copies = permute_rows(rows, order, 2)
    assert torch.equal(copies, rows[order // 2])
    assert torch.allclose(unpermute_rows(copies, order, 2), 2 * rows)
    assert torch.autograd.gradcheck(lambda x: permute_rows(x, order, 2), rows)
    assert torch.autograd.gradcheck(lambda x: unpermute_rows(x, order, 2), copies.detach().requires_grad_())


@pytest.mark.parametrize("model", ["tiny-mixtral", "tiny-deepseek-v3"])
def test_grouped_experts_compute_what_the_model_does(model: str) -> None:
    torch.manual_seed(0)
    built = build(resolve(model), 2, 16, "float32", fake=False)
    plain = built.module(**built.inputs)
    plain.backward()
    gradients = {
        name: one.grad.clone() for name, one in built.module.named_parameters() if one.grad is not None
    }
    built.module.zero_grad()
    assert group_experts(built.module) is None
    grouped = built.module(**built.inputs)
    grouped.backward()
    assert torch.allclose(grouped, plain, rtol=1e-5)
    for name, one in built.module.named_parameters():
        if name in gradients:
            assert one.grad is not None
            assert torch.allclose(one.grad, gradients[name], rtol=1e-3, atol=1e-6), name


def test_shared_experts_are_not_run() -> None:
    built = build(resolve("tiny-mixtral"), 1, 16, "float32", fake=False)
    found = group_experts(built.module, 2)
    assert found is not None and len(found.parameters) == 8
    with pytest.raises(RunError, match="predicted, not run"):
        built.module(**built.inputs)
