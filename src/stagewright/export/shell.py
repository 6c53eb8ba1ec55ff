"""Static expansion of shell scripts: the words of their commands, without running anything.

Assignments, quotes, arrays, defaults, arithmetic, conditions, `case`, functions, `eval` and `bash -c` are followed. What
depends on more than the script (its arguments, outputs of commands) stays as it is written, such as ``$1``.

Source: POSIX.1-2017, chapter 2, "Shell Command Language", and the manual of bash 5.2 for arrays and ``[[``. Ignores:
redirections, patterns of file names, and what loops do after their first round.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from stagewright.errors import InputError
from stagewright.export.shell_parser import ASSIGNMENT, RawArray, RawWord, ShellNode, ShellParser

_NAME = re.compile(r"[A-Za-z_]\w*")
_EXPANSION = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^]]*)\])?(?:(:?[-=+?])(.*)|(.*))", re.DOTALL)
_UNSET = re.compile(r"\$([A-Za-z_]\w*)")
_BLANKS = " \t\r\n"
_WITHOUT_INFLUENCE = {
    "true",
    ":",
    "set",
    "shopt",
    "echo",
    "printf",
    "cd",
    "mkdir",
    "rm",
    "source",
    ".",
    "ulimit",
    "module",
}
"""Commands that set no variable and start no program."""
_MOST_COMMANDS = 20_000
_MOST_NESTED = 50
_MOST_CHARACTERS = 2**20
"""Limit of an expanded word, for scripts that double a variable repeatedly."""


@dataclass(frozen=True)
class Word:
    """A word of a command, with the line on which it was written."""

    text: str
    line: int


@dataclass(frozen=True)
class _Characters:
    """Characters of a word; those from quotes or a quoted expansion are not split at blanks."""

    text: str
    line: int
    is_quoted: bool


_Text = tuple[_Characters, ...]
_Value = _Text | list[_Text]


class _Exit(Exception):
    """Raised when a script would exit."""


@dataclass(frozen=True)
class Script:
    """An expanded script: the words of every command in order, those of every variable at its end, and sentences on what
    was not followed."""

    commands: tuple[tuple[Word, ...], ...]
    variables: tuple[tuple[Word, ...], ...]
    notes: tuple[str, ...]


def read_script(text: str, origin: str, arguments: Sequence[str] = ()) -> Script:
    """Expand the script in a text, which is started with `arguments`.

    >>> script = read_script('A="--x 1"; if [ $1 = a ]; then B=2; else B=3; fi; run $A --y $B', "here")
    >>> [word.text for word in script.commands[-1]], script.notes
    (['run', '--x', '1', '--y', '2'], ('the condition of line 1 ([ $1 = a ]) depends on more: its first branch is taken',))

    Raises:
        InputError: a quote, bracket or block of the script has no end; names its line.
    """
    given: list[_Text] = [(_Characters(argument, 0, True),) for argument in arguments]
    shell = _Shell(origin)
    if given:
        shell.variables |= {"@": given, **{f"{n}": value for n, value in enumerate(given, 1)}}
    try:
        shell.run(ShellParser(text, origin).script())
    except _Exit:
        pass
    except RecursionError:
        raise InputError(
            f"{origin} nests commands too deep: give argv.json, a list of its arguments"
        ) from None
    values = (value if isinstance(value, list) else [value] for value in shell.variables.values())
    return Script(
        tuple(map(tuple, shell.commands)),
        tuple(tuple(_word(part) for text in texts for part in _split(text)) for texts in values),
        tuple(dict.fromkeys(shell.notes)),
    )


@dataclass
class _Shell:
    """Interpreter of a script, with its variables and functions at the current command; it collects `commands` and
    `notes`."""

    origin: str
    variables: dict[str, _Value] = field(default_factory=dict)
    functions: dict[str, ShellNode] = field(default_factory=dict)
    commands: list[list[Word]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    depth: int = 0
    count: int = 0

    def run(self, nodes: Sequence[ShellNode]) -> bool | None:
        """Run commands and return whether the last succeeds; None if that depends on more than the script."""
        status: bool | None = True
        for node in nodes:
            self.count += 1
            if self.count > _MOST_COMMANDS or self.depth > _MOST_NESTED:
                raise InputError(
                    f"{self.origin}, line {node.line}: the script has no end, or too many commands: give argv.json, a list "
                    "of its arguments"
                )
            self.depth += 1
            status = getattr(self, f"_{node.kind}")(node)
            self.depth -= 1
        return status

    def _group(self, node: ShellNode) -> bool | None:
        return self.run(node.parts)

    def _pipe(self, node: ShellNode) -> bool | None:
        return self.run(node.parts)

    def _not(self, node: ShellNode) -> bool | None:
        status = self.run(node.parts)
        return None if status is None else not status

    def _and(self, node: ShellNode) -> bool | None:
        first = self.run(node.parts[:1])
        if first is None and _is_test(node.parts[0]):
            if _matter(node.parts[1:]):
                self._note_condition(node.parts[0], "what follows is not taken")
            return None
        return first if first is False else self.run(node.parts[1:])

    def _or(self, node: ShellNode) -> bool | None:
        first = self.run(node.parts[:1])
        if first is None:
            if _is_test(node.parts[0]) and _matter(node.parts[1:]):
                self._note_condition(node.parts[0], "what follows is not taken")
            return None  # a command is taken to succeed
        return first or self.run(node.parts[1:])

    def _function(self, node: ShellNode) -> bool | None:
        self.functions[node.words[0]] = node.parts[0]
        return True

    def _loop(self, node: ShellNode) -> bool | None:
        self.notes.append(f"the loop of line {node.line} is not followed")
        return None

    def _arithmetic(self, node: ShellNode) -> bool | None:
        value = _joined(self._expanded(node.words[0]))
        return int(value) != 0 if value.lstrip("-").isdecimal() else None

    def _for(self, node: ShellNode) -> bool | None:
        name, *words = node.words
        fields = [text for word in words for text in self._fields(word)]
        if not fields and name:
            return True
        if len(fields) != 1:
            self.notes.append(f"the loop of line {node.line} is followed for its first round alone")
        if name:
            self.variables[name] = fields[0]
        return self.run(node.parts)

    def _if(self, node: ShellNode) -> bool | None:
        branches, otherwise = node.parts
        is_choice = len(branches) > 1 or otherwise is not None
        for number, (condition, body) in enumerate(branches):
            status = self.run(condition)
            if status is None and is_choice and not _ends_script(body):
                self._note_condition(condition[-1], "its first branch is taken")
                return self.run(body)
            if status is None and _matter(body):
                self._note_condition(condition[-1], "its branch is not taken")
            if status:
                return self.run(body)
            is_choice = is_choice and (number + 2 < len(branches) or otherwise is not None)
        return self.run(otherwise or ())

    def _case(self, node: ShellNode) -> bool | None:
        subject = _joined(self._expanded(node.words[0]))
        for patterns, body in node.parts:
            texts = [_joined(self._expanded(pattern)) for pattern in patterns]
            if "$" in subject and not _ends_script(body):
                self.notes.append(
                    f"the case of line {node.line} ({subject}) depends on more: its first branch is taken"
                )
                return self.run(body)
            if "$" not in subject and any(fnmatchcase(subject, text) for text in texts):
                return self.run(body)
        return True

    def _note_condition(self, node: ShellNode, outcome: str) -> None:
        words = " ".join(word.text for word in node.words if isinstance(word, RawWord))
        self.notes.append(f"the condition of line {node.line} ({words}) depends on more: {outcome}")

    def _simple(self, node: ShellNode) -> bool | None:
        words = list(node.words)
        while words and self._assign(words[0]):
            words.pop(0)
        if not words:
            return True
        first = words[0].text if isinstance(words[0], RawWord) else ""
        if first in ("export", "local", "readonly", "declare", "typeset"):
            for word in words[1:]:
                self._assign(word)
            return True
        if first in ("[", "test", "[["):
            fields = [self._expanded(word) for word in words if isinstance(word, RawWord)]
            texts = [_joined(text) for text in fields][1:]
            for name in dict.fromkeys(name for text in texts for name in _UNSET.findall(text)):
                self.notes.append(
                    f"${name} of line {node.line}, which the file does not set, is taken as empty"
                )
            return _test(texts, first == "[[")
        fields = [_word(text) for word in words if isinstance(word, RawWord) for text in self._fields(word)]
        return self._called(fields, node) if fields else True

    def _called(self, words: list[Word], node: ShellNode) -> bool | None:
        name = words[0].text
        if name in _WITHOUT_INFLUENCE:
            if name in ("source", "."):
                self.notes.append(f"line {node.line} reads '{words[-1].text}', which is not followed")
            return True
        if name == "false":
            return False
        if name in ("exit", "return", "exec") and (name != "exec" or len(words) == 1):
            raise _Exit
        if name == "unset":
            for word in words[1:]:
                self.variables.pop(word.text, None)
            return True
        if name == "eval":
            return self._nested(" ".join(word.text for word in words[1:]), words[0].line, words[1:])
        for at, word in enumerate(words[:-1]):
            shells = words[max(0, at - 2) : at]
            if re.fullmatch(r"-l?c", word.text) and any(_is_shell(shell.text) for shell in shells):
                return self._nested(words[at + 1].text, words[at + 1].line, words[at + 1 : at + 2])
        if (body := self.functions.get(name)) is not None:
            outer = {key: value for key, value in self.variables.items() if key.isdecimal() or key == "@"}
            arguments: list[_Text] = [(_Characters(word.text, word.line, False),) for word in words[1:]]
            self.variables |= {"@": arguments, **{f"{n}": text for n, text in enumerate(arguments, 1)}}
            try:
                return self.run([body])
            except _Exit:
                return None
            finally:
                for key in ["@", *map(str, range(1, len(words)))]:
                    self.variables.pop(key, None)
                self.variables |= outer
        self.commands.append(words)
        return None

    def _nested(self, text: str, line: int, words: Sequence[Word]) -> bool | None:
        """Run the commands of `eval` or `bash -c`; words that also occur in `words` keep their lines."""
        before = len(self.commands)
        status = self.run(ShellParser(text, self.origin, line).script())
        lines = {word.text: word.line for word in words}
        for number in range(before, len(self.commands)):
            self.commands[number] = [
                Word(word.text, lines.get(word.text, line)) for word in self.commands[number]
            ]
        return status

    def _assign(self, word: RawWord | tuple[str, RawArray]) -> bool:
        """Perform the assignment if a word is one, and return whether it is."""
        is_array = isinstance(word, tuple)
        match = ASSIGNMENT.match(word[0] if is_array else word.text)
        if match is None or match[2]:
            return match is not None
        value: _Value
        if isinstance(word, tuple):
            value = [text for item in word[1].words for text in self._fields(item)]
        else:
            raw = RawWord(word.text[match.end() :], word.line)
            value = tuple(_Characters(run.text, run.line, False) for run in self._expanded(raw))
        if match[3]:
            before = self.variables.get(match[1], [] if isinstance(value, list) else ())
            if isinstance(before, list):
                value = [*before, *(value if isinstance(value, list) else [value])]
            else:
                value = [before, *value] if isinstance(value, list) else (*before, *value)
        self.variables[match[1]] = value
        return True

    def _fields(self, word: RawWord) -> list[_Text]:
        """Return the words that a word expands to: unquoted parts are split at blanks, elements of arrays are words."""
        if re.fullmatch(r'"?\$\{?(\w+\[[@*]\]|@)\}?"?', word.text):
            name = re.sub(r"[^\w@]", "", word.text).removesuffix("@") or "@"
            value = self.variables.get(name, [])
            texts = value if isinstance(value, list) else [value]
            if word.text.startswith('"'):
                return [tuple(_Characters(run.text, run.line, True) for run in text) for text in texts]
            return [part for text in texts for part in _split(text)]
        return _split(self._expanded(word))

    def _expanded(self, word: RawWord) -> _Text:
        """Return a word with quotes removed and variables expanded."""
        runs = tuple(self._runs(word.text, word.line, False))
        if sum(len(run.text) for run in runs) > _MOST_CHARACTERS:
            raise InputError(
                f"{self.origin}, line {word.line}: a word expands to more than {_MOST_CHARACTERS:,} characters: give "
                "argv.json, a list of its arguments"
            )
        return runs

    def _runs(self, text: str, line: int, is_quoted: bool) -> Iterator[_Characters]:
        at, plain = 0, ""
        while at < len(text):
            character = text[at]
            if character == "\\" and at + 1 < len(text):
                escaped = text[at + 1]
                if escaped != "\n":
                    is_escape = not is_quoted or escaped in '$`"\\'
                    if plain and not is_quoted:
                        yield _Characters(plain, line, is_quoted)
                        plain = ""
                    if is_quoted:
                        plain += escaped if is_escape else character + escaped
                    else:
                        yield _Characters(escaped, line, True)
                at += 2
                continue
            if character in "\"'$`" and not (character == "'" and is_quoted):
                if plain:
                    yield _Characters(plain, line, is_quoted)
                    plain = ""
                end, runs = self._special(text, at, line, is_quoted)
                yield from runs
                at = end
                continue
            plain += character
            at += 1
        if plain:
            yield _Characters(plain, line, is_quoted)

    def _special(self, text: str, at: int, line: int, is_quoted: bool) -> tuple[int, list[_Characters]]:
        """Return the end and the value of quotes or an expansion that begins at `at`."""
        character = text[at]
        if character == "'":
            end = text.find("'", at + 1)
            return end + 1, [_Characters(text[at + 1 : end], line, True)]
        if character == '"':
            end = ShellParser(text, self.origin, line).end(at)
            return end, [*self._runs(text[at + 1 : end - 1], line, True), _Characters("", line, True)]
        if character == "`":
            end = text.find("`", at + 1)
            end = len(text) if end < 0 else end + 1
            return end, [_Characters(f"$({text[at + 1 : end - 1]})", line, True)]
        if text.startswith("$(", at) or text.startswith("${", at):
            end = ShellParser(text, self.origin, line).end(at + 1)
            inner = text[at + 2 : end - 1]
            if text.startswith("$((", at):
                return end, [self._computed(inner[1:-1], line)]
            if text[at + 1] == "(":
                return end, [_Characters(text[at:end], line, True)]
            return end, self._value(inner, line, is_quoted)
        match = re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$!-])").match(text, at)
        if match is None:
            return at + 1, [_Characters("$", line, is_quoted)]
        return match.end(), self._value(match[1], line, is_quoted)

    def _value(self, inner: str, line: int, is_quoted: bool) -> list[_Characters]:
        """Return the value of ``${inner}``; unchanged if the script does not determine it."""
        match = _EXPANSION.fullmatch(inner)
        as_written = [
            _Characters(
                f"${inner}" if _NAME.fullmatch(inner) or len(inner) == 1 else f"${{{inner}}}", line, True
            )
        ]
        if match is None or match[6]:
            return as_written
        is_length, name, index, mark, default = match[1], match[2], match[3], match[4], match[5]
        value = self.variables.get(name)
        if isinstance(value, list):
            if is_length:
                return [_Characters(str(len(value)), line, is_quoted)]
            chosen = value
            if index is None or index.isdecimal():
                chosen = value[int(index or 0) : int(index or 0) + 1]
            separated = [run for text in chosen for run in (*text, _Characters(" ", line, False))]
            value = tuple(separated[:-1])
        if is_length:
            return as_written if value is None else [_Characters(str(len(_joined(value))), line, is_quoted)]
        is_set = value is not None and (bool(_joined(value)) or ":" not in (mark or ""))
        if mark is not None and mark[-1] == "+":
            return list(self._runs(default, line, is_quoted)) if is_set else []
        if value is not None and is_set:
            return [_Characters(run.text, run.line, is_quoted) for run in value]
        if mark is not None and mark[-1] in "-=":
            filled = list(self._runs(default, line, is_quoted))
            if mark[-1] == "=":
                self.variables[name] = tuple(filled)
            return filled
        if value is not None:
            return []
        return as_written

    def _computed(self, expression: str, line: int) -> _Characters:
        """Return the number of ``$((expression))``, or the expression with the values of the variables that are set."""
        text = re.sub(r"(?<![\w$}])([A-Za-z_]\w*)", r"$\1", expression)
        written = _joined(tuple(self._runs(text, line, True)))
        try:
            return _Characters(str(_number(ast.parse(written.strip(), mode="eval").body)), line, False)
        except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError, MemoryError):
            return _Characters(f"$(({written}))", line, True)


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv, ast.Pow: lambda base, power: base ** min(power, 64),
}  # fmt: skip


def _number(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp):
        value = _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_number(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    else:
        raise ValueError("no arithmetic of whole numbers")
    if not -(2**63) <= value < 2**63:
        raise ValueError("out of range")
    return value


def _joined(text: _Text) -> str:
    return "".join(run.text for run in text)


def _word(text: _Text) -> Word:
    return Word(_joined(text), text[0].line if text else 0)


def _split(text: _Text) -> list[_Text]:
    """Return the words of an expanded word: unquoted runs are split at blanks."""
    words: list[_Text] = []
    current: list[_Characters] = []
    for run in text:
        if run.is_quoted:
            current.append(run)
            continue
        line = run.line
        for piece in re.split(r"([ \t\r\n]+)", run.text):
            if piece and piece[0] in _BLANKS:
                line += piece.count("\n")
                if current:
                    words.append(tuple(current))
                current = []
            elif piece:
                current.append(_Characters(piece, line, True))
    if current:
        words.append(tuple(current))
    return words


def _is_shell(word: str) -> bool:
    return word.rsplit("/", 1)[-1] in ("bash", "sh", "zsh", "dash")


def _is_test(node: ShellNode) -> bool:
    first = node.words[0] if node.kind == "simple" and node.words else None
    return isinstance(first, RawWord) and first.text in ("[", "[[", "test")


def _ends_script(body: Sequence[ShellNode]) -> bool:
    """Return whether commands exit the script, such as those that reject its arguments."""
    heads = [node.words[0] for node in body if node.kind == "simple" and node.words]
    return any(isinstance(head, RawWord) and head.text in ("exit", "return") for head in heads)


def _matter(nodes: Sequence[ShellNode]) -> bool:
    """Return whether commands assign variables, or may start a program with options."""
    for node in nodes:
        if node.kind != "simple":
            return True
        head = node.words[0] if node.words else RawWord("true", 0)
        if not isinstance(head, RawWord) or head.text not in {*_WITHOUT_INFLUENCE, "exit", "return", "unset"}:
            return True
    return False


def _test(words: list[str], is_double: bool) -> bool | None:
    """Return the outcome of ``[`` or ``[[``; None if it depends on more than the script.

    >>> _test(["7B", "=", "7B", "]"], False), _test(["-z", "$1", "]"], False), _test(["8", "-gt", "16", "]"], False)
    (True, None, False)
    """
    if words and words[-1] in ("]", "]]"):
        words = words[:-1]
    for mark, joined in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if mark in words and (is_double or mark.startswith("-")) and words.index(mark) > 0:
            at = words.index(mark)
            sides = [_test(words[:at], is_double), _test(words[at + 1 :], is_double)]
            if joined(side is (joined is any) for side in sides) if joined is any else False in sides:
                return joined is any
            return None if None in sides else joined is all
    if words and words[0] == "!":
        inner = _test(words[1:], is_double)
        return None if inner is None else not inner
    operands = [_without_unset(word) for word in words]
    if any("$" in word for word in operands):
        return None
    if len(operands) == 1:
        return bool(operands[0])
    if len(operands) == 2 and operands[0] in ("-z", "-n"):
        return bool(operands[1]) == (operands[0] == "-n")
    if len(operands) != 3:
        return None
    first, sign, right = operands
    if sign in ("=", "=="):
        return fnmatchcase(first, right) if is_double else first == right
    if sign == "!=":
        return not (fnmatchcase(first, right) if is_double else first == right)
    compared = {"-eq": "eq", "-ne": "ne", "-lt": "lt", "-le": "le", "-gt": "gt", "-ge": "ge"}.get(sign)
    if compared and all(re.fullmatch(r"-?\d{1,18}", side) for side in (first, right)):
        return getattr(operator, compared)(int(first), int(right))
    return None


def _without_unset(word: str) -> str:
    """Return a word with variables that the script does not set removed, as in an empty environment."""
    return _UNSET.sub("", word)
