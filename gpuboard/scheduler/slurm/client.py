"""This user's jobs in Slurm: submit, query, extend, cancel. Each call runs one command.

Output formats: sbatch(1), squeue(1), scancel(1), scontrol(1) of Slurm 22.05 to 24.05.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

import msgspec

from gpuboard.errors import GpuboardError, NoNodeReached
from gpuboard.model.text import clean
from gpuboard.model.units import day_time
from gpuboard.scheduler.slurm import sbatch_args
from gpuboard.scheduler.slurm.jobs import effective_state
from gpuboard.transport.base import TransportError
from gpuboard.transport.command import Command, Ran, run
from gpuboard.transport.slurm.srun import program
from gpuboard.transport.slurm.srun_errors import ENDING

COMMAND_S = 25.0  # timeout of a command; Slurm's commands give up after 10 to 20 s
SUBMIT_S = 60.0  # timeout of sbatch, which retries when the controller is too busy to accept a job
SUBMITTING = "GPUBOARD_SUBMIT"  # variable with the lease's id, by which the keeper finds a lease's sbatch

SECRETS = ("SLURM_JWT",)  # variables of Slurm's commands that must not be written to a file
# States in which a job has no resources (squeue(1), JOB STATE CODES): the reason; "" where Slurm reports it only later.
ENDED_STATES = {
    "BOOT_FAIL": "one of its nodes did not start",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "its script ended, as it does without heartbeats of the keeper",
    "COMPLETING": "",  # the reason is known when its epilogs have run
    "DEADLINE": "it reached its deadline",
    "FAILED": "it failed",
    "NODE_FAIL": "one of its nodes failed",
    "OUT_OF_MEMORY": "it ran out of memory",
    "PREEMPTED": "it was preempted",
    "REVOKED": "it was revoked",
    "TIMEOUT": "it reached its time limit",
}

# The environment of sbatch, which Slurm stores in the job's record: without the secrets that a shell's variables hold,
# and with those defaults for sbatch that have an option here.
_KEPT = (
    "PATH", "HOME", "USER", "LOGNAME", "LD_LIBRARY_PATH", "TZ", "KRB5CCNAME", "MODULEPATH",
    "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET",
    "SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_CONSTRAINT",
)  # fmt: skip
# The name, which the owner chooses, is last. The comment is read of this user's jobs only: a line end in it could forge
# a line of another job.
_FORMAT = "%A|%T|%r|%S|%L|%M|%P|%U|%N|%j"
_FORMAT_MINE = _FORMAT + "|%k"
_QUEUE_FORMAT = "%A|%T|%r|%S|%Q|%P"


class JobState(msgspec.Struct, frozen=True):
    """A job as squeue shows it. Times are epoch seconds by the controller's clock."""

    number: int
    state: str  # PENDING, CONFIGURING, RUNNING, …
    reason: str = ""
    start: float | None = None  # of a pending job Slurm's estimate; None: not estimated yet
    left_s: float | None = None  # until its time limit; None: it has none
    used_s: float = 0.0  # how long it has run
    partition: str = ""
    uid: int = -1
    nodes: str = ""  # as Slurm writes them
    name: str = ""
    comment: str = ""

    @property
    def ended(self) -> bool:
        """Whether it has released its resources, or is about to."""
        return self.state in ENDING

    @property
    def lease(self) -> str | None:
        """The lease that it was submitted for; None for any other job."""
        return sbatch_args.lease_of(self.name)


class QueuePlace(msgspec.Struct, frozen=True):
    """A pending job in its partition's queue."""

    job: JobState
    ahead: int  # visible pending jobs with a higher priority
    waiting: int  # all visible pending jobs, including it


