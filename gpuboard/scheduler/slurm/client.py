"""Jobs of ours in Slurm: one is submitted, looked at, prolonged, cancelled. One command a call, never one more.

What the commands print: sbatch(1), squeue(1), scancel(1), scontrol(1) of Slurm 22.05 to 24.05.
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
from gpuboard.transport.base import TransportError
from gpuboard.transport.command import Command, Ran, run
from gpuboard.transport.slurm.srun import program
from gpuboard.transport.slurm.srun_errors import ENDING

COMMAND_S = 25.0  # Slurm's commands give up after 10 to 20 s by themselves
SUBMIT_S = 60.0  # sbatch tries again where the controller is too busy to take a job
SUBMITTING = "GPUBOARD_SUBMIT"  # the variable by which the keeper knows a lease's sbatch: its lease

SECRETS = ("SLURM_JWT",)  # variables for Slurm's commands that are written to no file
# States in which a job holds nothing (squeue(1), JOB STATE CODES): why; "" where Slurm tells that only later.
ENDED_STATES = {
    "BOOT_FAIL": "a node of it did not start",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "its script ended, as it does without a heartbeat of the keeper",
    "COMPLETING": "",  # the reason is known when its epilogs have run
    "DEADLINE": "its deadline has come",
    "FAILED": "it failed",
    "NODE_FAIL": "a node of it failed",
    "OUT_OF_MEMORY": "it ran out of memory",
    "PREEMPTED": "it was preempted",
    "REVOKED": "it was revoked",
    "TIMEOUT": "its time limit has come",
}

# What sbatch is started with, and so what the job's record in Slurm holds: none of the secrets of a shell's variables.
# Of the defaults that people set for sbatch those that have an option here.
_KEPT = (
    "PATH", "HOME", "USER", "LOGNAME", "LD_LIBRARY_PATH", "TZ", "KRB5CCNAME", "MODULEPATH",
    "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET",
    "SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_CONSTRAINT",
)  # fmt: skip
# The job's name, which is its owner's to choose, last. Of our own jobs the comment too, and of nobody else's: a line
# end in it begins a line that looks like any job's.
_FORMAT = "%A|%T|%r|%S|%L|%M|%P|%U|%N|%j"
_FORMAT_MINE = _FORMAT + "|%k"
_QUEUE_FORMAT = "%A|%T|%r|%S|%Q|%P"


class JobState(msgspec.Struct, frozen=True):
    """A job as squeue shows it. Times are epoch seconds by the controller's clock."""

    number: int
    state: str  # PENDING, CONFIGURING, RUNNING, …
    reason: str = ""
    start: float | None = None  # of a pending job Slurm's estimate, None where it has none yet
    left_s: float | None = None  # until its time limit; None: it has none
    used_s: float = 0.0  # how long it has run
    partition: str = ""
    uid: int = -1
    nodes: str = ""  # as Slurm writes them
    name: str = ""
    comment: str = ""

    @property
    def ended(self) -> bool:
        """Whether it holds nothing any more, or is about to give it back."""
        return self.state in ENDING

    @property
    def lease(self) -> str | None:
        """The lease it was made for; None for a job of anybody's."""
        return sbatch_args.lease_of(self.name)


class QueuePlace(msgspec.Struct, frozen=True):
    """A pending job in its partition's queue."""

    job: JobState
    ahead: int  # visible pending jobs with a higher priority
    waiting: int  # all visible pending ones, it included


