"""What srun and scontrol print → how many GPUs a job has where, and what an error means (pure)."""

from __future__ import annotations

import re

from gpuboard.model.text import clean
from gpuboard.transport.base import TransportError
from gpuboard.transport.exit_errors import explain_exit
from gpuboard.transport.process import Ending

_DETAIL = re.compile(r"^ +Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(.*?) *$", re.MULTILINE)
_NOISE = ("cluster configuration lacks support for cpu binding", "Check SLURM_JOB_ID environment variable")
_OF_THE_END = re.compile(r"^(Force )?Terminat|: tasks? 0: |^Job step aborted")
_BY_SIGNAL = 128  # srun's exit code for a task that was killed, plus the signal's number
_OURS = "is it still in `squeue --me`?"

# States in which a job holds nothing (squeue(1), JOB STATE CODES).
ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
})  # fmt: skip
ENDING = ENDED | {"COMPLETING"}  # or is about to give it back

# Words of srun and scontrol (slurm_errno.c and srun's own) → kind, what it means, what to do.
_REFUSALS = (
    ("unge ", "auth", "Slurm's authentication fails here", "is munged running? tell the administrator"),
    ("Invalid job id", "no-job", "Slurm knows no job {job}", _OURS),
    ("has expired", "no-job", "Slurm job {job} is over", _OURS),
    ("already completing or completed", "no-job", "Slurm job {job} is over", _OURS),
    ("Job is pending execution", "no-job", "Slurm job {job} has not started yet", "see `squeue --job {job} --start`"),
    ("Access/permission denied", "no-job", "Slurm job {job} is somebody else's", "see `squeue --me`"),
    ("node configuration is not available", "no-job", "{node} is not a node of Slurm job {job}", "see `squeue --me`"),
    ("Invalid generic resource", "no-job", "Slurm gives no step the GPUs of job {job} on {node}", ""),
    ("presently disabled", "timeout", "Slurm starts no step in job {job} now", "is it suspended? see `squeue --me`"),
    ("nodes are busy", "timeout", "Slurm starts no step in job {job} now", "see `squeue --steps --job {job}`"),
    ("step creation temp", "timeout", "Slurm starts no step in job {job} now", "see `squeue --steps --job {job}`"),
    ("Task launch for", "unreachable", "Slurm's daemon on {node} does not answer", "see `scontrol show node {node}`"),
    ("Unable to contact slurm", "unreachable", "Slurm's controller cannot be reached", "see `scontrol ping`"),
    ("Socket timed out", "unreachable", "Slurm's controller does not answer", "see `scontrol ping`"),
    ("onnection refused", "unreachable", "Slurm's controller cannot be reached", "see `scontrol ping`"),
    ("cannot stat file", "resolve", "Slurm's configuration is not where it should be", "check SLURM_CONF"),
    ("configuration source", "resolve", "Slurm has no configuration here", "set SLURM_CONF"),
)  # fmt: skip


def gpus_by_nodes(text: str, job: str, component: str) -> list[tuple[str, int]]:
    """Return (nodeset, GPUs that the job has on each of its nodes) of ``scontrol show job -d``.

    ``component``: of a heterogeneous job, whose parts are printed one after the other; "" for others.
    """
    head = rf"^JobId=\d+ HetJobId={job} HetJobOffset={component}\b" if component else rf"^JobId={job}\b"
    for record in text.split("\n\n"):
        if re.search(head, record, re.MULTILINE):
            return [(nodes, gpu_count(gres)) for nodes, gres in _DETAIL.findall(record)]
    return []


def ending(text: str) -> bool:
    """Return whether the job that ``scontrol show job`` shows has ended, or is about to."""
    state = re.search(r"^ +JobState=(\w+)", text, re.MULTILINE)
    return state is not None and state[1] in ENDING


def explain_no_nodes(text: str, job: str) -> TransportError:
    """Return what `scontrol show job` means that shows no nodes of ``job``."""
    if "JobState=PENDING" in text:
        return TransportError("no-job", f"Slurm job {job} has not started yet", "see `squeue --me --start`")
    return TransportError("no-job", f"Slurm job {job} is over", _OURS)


def gpu_count(gres: str) -> int:
    """Return how many GPUs a GRES field has, as ``gpu:h100:4(IDX:0-3),gpu:2(IDX:4,6)`` or ``gpu:a100(CNT:2)``."""
    total = 0
    for name, _, counted in re.findall(r"(?:^|,)gpu((?::[^:,()]+)*)(\((?:CNT:(\d+)|[^)]*)\))?", gres):
        last = name.rpartition(":")[2]
        total += int(counted) if counted else int(last) if last.isdecimal() else 0
    return total


def explain_refusal(stderr: bytes, job: str, node: str = "") -> TransportError:
    """Return what the error that scontrol or srun ended with means."""
    lines = _lines(stderr)
    for words, kind, meaning, remedy in _REFUSALS:
        if any(words in line for line in lines):
            return TransportError(kind, meaning.format(job=job, node=node), remedy.format(job=job, node=node))
    return TransportError("exited", f"srun: {lines[-1]}" if lines else "srun ended without a word")


def explain_over(job: str, node: str, because: str = "") -> TransportError:
    """Return what it means that Slurm has ended a step."""
    return TransportError("no-job", f"Slurm has ended job {job}, or its step on {node}{because}", _OURS)


def explain_end(ending: Ending, job: str, node: str, python: str) -> TransportError:
    """Return why the step of an agent is over."""
    lines = _lines(ending.stderr)
    if cancelled := [line for line in lines if "CANCELLED" in line or "NODE FAILURE" in line]:
        why = re.search(r"DUE TO ([A-Z ]+)", cancelled[-1])
        return explain_over(job, node, f" ({why[1].strip().lower()})" if why else "")
    if ending.late and not any(words in line for line in lines for words, *_ in _REFUSALS):
        return TransportError("timeout", f"Slurm has started no step of job {job} on {node} in time", "try again")
    code = ending.code
    ran = [line for line in lines if ": task 0: " in line]
    if ran and (said := re.search(r"Exited with exit code (\d+)", ran[-1])):
        code = int(said[1])
    if code is not None and code > _BY_SIGNAL:
        code = _BY_SIGNAL - code
    if not ending.late and (ran or (code is not None and code <= 0)):
        theirs = [line for line in lines if line not in ran and not _OF_THE_END.search(line)]
        return explain_exit(code, "\n".join(theirs).encode(), python)
    return explain_refusal(ending.stderr, job, node)


def _lines(stderr: bytes) -> list[str]:
    """Return what is worth reading of it, without the program's name before it."""
    found = []
    for line in stderr.decode("utf-8", "replace").splitlines():
        text = re.sub(r"^(srun|scontrol|slurm_\w+)( error)?: (error: )?", "", clean(line)).strip()
        if text and not any(words in text for words in _NOISE):
            found.append(text)
    return found
