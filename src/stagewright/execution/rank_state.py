"""In-memory copies of one rank's state, for a user's loop that continues from it under the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stagewright.errors import InputError
from stagewright.execution.session import Session
from stagewright.execution.state import RegionIndex, held, loss_scale_of, named_by, resumed


def copied(session: Session) -> dict[str, Any]:
    """Return copies of all tensors that training changes on this rank, by name and region, and its other state."""
    return {
        "state": {entry.key: entry.tensor.detach().clone() for entry in held(session)},
        "loss_scale": loss_scale_of(session),
        "passed_over": session.passed_over,
    }


def places_for(session: Session, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return this rank's tensors to restore from a state of `copied`. Raises `InputError` where it is of another plan."""
    index = RegionIndex[int]()
    for key, tensor in state["state"].items():
        index.add(*named_by(key, tuple(tensor.shape)), 0)
    tensors = {entry.key: entry.tensor for entry in held(session, index)}
    if tensors.keys() != state["state"].keys():
        raise InputError(
            "the state is of another plan: write a checkpoint under that plan, and resume under this one"
        )
    return tensors


def put_back(session: Session, state: Mapping[str, Any], places: Mapping[str, torch.Tensor]) -> None:
    """Restore this rank's state from a state of `copied`; every rank must call this."""
    for key, tensor in places.items():
        tensor.copy_(state["state"][key])
    resumed(session, state["loss_scale"])
    session.passed_over = state["passed_over"]
