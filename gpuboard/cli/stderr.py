"""Messages for people, on stderr."""

from __future__ import annotations

import contextlib
import sys

from gpuboard.model.text import lines


def report(text: str) -> None:
    """Print a message on stderr, prefixed with ``gpuboard:``; ignore a closed stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(f"gpuboard: {lines(text)}", file=sys.stderr, flush=True)
