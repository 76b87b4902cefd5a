"""Slurm's commands: where they are, the environment they get, and running one with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import subprocess

# Variables that say where Slurm is and who we are for it; all others of Slurm's change what its commands do or print.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET"})
_PREFIXES = ("SLURM_", "SLURMD_", "SCONTROL_", "SQUEUE_", "SINFO_", "SRUN_", "SBATCH_", "SALLOC_", "SCANCEL_", "SACCT_")


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
    kept = {key: value for key, value in env.items() if key in _KEPT or not key.startswith(_PREFIXES)}
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


def run(argv: list[str], env: Mapping[str, str], timeout_s: float, running: Running) -> Done:
    """Run a command to its end, or kill it and all it started after ``timeout_s``. Raises OSError when it cannot start.

    It has a process group of its own, so that ctrl-C at the terminal does not end a question that others wait for.
    """
    import subprocess  # 19 ms

    begun = time.monotonic()
    with running.lock:
        if running.stopped:
            raise InterruptedError("stopped")
        child = running.child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            cwd="/",
            process_group=0,
        )
    code: int | None = None
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
        code = child.returncode
    except subprocess.TimeoutExpired:
        stdout = stderr = b""
    finally:
        running.kill()
    with running.lock:
        running.child = None
    return Done(code, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"), time.monotonic() - begun)


class Running:
    """The command that runs now, for whoever has to end it from another thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def stop(self) -> None:
        """Kill what runs, and let nothing be started any more."""
        self.stopped = True
        self.kill()

    def kill(self) -> None:
        """Kill the command and all of its process group; one that hangs in the kernel is left behind."""
        with self.lock:
            if self.child is not None and self.child.poll() is None:  # else the number may be another's by now
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.child.pid, signal.SIGKILL)
