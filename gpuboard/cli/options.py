"""What all commands' parsers share: errors instead of exits, the common flags, types for durations and sizes."""

from __future__ import annotations

import argparse
import difflib
import string
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn, TypeVar

from gpuboard.errors import UsageError
from gpuboard.model.text import shown
from gpuboard.model.units import parse_duration, parse_whole

T = TypeVar("T")

_COUNT_MAX = 10**9 - 1  # of GPUs, nodes and processes
_NO_WORD = ("-", *string.digits)  # how an option or a duration begins, and nothing that is to run


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, with the nearest option where one was misspelt.

    Options are never abbreviated: an abbreviation that works today is ambiguous after the next option is added.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="help", help="show this text")

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with ``message`` and where to look; never exits."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = (unknown.split() or ["''"])[0]
            near = nearest(word.split("=")[0][:100], list(self._option_string_actions)) if word[0] == "-" else None
            message = f"{shown(word)}: no such {'option' if word.startswith('-') else 'argument'}"
            message += f"; did you mean {near}?" if near else ""
        raise UsageError(f"{message}\n  see: {self.prog} --help")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments. Raises UsageError also for an empty value: that of a variable which was never set."""
        found = self.parse_args(self._parted(words))
        for action in self._actions:
            if getattr(found, action.dest, None) == "" and action.default != "":
                name = "/".join(action.option_strings) or action.metavar
                self.error(f"argument {name}: nothing is written there; is a variable not set?")
        return found

    def _parted(self, words: Sequence[str]) -> Sequence[str]:
        """Return ``words`` with ``--`` after a ``--wait`` that the first word of a command follows, and no duration.

        Left to itself, argparse takes ``train.py`` of ``launch --n 4 --wait train.py`` for one.
        """
        if not any(action.nargs == argparse.REMAINDER and not action.option_strings for action in self._actions):
            return words
        for position, action in self._leading(words):
            follows = words[position + 1] if position + 1 < len(words) else ""
            if action is not None and action.nargs == "?" and follows and not follows.startswith(_NO_WORD):
                return [*words[: position + 1], "--", *words[position + 1 :]]
        return words

    def said(self, option: str, words: Sequence[str]) -> str | None:
        """Return the value of ``option`` in a command line that may be wrong otherwise; None: it has none.

        Nothing behind the first word that may be what is to run is read; also the value of an unknown option may.
        """
        found = None
        for position, _ in self._leading(words):
            name, equals, value = words[position].partition("=")
            if name == option and name in self._option_string_actions:
                follows = words[position + 1] if position + 1 < len(words) else ""
                found = value if equals else "" if follows.startswith("-") else follows
        return found or None

    def _leading(self, words: Sequence[str]) -> Iterator[tuple[int, argparse.Action | None]]:
        """Yield where the options stand that are the command's own, before the words of what it is to run."""
        position = 0
        while position < len(words) and words[position].startswith("-") and words[position] != "--":
            action = self._option_string_actions.get(words[position])
            yield position, action
            position += 1
            follows = words[position] if position < len(words) else ""
            if action is not None and (action.nargs is None or (action.nargs == "?" and follows[:1].isdigit())):
                position += 1


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every command takes."""
    group = parser.add_argument_group("every command")
    group.add_argument(
        "--nodes",
        metavar="NODESET",
        action="append",
        help="the nodes to look at: gpu[01-16,20], @group, hostfile:PATH, ssh_config:PATTERN, slurm:PARTITION; may be "
        "given several times; default: config",
    )
    group.add_argument("--config", metavar="FILE", help="read this TOML file in place of the user's")


def nearest(word: str, words: list[str]) -> str | None:
    """Return the one of ``words`` that was most likely meant, None when none is close."""
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.6)), None)


def typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser that raises ValueError, so that argparse shows its words and not its own."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def patience(text: str) -> float:
    """Return seconds of a duration; ``0`` and ``0s`` mean none at all. Raises ArgumentTypeError."""
    return 0.0 if text in {"0", "0s"} else typed(parse_duration)(text)


def natural(text: str) -> int:
    """Return a whole number of at least 1. Raises ArgumentTypeError."""
    return whole(1, _COUNT_MAX)(text)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return what reads a whole number from ``least`` to ``most``, in place of int(), which reads ``٣`` and ``1_0``."""
    return typed(partial(parse_whole, least=least, most=most))
