"""The target of a launch: ``train.py``, ``-m package.module``, ``package.module:function`` or a program (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from gpuboard.errors import UsageError

_DOTTED = r"[^\W\d]\w*(?:[.][^\W\d]\w*)*"
LINKS = "gpuboard:links"  # of `gpuboard doctor --nccl`; its source is sent to the nodes
_LAUNCHER = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed")
_FUNCTION = re.compile(rf"{_DOTTED}:{_DOTTED}")


class Target(msgspec.Struct, frozen=True):
    """What each rank runs; ``args`` are passed to it unchanged."""

    kind: Literal["script", "module", "function", "program", "builtin"]
    name: str
    args: list[str] = []

    def words(self) -> str:
        """Return the target as written on the command line, without its arguments."""
        return f"-m {self.name}" if self.kind == "module" else self.name


def parse_target(words: Sequence[str], *, program: bool = False) -> Target:
    """Return the target of a command line: TARGET and ARGS, or ``-m MODULE ARGS``, ``-mMODULE``, ``-m=MODULE``.

    ``program``: --no-python. Raises UsageError for a missing or invalid target.
    """
    name, *args = (words[1:] if words[:1] == ["--"] else words) or [""]
    if name.startswith("-m") and program:
        raise UsageError("-m names a Python module; --no-python takes a program")
    if name.startswith("-m"):
        name, *args = [name[2:].removeprefix("="), *args] if len(name) > 2 else args or [""]
        if not re.fullmatch(_DOTTED, name):
            raise UsageError(f"-m needs a module, like package.train{f', not {name!r}' if name else ''}")
        return Target("module", name, args)
    if not name:
        raise UsageError("nothing to launch; pass a script, -m package.module or package.module:function")
    if name.startswith("-"):
        raise UsageError(f"{name} is not an option of launch; put the script's own options after its name (see --help)")
    if program:
        return Target("program", name, args)
    if name == LINKS:
        return Target("builtin", name, args)
    if _FUNCTION.fullmatch(name):
        return Target("function", name, args)
    if _LAUNCHER.fullmatch(name):
        raise UsageError(f"launch takes the place of {name}: pass only the script, or -m module, and its arguments")
    if ":" in name and not name.endswith(".py"):
        raise UsageError(f"{name!r} is neither a script nor package.module:function")
    return Target("script", name, args)
