"""The state of one rank by itself, for a loop that goes on from it under the same plan, in memory alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stagewright.errors import InputError
from stagewright.execution.session import Session
from stagewright.execution.state import RegionIndex, held, loss_scale_of, named_by, resumed


def copied(session: Session) -> dict[str, Any]:
    """Copies of all tensors that training changes on this rank, by name and region, and what is no tensor."""
    return {
        "state": {one.key: one.tensor.detach().clone() for one in held(session)},
        "loss_scale": loss_scale_of(session),
        "passed_over": session.passed_over,
    }


def places_for(session: Session, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of this rank that are to be as `copied` took them. Raises `InputError` where it was of another plan."""
    index = RegionIndex[int]()
    for key, tensor in state["state"].items():
        index.add(*named_by(key, tuple(tensor.shape)), 0)
    own = {one.key: one.tensor for one in held(session, index)}
    if own.keys() != state["state"].keys():
        raise InputError(
            "the state is of another plan: write a checkpoint under one, and resume under the other"
        )
    return own


def put_back(session: Session, state: Mapping[str, Any], places: Mapping[str, torch.Tensor]) -> None:
    """This rank is again as `copied` took it; every rank must call this."""
    for key, tensor in places.items():
        tensor.copy_(state["state"][key])
    resumed(session, state["loss_scale"])
    session.passed_over = state["passed_over"]
