"""The guard: the outermost process of a launch on its node, which ends last and leaves no process of the run behind.

It forks the supervisor and then does three things only: it adopts orphans (PR_SET_CHILD_SUBREAPER), watches the
supervisor through a pipe, and watches the connection for its end, in case the supervisor is stopped or hangs.
"""

import os
import signal
import time

from gpuboard.agent.event_loop import IN, poll
from gpuboard.agent.launch import scratch, teardown

MYPY = False
if MYPY:
    from typing import Any, Dict, Optional

    from gpuboard.agent.protocol import AgentChannel

_TEARDOWN_S = 1.6  # for the supervisor to end the run's processes itself, after the end of the connection
_POLLRDHUP = 0x2000  # select.POLLRDHUP is new in Python 3.7


def run(channel: "AgentChannel", config: "Dict[str, Any]") -> None:
    """Run a launch on this node until none of its processes is left (docs/launch-protocol.md)."""
    teardown.adopt_orphans()
    # Slurm sends these to all processes of a step; they are for the ranks.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    supervisor_life, supervisor_end = os.pipe()  # each process holds the write end of its own lifeline
    guard_life, guard_end = os.pipe()
    guard_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # ctrl-C and hang-up of a terminal are for the head
        os.close(supervisor_life)
        os.close(guard_end)
        from gpuboard.agent.launch import supervisor  # late: the guard needs little memory

        _supervise(supervisor.Supervisor(channel, config, guard_life, guard_pid), channel)
    os.close(supervisor_end)
    os.close(guard_life)
    ended: "Dict[int, int]" = {}  # children → their status from waitpid
    reason = _watch(channel.fd_in, supervisor_life, pid, ended)
    killed = False
    if reason is None:
        status = ended[pid] if pid in ended else os.waitpid(pid, 0)[1]
        killed = os.WIFSIGNALED(status)
        reason = "the supervisor was killed by signal %d" % os.WTERMSIG(status) if killed else ""
    if reason:
        channel.event("stopping", {"reason": reason, "killed": killed})
    teardown.kill_all(config, os.getpid(), (), lambda: _reap(ended), 4.0)
    scratch.remove(config)


def _supervise(supervisor: "Any", channel: "AgentChannel") -> None:
    """Run the supervisor and end its process; does not return."""
    code = 1
    try:
        supervisor.run()
        code = 0
    except BaseException:
        import traceback  # late: for errors only

        channel.event("stderr", {"text": traceback.format_exc()})
    finally:
        channel.drain(1.0)
        os._exit(code)


def _watch(connection: int, supervisor_life: int, supervisor_pid: int, ended: "Dict[int, int]") -> "Optional[str]":
    """Return when the supervisor has ended; kill it if it does not act on the end of the connection or on SIGTERM.

    None: it ended by itself. Else what the head does not know, as it did not act on a SIGTERM; "" for nothing.
    ``ended`` gets the children that have ended.
    """
    # Handlers, not SIG_IGN: ranks inherit ignored signals.
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    # Of the connection only its end: the supervisor reads the data.
    watched = {supervisor_life: IN, connection: _POLLRDHUP, wake_read: IN}
    deadline = None
    while True:
        ready = poll(watched, None if deadline is None else deadline - time.monotonic())
        if wake_read in ready:
            os.read(wake_read, 4096)
            _reap(ended)
        if supervisor_life in ready:
            return None
        if connection in ready:
            del watched[connection]
        if (connection in ready or ending) and deadline is None:
            if ending:
                teardown.send_signal(supervisor_pid, signal.SIGTERM)
            deadline = time.monotonic() + _TEARDOWN_S
        if deadline is not None and time.monotonic() >= deadline:
            teardown.send_signal(supervisor_pid, signal.SIGKILL)
            return teardown.signal_text(signal.SIGTERM) if ending else ""


def _reap(ended: "Dict[int, int]") -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        ended[pid] = status
