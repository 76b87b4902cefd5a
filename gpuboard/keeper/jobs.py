"""A lease that is a job of a scheduler: what its keeper does in place of calls to nodes.

The heartbeat is the time of a file in the home, which the job's own script watches. The scheduler is asked once a
minute whether the jobs of all leases still run. The record (:class:`~gpuboard.keeper.record.KeptJob`) has the commands
for that and for ending a job, and the meaning of a job's states: this layer knows no scheduler.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuboard.keeper.calls import Calls, NodeAnswer
from gpuboard.keeper.holder import own_pids
from gpuboard.keeper.loop import boottime, log

if TYPE_CHECKING:
    from gpuboard.keeper.record import KeptJob
    from gpuboard.keeper.timing import KeeperTiming
    from gpuboard.transport.command import Ran


class _Looked(NamedTuple):
    asked: float  # seconds since boot
    due: float  # when to ask again
    states: dict[str, str] | None


class JobWatch:
    """The states of this user's jobs, asked for all leases at once and rarely. Called from threads."""

    def __init__(self, timing: KeeperTiming) -> None:
        self._timing = timing
        self._lock = threading.Lock()
        self._known: dict[str, _Looked] = {}  # by command

    def states(self, job: KeptJob, since: float) -> dict[str, str] | None:
        """Return the state of each job by its name, as it was about a minute ago at most.

        ``since``: seconds since boot before which an answer does not cover this job. None: not known yet.
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
    """Ask for the states of jobs, by name; of two with one name the one that has not ended. None: no answer."""
    ran = _run(job, job.look, timing)
    if not ran.ok:
        log(f"no answer about jobs: {_words(ran, timing)}")
        return None
    found: dict[str, str] = {}
    for line in ran.out.splitlines():
        number, _, rest = line.partition("|")
        state, _, name = rest.partition("|")
        if number.isdecimal() and (name not in found or state not in job.ended):
            found[name] = state
    return found


class JobCalls(Calls):
    """Calls for the one lease that a job is."""

    def __init__(self, name: str, lease: str, job: KeptJob, watch: JobWatch, timing: KeeperTiming) -> None:
        super().__init__(name, job.touch_s)
        self._lease = lease
        self._job = job
        self._watch = watch
        self._timing = timing
        self._since = boottime()
        self._touching = threading.Lock()
        self._over = False  # no more heartbeats: the heartbeat file is removed when the lease ends
        self._touched = False  # once: a hand-over waits for the first heartbeat, and for no command
        self._clean_since: float | None = None  # since when no job of that name was seen

    def close(self) -> None:
        """Do nothing more once the calls that wait are answered; the heartbeat file stays as it is from now on."""
        self._over = True
        if self._touching.acquire(timeout=self._timing.file_s):
            self._touching.release()
        super().close()

    def _answer(self, op: str, args: dict[str, Any]) -> NodeAnswer:
        does: dict[str, Callable[[], NodeAnswer]] = {
            "touch": self._touch,
            "release": self._release,
            "read": lambda: NodeAnswer({}),
            "carriers": lambda: NodeAnswer({"processes": []}),  # those of this host were looked for already
        }
        try:
            return does[op]()
        except OSError as error:  # the home is away, or the scheduler's commands are
            return NodeAnswer(None, "lost", f"{error.strerror or error}")

    def _touch(self) -> NodeAnswer:
        with self._touching:
            if self._job.heartbeat and not self._over:
                heartbeat(self._job.heartbeat)
        ended = self._ended() if self._job.number is not None and self._touched else None
        self._touched = True
        return ended or NodeAnswer({"alive": [self._lease], "lapsed": []})

    def _ended(self) -> NodeAnswer | None:
        """Return the answer of a touch when the job has ended and it is known why; None otherwise."""
        states = self._watch.states(self._job, self._since)
        if states is None:
            return None
        state = states.get(self._job.job_name)
        words = "it is not there any more" if state is None else self._job.ended.get(state, "")
        if not words:
            return None
        return NodeAnswer({"alive": [], "lapsed": [self._lease] if state in self._job.in_time else [], "words": words})

    def _release(self) -> NodeAnswer:
        """End the job. It counts as ended when it is seen no more, also one that a submission still brings."""
        until = time.monotonic() + self._timing.submit_s
        while _submitting(self._job):
            if time.monotonic() > until:
                return NodeAnswer(None, "lost", "it is still being submitted")
            time.sleep(0.05)
        cancelled = _run(self._job, self._job.cancel, self._timing)
        if not cancelled.ok:
            self._clean_since = None
            return NodeAnswer(None, "lost", f"not cancelled: {_words(cancelled, self._timing)}")
        states = look(self._job, self._timing)
        if states is None:
            return NodeAnswer(None, "lost", "the scheduler did not answer whether it is cancelled")
        state = states.get(self._job.job_name)
        if state is not None and state not in self._job.ended:
            self._clean_since = None
            return NodeAnswer(None, "lost", "it was cancelled and still exists")
        if self._job.number is None:
            # A scheduler that was too busy to answer may yet do what it was asked before.
            self._clean_since = self._clean_since or boottime()
            if boottime() - self._clean_since < self._timing.settle_s:
                return NodeAnswer(None, "lost", "looking once more whether there is a job")
        return NodeAnswer({"released": []})


def heartbeat(path: str) -> None:
    """Set the time of a heartbeat file, by the clock of the file's own server. Raises OSError."""
    try:
        os.utime(path)
    except FileNotFoundError:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _submitting(job: KeptJob) -> bool:
    """Return whether a command that submits the job still runs here; the job's own script has its mark too."""
    mark = job.mark.encode()
    inside = f"{job.inside}=".encode()
    for pid in own_pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            continue  # ended
        if mark in variables and not any(variable.startswith(inside) for variable in variables):
            return True
    return False


def _run(job: KeptJob, command: Sequence[str], timing: KeeperTiming) -> Ran:
    from gpuboard.transport.command import run  # late: most keepers keep no jobs

    secrets = {name: os.environ[name] for name in job.secrets if name in os.environ}
    return run(command, {**job.environ, **secrets}, timing.command_s)


def _words(ran: Ran, timing: KeeperTiming) -> str:
    if not ran.ended:
        return f"no answer in {timing.command_s:.0f} s"
    return " ".join(ran.err.split())[:300] or f"exit code {ran.code}"
