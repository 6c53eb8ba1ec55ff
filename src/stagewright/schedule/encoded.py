"""Encoding of the rules of a program as integers, without a token object per microbatch.

Tokens of different microbatches differ only in the microbatch, so `TokenRules` is evaluated once per kind, stage and peer.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from stagewright.schedule.action import Action, Kind
from stagewright.schedule.tokens import Token, TokenRules, What

Codes = tuple[int, ...]
_Template = tuple[tuple[int, int], ...]
"""(Code for microbatch 0, increment per microbatch) of each token."""


class Effects(NamedTuple):
    """Numbers of the tokens that an action needs, makes and drops."""

    needs: Codes
    makes: Codes
    drops: Codes


class EncodedRules:
    """`rules` with tokens as numbers; actions have microbatches below `num_microbatches`.

    >>> from stagewright.schedule.builders import build
    >>> program = build("1f1b", 2, 4)
    >>> codes = EncodedRules(TokenRules.of(program), program.num_microbatches)
    >>> made, needed = codes.effects(Action.parse("0F3")).makes, codes.effects(Action.parse("1F3")).needs
    >>> made[0] == needed[0], str(codes.token(needed[0]))
    (True, 'value of stage 0 for stage 1 of microbatch 3')
    """

    def __init__(self, rules: TokenRules, num_microbatches: int) -> None:
        self.rules = rules
        self.stride = num_microbatches + 1
        self._bases: dict[tuple[What, int, int | None], int] = {}
        self._templates: dict[tuple[Kind, int, int | None], tuple[_Template, _Template, _Template]] = {}

    def effects(self, action: Action) -> Effects:
        """Return the effects of `action` by `TokenRules`."""
        if action.overlapped is not None:
            parts = [self.effects(part) for part in action.parts]
            return Effects(*(tuple(chain.from_iterable(codes)) for codes in zip(*parts, strict=True)))
        key = (action.kind, action.stage, action.peer)
        if key not in self._templates:
            rules = self.rules
            needs, makes, drops = rules.needs(action), rules.makes(action), rules.drops(action)
            self._templates[key] = self._template(needs), self._template(makes), self._template(drops)
        needs, makes, drops = self._templates[key]
        microbatch = action.microbatch or 0
        return Effects(
            tuple([first + step * microbatch for first, step in needs]),
            tuple([first + step * microbatch for first, step in makes]),
            tuple([first + step * microbatch for first, step in drops]),
        )

    def token(self, code: int) -> Token:
        """Return the token with this number."""
        base, microbatch = divmod(code, self.stride)
        what, stage, peer = next(key for key, number in self._bases.items() if number == base)
        return Token(what, stage, microbatch - 1 if microbatch else None, peer)

    def _template(self, tokens: tuple[Token, ...]) -> _Template:
        template: list[tuple[int, int]] = []
        for what, stage, microbatch, peer in tokens:
            base = self._bases.setdefault((what, stage, peer), len(self._bases))
            step = 0 if microbatch is None else 1
            template.append((base * self.stride + step, step))
        return tuple(template)
