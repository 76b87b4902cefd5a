"""`--status-file`: the outcome of a command as JSON, written however the command ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from gpuboard.cli.stderr import report
from gpuboard.cli.stdout import write_json
from gpuboard.errors import GpuboardError
from gpuboard.leases.terms import uninterrupted
from gpuboard.model.text import lines

OPTION = "--status-file"
_EXTRA: dict[str, dict[str, Any]] = {
    "run": {"started": False, "lease": None, "node": None, "gpus": []},
    "launch": {"run": None},
}


def outcome_of(command: str) -> dict[str, Any]:
    """Return the file's initial content for ``run`` or ``launch`` (docs/commands.md)."""
    return {"schema": 1, "command": command, "exit_code": 1, "error": None} | _EXTRA[command]


@contextlib.contextmanager
def recorded(outcome: dict[str, Any], file: str | None, *, printed: bool = False) -> Iterator[None]:
    """Complete ``outcome`` (keys ``exit_code``, ``error``) from how the block ends, and write it to ``file``.

    ``printed``: print it on stdout, too. With ``outcome`` empty at the end nothing is written: another process will.

    A file that cannot be written is reported and leaves the command's exit code unchanged.
    """
    try:
        yield
    except GpuboardError as error:
        outcome |= {"exit_code": error.exit_code, "error": str(error)}
        raise
    except KeyboardInterrupt:
        outcome |= {"exit_code": 130, "error": "interrupted"}
        raise
    except Exception as error:
        outcome |= {"exit_code": 1, "error": lines(f"{type(error).__name__}: {error}")}
        raise
    finally:
        if file and outcome:
            try:
                with uninterrupted(), open(file, "wb", opener=_opener) as stream:
                    stream.write(msgspec.json.encode(outcome) + b"\n")
            except OSError as error:
                report(f"{OPTION} {file}: {error.strerror}")
        if printed:  # last: stdout may be full or closed
            write_json(outcome)


def _opener(path: str, flags: int) -> int:
    """Open for writing. A FIFO without a reader raises an OSError (ENXIO) instead of blocking."""
    fd = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(fd, True)
    return fd