class Jobs:
    """Slurm's commands for the jobs of one user."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.environ = {name: env[name] for name in _KEPT if name in env}
        # Times as epoch seconds: squeue prints no time zone, and local time is ambiguous for an hour in autumn.
        self.environ |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        self.user = str(os.geteuid())
        self._submitting: Command | None = None
        self._begun = False

    def submit(self, arguments: Sequence[str], script: str, lease: str) -> tuple[int, str]:
        """Submit a job and return its number and sbatch's warnings.

        Raises the error that a refusal means, Uncertain where there may be a job nevertheless. After an interrupt
        sbatch goes on: see :meth:`settle`.
        """
        self._begun = True
        environ = self.environ | {SUBMITTING: lease}
        self._submitting = Command([_program("sbatch"), *arguments], environ, script.encode())
        if self._submitting.wait(SUBMIT_S) is None:
            self._submitting.kill()  # the controller may accept its request nevertheless
        return self._outcome(SUBMIT_S)

    def settle(self, timeout_s: float) -> int | None:
        """Return the job of a submission that was interrupted at any point; None when there is none.

        Raises Uncertain when that is unknown.
        """
        if not self._begun:
            return None
        try:
            return self._outcome(timeout_s)[0]
        except Uncertain:
            raise
        except GpuboardError:
            return None

    def _outcome(self, timeout_s: float) -> tuple[int, str]:
        """Wait for the end of sbatch and return its result. Raises the error that it means."""
        ran = self._submitting.wait(timeout_s) if self._submitting is not None else None
        if ran is None:
            raise Uncertain(f"sbatch did not respond within {timeout_s:.0f} s; see `scontrol ping`")
        number = sbatch_args.job_number(ran.out) if ran.code == 0 else None
        if number is not None:
            return number, _one_line(ran.err)
        error = sbatch_args.refusal(ran.err, ran.code if ran.code is not None else 1)
        # killed, or its number is unreadable, or the controller may have received the request
        if ran.code is None or ran.code <= 0 or sbatch_args.is_uncertain(ran.err):
            raise Uncertain(str(error))
        raise error

    def test(self, arguments: Sequence[str], script: str) -> str:
        """Return Slurm's estimate for a job without submitting it: when and where it would start. Raises refusals."""
        command = [_program("sbatch"), *arguments, "--test-only"]
        ran = run(command, self.environ, COMMAND_S, script.encode())
        if not ran.ended:
            raise NoNodeReached(_no_answer("sbatch"))
        if ran.code != 0:
            raise sbatch_args.refusal(ran.err.replace("allocation failure: ", "sbatch: error: "), ran.code or 1)
        estimate = _one_line(ran.err).removeprefix("sbatch: ")
        return re.sub(r"(?<= to start at )[0-9]{1,12}\b", lambda at: day_time(int(at[0])), estimate)

    def job(self, number: int) -> JobState | None:
        """Return a job, for some minutes also an ended one; None when it is unknown to Slurm. Raises NoNodeReached."""
        ran = self._ask(["squeue", "--noheader", "--states=all", f"--jobs={number}", f"--format={_FORMAT}"])
        if ran.code != 0 and "Invalid job id" in ran.err:
            return None
        return next((job for job in _jobs(_answer("squeue", ran)) if job.number == number), None)

    def of_lease(self, lease: str, *, mine: bool = True) -> list[JobState]:
        """Return the jobs of a lease that have not ended; ``mine``: only this user's. Raises NoNodeReached."""
        who = [f"--user={self.user}"] if mine else []
        name = sbatch_args.job_name(lease)
        ran = self._ask(["squeue", "--noheader", f"--name={name}", *who, f"--format={_FORMAT}"])
        return [job for job in _jobs(_answer("squeue", ran)) if job.name == name and not job.ended]

    def mine(self) -> list[JobState]:
        """Return this user's jobs that were submitted for leases and have not ended. Raises NoNodeReached."""
        ran = self._ask(["squeue", "--noheader", f"--user={self.user}", f"--format={_FORMAT_MINE}"])
        return [job for job in _jobs(_answer("squeue", ran)) if job.lease is not None and not job.ended]

    def place(self, number: int, partition: str) -> QueuePlace | None:
        """Return a job's place in the queue; None when it is not pending any more. Raises NoNodeReached."""
        where = [f"--partition={partition}"] if partition else []
        ran = self._ask(["squeue", "--noheader", "--states=PENDING", *where, f"--format={_QUEUE_FORMAT}"])
        return _place(_answer("squeue", ran), number)

    def partitions(self) -> list[tuple[str, bool, float | None]]:
        """Return the partitions: name, whether it is the default, time limit of a job (seconds)."""
        ran = self._ask(["sinfo", "--noheader", "--format=%P|%l"])
        found = {}
        for line in _answer("sinfo", ran).splitlines():
            name, _, limit = line.partition("|")
            found[name.rstrip("*")] = (name.rstrip("*"), name.endswith("*"), seconds(limit))
        return list(found.values())

    def cancel_command(self, lease: str) -> list[str]:
        """Return the command that cancels a lease's job, also before its number is known."""
        return [_program("scancel"), f"--name={sbatch_args.job_name(lease)}", f"--user={self.user}"]

    def look_command(self) -> list[str]:
        """Return the command that prints ``number|state|name`` of this user's jobs, with recently ended ones."""
        return [_program("squeue"), "--noheader", "--states=all", f"--user={self.user}", "--format=%A|%T|%j"]

    def cancel(self, lease: str) -> None:
        """Cancel the job of this user's lease, by its name. Raises GpuboardError when Slurm refuses."""
        _answer("scancel", self._run(self.cancel_command(lease), COMMAND_S))

    def cancel_number(self, number: int) -> None:
        """Cancel a job by its number, as root also another user's. Raises GpuboardError when Slurm refuses."""
        _answer("scancel", self._ask(["scancel", str(number)]))

    def set_limit(self, number: int, minutes: int) -> None:
        """Set a job's time limit. Raises GpuboardError with Slurm's message."""
        ran = self._ask(["scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}"])
        if ran.code != 0 and "denied" in ran.err:
            raise GpuboardError(
                f"Slurm does not allow you to extend job {number}: {_one_line(ran.err)}; ask its administrators "
                f"(scontrol update JobId={number} TimeLimit={minutes}), or make a new reservation before it ends"
            )
        _answer("scontrol", ran)

    def _ask(self, command: Sequence[str]) -> Ran:
        return self._run([_program(command[0]), *command[1:]], COMMAND_S)

    def _run(self, command: Sequence[str], timeout_s: float) -> Ran:
        try:
            ran = run(command, self.environ, timeout_s)
        except OSError as error:
            raise GpuboardError(f"{command[0]} cannot be run: {error.strerror or error}") from None
        if not ran.ended:
            raise NoNodeReached(_no_answer(os.path.basename(command[0])))
        return ran


