"""What sbatch is told, and what its refusals mean. Pure.

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

# What a lease is made of must stay ours: its size and time (options of ours), its script, where it runs, what it is
# called, and that sbatch returns at once with one job.
_OURS = {
    "account": "say --account",
    "array": "a lease is one job",
    "chdir": "the job runs nothing of yours",
    "clusters": "one cluster, that of SLURM_CONF",
    "comment": "say --purpose",
    "error": "the job prints nothing",
    "exclude": "say --exclude",
    "export": "the job runs nothing of yours",
    "export-file": "the job runs nothing of yours",
    "get-user-env": "the job runs nothing of yours",
    "gid": "a lease is its owner's",
    "gpus": "say --n",
    "gpus-per-node": "say --per-node",
    "gpus-per-socket": "say --n",
    "gpus-per-task": "say --n",
    "gres": "say --n",
    "help": "see sbatch(1)",
    "hold": "a lease is to start",
    "ignore-pbs": "the script is gpuboard's",
    "input": "the job reads nothing",
    "job-name": "the lease's id is in it",
    "nodefile": "say --nodes",
    "nodelist": "say --nodes",
    "nodes": "say --max-nodes",
    "no-requeue": "no lease is requeued",
    "ntasks-per-gpu": "say --n",
    "output": "the job prints nothing",
    "parsable": "it is set",
    "partition": "say --partition",
    "qos": "say --qos",
    "quiet": "its words are needed",
    "requeue": "no lease is requeued",
    "reservation": "say --reservation",
    "test-only": "say --dry-run",
    "time": "say --for",
    "uid": "a lease is its owner's",
    "usage": "see sbatch(1)",
    "verbose": "its words are needed",
    "version": "see sbatch(1)",
    "wait": "say --wait without --slurm",
    "wrap": "the script is gpuboard's",
}
_OURS_SHORT = {
    "A": "account", "a": "array", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "h": "help", "H": "hold",
    "i": "input", "J": "job-name", "M": "clusters", "N": "nodes", "o": "output", "p": "partition", "q": "qos",
    "Q": "quiet", "t": "time", "u": "usage", "v": "verbose", "V": "version", "w": "nodelist", "W": "wait",
    "x": "exclude",
}  # fmt: skip

# How a text of Slurm's begins → the exit code it means here.
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
)
# sbatch may have been heard all the same: nobody knows whether there is a job now.
_UNCERTAIN = ("Socket timed out", "Zero Bytes", "Communication connection failure", "Unexpected message")

# Reasons of pending jobs that the job, as it was asked for, never gets beyond, with what helps.
_NEVER = {
    "BadConstraints": "no node can ever have all of it",
    "PartitionNodeLimit": "it is more or fewer nodes than the partition gives one job; see `scontrol show partition`",
    "PartitionTimeLimit": "it is longer than the partition allows; try a shorter --for",
    "MaxMemPerLimit": "it is more memory than the partition gives one job; see `scontrol show partition`",
    "ReservationDeleted": "that reservation is over; see `scontrol show reservation`",
    "AccountNotAllowed": "the partition is not for that account; try --account or --partition",
    "InvalidAccount": "see `sacctmgr show associations user=$USER`; try --account",
    "InvalidQOS": "see `sacctmgr show associations user=$USER`; try --qos",
    "QOSNotAllowed": "the partition is not for that QOS; try --qos or --partition",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held: `scontrol release` lets it go on",
    "DependencyNeverSatisfied": "what it depends on has failed",
}
# The same of those that come in many: limits on what one job may have, which is not what others have at the moment.
_NEVER_LIKE = (
    (re.compile(r"AssocMax\w+Per(?:Job|Node)(?:Limit)?", re.ASCII),
     "it is more than your account gives one job; see `sacctmgr show associations user=$USER`, try less, or --account"),
    (re.compile(r"QOSMax\w+Per(?:Job|Node)(?:Limit)?", re.ASCII),
     "it is more than that QOS gives one job; see `sacctmgr show qos`, try less, or --qos"),
    (re.compile(r"QOSMin\w+", re.ASCII), "it is less than that QOS wants of a job; see `sacctmgr show qos`, try --qos"),
    (re.compile(r"Job's (?:account|QOS) not (?:known|permitted)\b.*"),
     "see `scontrol show partition`; try --account, --qos or --partition"),
)  # fmt: skip


class Ask(msgspec.Struct, frozen=True):
    """What a job asks for besides GPUs: the site's settings, with what the command line said in their place."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    cpus_per_gpu: int = 0  # 0: as Slurm has it
    mem_per_gpu: int = 0  # bytes; 0: as Slurm has it
    more: tuple[str, ...] = ()  # further options of sbatch


