"""Programs: the ordered actions of every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stagewright.errors import ScheduleError
from stagewright.limits import MOST_ACTIONS
from stagewright.schedule.action import COMPUTE, TRANSFERS, Action
from stagewright.schedule.placement import Placement
from stagewright.text import one_line

_MOST_SHOWN = 40
_MOST_OF_NAME = 100


@dataclass(frozen=True, slots=True)
class Program:
    """The actions of every rank for one batch, in order.

    >>> program = Program.from_text('''
    ...     program tiny
    ...     microbatches 1
    ...     placement 0 1
    ...     0: 0F0 0B0
    ...     1: 1F0 1B0
    ... ''')
    >>> program.num_ranks, program.num_stages, [str(action) for action in program.actions(1)]
    (2, 2, ['1F0', '1B0'])
    >>> Program.from_text(program.to_text()) == program == Program.from_document(program.to_document())
    True
    """

    name: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def __hash__(self) -> int:
        """Hash only the shape: a program has up to a million actions, and different programs seldom have equal shapes."""
        return hash((self.name, self.placement, self.num_microbatches, tuple(map(len, self.ranks))))

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.ranks))

    @property
    def is_lowered(self) -> bool:
        """Whether the program says when values are sent and received."""
        return any(action.kind in TRANSFERS for action in self)

    def actions(self, rank: int) -> tuple[Action, ...]:
        return self.ranks[rank]

    def __iter__(self) -> Iterator[Action]:
        """Every action, rank by rank."""
        return (action for actions in self.ranks for action in actions)

    def with_ranks(self, ranks: Iterable[Iterable[Action]]) -> Program:
        """Return the same program with other actions."""
        return replace(self, ranks=tuple(map(tuple, ranks)))

    def compute_only(self) -> Program:
        """Return the program without transfers, sharding and optimizer steps."""
        return self.with_ranks(
            (action for action in actions if action.kind in COMPUTE) for actions in self.ranks
        )

    def to_text(self) -> str:
        """Return lines with the name, microbatches, placement, then one line of actions per rank."""
        placement = " ".join(map(str, self.placement.rank_of_stage))
        head = [f"program {self.name}", f"microbatches {self.num_microbatches}", f"placement {placement}"]
        return (
            "\n".join([*head, *(f"{rank}: {line}".rstrip() for rank, line in enumerate(self.lines()))]) + "\n"
        )

    def lines(self) -> list[str]:
        """Return one line of action texts per rank."""
        return [" ".join(map(str, actions)) for actions in self.ranks]

    @classmethod
    def from_text(cls, text: str) -> Program:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        heads = [
            _after(word, lines, index) for index, word in enumerate(("program", "microbatches", "placement"))
        ]
        ranks = [_after(f"{rank}:", lines, 3 + rank).split() for rank in range(len(lines) - 3)]
        return _assembled(heads[0], heads[2].split(), heads[1], ranks)

    def to_document(self) -> dict[str, Any]:
        """Return plain data for JSON: `name`, `num_microbatches`, `rank_of_stage`, `ranks` (lists of texts)."""
        return {
            "name": self.name,
            "num_microbatches": self.num_microbatches,
            "rank_of_stage": list(self.placement.rank_of_stage),
            "ranks": [[str(action) for action in actions] for actions in self.ranks],
        }

    @classmethod
    def from_document(cls, document: object) -> Program:
        """Return the program of `to_document`; other keys are ignored. Raise `ScheduleError` for anything else."""
        if not isinstance(document, Mapping):
            raise ScheduleError(f"a program document is an object of keys and values, not {_shown(document)}")
        for key, (holds, kind) in _DOCUMENT.items():
            if key not in document:
                raise ScheduleError(f"a program document needs the key '{key}', {kind}")
            if not holds(document[key]):
                raise ScheduleError(f"'{key}' of a program is {kind}, not {_shown(document[key])}")
        return _assembled(*(document[key] for key in _DOCUMENT))


def build_program(
    name: str, placement: Placement, num_microbatches: int, order: Callable[[int], Iterable[Action]]
) -> Program:
    """Build the program in which rank `r` performs ``order(r)``; raise `ScheduleError` without microbatches."""
    check_size(name, placement.num_stages, num_microbatches)
    ranks = tuple(tuple(order(rank)) for rank in range(placement.num_ranks))
    return Program(name, placement, num_microbatches, ranks)


def check_name(name: str) -> None:
    """Raise `ScheduleError` for an invalid name of a schedule: tables, and files of other programs, contain it."""
    if len(name) > _MOST_OF_NAME or one_line(name) != name:
        raise ScheduleError(
            f"'{one_line(name[:_MOST_OF_NAME])}' is not a valid name of a schedule: use one line of at most {_MOST_OF_NAME} "
            "visible characters"
        )


def check_size(name: str, num_stages: int, num_microbatches: int) -> None:
    """Raise `ScheduleError` for a program without microbatches, or with too many to simulate."""
    if num_microbatches < 1:
        raise ScheduleError(f"{name}: a batch needs at least one microbatch, not {num_microbatches}")
    if 2 * num_stages * num_microbatches > MOST_ACTIONS:
        raise ScheduleError(
            f"{name}: {num_stages:,} stages of {num_microbatches:,} microbatches are more than {MOST_ACTIONS:,} forwards "
            "and backwards, which take too long to simulate: make microbatches larger, so that there are fewer"
        )


def _after(word: str, lines: list[str], index: int) -> str:
    if index >= len(lines) or not lines[index].startswith(word):
        start = f"'{lines[index][:40]}'" if index < len(lines) else "the end"
        raise ScheduleError(f"line {index + 1} of a program must start with '{word}', found {start}")
    return lines[index].removeprefix(word).strip()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(holds, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_DOCUMENT: dict[str, tuple[Callable[[object], bool], str]] = {
    "name": (_is_text, "a text"),
    "rank_of_stage": (lambda value: _is_list(value, _is_count), "a list of whole numbers"),
    "num_microbatches": (_is_count, "a whole number"),
    "ranks": (
        lambda value: _is_list(value, lambda texts: _is_list(texts, _is_text)),
        'a list of lists of actions, such as [["0F0", "0B0"]]',
    ),
}
"""Check and description of the value of each key of a program document, in the order of the parameters of `_assembled`."""


def _shown(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _assembled(
    name: str, rank_of_stage: Iterable[Any], num_microbatches: Any, ranks: Iterable[Iterable[str]]
) -> Program:
    check_name(name)
    try:
        placement, count = Placement(tuple(int(rank) for rank in rank_of_stage)), int(num_microbatches)
    except ValueError as error:
        raise ScheduleError(f"program '{name}': ranks and microbatches are whole numbers: {error}") from None
    check_size(f"program '{name}'", placement.num_stages, count)
    parsed = tuple(tuple(Action.parse(text) for text in texts) for texts in ranks)
    if len(parsed) != placement.num_ranks:
        raise ScheduleError(
            f"program '{name}' lists {len(parsed)} ranks but its placement has {placement.num_ranks}"
        )
    return Program(name, placement, count, parsed)
