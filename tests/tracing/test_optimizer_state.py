"""What optimizers keep and move, as torch itself shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.errors import InputError
from stagewright.estimation.optimizer import ADAMW, OptimizerState
from stagewright.planning.job import Job, load_job
from stagewright.tracing.optimizers import maker, optimizer_names
from stagewright.tracing.optimizers import state_fields as fields_of

TORCH = sorted(set(optimizer_names()) - {"lbfgs", "sparseadam"})


def asked(*given: Any) -> OptimizerState:
    return OptimizerState.model_validate(fields_of(*given))


@pytest.fixture(scope="module")
def known() -> dict[str, OptimizerState]:
    return {name: asked(name, 1e-3, {}, "float32") for name in TORCH}


def test_adamw_is_what_is_taken_for_known(known: dict[str, OptimizerState]) -> None:
    assert known["adamw"] == ADAMW == known["adam"]


def test_every_optimizer_of_torch_is_asked(known: dict[str, OptimizerState]) -> None:
    """Moments of a matrix, and whether a range of its elements is enough."""
    assert {name: state.num_moments for name, state in known.items()} == {
        "adadelta": 2, "adafactor": 0, "adagrad": 1, "adam": 2, "adamax": 2, "adamw": 2, "asgd": 1, "muon": 1, "nadam": 2,
        "radam": 2, "rmsprop": 1, "rprop": 2, "sgd": 0,
    }  # fmt: skip
    assert {name for name, state in known.items() if not state.is_elementwise} == {"adafactor", "muon"}
    assert all(state.passes >= 3 for state in known.values())


def test_options_change_what_is_kept() -> None:
    assert asked("sgd", 1e-3, {"momentum": 0.9}, "float32").passes == 5
    assert asked("adamw", 1e-3, {"amsgrad": True}, "float32").num_moments == 3
    assert asked("rmsprop", 1e-3, {"centered": True, "momentum": 0.5}, "float32").num_moments == 3


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("shape", [(17,), (6, 9), (4, 6, 8)])
def test_bytes_are_those_of_a_parameter_of_another_shape(
    name: str, shape: tuple[int, ...], known: dict[str, OptimizerState]
) -> None:
    parameter = torch.nn.Parameter(torch.randn(shape))
    optimizers = maker(name, 1e-3, {})([{"params": [("one", parameter)], "weight_decay": 0.0}])
    for _ in range(2):
        parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    kept = [one for optimizer in optimizers for state in optimizer.state.values() for one in state.values()]
    sizes = [one.nbytes for one in kept if isinstance(one, torch.Tensor)]
    assert sizes == list(known[name].storages(shape, 4))


def test_products_are_those_of_the_matrix(known: dict[str, OptimizerState]) -> None:
    """Five iterations, each of three products of the smaller side."""
    small, large = 8, 24
    assert known["muon"].product_flop((large, small)) == 5 * 2 * (2 * small**2 * large + small**3)
    assert known["sgd"].product_flop((large, small)) == 0


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"optimizer": "admw"}, "did you mean 'adamw'|adamw"),
        ({"optimizer": "lbfgs"}, "needs the loss again"),
        ({"optimizer": "sgd", "optimizer_options": {"momntum": 0.9}}, "no option 'momntum'.*momentum"),
        ({"optimizer": "sgd", "betas": (0.5, 0.5)}, "betas is AdamW's"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "has no weight decay"),
        ({"optimizer": "sgd", "runtime": "megatron-lm"}, "predicted only with AdamW"),
        ({"optimizer": "sgd", "optimizer_options": {"momentum": -1.0}}, "momentum"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        load_job(None, {"global_batch": 1, "sequence_length": 1, **given}).with_state()


def test_a_factory_is_asked_and_what_it_returns_is_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def good(groups, lr, momentum):\n    return torch.optim.SGD(groups, lr=lr, momentum=momentum)\n"
        "def bad(groups, lr):\n    return 3\n"
    )
    base = {"global_batch": 1, "sequence_length": 1}
    given = {"optimizer": f"{tmp_path}/mine.py:good", "optimizer_options": {"momentum": 0.9}}
    found = load_job(None, base | given).with_state()
    assert found.kept.num_moments == 1 and found.kept.is_elementwise and found.weight_decay == 0.1
    with pytest.raises(InputError, match="it is called with parameter groups"):
        load_job(None, base | {"optimizer": f"{tmp_path}/mine.py:good"}).with_state()
    with pytest.raises(InputError, match=r"must return a torch.optim.Optimizer"):
        load_job(None, base | {"optimizer": f"{tmp_path}/mine.py:bad"}).with_state()


def test_weights_decay_by_default_where_that_is_beside_the_update() -> None:
    base = {"global_batch": 1, "sequence_length": 1}
    decays = {name: load_job(None, base | {"optimizer": name}).weight_decay for name in ("muon", "sgd")}
    assert decays == {"muon": 0.1, "sgd": 0.0} and Job.model_validate(base).weight_decay == 0.1
