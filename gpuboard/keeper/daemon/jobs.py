"""Leases that are jobs of a scheduler: their heartbeat, their state and their release.

The heartbeat is the mtime of a file in the home, which the job's script watches. The scheduler is queried once a minute
for the states of all leases' jobs. The record (:class:`~gpuboard.keeper.record.KeptJob`) has the commands for the query
and for ending a job, and what a job's states mean: this module depends on no scheduler.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuboard.agent.proc import own_pids, read_environ
from gpuboard.keeper.daemon.calls import Calls, NodeAnswer
from gpuboard.keeper.daemon.loop import boottime, log

if TYPE_CHECKING:
    from gpuboard.keeper.record import KeptJob
    from gpuboard.keeper.timing import KeeperTiming
    from gpuboard.transport.command import Ran


class _Looked(NamedTuple):
    asked: float  # seconds since boot
    due: float  # of the next query
    states: dict[str, str] | None


class JobWatch:
    """The states of this user's jobs, queried rarely and for all leases at once. Thread-safe."""

    def __init__(self, timing: KeeperTiming) -> None:
        self._timing = timing
        self._lock = threading.Lock()
        self._known: dict[str, _Looked] = {}  # by command

    def states(self, job: KeptJob, since: float) -> dict[str, str] | None:
        """Return the state of each job by its name, at most about a minute old; None: not known yet.

        ``since``: seconds since boot; an earlier query does not cover this job.
        """
        key = "\0".join([*job.look, *(f"{k}={v}" for k, v in sorted(job.environ.items()))])
        with self._lock:
            known = self._known.get(key)
            if known is None or boottime() >= known.due:
                asked = boottime()
                states = look(job, self._timing)
                due = asked + max(self._timing.job_look_s, self._timing.job_look_share * (boottime() - asked))
                known = self._known[key] = _Looked(asked, due, states)
            return known.states if known.asked >= since else None


def look(job: KeptJob, timing: KeeperTiming) -> dict[str, str] | None:
    """Query the states of jobs by name; of two with one name, the one that has not ended. None: no answer."""
    ran = _run(job, job.look, timing)
    if not ran.ok:
        log(f"query of jobs failed: {_failure(ran, timing)}")
        return None
    found: dict[str, str] = {}
    for line in ran.out.splitlines():
        number, _, rest = line.partition("|")
        state, _, name = rest.partition("|")
        if number.isdecimal() and (name not in found or state not in job.ended):
            found[name] = state
    return found


class JobCalls(Calls):
    """Calls for one lease, which is a job."""

    def __init__(self, name: str, lease: str, job: KeptJob, watch: JobWatch, timing: KeeperTiming) -> None:
        super().__init__(name, job.touch_s)
        self._lease = lease
        self._job = job
        self._watch = watch
        self._timing = timing
        self._since = boottime()
        self._touching = threading.Lock()
        self._over = False  # no more heartbeats: the heartbeat file is removed when the lease ends
        self._touched = False  # the first heartbeat, for which a hand-over waits, runs no command
        self._absent_since: float | None = None  # since when queries show no job of that name

    def close(self) -> None:
        """Stop once the queued calls are answered; the heartbeat file is not written any more from now on."""
        self._over = True
        if self._touching.acquire(timeout=self._timing.file_s):
            self._touching.release()
        super().close()

    def _answer(self, op: str, args: dict[str, Any]) -> NodeAnswer:
        does: dict[str, Callable[[], NodeAnswer]] = {
            "touch": self._touch,
            "release": self._release,
            "read": lambda: NodeAnswer({}),
            "carriers": lambda: NodeAnswer({"processes": []}),  # those of this host are known already
        }
        try:
            return does[op]()
        except OSError as error:  # the home or the scheduler's commands are missing
            return NodeAnswer(None, "lost", f"{error.strerror or error}")

    def _touch(self) -> NodeAnswer:
        with self._touching:
            if self._job.heartbeat and not self._over:
                heartbeat(self._job.heartbeat)
        ended = self._ended() if self._job.number is not None and self._touched else None
        self._touched = True
        return ended or NodeAnswer({"alive": [self._lease], "lapsed": []})

    def _ended(self) -> NodeAnswer | None:
        """Return the answer of a touch when the job has ended for a known reason, else None."""
        states = self._watch.states(self._job, self._since)
        if states is None:
            return None
        state = states.get(self._job.job_name)
        reason = "it no longer exists" if state is None else self._job.ended.get(state, "")
        if not reason:
            return None
        return NodeAnswer({"alive": [], "lapsed": [self._lease] if state in self._job.in_time else [], "words": reason})

    def _release(self) -> NodeAnswer:
        """End the job, also one that is still being submitted. It has ended when queries show it no more."""
        until = time.monotonic() + self._timing.submit_s
        while _submitting(self._job):
            if time.monotonic() > until:
                return NodeAnswer(None, "lost", "it is still being submitted")
            time.sleep(0.05)
        cancelled = _run(self._job, self._job.cancel, self._timing)
        if not cancelled.ok:
            self._absent_since = None
            return NodeAnswer(None, "lost", f"not cancelled: {_failure(cancelled, self._timing)}")
        states = look(self._job, self._timing)
        if states is None:
            return NodeAnswer(None, "lost", "no answer from the scheduler whether it is cancelled")
        state = states.get(self._job.job_name)
        if state is not None and state not in self._job.ended:
            self._absent_since = None
            return NodeAnswer(None, "lost", "cancelled, but it still exists")
        if self._job.number is None:
            # A scheduler that timed out may still execute the submission.
            self._absent_since = self._absent_since or boottime()
            if boottime() - self._absent_since < self._timing.settle_s:
                return NodeAnswer(None, "lost", "querying once more whether there is a job")
        return NodeAnswer({"released": []})


def heartbeat(path: str) -> None:
    """Set the mtime of a heartbeat file by the file server's clock. Raises OSError."""
    try:
        os.utime(path)
    except FileNotFoundError:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _submitting(job: KeptJob) -> bool:
    """Return whether the command that submits the job is still running here; the job's script has its mark too."""
    mark = job.mark.encode()
    inside = f"{job.inside}=".encode()
    for pid in own_pids():
        variables = read_environ(pid) or ()
        if mark in variables and not any(variable.startswith(inside) for variable in variables):
            return True
    return False


def _run(job: KeptJob, command: Sequence[str], timing: KeeperTiming) -> Ran:
    from gpuboard.transport.command import run  # late: most keepers have no jobs

    secrets = {name: os.environ[name] for name in job.secrets if name in os.environ}
    return run(command, {**job.environ, **secrets}, timing.command_s)


def _failure(ran: Ran, timing: KeeperTiming) -> str:
    if not ran.ended:
        return f"no answer in {timing.command_s:.0f} s"
    return " ".join(ran.err.split())[:300] or f"exit code {ran.code}"
