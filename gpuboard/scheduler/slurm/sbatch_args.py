"""The arguments of sbatch, and what its refusals mean. Pure.

Options and texts: sbatch(1) and slurm_errno.c of Slurm 22.05 to 24.05.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuboard.errors import GpuboardError, NeverPossible, NoNodeReached, NotFree, UsageError
from gpuboard.model.request import Refusal
from gpuboard.model.text import clean
from gpuboard.model.units import parse_size

if TYPE_CHECKING:
    from gpuboard.config import SlurmSettings

JOB_NAME = "gpuboard-"  # followed by the lease's id
_LEASE = re.compile(JOB_NAME + r"([a-z][a-z0-9]{3,15})", re.ASCII)

# Options that --slurm may not set, because they define the lease: its size and time (gpuboard has options for these),
# its script, working directory and name, and that sbatch returns at once with one job.
_RESERVED = {
    "account": "use --account",
    "array": "a lease is one job",
    "chdir": "the job does not run your program",
    "clusters": "one cluster, that of SLURM_CONF",
    "comment": "use --purpose",
    "error": "the job prints nothing",
    "exclude": "use --exclude",
    "export": "the job does not run your program",
    "export-file": "the job does not run your program",
    "get-user-env": "the job does not run your program",
    "gid": "a lease belongs to its owner",
    "gpus": "use --n",
    "gpus-per-node": "use --per-node",
    "gpus-per-socket": "use --n",
    "gpus-per-task": "use --n",
    "gres": "use --n",
    "help": "see sbatch(1)",
    "hold": "a lease must start",
    "ignore-pbs": "the script is set by gpuboard",
    "input": "the job reads nothing",
    "job-name": "the lease's id is in it",
    "nodefile": "use --nodes",
    "nodelist": "use --nodes",
    "nodes": "use --max-nodes",
    "no-requeue": "a lease is never requeued",
    "ntasks-per-gpu": "use --n",
    "output": "the job prints nothing",
    "parsable": "gpuboard sets it",
    "partition": "use --partition",
    "qos": "use --qos",
    "quiet": "gpuboard reads the messages of sbatch",
    "requeue": "a lease is never requeued",
    "reservation": "use --reservation",
    "test-only": "use --dry-run",
    "time": "use --for",
    "uid": "a lease belongs to its owner",
    "usage": "see sbatch(1)",
    "verbose": "gpuboard reads the messages of sbatch",
    "version": "see sbatch(1)",
    "wait": "use --wait without --slurm",
    "wrap": "the script is set by gpuboard",
}
_RESERVED_SHORT = {
    "A": "account", "a": "array", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "h": "help", "H": "hold",
    "i": "input", "J": "job-name", "M": "clusters", "N": "nodes", "o": "output", "p": "partition", "q": "qos",
    "Q": "quiet", "t": "time", "u": "usage", "v": "verbose", "V": "version", "w": "nodelist", "W": "wait",
    "x": "exclude",
}  # fmt: skip

# Part of an error message of Slurm → the exit code it means here.
_REFUSALS = (
    ("Requested node configuration is not available", 3),
    ("Node count specification invalid", 3),
    ("More processors requested than permitted", 3),
    ("Memory specification can not be satisfied", 3),
    ("Memory required by task is not available", 3),
    ("Invalid generic resource (gres) specification", 3),
    ("Requested partition configuration not available now", 4),
    ("Required partition not available (inactive or drain)", 4),
    ("Requested nodes are busy", 4),
    ("Required node not available (down, drained or reserved)", 4),
    ("Requested reservation not usable now", 4),
    ("Job violates accounting/QOS policy", 4),
    ("Job/step already completing or completed", 4),
    ("Invalid partition name specified", 2),
    ("No partition specified or system default partition", 2),
    ("Invalid account or account/partition combination specified", 2),
    ("Invalid qos specification", 2),
    ("Requested reservation is invalid", 2),
    ("Access denied to requested reservation", 2),
    ("Invalid feature specification", 2),
    ("Invalid node name specified", 2),
    ("Invalid license specification", 2),
    ("Requested time limit is invalid", 2),
    ("Time limit specification required, but not provided", 2),
    ("User's group not permitted to use this partition", 2),
    ("Account not permitted to use this partition", 2),
    ("QOS not permitted to use this partition", 2),
    ("Unable to contact slurm controller", 6),
    ("Socket timed out on send/recv operation", 6),
    ("Zero Bytes were transmitted or received", 6),
    ("Communication connection failure", 6),
    ("Unexpected message received", 6),
    ("Slurm backup controller in standby mode", 6),
    ("Protocol authentication error", 6),
    ("Could not establish a configuration source", 6),  # configless, and slurmctld does not answer
)
# The controller may have received the request: it is unknown whether there is a job now.
_UNCERTAIN = ("Socket timed out", "Zero Bytes", "Communication connection failure", "Unexpected message")

# Reasons for which a pending job can never start as requested, each with the remedy.
_NEVER = {
    "BadConstraints": "no node has all of it",
    "PartitionNodeLimit": "the partition allows a job fewer or more nodes; see `scontrol show partition`",
    "PartitionTimeLimit": "longer than the partition allows; try a shorter --for",
    "MaxMemPerLimit": "more memory than the partition allows a job; see `scontrol show partition`",
    "ReservationDeleted": "that reservation has ended; see `scontrol show reservation`",
    "AccountNotAllowed": "the partition does not accept that account; try --account or --partition",
    "InvalidAccount": "see `sacctmgr show associations user=$USER`; try --account",
    "InvalidQOS": "see `sacctmgr show associations user=$USER`; try --qos",
    "QOSNotAllowed": "the partition does not accept that QOS; try --qos or --partition",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held; continue it with `scontrol release`",
    "DependencyNeverSatisfied": "the job that it depends on has failed",
}
# The same for families of reasons: limits on one job, as opposed to limits on what is in use at the moment.
_NEVER_LIKE = (
    (re.compile(r"AssocMax\w+Per(?:Job|Node)(?:Limit)?", re.ASCII),
     "more than your account allows a job; see `sacctmgr show associations user=$USER`, try less, or --account"),
    (re.compile(r"QOSMax\w+Per(?:Job|Node)(?:Limit)?", re.ASCII),
     "more than that QOS allows a job; see `sacctmgr show qos`, try less, or --qos"),
    (re.compile(r"QOSMin\w+", re.ASCII), "less than that QOS requires of a job; see `sacctmgr show qos`, try --qos"),
    (re.compile(r"Job's (?:account|QOS) not (?:known|permitted)\b.*"),
     "see `scontrol show partition`; try --account, --qos or --partition"),
)  # fmt: skip


class Ask(msgspec.Struct, frozen=True):
    """What a job requests besides GPUs: the site's settings, overridden by the command line."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    cpus_per_gpu: int = 0  # 0: Slurm's default
    mem_per_gpu: int = 0  # bytes; 0: Slurm's default
    more: tuple[str, ...] = ()  # further options of sbatch


