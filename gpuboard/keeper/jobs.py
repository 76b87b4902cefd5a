"""A lease that is a job of a scheduler: what its keeper does in place of calls to nodes.

Life is shown by the time of a file in the home, which the job's own script watches. The scheduler is asked once a
minute whether the jobs of all leases still run, and told when one is to end. How both is done stands in the record, as
command lines: this layer knows no scheduler.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuboard.keeper.holder import own_pids
from gpuboard.keeper.loop import boottime, log
from gpuboard.keeper.nodes import NodeAnswer, Report

if TYPE_CHECKING:
    import queue

    from gpuboard.keeper.record import KeptJob
    from gpuboard.transport.command import Ran

LOOK_S = 60.0  # between two questions whether jobs still run, at least
LOOK_SHARE = 50  # and at least so many times what the last one took
COMMAND_S = 30.0
SECRETS = ("SLURM_JWT",)  # variables that no record holds: the keeper has them from the command that started it
_SETTLE_S = 4.0  # from one look that finds no job to the next, where its number was never learned
_SHOWING_S = 0.2  # waited for a file's server that answers slowly; the file may be left behind then
_SUBMIT_S = 60.0  # that the end of the command which submits a job is waited for, before it is said that it lasts

_IN_TIME = "its time limit has come"
# States in which a job holds nothing (squeue(1), JOB STATE CODES), and what to say of them.
_ENDED = {
    "BOOT_FAIL": "a node of it did not start",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "it ended by itself, as it does without a sign of life of its keeper",
    "COMPLETING": "",  # why, Slurm says when its epilogs have run
    "DEADLINE": "its deadline has come",
    "FAILED": "it failed",
    "NODE_FAIL": "a node of it failed",
    "OUT_OF_MEMORY": "it ran out of memory",
    "PREEMPTED": "it was preempted",
    "REVOKED": "it was revoked",
    "TIMEOUT": _IN_TIME,
}
_Job = tuple[str, dict[str, Any], Report]


class _Looked(NamedTuple):
    asked: float  # seconds since boot
    due: float  # when to ask again
    states: dict[str, str] | None


class JobWatch:
    """What the scheduler says of this user's jobs, asked for all leases at once and rarely. Called from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, _Looked] = {}  # by command

    def states(self, job: KeptJob, since: float) -> dict[str, str] | None:
        """Return the state of each job by its name, as it was about a minute ago at most.

        ``since``: seconds since boot before which an answer says nothing about this job. None: nobody knows yet.
        """
        key = "\0".join([*job.look, *(f"{k}={v}" for k, v in sorted(job.environ.items()))])
        with self._lock:
            known = self._known.get(key)
            if known is None or boottime() >= known.due:
                asked = boottime()
                states = look(job.look, job.environ)
                due = asked + max(LOOK_S, LOOK_SHARE * (boottime() - asked))
                known = self._known[key] = _Looked(asked, due, states)
            return known.states if known.asked >= since else None


def look(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, str] | None:
    """Ask for the states of jobs, by name; of two with one name the one that has not ended. None: no answer."""
    ran = _run(command, environ)
    if not ran.ok:
        log(f"no answer about jobs: {_words(ran)}")
        return None
    found: dict[str, str] = {}
    for line in ran.out.splitlines():
        number, _, rest = line.partition("|")
        state, _, name = rest.partition("|")
        if number.isdecimal() and (name not in found or state not in _ENDED):
            found[name] = state
    return found


