"""Slurm's commands: where they are, the environment they get, and running one with a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from gpuboard.transport.spawn import SLURM_SETUP

# Variables that change what Slurm's commands do or print; those that say where Slurm is are kept.
_PREFIXES = ("SLURM_", "SLURMD_", "SCONTROL_", "SQUEUE_", "SINFO_", "SRUN_", "SBATCH_", "SALLOC_", "SCANCEL_", "SACCT_")
_SLICE_S = 0.05  # so soon a command is ended after ``stopped`` was set


class Done(NamedTuple):
    """How a command ended."""

    code: int | None  # of a signal its negative number; None: it was killed, because it took too long
    stdout: str
    stderr: str
    took_s: float


def which(name: str, env: Mapping[str, str]) -> str | None:
    """Return the path of a program on PATH (shutil.which takes 5 ms to import)."""
    for folder in env.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, name)
        if folder.startswith("/") and os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a command whose output is read: English, times in seconds, nothing else changed."""
    kept = {key: value for key, value in env.items() if key in SLURM_SETUP or not key.startswith(_PREFIXES)}
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


def run(argv: list[str], env: Mapping[str, str], timeout_s: float, stopped: threading.Event) -> Done:
    """Run a command to its end, or kill it and what it started after ``timeout_s`` or when ``stopped`` is set.

    Raises OSError when it cannot be started.
    """
    from gpuboard.transport.command import Command  # late: `find` is called by every command

    begun = time.monotonic()
    command = Command(argv, env)
    try:
        while (left_s := begun + timeout_s - time.monotonic()) > 0 and not stopped.is_set():
            if (ran := command.wait(min(left_s, _SLICE_S))) is not None:
                code = 0 if ran.code is None and not ran.err else ran.code  # nobody knows it where SIGCHLD is ignored
                return Done(1 if code is None else code, ran.out, ran.err, time.monotonic() - begun)
    finally:
        command.kill()
    return Done(None, "", "", time.monotonic() - begun)
