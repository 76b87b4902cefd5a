"""gpuboard's command lines as forks of one process that has imported gpuboard: 20 ms each instead of 150, and measured.

A fork runs ``gpuboard.__main__.main`` with its own arguments, environment, streams and limit of memory.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.integration.here import Here, Measured

PATIENCE_S = 60.0  # for a command that waits for ever; a machine that is busy takes long for anything
ADDRESSES = 3 << 30  # bytes of address space: a runaway ends before the machine does
LATE = ("gpuboard.cluster.fleet", "gpuboard.keeper.client")  # imported late by most commands


class Forked:
    """The process that forks, in the home and with the GPUs of ``here``."""

    def __init__(self, here: Here) -> None:
        self._here = here
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.security.forked", str(here.folder)], env=here.env, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def measured(self, args: Sequence[str | bytes], env: Mapping[str, str | bytes]) -> Measured:
        """Run gpuboard to its end, at most ``PATIENCE_S`` and with at most ``ADDRESSES`` of memory."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        command = [list(map(os.fsdecode, args)), {name: os.fsdecode(value) for name, value in env.items()}]
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        code, seconds, peak = json.loads(self._process.stdout.readline())
        out, err = ((self._here.folder / name).read_text("utf-8", "replace") for name in ("stdout", "stderr"))
        return Measured(code, out, err, seconds, peak)

    def close(self) -> None:
        with self._process:
            self._process.kill()


def main(folder: str) -> None:
    """Run each command of stdin in a fork; print its exit code, seconds of CPU time and bytes of memory."""
    from gpuboard.cli.commands import COMMANDS
    from gpuboard.cli.main import load

    for name in COMMANDS:
        load(name)
    for name in LATE:
        importlib.import_module(name)
    for line in sys.stdin:
        argv, env = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(folder, argv, env)
        pidfd = os.pidfd_open(pid)
        if not select.select([pidfd], [], [], PATIENCE_S)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(pidfd)
        _, status, used = os.wait4(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps([code, used.ru_utime + used.ru_stime, used.ru_maxrss << 10]), flush=True)


def _run(folder: str, argv: list[str], env: dict[str, str]) -> None:
    """Be gpuboard."""
    from gpuboard.__main__ import main as gpuboard

    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    os.environ.update(env)
    sys.argv[1:] = argv
    gpuboard()


if __name__ == "__main__":
    main(sys.argv[1])