class Jobs:
    """Slurm's commands for the jobs of one user."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.environ = {name: env[name] for name in _KEPT if name in env}
        # Times as epoch seconds: the words of squeue have no time zone, and a day in autumn has two hours alike.
        self.environ |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        self.user = str(os.geteuid())
        self._submitting: Command | None = None
        self._begun = False

    def submit(self, arguments: Sequence[str], script: str, lease: str) -> tuple[int, str]:
        """Submit a job and return its number and what sbatch remarked.

        Raises the error that a refusal means, Uncertain where there may be a job all the same. When it is interrupted,
        sbatch goes on: see :meth:`settle`.
        """
        self._begun = True
        environ = self.environ | {SUBMITTING: lease}
        self._submitting = Command([_program("sbatch"), *arguments], environ, script.encode())
        if self._submitting.wait(SUBMIT_S) is None:
            self._submitting.kill()  # what it has asked for by now, the controller may do all the same
        return self._outcome(SUBMIT_S)

    def settle(self, timeout_s: float) -> int | None:
        """Return the job that a submission has made which was interrupted at any point; None when there is none.

        Raises Uncertain when nobody knows.
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
        """Wait for sbatch's end and return what it said. Raises what that means."""
        ran = self._submitting.wait(timeout_s) if self._submitting is not None else None
        if ran is None:
            raise Uncertain(f"sbatch has said nothing for {timeout_s:.0f} s; see `scontrol ping`")
        number = sbatch_args.job_number(ran.out) if ran.code == 0 else None
        if number is not None:
            return number, _words(ran.err)
        error = sbatch_args.refusal(ran.err, ran.code if ran.code is not None else 1)
        # killed, or it printed a number that nobody can read, or the controller may have heard it
        if ran.code is None or ran.code <= 0 or sbatch_args.is_uncertain(ran.err):
            raise Uncertain(str(error))
        raise error

    def test(self, arguments: Sequence[str], script: str) -> str:
        """Return what Slurm says of a job without taking it: when and where it would start. Raises what it refuses."""
        command = [_program("sbatch"), *arguments, "--test-only"]
        ran = run(command, self.environ, COMMAND_S, script.encode())
        if not ran.ended:
            raise NoNodeReached(_silent("sbatch"))
        if ran.code != 0:
            raise sbatch_args.refusal(ran.err.replace("allocation failure: ", "sbatch: error: "), ran.code or 1)
        words = _words(ran.err).removeprefix("sbatch: ")
        return re.sub(r"(?<= to start at )[0-9]{1,12}\b", lambda at: day_time(int(at[0])), words)

    def job(self, number: int) -> JobState | None:
        """Return a job, ended ones for some minutes too; None when Slurm knows it no more. Raises NoNodeReached."""
        ran = self._ask(["squeue", "--noheader", "--states=all", f"--jobs={number}", f"--format={_FORMAT}"])
        if ran.code != 0 and "Invalid job id" in ran.err:
            return None
        return next((job for job in _jobs(_answer("squeue", ran)) if job.number == number), None)

    def of_lease(self, lease: str, *, mine: bool = True) -> list[JobState]:
        """Return the jobs of a lease that have not ended; ``mine``: only ours. Raises NoNodeReached."""
        who = [f"--user={self.user}"] if mine else []
        name = sbatch_args.job_name(lease)
        ran = self._ask(["squeue", "--noheader", f"--name={name}", *who, f"--format={_FORMAT}"])
        return [job for job in _jobs(_answer("squeue", ran)) if job.name == name and not job.ended]

    def mine(self) -> list[JobState]:
        """Return our jobs that were made for leases and have not ended. Raises NoNodeReached."""
        ran = self._ask(["squeue", "--noheader", f"--user={self.user}", f"--format={_FORMAT_MINE}"])
        return [job for job in _jobs(_answer("squeue", ran)) if job.lease is not None and not job.ended]

    def place(self, number: int, partition: str) -> QueuePlace | None:
        """Return a job's place in the queue; None when it is not pending any more. Raises NoNodeReached."""
        where = [f"--partition={partition}"] if partition else []
        ran = self._ask(["squeue", "--noheader", "--states=PENDING", *where, f"--format={_QUEUE_FORMAT}"])
        return _place(_answer("squeue", ran), number)

    def show(self, number: int) -> str:
        """Return what ``scontrol show job -d`` prints. Raises NoNodeReached, GpuboardError when there is none."""
        ran = self._ask(["scontrol", "show", "job", "-d", str(number)])
        if ran.code != 0 and "Invalid job id" in ran.err:
            raise GpuboardError(f"Slurm knows no job {number} any more")
        return _answer("scontrol", ran)

    def partitions(self) -> list[tuple[str, bool, float | None]]:
        """Return the partitions: name, whether it is the default one, the longest time of a job in it (seconds)."""
        ran = self._ask(["sinfo", "--noheader", "--format=%P|%l"])
        found = {}
        for line in _answer("sinfo", ran).splitlines():
            name, _, limit = line.partition("|")
            found[name.rstrip("*")] = (name.rstrip("*"), name.endswith("*"), seconds(limit))
        return list(found.values())

    def cancel_command(self, lease: str) -> list[str]:
        """Return the command that ends a lease's job, also before its number is known."""
        return [_program("scancel"), f"--name={sbatch_args.job_name(lease)}", f"--user={self.user}"]

    def look_command(self) -> list[str]:
        """Return the command that says of every job of ours ``number|state|name``, of ended ones for some minutes."""
        return [_program("squeue"), "--noheader", "--states=all", f"--user={self.user}", "--format=%A|%T|%j"]

    def cancel(self, lease: str) -> None:
        """End the job of a lease of ours, by its name. Raises GpuboardError when Slurm does not do it."""
        _answer("scancel", self._run(self.cancel_command(lease), COMMAND_S))

    def cancel_number(self, number: int) -> None:
        """End a job by its number, somebody else's too (root). Raises GpuboardError when Slurm does not do it."""
        _answer("scancel", self._ask(["scancel", str(number)]))

    def set_limit(self, number: int, minutes: int) -> None:
        """Set how long a job may run in all. Raises GpuboardError with Slurm's words."""
        ran = self._ask(["scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}"])
        if ran.code != 0 and "denied" in ran.err:
            raise GpuboardError(
                f"Slurm does not let you prolong job {number}: {_words(ran.err)}; ask its administrators "
                f"(scontrol update JobId={number} TimeLimit={minutes}), or reserve anew before it ends"
            )
        _answer("scontrol", ran)

    def _ask(self, command: Sequence[str]) -> Ran:
        return self._run([_program(command[0]), *command[1:]], COMMAND_S)

    def _run(self, command: Sequence[str], timeout_s: float) -> Ran:
        ran = run(command, self.environ, timeout_s)
        if not ran.ended:
            raise NoNodeReached(_silent(os.path.basename(command[0])))
        return ran


class Uncertain(NoNodeReached):
    """sbatch has failed, and there may be a job all the same: the controller did not answer, but may have heard."""


def _program(name: str) -> str:
    try:
        return program(name)
    except TransportError as error:
        raise GpuboardError(str(error)) from None


def _silent(name: str) -> str:
    return f"{name} has had no answer of Slurm's controller for {COMMAND_S:.0f} s; see `scontrol ping`"


def _answer(name: str, ran: Ran) -> str:
    """Return what a command printed. Raises NoNodeReached where the controller was not reached, else GpuboardError."""
    if ran.ok:
        return ran.out
    words = _words(ran.err) or f"{name} ended with exit code {ran.code}"
    if sbatch_args.is_unreached(ran.err):
        raise NoNodeReached(f"Slurm's controller was not reached: {words}; see `scontrol ping`")
    raise GpuboardError(f"Slurm: {words}")


def _words(text: str) -> str:
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
                state,
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
    """Return a job's place in squeue's list of pending jobs. Held and dependent ones are ahead of nobody."""
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
