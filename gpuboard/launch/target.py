"""The target of a launch: ``train.py``, ``-m package.module`` or ``package.module:function`` (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from gpuboard.errors import UsageError

_DOTTED = r"[^\W\d]\w*(?:[.][^\W\d]\w*)*"
_FUNCTION = re.compile(rf"{_DOTTED}:{_DOTTED}")


class Target(msgspec.Struct, frozen=True):
    """What each rank runs; ``args`` are passed to it unchanged."""

    kind: Literal["script", "module", "function"]
    name: str
    args: list[str] = []

    def words(self) -> str:
        """Return the target as written on the command line, without its arguments."""
        return f"-m {self.name}" if self.kind == "module" else self.name


def parse_target(words: Sequence[str], module: Sequence[str] | None) -> Target:
    """Return the target of a command line.

    ``words`` are TARGET and ARGS; ``module`` are the words after ``-m``, None without it. Raises UsageError for a
    missing or invalid target.
    """
    if module is not None:
        if not module or not re.fullmatch(_DOTTED, module[0]):
            raise UsageError(f"-m needs a module, like package.train{f', not {module[0]!r}' if module else ''}")
        return Target("module", module[0], list(module[1:]))
    words = list(words[1:] if words and words[0] == "--" else words)
    if not words or not words[0]:
        raise UsageError("nothing to launch; pass a script, -m package.module or package.module:function")
    name = words[0]
    if name.startswith("-"):
        raise UsageError(f"{name} is not an option of launch; put the script's own options after its name (see --help)")
    if _FUNCTION.fullmatch(name):
        return Target("function", name, words[1:])
    if ":" in name and not name.endswith(".py"):
        raise UsageError(f"{name!r} is neither a script nor package.module:function")
    return Target("script", name, words[1:])
