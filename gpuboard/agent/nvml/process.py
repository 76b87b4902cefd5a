"""One NVML process from its parent's side: started by fork, controlled by a pipe, watched through shared memory."""

import errno
import marshal
import mmap
import os
import struct

from gpuboard.agent import proc
from gpuboard.agent.nvml.terms import NO_GPU

MYPY = False
if MYPY:
    from typing import Any, List, Optional, Set, Tuple

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
SIGKILL = 9  # signal(7); the module takes 4 ms to import
SPIN_S = 1.0  # CPU time in one call after which a runnable process counts as hanging


class NvmlProcess:
    """One NVML process and our end of its pipes."""

    def __init__(self, pid: int, fd_in: int, fd_out: int, mark: "Any", now: float) -> None:
        self.pid = pid
        self.fd_in = fd_in
        self.fd_out = fd_out
        self.mark = mark  # shared bytes, as in reader.serve
        self.born = now
        self.busy = True
        self.since = now  # when its progress mark last changed
        self._seen = b""
        self._cpu_s: "Optional[float]" = None  # when it was first found runnable without progress
        self._data = bytearray()

    def stalled_s(self, now: float, limit_s: float) -> float:
        """Return how long it has been in one call, in seconds; 0 below ``limit_s`` and while it only lacks a CPU.

        On a node with all CPUs busy a process of nice 19 can wait for seconds. It is then runnable and uses no CPU
        time, while a hung call sleeps or spins.
        """
        seen = bytes(self.mark[:2])
        if seen != self._seen:
            self._seen, self.since, self._cpu_s = seen, now, None
        if now - self.since <= limit_s:
            return 0.0
        stat = proc.read_process(self.pid)
        if stat is not None and stat.state == "R":
            if self._cpu_s is None:
                self._cpu_s = stat.cpu_s
            if stat.cpu_s - self._cpu_s < SPIN_S:
                return 0.0
        return now - self.since

    def at(self) -> "Optional[int]":
        """Return the GPU it is reading (or XIDS, RATES), None between GPUs."""
        return None if self.mark[0] == NO_GPU else self.mark[0]

    def receive(self) -> "Tuple[List[Any], bool]":
        """Return (complete messages, whether the process has ended)."""
        ended = False
        while True:
            try:
                data = os.read(self.fd_in, 65536)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    break
                raise
            if not data:
                ended = True
                break
            self._data += data
        messages = []
        while len(self._data) >= 4:
            size = struct.unpack("=I", bytes(self._data[:4]))[0]
            if len(self._data) < 4 + size:
                break
            messages.append(marshal.loads(bytes(self._data[4 : 4 + size])))
            del self._data[: 4 + size]
        return messages, ended

    def ask(self, now: float, rates: bool, looked: int) -> None:
        """Request a pass, with ``rates`` and the throughput of GPU ``looked`` (or NO_GPU)."""
        self.mark[2], self.mark[3] = rates, looked
        self.busy, self.since, self._cpu_s = True, now, None
        try:
            os.write(self.fd_out, b"r")
        except OSError:
            pass  # it has ended; end-of-file on fd_in follows

    def close(self) -> None:
        os.close(self.fd_in)
        os.close(self.fd_out)


def spawn(now: float, close: "List[int]", skip: "Set[int]", only: "Optional[int]") -> NvmlProcess:
    """Start an NVML process that skips the GPUs in ``skip`` or reads ``only`` one; it closes ``close`` first.

    Raises OSError if no process can be started.
    """
    mark = mmap.mmap(-1, 4)
    mark[0] = NO_GPU
    theirs_in, fd_out = os.pipe()
    fd_in, theirs_out = os.pipe()
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:  # too many processes: the next attempt follows
        for fd in (theirs_in, fd_out, fd_in, theirs_out):
            os.close(fd)
        raise
    if pid == 0:
        try:
            for fd in close + [fd_in, fd_out]:
                os.close(fd)
            _serve(parent, (theirs_in, theirs_out), mark, skip, only)
        finally:
            os._exit(1)
    os.close(theirs_in)
    os.close(theirs_out)
    os.set_blocking(fd_in, False)
    os.set_blocking(fd_out, False)
    return NvmlProcess(pid, fd_in, fd_out, mark, now)


def _serve(parent: int, fds: "Tuple[int, int]", mark: "Any", skip: "Set[int]", only: "Optional[int]") -> None:
    try:
        import ctypes  # only here, like nvml: the parent must never load NVML or its bindings

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, SIGKILL)  # end with the agent
        if os.getppid() != parent:
            os._exit(0)
        from gpuboard.agent.nvml import reader as nvml  # 30 ms; 200 ms when compiled from its source on a node

        nvml.serve(fds[0], fds[1], mark, skip, only)
        os._exit(0)
    except (OSError, KeyboardInterrupt):
        os._exit(0)  # the agent is gone
    except BaseException:
        import traceback  # late: only when something is wrong

        os.write(2, traceback.format_exc().encode("utf-8", "replace"))
