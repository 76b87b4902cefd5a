"""The options of commands that show a recording in place of the cluster."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gpuboard.cli.options import path
from gpuboard.errors import UsageError

if TYPE_CHECKING:
    from gpuboard.recording.file import Recording


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Add ``--replay`` and ``--at``."""
    parser.add_argument("--replay", type=path, metavar="FILE", help="show a recording (`gpuboard record`)")
    parser.add_argument("--at", metavar="TIME", help="with --replay: the cluster at this moment: 14:03, 14:03:21, "
                        "2026-01-31T14:03, +90m after the beginning or -10m before the end")  # fmt: skip


def open_replay(args: argparse.Namespace) -> tuple[Recording, float | None] | None:
    """Return the recording and the moment (epoch seconds) that the arguments name; None without. Raises UsageError."""
    if args.replay is None:
        if args.at is not None:
            raise UsageError("--at needs --replay FILE")
        return None
    if args.nodes:
        raise UsageError(
            "--nodes cannot be combined with --replay, which shows the recorded nodes; filter them: "
            "`status --filter node:gpu01`, or `/` on the board"
        )
    from gpuboard.recording.file import Recording
    from gpuboard.recording.player import moment_of

    recording = Recording(args.replay)
    return recording, None if args.at is None else moment_of(args.at, recording)
