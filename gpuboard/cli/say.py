"""Messages for people, on stderr."""

from __future__ import annotations

import contextlib
import sys

from gpuboard.model.text import lines


def say(text: str) -> None:
    """Print words for people on stderr, the first line marked as ours; a stderr that is gone is no error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"gpuboard: {lines(text)}", file=sys.stderr, flush=True)
