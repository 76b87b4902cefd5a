"""Pictures of the screen in files, as SVG or as text. No textual."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from gpuboard import paths
from gpuboard.errors import GpuboardError

_SAME_SECOND = 100  # pictures with one name


def save(text: str, title: str, kind: str, env: Mapping[str, str], at: float) -> Path:
    """Write a picture into the current folder, or the state folder where that is not possible; return its path.

    Never replaces a file. Only the user can read it: command lines on the screen may hold passwords. ``kind``: its
    suffix. ``at``: epoch seconds, for its name. Raises GpuboardError with the reason for each folder.
    """
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "screen"
    name = f"gpuboard-{words}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(at))}"
    state = paths.state_dir(env) / "screenshots"
    failed: list[str] = []
    for folder in (_here(), state):
        try:
            if folder == state:
                paths.make_private(folder)
            return _write(folder, name, kind, text.encode("utf-8", "replace"))
        except OSError as error:
            failed.append(f"{folder}: {error.strerror}")
    raise GpuboardError(
        f"the screen was not saved: {'; '.join(failed)}; start gpuboard in a folder that you can write to"
    )


def plain(svg: str) -> str:
    """Return an SVG that asks no other host for fonts."""
    head, end, body = svg.partition("</style>")  # what is on the screen follows
    head = re.sub(r"\s*@font-face \{.*?\}", "", head, flags=re.DOTALL)
    head = re.sub(r"\s*<!--.*?-->", "", head, flags=re.DOTALL)
    head = head.replace("font-family: Fira Code, monospace", "font-family: ui-monospace, Menlo, Consolas, monospace")
    svg = head.replace("font-family: arial", "font-family: sans-serif") + end + body
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError:  # removed meanwhile
        return Path(".")


def _write(folder: Path, name: str, kind: str, data: bytes) -> Path:
    for number in range(1, _SAME_SECOND + 1):
        path = folder / (f"{name}.{kind}" if number == 1 else f"{name}-{number}.{kind}")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            if number == _SAME_SECOND:
                raise
            continue
        try:
            with open(fd, "wb") as file:
                file.write(data)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return path
    raise AssertionError
