"""Parsing of shell scripts into commands, with words as they are written.

Source: POSIX.1-2017, chapter 2, "Shell Command Language", and the manual of bash 5.2 for arrays and ``[[``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from stagewright.errors import InputError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")
_ENDS = " \t\r\n;&|()<>"
_RESERVED = {"while": "loop", "until": "loop", "select": "loop", "{": "block", "!": "not"}


@dataclass(frozen=True)
class RawWord:
    """A word as written, with quotes."""

    text: str
    line: int


@dataclass(frozen=True)
class RawArray:
    words: tuple[RawWord, ...]


@dataclass(frozen=True)
class ShellNode:
    """A command; `kind` determines the meaning of its parts."""

    kind: str
    line: int
    words: tuple[Any, ...] = ()
    parts: tuple[Any, ...] = ()


class ShellParser:
    """Parser of a script into nodes."""

    def __init__(self, text: str, origin: str, line: int = 1) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at, self._line, self._origin = 0, line, origin
        self._heredocs: list[str] = []

    def script(self) -> tuple[ShellNode, ...]:
        nodes = self._list(())
        if self._at < len(self._text):
            raise self._error(f"'{self._text[self._at]}' closes nothing")
        return nodes

    def end(self, at: int) -> int:
        """Return the end of the quotes or brackets that begin at `at`.

        Raises:
            InputError: they have no end.
        """
        self._at, opening = at, self._text[at]
        if opening in "\"'`":
            self._quoted(opening)
        else:
            self._brackets(opening, {"(": ")", "{": "}"}[opening])
        return self._at

    def _error(self, what: str, line: int | None = None) -> InputError:
        return InputError(
            f"{self._origin}, line {line or self._line}: {what}: correct the script, or give argv.json, a list of its "
            "arguments"
        )

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _skip(self, newlines: bool) -> None:
        """Skip blanks, comments and continued lines."""
        while self._at < len(self._text):
            character = self._text[self._at]
            if self._text.startswith("\\\n", self._at):
                self._at += 2  # a continued line has the number of its first
            elif character in " \t\r":
                self._at += 1
            elif character == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif character == "\n" and newlines:
                self._newline()
            else:
                return

    def _newline(self) -> None:
        self._at += 1
        self._line = self._text.count("\n", 0, self._at) + 1
        for mark in self._heredocs:  # whose lines are data of a command
            end = re.compile(rf"^\t*{re.escape(mark)}$", re.MULTILINE).search(self._text, self._at)
            self._at = len(self._text) if end is None else min(end.end() + 1, len(self._text))
            self._line = self._text.count("\n", 0, self._at) + 1
        self._heredocs.clear()

    def _list(self, until: tuple[str, ...]) -> tuple[ShellNode, ...]:
        """Parse commands up to a reserved word, a closing bracket or the end."""
        nodes: list[ShellNode] = []
        while True:
            self._skip(newlines=True)
            if not (character := self._peek()) or character == ")" or self._word_ahead() in until:
                return tuple(nodes)
            if character in ";&|":
                if self._text.startswith(";;", self._at):
                    return tuple(nodes)
                self._at += 1
                continue
            nodes.append(self._and_or())

    def _word_ahead(self) -> str:
        match = re.compile(r"[A-Za-z]+|[{}!]|\[\[").match(self._text, self._at)
        if match is None or (self._text[match.end() : match.end() + 1] or " ") not in _ENDS:
            return ""
        return match.group()

    def _and_or(self) -> ShellNode:
        """Parse commands joined by && and ||, and pipelines, whose parts all run."""
        node = self._command()
        while True:
            self._skip(newlines=False)
            for mark, kind in (("&&", "and"), ("||", "or"), ("|", "pipe")):
                if self._text.startswith(mark, self._at):
                    self._at += len(mark) + (mark == "|" and self._text[self._at + 1 : self._at + 2] == "&")
                    self._skip(newlines=True)
                    node = ShellNode(kind, node.line, parts=(node, self._command()))
                    break
            else:
                return node

    def _take(self, word: str, opened: int) -> None:
        self._skip(newlines=True)
        if self._word_ahead() != word:
            raise self._error(f"a block has no '{word}'", opened)
        self._at += len(word)

    def _command(self) -> ShellNode:
        self._skip(newlines=False)
        line, word = self._line, self._word_ahead()
        if self._peek() == "(":
            if self._text.startswith("((", self._at) and (end := self._text.find("))", self._at)) >= 0:
                words = (RawWord(f"$({self._text[self._at + 1 : end + 1]})", line),)
                self._at = end + 2
                return ShellNode("arithmetic", line, words)
            self._at += 1
            body = self._list(())
            self._close(line)
            return self._redirected(ShellNode("group", line, parts=body))
        if word in ("if", "while", "until", "for", "select", "case", "function", "{", "!", "[["):
            if word == "[[":
                return self._double_test(line)
            self._at += len(word)
            return self._redirected(getattr(self, f"_{_RESERVED.get(word, word)}")(line))
        if (function := re.compile(r"([A-Za-z_][\w.-]*)[ \t]*\(\)").match(self._text, self._at)) is not None:
            self._at = function.end()
            return self._function_body(function[1], line)
        return self._simple(line)

    def _close(self, opened: int) -> None:
        self._skip(newlines=True)
        if self._peek() != ")":
            raise self._error("a bracket has no end", opened)
        self._at += 1

    def _redirected(self, node: ShellNode) -> ShellNode:
        """Skip redirections after a block."""
        self._skip(newlines=False)
        while self._peek() in ("<", ">") or re.compile(r"\d+[<>]").match(self._text, self._at):
            self._redirection()
            self._skip(newlines=False)
        return node

    def _redirection(self) -> None:
        match = re.compile(r"\d*(<<<|<<-?|>>|[<>]&|<>|>\||[<>])").match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        self._skip(newlines=False)
        if self._peek() == "(":  # a process that is read as a file
            self._brackets("(", ")")
            return
        target = self._raw() if self._peek() not in ("", "\n") else None
        if match[1] in ("<<", "<<-") and target is not None:
            self._heredocs.append(re.sub(r"[\"'\\]", "", target.text))

    def _not(self, line: int) -> ShellNode:
        return ShellNode("not", line, parts=(self._command(),))

    def _block(self, line: int) -> ShellNode:
        body = self._list(("}",))
        self._take("}", line)
        return ShellNode("group", line, parts=body)

    def _if(self, line: int) -> ShellNode:
        branches: list[tuple[tuple[ShellNode, ...], tuple[ShellNode, ...]]] = []
        otherwise: tuple[ShellNode, ...] | None = None
        while True:
            condition = self._list(("then",))
            self._take("then", line)
            branches.append((condition, self._list(("elif", "else", "fi"))))
            word = self._word_ahead()
            self._at += len(word)
            if word == "else":
                otherwise = self._list(("fi",))
                self._take("fi", line)
            if word != "elif":
                if word not in ("else", "fi"):
                    raise self._error("an 'if' has no 'fi'", line)
                return ShellNode("if", line, parts=(tuple(branches), otherwise))

    def _loop(self, line: int) -> ShellNode:
        self._list(("do",))
        self._take("do", line)
        self._list(("done",))
        self._take("done", line)
        return ShellNode("loop", line)

    def _for(self, line: int) -> ShellNode:
        self._skip(newlines=False)
        if self._peek() == "(":
            self._brackets("(", ")")
            name, words = "", []
        else:
            name, words = self._raw().text, []
            self._skip(newlines=True)
            if self._word_ahead() == "in":
                self._at += 2
                self._skip(newlines=False)
                while self._peek() not in ("", "\n", ";"):
                    words.append(self._raw())
                    self._skip(newlines=False)
        self._list(("do",))
        self._take("do", line)
        body = self._list(("done",))
        self._take("done", line)
        return ShellNode("for", line, (name, *words), body)

    def _case(self, line: int) -> ShellNode:
        self._skip(newlines=False)
        subject = self._raw()
        self._take("in", line)
        branches = []
        while True:
            self._skip(newlines=True)
            if self._word_ahead() == "esac":
                self._at += 4
                return ShellNode("case", line, (subject,), tuple(branches))
            if not self._peek():
                raise self._error("a 'case' has no 'esac'", line)
            if self._peek() == "(":
                self._at += 1
            patterns = []
            while self._peek() != ")":
                self._skip(newlines=False)
                if not self._peek() or self._peek() == "\n":
                    raise self._error("a pattern of 'case' has no ')'")
                if self._peek() == "|":
                    self._at += 1
                elif self._peek() != ")":
                    patterns.append(self._raw())
            self._at += 1
            branches.append((tuple(patterns), self._list(("esac",))))
            while self._peek() and self._peek() in ";&":
                self._at += 1

    def _function(self, line: int) -> ShellNode:
        self._skip(newlines=False)
        name = self._raw().text
        self._skip(newlines=False)
        if self._text.startswith("()", self._at):
            self._at += 2
        return self._function_body(name, line)

    def _function_body(self, name: str, line: int) -> ShellNode:
        self._skip(newlines=True)
        return ShellNode("function", line, (name,), (self._command(),))

    def _double_test(self, line: int) -> ShellNode:
        end = self._text.find("]]", self._at)
        if end < 0:
            raise self._error("'[[' has no ']]'", line)
        words = []
        self._at += 2
        while True:
            self._skip(newlines=True)
            if self._text.startswith("]]", self._at):
                self._at += 2
                return ShellNode("simple", line, (RawWord("[[", line), *words, RawWord("]]", line)))
            mark = re.compile(r"&&|\|\||[()<>]").match(self._text, self._at)
            if mark is not None:
                self._at = mark.end()
                words.append(RawWord(mark.group(), self._line))
            elif not self._peek():
                raise self._error("'[[' has no ']]'", line)
            else:
                words.append(self._raw())

    def _simple(self, line: int) -> ShellNode:
        words: list[RawWord | tuple[str, RawArray]] = []
        while True:
            self._skip(newlines=False)
            character = self._peek()
            if not character or character in "\n;|)" or (character == "&" and self._peek_at(1) != ">"):
                return ShellNode("simple", line, tuple(words))
            if character == "&":
                self._at += 1
            if self._peek() in "<>" or re.compile(r"\d+[<>]").match(self._text, self._at):
                self._redirection()
            elif character == "(":
                raise self._error("a bracket is where no command begins")
            else:
                word = self._raw()
                if ASSIGNMENT.fullmatch(word.text) and self._peek() == "(":
                    opened, items = self._line, []
                    self._at += 1
                    while True:
                        self._skip(newlines=True)
                        if self._peek() in ("", ")"):
                            break
                        if self._peek() in ";&|<>(":
                            raise self._error(f"'{self._peek()}' is in an array")
                        items.append(self._raw())
                    self._close(opened)
                    words.append((word.text, RawArray(tuple(items))))
                else:
                    words.append(word)

    def _peek_at(self, offset: int) -> str:
        return self._text[self._at + offset : self._at + offset + 1]

    def _raw(self) -> RawWord:
        """Parse a word with its quotes."""
        start, line = self._at, self._line
        while self._at < len(self._text) and self._text[self._at] not in _ENDS:
            character = self._text[self._at]
            if character == "\\":
                self._at += 2
            elif character == "'":
                self._quoted("'")
            elif character in '"`':
                self._quoted(character)
            elif character == "$" and self._peek_at(1) in ("{", "("):
                self._at += 1
                self._brackets(self._peek(), "}" if self._peek() == "{" else ")")
            else:
                self._at += 1
        if self._at == start:
            raise self._error(f"'{self._peek()}' is where no word can be")
        self._line = self._text.count("\n", 0, self._at) + 1 if "\n" in self._text[start : self._at] else line
        text = self._text[start : self._at]
        return RawWord(text, line)

    def _quoted(self, quote: str) -> None:
        opened = self._line
        self._at += 1
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == quote:
                self._at += 1
                return
            if character == "\\" and quote != "'":
                self._at += 2
            elif character == "$" and quote == '"' and self._peek_at(1) in ("{", "("):
                self._at += 1
                self._brackets(self._peek(), "}" if self._peek() == "{" else ")")
            else:
                self._at += 1
        raise self._error(f"a quote ({quote}) has no end", opened)

    def _brackets(self, opening: str, closing: str) -> None:
        opened, depth = self._line, 0
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\\":
                self._at += 2
                continue
            if character in "\"'`":
                self._quoted(character)
                continue
            depth += (character == opening) - (character == closing)
            self._at += 1
            if not depth:
                return
        raise self._error("a bracket has no end", opened)
