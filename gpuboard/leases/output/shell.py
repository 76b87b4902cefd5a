"""Lines for shells to evaluate: assignments, and those that fail closed. Imports nothing: it must always work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHELLS = ("shell", "csh", "fish")
FORMATS = (*SHELLS, "env", "json", "rank-map", "hostfile", "rankfile", "deepspeed", "uuids")
VARIABLES = ("GPUBOARD_LEASE", "GPUBOARD_RANK_MAP", "GPUBOARD_NODES")


def assignments(shell: str, values: Mapping[str, str]) -> str:
    """Return the lines that set and export ``values`` in sh (``shell``), csh or fish, every value quoted.

    In csh and fish each statement ends with ``;``: their command substitution replaces line ends by blanks.
    """
    if shell == "csh":
        return "".join(f"setenv {name} {quote_csh(value)};\n" for name, value in values.items())
    if shell == "fish":
        return "".join(f"set -gx {name} {quote_fish(value)};\n" for name, value in values.items())
    return "".join(f"export {name}={quote_sh(value)}\n" for name, value in values.items())


def fail_closed(form: str, code: int) -> str:
    """Return lines that hide all GPUs, unset the variables of an older lease, and make ``eval`` return ``code``.

    "" for formats that no shell evaluates, except an empty assignment for ``env``.
    """
    if form == "csh":
        forget = "".join(f"unsetenv {name}; " for name in VARIABLES)
        return f'setenv CUDA_VISIBLE_DEVICES ""; {forget}( exit {code} );\n'
    if form == "fish":
        forget = "".join(f"set -e {name}; " for name in VARIABLES)  # fish has no (exit N)
        return f"set -gx CUDA_VISIBLE_DEVICES ''; {forget}/bin/sh -c 'exit {code}';\n"
    if form == "env":
        return "CUDA_VISIBLE_DEVICES=\n"
    return f"export CUDA_VISIBLE_DEVICES=''; unset {' '.join(VARIABLES)}; (exit {code})\n" if form == "shell" else ""


def quote_sh(text: str) -> str:
    """Return ``text`` as one word of sh, bash, dash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def quote_csh(text: str) -> str:
    """Return ``text`` as one word of csh and tcsh.

    Outside the quotes only letters, digits and backslashed characters: an unquoted `…` globs its words before
    ``eval`` sees the quotes. History (``!``) is substituted even inside single quotes.
    """
    found = "".join(c if c.isascii() and (c.isalnum() or c in "_./:,-") else f"\\{c}" for c in text)
    return found or "''"


def quote_fish(text: str) -> str:
    """Return ``text`` as one word of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def requested_format(argv: Sequence[str]) -> str | None:
    """Return the value of ``--format`` in a command line that may be invalid; None if missing or unknown."""
    form = None
    for position, word in enumerate(argv):
        if word == "--":
            break
        if word == "--format" and position + 1 < len(argv):
            form = argv[position + 1]
        elif word.startswith("--format="):
            form = word[9:]
        elif word == "--json":
            form = "json"
    return form if form in FORMATS else None
