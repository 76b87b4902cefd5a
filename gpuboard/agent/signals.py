"""Sends a signal to a process from a reading. Its start time is checked, because pids are reused."""

import os
import signal

MYPY = False
if MYPY:
    from typing import Any, Dict, Literal  # novm

    from gpuboard.agent.processes import Processes

NAMES = ("TERM", "INT", "KILL", "USR1", "STOP", "CONT")
SAME_S = 1.0  # tolerance of start times, which readings round; pids are not reused this fast


class SignalRefused(Exception):
    """No signal was sent; ``kind`` as in docs/agent-protocol.md."""

    def __init__(self, kind: "Literal['invalid', 'not-found', 'not-yours']", message: str) -> None:
        Exception.__init__(self, message)
        self.kind = kind
        self.message = message


def send(args: "Dict[str, Any]", processes: "Processes") -> "Dict[str, Any]":
    """Send ``args["signal"]`` to ``args["pid"]`` if that process was started at ``args["started"]``, epoch seconds.

    The kernel checks the permission. Raises SignalRefused.
    """
    name, pid, started = args.get("signal"), args.get("pid"), args.get("started")
    if name not in NAMES or not isinstance(pid, int) or not isinstance(started, (int, float)):
        raise SignalRefused("invalid", "a signal needs pid, started and one of %s" % ", ".join(NAMES))
    if pid < 2:  # 0 and below are whole groups of processes, 1 is init
        raise SignalRefused("invalid", "pid %d cannot be sent a signal" % pid)
    number = getattr(signal, "SIG" + name)
    handle = _open(pid)
    try:
        found = processes.started(pid)
        if found is None or not abs(found - started) <= SAME_S:  # also False where ``started`` is NaN
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
    """Return a pidfd, which refers to this process even if its pid is reused; None before Python 3.9 or Linux 5.3."""
    pidfd_open = getattr(os, "pidfd_open", None)
    try:
        return pidfd_open(pid) if pidfd_open else None
    except OSError:
        return None  # ended, or an old kernel: the caller's next steps find out
