"""The options of a run: one value that is checked when it is made and sent to every rank."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import stagewright
from stagewright.errors import InputError
from stagewright.execution.data.prepared import PreparedData, PreparedSource
from stagewright.execution.data_identity import DataIdentity
from stagewright.execution.options import RunOptions


def test_ranks_get_the_options_as_they_are() -> None:
    source = PreparedSource(kind="tokens", path="/data/text.txt")
    data = PreparedData(sources=(source,), identity=DataIdentity(kind="text", num_tokens=3))
    options = RunOptions(
        "plan.json", data, steps=3, ranks=[1, 0], checkpoint="kept", rates={"warmup_steps": 2}
    )
    assert RunOptions.from_json(options.to_json()) == options
    assert RunOptions.from_json(RunOptions(out=Path("out")).to_json()).out == "out"


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"keep_every": 5}, "--keep-every needs --keep-last"),
        ({"keep_last": 5}, "--keep-last needs --checkpoint"),
        ({"checkpoint": "kept", "checkpoint_every": 0}, "at least 1"),
        ({"evaluate_every": 5}, "--evaluate-every needs --held-out"),
        ({"on_nan": "skipp"}, "did you mean 'skip'"),
        ({"on_nan": "rollback"}, "--on-nan rollback needs --checkpoint"),
        ({"other_data": True}, "--other-data needs --resume"),
        ({"checkpoint": "kept", "replan": True, "ranks": "ranks.csv"}, "give one of them"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        RunOptions(**options)


@pytest.mark.parametrize("function", [stagewright.run, stagewright.Trainer.__init__])
def test_the_fields_are_keywords(function: Any) -> None:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    assert names == [field.name for field in fields(RunOptions)]