class Shape(msgspec.Struct, frozen=True):
    """How many GPUs, of which kind, on how many nodes."""

    gpus: int
    nodes: int  # at most so many; with ``per_node`` exactly
    per_node: int | None = None
    type: str = ""  # Slurm's word for the kind of GPU; "": any
    exclude: str = ""  # nodes as Slurm writes them


class JobSpec(msgspec.Struct, frozen=True):
    """The lease a job is made for."""

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
    """Return what to ask for: flags (None: not said) before settings. Raises UsageError for options that are ours."""
    for option in more:
        check_option(option, "--slurm")
    for option in settings.args:
        check_option(option, "slurm.args")
    said = {"--partition": partition, "--account": account, "--qos": qos, "--reservation": reservation}
    for name, value in said.items():
        if value is not None and not re.fullmatch(r"[A-Za-z0-9_.,@+:=-]{1,200}", value, re.ASCII):
            raise UsageError(f"{name} {clean(value, 60)!r} is not a name that Slurm could know")
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
    """Raise UsageError when ``text`` is not one option of sbatch that may be added to ours; ``where`` it was said."""
    shown = clean(text, 80)
    if not re.fullmatch(r"-[A-Za-z]\S*|--[a-z][a-z-]*(=.*)?", text) or not text.isprintable():
        raise UsageError(f"{where}: {shown!r} is not one option of sbatch, as --constraint=a100 is")
    if not text.startswith("--"):
        name, words = text[1], _OURS.get(_OURS_SHORT.get(text[1], ""), "")
        if words:
            raise UsageError(f"{where}: -{name} is gpuboard's to say: {words}")
        return
    name = text[2:].partition("=")[0]
    for ours, words in _OURS.items():
        # sbatch takes what is left of an option's name where it is the only one, and is none itself
        if ours.startswith(name) and name != "ntasks":
            raise UsageError(f"{where}: --{ours} is gpuboard's to say: {words}")


def arguments(shape: Shape, asked: Ask, lease: JobSpec) -> list[str]:
    """Return the arguments of sbatch, without its name; the script comes over its stdin."""
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
    # Its output goes nowhere: where the home is not shared, a job whose output cannot be opened fails at its start.
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
    """Return the number that ``sbatch --parsable`` printed (``123`` or ``123;cluster``); None when it is not there."""
    found = re.findall(r"^([0-9]{1,10})(?:;.*)?$", stdout, re.MULTILINE)
    return int(found[-1]) if found else None


def is_uncertain(stderr: str) -> bool:
    """Tell whether a job may have come into being although sbatch failed so."""
    return any(text in stderr for text in _UNCERTAIN)


def is_unreached(stderr: str) -> bool:
    """Tell whether a command of Slurm's failed for want of the controller."""
    return any(text in stderr for text, number in _REFUSALS if number == 6)


def refusal(stderr: str, code: int) -> GpuboardError:
    """Return the error that a failed sbatch stands for, in Slurm's words and with the exit code they mean."""
    lines = [line for line in map(str.strip, stderr.splitlines()) if line and not line.startswith("Try ")]
    words = "; ".join(dict.fromkeys(clean(_said(line), 300) for line in lines)) or f"sbatch ended with exit code {code}"
    meaning = next((number for text, number in _REFUSALS if text in stderr), 2 if code == 255 else 1)
    if meaning == 4 and any(map(never_reason, re.findall(r"\w+", stderr))):  # sbatch names the limit that is in the way
        meaning = 3
    if meaning == 3:
        return NeverPossible(Refusal(3, f"Slurm refuses: {words}"))
    if meaning == 4:
        return NotFree(Refusal(4, f"Slurm refuses: {words}", nearest="--wait"))
    if meaning == 6:
        return NoNodeReached(f"Slurm's controller was not reached: {words}; see `scontrol ping`")
    if meaning == 2:
        return UsageError(f"Slurm refuses: {words}")
    return GpuboardError(f"Slurm refuses: {words}")


def _said(line: str) -> str:
    """Return a line of sbatch without what it begins every line with."""
    line = re.sub(r"^sbatch: (error: |fatal: )?", "", line)
    return line.removeprefix("Batch job submission failed: ")


def never_reason(reason: str) -> str | None:
    """Return why a job that is pending for ``reason`` will never start as it is; None when it may."""
    return _NEVER.get(reason) or next((words for like, words in _NEVER_LIKE if like.fullmatch(reason)), None)


def is_undecided(reason: str) -> bool:
    """Tell whether Slurm may still start a pending job at once: it has not looked at it yet, or not with backfill."""
    return reason in {"", "None", "Priority", "Prolog", "Cleaning"}
