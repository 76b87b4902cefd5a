"""A signal to one process, the very one that a reading showed: pids are used again."""

import os
import signal

MYPY = False
if MYPY:
    from typing import Any, Dict

    from gpuboard.agent.proc import Processes

NAMES = ("TERM", "INT", "KILL", "USR1", "STOP", "CONT")
SAME_S = 1.0  # readings round; a pid is not used again within so little time, and a clock set anew is no reason to kill


class SignalRefused(Exception):
    """Why no signal was sent; ``kind`` as in docs/agent-protocol.md."""

    def __init__(self, kind: str, message: str) -> None:
        Exception.__init__(self, message)
        self.kind = kind
        self.message = message


def send(args: "Dict[str, Any]", processes: "Processes") -> "Dict[str, Any]":
    """Send ``args["signal"]`` to ``args["pid"]`` if that process was started at ``args["started"]``, epoch seconds.

    Whether we may is the kernel's to say. Raises Refuse.
    """
    name, pid, started = args.get("signal"), args.get("pid"), args.get("started")
    if name not in NAMES or not isinstance(pid, int) or not isinstance(started, (int, float)):
        raise SignalRefused("invalid", "a signal needs pid, started and one of %s" % ", ".join(NAMES))
    if pid < 2:  # 0 and below are whole groups of processes, 1 is init
        raise SignalRefused("invalid", "pid %d is no process to send a signal to" % pid)
    number = getattr(signal, "SIG" + name)
    handle = _open(pid)
    try:
        found = processes.started(pid)
        if found is None or not abs(found - started) <= SAME_S:  # nor where ``started`` is NaN
            raise SignalRefused("not-found", "process %d has ended" % pid)
        send_signal = getattr(signal, "pidfd_send_signal", None)
        if handle is None or send_signal is None:
            os.kill(pid, number)
        else:
            send_signal(handle, number)
    except ProcessLookupError:
        raise SignalRefused("not-found", "process %d has ended" % pid)
    except PermissionError:
        raise SignalRefused("not-yours", "process %d is not yours" % pid)
    finally:
        if handle is not None:
            os.close(handle)
    return {"pid": pid}


def _open(pid: int) -> "Any":
    """Return a pidfd, which stays with the process whatever becomes of its pid; None before Python 3.9 or Linux 5.3."""
    pidfd_open = getattr(os, "pidfd_open", None)
    try:
        return pidfd_open(pid) if pidfd_open else None
    except OSError:
        return None  # gone, or an old kernel: what follows finds out