class Shape(msgspec.Struct, frozen=True):
    """The number and type of GPUs, and the number of nodes."""

    gpus: int
    nodes: int  # the most; with ``per_node`` the exact number
    per_node: int | None = None
    type: str = ""  # Slurm's name of the GPU type; "": any
    exclude: str = ""  # nodes as Slurm writes them


class JobSpec(msgspec.Struct, frozen=True):
    """The lease that a job is submitted for."""

    id: str
    for_s: float
    purpose: str = ""


def ask(
    settings: SlurmSettings,
    *,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    reservation: str | None = None,
    more: Sequence[str] = (),
) -> Ask:
    """Return what to request: flags (None: not given) override settings. Raises UsageError for reserved options."""
    for option in more:
        check_option(option, "--slurm")
    for option in settings.args:
        check_option(option, "slurm.args")
    flags = {"--partition": partition, "--account": account, "--qos": qos, "--reservation": reservation}
    for name, value in flags.items():
        if value is not None and not re.fullmatch(r"[A-Za-z0-9_.,@+:=-]{1,200}", value, re.ASCII):
            raise UsageError(f"{name} {clean(value, 60)!r} is not a valid name in Slurm")
    return Ask(
        partition=settings.partition if partition is None else partition,
        account=settings.account if account is None else account,
        qos=settings.qos if qos is None else qos,
        reservation=settings.reservation if reservation is None else reservation,
        cpus_per_gpu=settings.cpus_per_gpu,
        mem_per_gpu=parse_size(settings.mem_per_gpu) if settings.mem_per_gpu else 0,
        more=(*settings.args, *more),
    )


def check_option(text: str, where: str) -> None:
    """Raise UsageError when ``text`` is not an option of sbatch that may be added; ``where``: the flag or setting."""
    shown = clean(text, 80)
    if not re.fullmatch(r"-[A-Za-z]\S*|--[a-z][a-z-]*(=.*)?", text) or not text.isprintable():
        raise UsageError(f"{where}: {shown!r} is not an option of sbatch; write one, e.g. --constraint=a100")
    if not text.startswith("--"):
        name, words = text[1], _RESERVED.get(_RESERVED_SHORT.get(text[1], ""), "")
        if words:
            raise UsageError(f"{where}: -{name} cannot be passed on: {words}")
        return
    name = text[2:].partition("=")[0]
    for reserved, words in _RESERVED.items():
        # sbatch accepts unambiguous abbreviations of an option; "ntasks" is an option of its own
        if reserved.startswith(name) and name != "ntasks":
            raise UsageError(f"{where}: --{reserved} cannot be passed on: {words}")


