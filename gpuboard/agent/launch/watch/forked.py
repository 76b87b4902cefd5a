"""Looks at ranks in a forked process with a deadline.

/proc of a process in uninterruptible sleep, a stopped rank's sockets and ptrace may block.
"""

import ctypes
import json
import os
import signal

from gpuboard.agent.event_loop import IN
from gpuboard.agent.launch import teardown

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Set

    from gpuboard.agent.event_loop import Loop

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_DEADLINE_S = 5.0


class Looks:
    """The looks of one process. ``pids``: the processes of those that have no result yet."""

    def __init__(self, loop: "Loop") -> None:
        self.pids: "Set[int]" = set()
        self._loop = loop

    def start(self, look: "Callable[[], Dict[str, Any]]", done: "Callable[[Dict[str, Any]], None]") -> None:
        """Call ``look`` in a new process; call ``done`` with its result once, without ranks if it takes too long."""
        fd_in, fd_out = os.pipe()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(fd_in)
            os.close(fd_out)
            raise
        if pid == 0:
            try:
                _run(parent, fd_out, look)
            finally:
                os._exit(1)
        os.close(fd_out)
        os.set_blocking(fd_in, False)
        self.pids.add(pid)
        received: "List[bytes]" = []

        def finish() -> None:
            self._loop.unwatch(fd_in)
            os.close(fd_in)
            self._loop.cancel(timer)
            self.pids.discard(pid)
            try:
                result = json.loads(b"".join(received).decode("utf-8"))
            except ValueError:
                result = {"ranks": [], "load": None, "error": "no result within %d s" % _DEADLINE_S}
            done(result)

        def read() -> None:
            while True:
                try:
                    data = os.read(fd_in, 65536)
                except BlockingIOError:
                    return
                if not data:
                    finish()
                    return
                received.append(data)

        def late() -> None:
            # Only here: its end-of-file comes with its end, and a process that has been reaped may share its pid.
            teardown.send_signal(pid, signal.SIGKILL)  # reaped with the other children
            finish()

        timer = self._loop.after(_DEADLINE_S, late)
        self._loop.watch(fd_in, IN, read)


def _run(parent: int, fd_out: int, look: "Callable[[], Dict[str, Any]]") -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    # Pipes whose ends show others the end of the supervisor must not stay open here.
    limit = os.sysconf("SC_OPEN_MAX")
    os.closerange(3, fd_out)
    os.closerange(fd_out + 1, min(limit if limit > 0 else 65536, 65536))
    data = json.dumps(look()).encode("ascii")
    while data:
        data = data[os.write(fd_out, data) :]
    os._exit(0)
