"""Shared parts of all commands' parsers: errors instead of exits, the common options, parsers of values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from gpuboard.errors import UsageError
from gpuboard.model.text import shown
from gpuboard.model.units import parse_duration, parse_whole

T = TypeVar("T")

_COUNT_MAX = 10**9 - 1  # GPUs, nodes, process ids
_EMPTY = "empty value; is a shell variable unset?"
_WORDING = (  # argparse's messages, which differ between Python versions → gpuboard's
    (r"argument (\S+): expected one argument", r"\1 needs a value"),
    (r"argument (\S+): not allowed with argument (\S+)", r"\1 cannot be combined with \2"),
    (r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", r"\1: \2 is not one of: \3"),
    (r"one of the arguments (.*) is required|the following arguments are required: (.*)", r"missing: \1\2"),
    (r"argument (\S+): (.*)", r"\1: \2"),
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError and suggests the nearest option for a misspelt one.

    Abbreviated options are errors: an abbreviation becomes ambiguous when another option is added.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=80),  # for argparse's checks of options
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="help", help="show this help")
        self._misspelt = ""  # the first unknown option among the words read last

    def print_help(self, file: object = None) -> None:
        """Print the help. Raises OSError, which argparse ignores."""
        self.formatter_class = argparse.RawDescriptionHelpFormatter  # measures the terminal, with shutil: 2 ms
        print(self.format_help(), end="", flush=True)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with ``message`` and a pointer to the help; never exit.

        A misspelt option is reported rather than the missing one that was meant.
        """
        if self._misspelt and "required" in message:
            message = f"unrecognized arguments: {self._misspelt}"
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = (unknown.split() or ["''"])[0]
            public = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
            near = nearest(word.split("=")[0][:100], public) if word[0] == "-" else None
            message = f"{shown(word)}: no such option" if word[0] == "-" else f"unexpected argument: {shown(word)}"
            message += f"; did you mean {near}?" if near else ""
        for pattern, wording in _WORDING:
            if found := re.fullmatch(pattern, message, re.DOTALL):
                message = found.expand(wording)
                break
        raise UsageError(f"{message}\n  see: {self.prog} --help")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments. Raises UsageError, also for an empty value (usually an unset shell variable)."""
        rest = {action.dest for action in self._actions if action.nargs == argparse.REMAINDER}
        at = self._leading(words)[1] if rest else len(words)
        options = (word for word in words[:at] if word.startswith("--") and word != "--")
        self._misspelt = next((w for w in options if w.partition("=")[0] not in self._option_string_actions), "")
        found = self.parse_args(self._joined(words[:at]))
        for dest in rest:  # argparse would lose words at `--`, and read `train.py` after `--wait` as the duration
            if taken := getattr(found, dest):  # a word that starts with a dash and is not an option: -, -1, "-a b"
                self.error(f"unrecognized arguments: {taken[0]}")
            setattr(found, dest, list(words[at:]))
        for action in self._actions:
            value = getattr(found, action.dest, None)
            given = value if isinstance(value, list) and action.dest not in rest else [value]
            if "" in given and action.default != "":
                name = "/".join(action.option_strings) or action.metavar
                self.error(f"{name}: {_EMPTY}")
        return found

    def _joined(self, words: Sequence[str]) -> list[str]:
        """Return ``words`` with `--at=-10m` for `--at -10m`: argparse reads a value with a dash as an option."""
        found: list[str] = []
        for position, word in enumerate(words):
            option = self._option_string_actions.get(words[position - 1]) if position else None
            known = word in self._option_string_actions
            if option is not None and option.nargs is None and re.match("-[^-]", word) and not known:
                found[-1] += f"={word}"
            else:
                found.append(word)
        return found

    def value_of(self, option: str, words: Sequence[str]) -> str | None:
        """Return the value of ``option``, or None, in a command line that may be invalid elsewhere.

        Reading stops at the first word that may be the command to run. The value of an unknown option may be that word.
        """
        found = None
        for position in self._leading(words)[0]:
            name, equals, value = words[position].partition("=")
            if name == option and name in self._option_string_actions:
                follows = words[position + 1] if position + 1 < len(words) else ""
                found = value if equals else "" if follows.startswith("-") else follows
        return found or None

    def _leading(self, words: Sequence[str]) -> tuple[list[int], int]:
        """Return the positions of the options before the command to run, and the position of its first word.

        A short option that takes the remainder (``-m``, also with its value attached) is that word.
        """
        found = []
        position = 0
        while position < len(words) and words[position].startswith("-") and words[position] != "--":
            word = words[position]
            action = self._option_string_actions.get(word if word.startswith("--") else word[:2])
            if action is not None and action.nargs == argparse.REMAINDER:
                break
            found.append(position)
            position += 1
            follows = words[position] if position < len(words) else ""
            if word not in self._option_string_actions or action is None:
                continue
            if action.nargs is None or (action.nargs == "?" and follows[:1].isdigit()):
                position += 1
        return found, min(position, len(words))


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command takes."""
    group = parser.add_argument_group("options of every command")
    group.add_argument(
        "--nodes",
        metavar="NODESET",
        action="append",
        help="use these nodes: gpu[01-16,20], @group, hostfile:PATH, ssh_config:PATTERN or slurm:PARTITION; may be "
        "repeated; default: `nodes` in the config, else Slurm's GPU nodes, else this machine",
    )
    group.add_argument("--config", metavar="FILE", help="read this TOML file instead of ~/.config/gpuboard/config.toml")


def nearest(word: str, words: list[str]) -> str | None:
    """Return the closest match for ``word`` among ``words``, or None."""
    import difflib  # late: 1 ms, which only an error needs

    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.7)), None)


def typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser that raises ValueError, so that argparse shows the parser's message."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def duration_or_zero(text: str) -> float:
    """Return seconds of a duration, or 0 for ``0`` and ``0s``. Raises ArgumentTypeError."""
    return 0.0 if text in {"0", "0s"} else typed(parse_duration)(text)


def path(text: str) -> Path:
    """Return the path that is not empty. Raises ArgumentTypeError."""
    if not text:
        raise argparse.ArgumentTypeError(_EMPTY)
    return Path(text)


def natural(text: str) -> int:
    """Return a whole number of at least 1. Raises ArgumentTypeError."""
    return whole(1, _COUNT_MAX)(text)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``least`` to ``most``. Unlike int() it refuses ``٣`` and ``1_0``."""
    return typed(partial(parse_whole, least=least, most=most))
