"""The report of an unexpected exception: a short message, and a file with the traceback. No textual."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from gpuboard import __version__, paths


def report(error: BaseException, env: Mapping[str, str]) -> str:
    """Return the message for the user; write the traceback to a private file in the state folder."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}" if frame else "?"
    about = f"gpuboard {__version__} on Python {sys.version.split()[0]}"
    file = paths.state_dir(env) / "crash.txt"
    text = f"{about}\n{''.join(traceback.format_exception(error))}"
    wrote = False
    with contextlib.suppress(OSError):
        paths.make_private(file.parent)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as stream:
            stream.write(text)
        wrote = True
    send = f"with {file}" if wrote else f"with this line, and {about}"
    return f"this is a bug: {type(error).__name__} at {where}: {error}\n  please report it {send}"