def arguments(shape: Shape, asked: Ask, lease: JobSpec) -> list[str]:
    """Return the arguments of sbatch; the script is passed on stdin."""
    kind = f"{shape.type}:" if shape.type else ""
    found = [f"--job-name={job_name(lease.id)}", f"--time={minutes(lease.for_s)}"]
    if shape.per_node is not None:
        found += [f"--nodes={shape.nodes}", f"--gpus-per-node={kind}{shape.per_node}"]
    else:
        found += [f"--nodes={'1' if shape.nodes == 1 else f'1-{shape.nodes}'}", f"--gpus={kind}{shape.gpus}"]
    for option, value in (
        ("exclude", shape.exclude),
        ("partition", asked.partition),
        ("account", asked.account),
        ("qos", asked.qos),
        ("reservation", asked.reservation),
        ("cpus-per-gpu", asked.cpus_per_gpu),
        ("mem-per-gpu", asked.mem_per_gpu and f"{-(-asked.mem_per_gpu // 2**20)}M"),
        ("comment", clean(lease.purpose, 200)),
    ):
        if value:
            found.append(f"--{option}={value}")
    # No output file: a job whose output cannot be opened (home not shared) fails at its start.
    return [*found, "--no-requeue", "--output=/dev/null", "--chdir=/", "--export=ALL", "--parsable", *asked.more]


def minutes(for_s: float) -> int:
    """Return a time limit in Slurm's unit, rounded up."""
    return max(1, math.ceil(for_s / 60))


def job_name(lease: str) -> str:
    """Return the name of a lease's job."""
    return JOB_NAME + lease


def lease_of(name: str) -> str | None:
    """Return the id of the lease whose job has this name; None for any other job."""
    found = _LEASE.fullmatch(name)
    return found[1] if found else None


def job_number(stdout: str) -> int | None:
    """Return the number that ``sbatch --parsable`` printed (``123`` or ``123;cluster``); None if there is none."""
    found = re.findall(r"^([0-9]{1,10})(?:;.*)?$", stdout, re.MULTILINE)
    return int(found[-1]) if found else None


def is_uncertain(stderr: str) -> bool:
    """Return whether a job may exist although sbatch failed with this message."""
    return any(text in stderr for text in _UNCERTAIN)


def is_unreached(stderr: str) -> bool:
    """Return whether a Slurm command failed because it could not reach the controller."""
    return any(text in stderr for text, number in _REFUSALS if number == 6)


def refusal(stderr: str, code: int) -> GpuboardError:
    """Return the error of a failed sbatch: Slurm's message, with the exit code it means."""
    lines = [line for line in map(str.strip, stderr.splitlines()) if line and not line.startswith("Try ")]
    words = (
        "; ".join(dict.fromkeys(clean(_message(line), 300) for line in lines)) or f"sbatch ended with exit code {code}"
    )
    meaning = next((number for text, number in _REFUSALS if text in stderr), 2 if code == 255 else 1)
    if meaning == 4 and any(map(never_reason, re.findall(r"\w+", stderr))):  # sbatch names the limit that was exceeded
        meaning = 3
    if meaning == 3:
        return NeverPossible(Refusal(3, f"Slurm refuses: {words}"))
    if meaning == 4:
        return NotFree(Refusal(4, f"Slurm refuses: {words}", nearest="--wait"))
    if meaning == 6:
        return NoNodeReached(f"could not reach Slurm's controller: {words}; see `scontrol ping`")
    if meaning == 2:
        return UsageError(f"Slurm refuses: {words}")
    return GpuboardError(f"Slurm refuses: {words}")


def _message(line: str) -> str:
    line = re.sub(r"^sbatch: (error: |fatal: )?", "", line)
    return line.removeprefix("Batch job submission failed: ")


def never_reason(reason: str) -> str | None:
    """Return why a job that is pending for ``reason`` can never start as requested; None when it may."""
    return _NEVER.get(reason) or next((words for like, words in _NEVER_LIKE if like.fullmatch(reason)), None)


def is_undecided(reason: str) -> bool:
    """Return whether Slurm may still start a pending job at once: it was not scheduled yet, or not by backfill."""
    return reason in {"", "None", "Priority", "Prolog", "Cleaning"}
