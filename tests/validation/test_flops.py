"""Our count of FLOP is PyTorch's own, forward and backward, to the digit."""

from __future__ import annotations

import pytest
from flops import counted, predicted


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-mixtral", "tiny-vit"])
def test_whole_models_have_the_flop_that_pytorch_counts(name: str) -> None:
    assert predicted(name) == counted(name) > 0
