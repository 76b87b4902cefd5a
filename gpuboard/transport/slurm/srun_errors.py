"""Output of srun and scontrol → GPUs of a job per node, and errors (pure)."""

from __future__ import annotations

import re

from gpuboard.model.text import clean
from gpuboard.transport.base import Kind, TransportError
from gpuboard.transport.exit_errors import explain_exit
from gpuboard.transport.process import Exit

_DETAIL = re.compile(r"^ +Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(.*?) *$", re.MULTILINE)
_NOISE = ("cluster configuration lacks support for cpu binding", "Check SLURM_JOB_ID environment variable")
_OF_THE_END = re.compile(r"^(Force )?Terminat|: tasks? 0: |^Job step aborted")
_BY_SIGNAL = 128  # srun's exit code for a task that was killed, plus the signal's number
_CHECK_JOB = "is it still in `squeue --me`?"

# States of a job without resources (squeue(1), JOB STATE CODES).
ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
})  # fmt: skip
ENDING = ENDED | {"COMPLETING"}  # or is about to release them

# Text in messages of srun and scontrol (slurm_errno.c and srun's own) → kind, message, remedy.
_REFUSALS: tuple[tuple[str, Kind, str, str], ...] = (
    ("unge ", "auth", "Slurm's authentication failed here", "is munged running? contact the administrator"),
    ("Invalid job id", "no-job", "Slurm has no job {job}", _CHECK_JOB),
    ("has expired", "no-job", "Slurm job {job} has ended", _CHECK_JOB),
    ("already completing or completed", "no-job", "Slurm job {job} has ended", _CHECK_JOB),
    ("Job is pending execution", "no-job", "Slurm job {job} has not started yet", "see `squeue --job {job} --start`"),
    ("Access/permission denied", "no-job", "Slurm job {job} belongs to another user", "see `squeue --me`"),
    ("node configuration is not available", "no-job", "{node} is not a node of Slurm job {job}", "see `squeue --me`"),
    ("Invalid generic resource", "no-job", "Slurm refused a step the GPUs of job {job} on {node}", ""),
    ("presently disabled", "timeout", "Slurm cannot start a step in job {job} now",
     "is it suspended? see `squeue --me`"),
    ("nodes are busy", "timeout", "Slurm cannot start a step in job {job} now", "see `squeue --steps --job {job}`"),
    ("step creation temp", "timeout", "Slurm cannot start a step in job {job} now", "see `squeue --steps --job {job}`"),
    ("Task launch for", "unreachable", "slurmd on {node} does not respond", "see `scontrol show node {node}`"),
    ("Unable to contact slurm", "unreachable", "cannot connect to Slurm's controller", "see `scontrol ping`"),
    ("Socket timed out", "unreachable", "Slurm's controller does not respond", "see `scontrol ping`"),
    ("onnection refused", "unreachable", "cannot connect to Slurm's controller", "see `scontrol ping`"),
    ("cannot stat file", "resolve", "Slurm's configuration file is missing", "check SLURM_CONF"),
    ("configuration source", "resolve", "there is no Slurm configuration here", "set SLURM_CONF"),
)  # fmt: skip


def gpus_by_nodes(text: str, job: str, component: str) -> list[tuple[str, int]]:
    """Return (nodeset, GPUs that the job has on each of its nodes) of ``scontrol show job -d``.

    ``component``: number of a heterogeneous job's part (one record each); "" for other jobs.
    """
    head = rf"^JobId=\d+ HetJobId={job} HetJobOffset={component}\b" if component else rf"^JobId={job}\b"
    for record in text.split("\n\n"):
        if re.search(head, record, re.MULTILINE):
            return [(nodes, gpu_count(gres)) for nodes, gres in _DETAIL.findall(record)]
    return []


def ending(text: str) -> bool:
    """Return whether the job in ``scontrol show job``'s output has ended or is ending."""
    state = re.search(r"^ +JobState=(\w+)", text, re.MULTILINE)
    return state is not None and state[1] in ENDING


def explain_no_nodes(text: str, job: str) -> TransportError:
    """Return the error for `scontrol show job` without nodes of ``job``."""
    if "JobState=PENDING" in text:
        return TransportError("no-job", f"Slurm job {job} has not started yet", "see `squeue --me --start`")
    return TransportError("no-job", f"Slurm job {job} has ended", _CHECK_JOB)


def gpu_count(gres: str) -> int:
    """Return how many GPUs a GRES field has, as ``gpu:h100:4(IDX:0-3),gpu:2(IDX:4,6)`` or ``gpu:a100(CNT:2)``."""
    total = 0
    for name, _, counted in re.findall(r"(?:^|,)gpu((?::[^:,()]+)*)(\((?:CNT:(\d+)|[^)]*)\))?", gres):
        last = name.rpartition(":")[2]
        total += int(counted) if counted else int(last) if last.isdecimal() else 0
    return total


def explain_refusal(stderr: bytes, job: str, node: str = "") -> TransportError:
    """Return the error for a failed scontrol or srun."""
    lines = _lines(stderr)
    for words, kind, meaning, remedy in _REFUSALS:
        if any(words in line for line in lines):
            return TransportError(kind, meaning.format(job=job, node=node), remedy.format(job=job, node=node))
    return TransportError("exited", f"srun: {lines[-1]}" if lines else "srun failed without an error message")


def explain_over(job: str, node: str, because: str = "") -> TransportError:
    """Return the error for a step that Slurm has ended."""
    return TransportError("no-job", f"Slurm has ended job {job}, or its step on {node}{because}", _CHECK_JOB)


def explain_end(ending: Exit, job: str, node: str, python: str) -> TransportError:
    """Return why an agent's step has ended."""
    lines = _lines(ending.stderr)
    if cancelled := [line for line in lines if "CANCELLED" in line or "NODE FAILURE" in line]:
        why = re.search(r"DUE TO ([A-Z ]+)", cancelled[-1])
        return explain_over(job, node, f" ({why[1].strip().lower()})" if why else "")
    if ending.late and not any(words in line for line in lines for words, *_ in _REFUSALS):
        return TransportError("timeout", f"Slurm did not start a step of job {job} on {node} in time", "try again")
    code = ending.code
    ran = [line for line in lines if ": task 0: " in line]
    if ran and (exited := re.search(r"Exited with exit code (\d+)", ran[-1])):
        code = int(exited[1])
    if code is not None and code > _BY_SIGNAL:
        code = _BY_SIGNAL - code
    if not ending.late and (ran or (code is not None and code <= 0)):
        own = [line for line in lines if line not in ran and not _OF_THE_END.search(line)]
        return explain_exit(code, "\n".join(own).encode(), python)
    return explain_refusal(ending.stderr, job, node)


def _lines(stderr: bytes) -> list[str]:
    """Return the relevant lines, without the program's name before them."""
    found = []
    for line in stderr.decode("utf-8", "replace").splitlines():
        text = re.sub(r"^(srun|scontrol|slurm_\w+)( error)?: (error: )?", "", clean(line)).strip()
        if text and not any(words in text for words in _NOISE):
            found.append(text)
    return found