class JobCalls:
    """Calls for one lease, in the form of calls to a node. Each is answered, from a thread, through its ``report``."""

    def __init__(self, name: str, lease: str, job: KeptJob, watch: JobWatch) -> None:
        self.name = name
        self.every_s = job.touch_s
        self._lease = lease
        self._job = job
        self._watch = watch
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._since = boottime()
        self._showing = threading.Lock()
        self._over = False  # no life is shown any more: whoever ends the lease removes the heartbeat file
        self._shown = False  # life, once: whoever hands us the lease waits for that, and for no command
        self._clean_since: float | None = None  # since when no job of that name was seen

    def call(self, op: str, args: dict[str, Any], report: Report) -> None:
        """Do it. Never raises."""
        if self._jobs is None:
            import queue

            self._jobs = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._jobs,), name=self.name, daemon=True).start()
        self._jobs.put((op, args, report))

    def close(self) -> None:
        """Do nothing more, once what is on its way is done; from now on the heartbeat file stays as it is."""
        self._over = True
        if self._showing.acquire(timeout=_SHOWING_S):
            self._showing.release()
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def _serve(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        does: dict[str, Callable[[], NodeAnswer]] = {
            "touch": self._touch,
            "release": self._release,
            "read": lambda: NodeAnswer({}),
            "carriers": lambda: NodeAnswer({"processes": []}),  # those of this host were looked for already
        }
        while (job := jobs.get()) is not None:
            op, _, report = job
            try:
                report(does[op]())
            except OSError as error:  # the home is away, or the scheduler's commands are
                report(NodeAnswer(None, "lost", f"{error.strerror or error}"))

    def _touch(self) -> NodeAnswer:
        with self._showing:
            if self._job.heartbeat and not self._over:
                show_life(self._job.heartbeat)
        words = self._ended() if self._job.number is not None and self._shown else ""
        self._shown = True
        if not words:
            return NodeAnswer({"alive": [self._lease], "lapsed": []})
        return NodeAnswer({"alive": [], "lapsed": [self._lease] if words == _IN_TIME else [], "words": words})

    def _ended(self) -> str:
        """Return why the job holds nothing any more, "" when it does, as far as anybody knows."""
        states = self._watch.states(self._job, self._since)
        if states is None:
            return ""
        state = states.get(self._job.job_name)
        return "it is not there any more" if state is None else _ENDED.get(state, "")

    def _release(self) -> NodeAnswer:
        """End the job. It counts as ended when it is seen no more, also one that a submission still brings."""
        until = time.monotonic() + _SUBMIT_S
        while _submitting(self._lease):
            if time.monotonic() > until:
                return NodeAnswer(None, "lost", "it is still being submitted")
            time.sleep(0.05)
        cancelled = _run(self._job.cancel, self._job.environ)
        if not cancelled.ok:
            self._clean_since = None
            return NodeAnswer(None, "lost", f"not cancelled: {_words(cancelled)}")
        states = look(self._job.look, self._job.environ)
        if states is None:
            return NodeAnswer(None, "lost", "the scheduler does not say whether it is cancelled")
        if states.get(self._job.job_name, "COMPLETED") not in _ENDED:
            self._clean_since = None
            return NodeAnswer(None, "lost", "it was cancelled and is there all the same")
        if self._job.number is None:
            # A scheduler that was too busy to answer may yet do what it was asked before.
            self._clean_since = self._clean_since or boottime()
            if boottime() - self._clean_since < _SETTLE_S:
                return NodeAnswer(None, "lost", "looking once more whether there is a job")
        return NodeAnswer({"released": []})


def show_life(path: str) -> None:
    """Set the time of a heartbeat file, by the clock of the file's own server. Raises OSError."""
    try:
        os.utime(path)
    except FileNotFoundError:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _submitting(lease: str) -> bool:
    """Tell whether a command of ours that submits the lease's job still runs here."""
    wanted = b"\0GPUBOARD_SUBMIT=" + lease.encode() + b"\0"
    for pid in own_pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = b"\0" + file.read() + b"\0"
                if wanted in variables and b"\0SLURM_JOB_ID=" not in variables:  # else it is the job's own script
                    return True
        except OSError:
            continue  # ended
    return False


def _run(command: Sequence[str], environ: Mapping[str, str]) -> Ran:
    from gpuboard.transport.command import run  # late: most keepers keep no jobs

    secrets = {name: os.environ[name] for name in SECRETS if name in os.environ}
    return run(command, {**environ, **secrets}, COMMAND_S)


def _words(ran: Ran) -> str:
    if not ran.ended:
        return f"no answer in {COMMAND_S:.0f} s"
    return " ".join(ran.err.split())[:300] or f"exit code {ran.code}"