class Uncertain(NoNodeReached):
    """sbatch has failed, but there may be a job: the controller did not answer, and may have received the request."""


def _program(name: str) -> str:
    try:
        return program(name)
    except TransportError as error:
        raise GpuboardError(str(error)) from None


def _no_answer(name: str) -> str:
    return f"{name} got no answer from Slurm's controller within {COMMAND_S:.0f} s; see `scontrol ping`"


def _answer(name: str, ran: Ran) -> str:
    """Return what a command printed. Raises NoNodeReached where the controller was not reached, else GpuboardError."""
    if ran.ok:
        return ran.out
    why = _one_line(ran.err) or f"{name} ended with exit code {ran.code}"
    if sbatch_args.is_unreached(ran.err):
        raise NoNodeReached(f"could not reach Slurm's controller: {why}; see `scontrol ping`")
    raise GpuboardError(f"Slurm: {why}")


def _one_line(text: str) -> str:
    return "; ".join(clean(line.strip(), 300) for line in text.splitlines() if line.strip())


def _jobs(text: str) -> list[JobState]:
    found = []
    for line in text.splitlines():
        parts = [*line.split("|", 10), ""]
        if len(parts) < 11 or not parts[0].isdecimal() or not parts[7].isdecimal():
            continue
        state, reason, partition, nodes, name, comment = (clean(parts[k], 10000) for k in (1, 2, 6, 8, 9, 10))
        found.append(
            JobState(
                int(parts[0]),
                effective_state(state, reason),
                reason,
                start=_epoch(parts[3]),
                left_s=seconds(parts[4]),
                used_s=seconds(parts[5]) or 0.0,
                partition=partition,
                uid=int(parts[7]),
                nodes=nodes,
                name=name,
                comment="" if comment == "(null)" else comment,
            )
        )
    return found


def _place(text: str, number: int) -> QueuePlace | None:
    """Return a job's place in squeue's list of pending jobs. Held and dependent jobs do not count."""
    own: JobState | None = None
    own_priority = 0
    priorities: dict[int, int] = {}
    for line in text.splitlines():
        parts = line.split("|", 5)
        if len(parts) != 6 or not parts[0].isdecimal() or not parts[4].isdecimal():
            continue
        if int(parts[0]) == number:
            own = JobState(
                number, clean(parts[1], 40), clean(parts[2], 200), _epoch(parts[3]), partition=clean(parts[5], 200)
            )
            own_priority = int(parts[4])
        elif not parts[2].startswith(("JobHeld", "Dependency", "BeginTime")):
            priorities[int(parts[0])] = int(parts[4])
    if own is None:
        return None
    # Equal priorities: the earlier number goes first.
    ahead = sum((-priority, other) < (-own_priority, number) for other, priority in priorities.items())
    return QueuePlace(own, ahead, len(priorities) + 1)


def _epoch(text: str) -> float | None:
    return float(text) if text.isdecimal() and len(text) < 12 else None


def seconds(text: str) -> float | None:
    """Return the seconds of a time as Slurm prints it (``4-01:02:03``, ``10:00``); None for ``infinite`` and others."""
    days, dash, rest = text.strip().rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in parts) or (dash and not days.isdecimal()) or len(parts) > 3:
        return None
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    if len(parts) == 1 and not dash:  # minutes, or with days: hours
        total *= 60
    elif dash and len(parts) < 3:
        total *= 60 ** (3 - len(parts))
    return float(total + int(days or 0) * 86400)
