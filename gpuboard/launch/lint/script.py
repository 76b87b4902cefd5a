"""The script of a launch, read on this machine: its warnings as preflight checks."""

from __future__ import annotations

import ast
import stat
import warnings
from itertools import islice
from pathlib import Path

from gpuboard.launch.lint.rules import RULES, Rule
from gpuboard.launch.lint.tree import ScriptTree
from gpuboard.launch.preflight.check import Check
from gpuboard.launch.target import Target
from gpuboard.model.text import clean

_LARGEST = 128 * 1024  # bytes, 3,500 lines: takes 0.3 s; longer files are mostly generated
_SITES = 3  # places of one warning that are named
_MOST = 20  # that are looked for: bounds the time for a generated file


def script_checks(target: Target, folder: Path) -> list[Check]:
    """Return the warnings about ``target`` in ``folder``.

    None for a file that is not here (it may be on the nodes), is too large or is not valid Python: the rank itself
    reports a syntax error.
    """
    for file in _files(target):
        source = _read(folder / file)
        if source is not None:
            return _interpreter(source, clean(str(file))) or _checks(source, clean(str(file)))
    return []


def _files(target: Target) -> list[Path]:
    """Return the files that may be the target, relative to the folder of the launch."""
    if target.kind in {"program", "builtin"}:
        return []
    if target.kind == "script":
        return [Path(target.name), Path(target.name, "__main__.py")]
    base = Path(*target.name.partition(":")[0].split("."))
    inside = "__main__.py" if target.kind == "module" else "__init__.py"
    return [base / inside, base.with_suffix(".py")]


def _read(file: Path) -> bytes | None:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            return None
        with file.open("rb") as opened:
            return opened.read(_LARGEST)
    except (OSError, ValueError):
        return None


def _interpreter(source: bytes, file: str) -> list[Check]:
    """Return a warning for a program of another interpreter, such as a shell, by its first line."""
    first = source.partition(b"\n")[0].decode("utf-8", "replace")
    if not first.startswith("#!") or "py" in first:  # python3, pypy, ipython
        return []
    found = f"{file} begins with {clean(first, 80)}"
    remedy = f"launch it as it is, once per rank: --no-python {file}"
    return [Check("script: not Python", None, "warn", found, "the ranks run it with Python", remedy)]


def _checks(source: bytes, file: str) -> list[Check]:
    if b"torch" not in source and b"multiprocessing" not in source:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the script's text: invalid escapes
            tree = ScriptTree(ast.parse(source))
        return [check for rule in RULES if (check := _check(rule, tree, file)) is not None]
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: expressions nested too deeply
        return []


def _check(rule: Rule, tree: ScriptTree, file: str) -> Check | None:
    """Return the places of one mistake, None without any."""
    found = sorted(set(islice(rule.find(tree), _MOST)))
    places = [f"{file}:{line} {what}" for line, what in found[:_SITES]]
    if len(found) > _SITES:
        places.append(f"{len(found) - _SITES} more")
    return Check(rule.name, None, "warn", ", ".join(places), rule.cause, rule.remedy) if places else None
