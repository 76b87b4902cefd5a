"""Messages for people, on stderr. A closed or full stderr is ignored."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from gpuboard.model.text import clean, lines

if TYPE_CHECKING:
    from gpuboard.cli.context import Context


def report(text: str) -> None:
    """Print a message, prefixed with ``gpuboard:``."""
    show(f"gpuboard: {lines(text)}")


def show(text: str, end: str = "\n") -> None:
    """Print text."""
    with contextlib.suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr, flush=True)


def show_progress(text: str, context: Context) -> None:
    """Show a line in place where stderr is a terminal, cut at its width; an empty text erases it."""
    if context.shows_progress:
        import shutil  # late: `allocate` starts quickly

        from gpuboard.cli.table import elide

        show(f"\r\x1b[K{elide(clean(text), shutil.get_terminal_size().columns - 1)}", end="")
