"""Distributed jobs on this node, by the environment of their processes: torchrun's, srun's, mpirun's, by hand."""

import os

from gpuboard.agent import proc
from gpuboard.agent.launch import CallRefused
from gpuboard.agent.launch.teardown import descendants, read_processes

MYPY = False
if MYPY:
    from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

    class Member(NamedTuple):
        """A process with a rank; processes below it have the same variables."""

        job: Tuple[str, ...]  # values of SAME_JOB
        rank: int
        size: Optional[int]
        local_rank: int
        launcher: int  # position in _LAUNCHERS

else:
    from collections import namedtuple

    Member = namedtuple("Member", "job rank size local_rank launcher")

SAME_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "GPUBOARD_RUN")
# rank, world size, local rank. torchrun below srun: its own variables count, and it is no rank itself.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def find(pid: "Optional[int]") -> "List[Dict[str, Any]]":
    """Return the jobs of this user on this node (root: of everyone), or that of process ``pid`` alone: the job that it
    is a rank of, or whose ranks it has started.

    Each: ``job`` (values of SAME_JOB that are set), ``ranks`` (``rank, size, local_rank, pid, uid, command``).
    Raises CallRefused if there is no such process, or its environment cannot be read.
    """
    named = _member(_environ(pid), named=True) if pid is not None else None
    wanted = {named.job} if named is not None else None
    members: "Dict[int, Member]" = {}
    for other in sorted(proc.own_pids() if os.geteuid() else proc.pids()):
        variables = proc.read_environ(other)
        member = _member(_mapped(variables), named=False) if variables else None
        if member is not None:
            members[other] = member
    if pid is not None and named is None:
        wanted = {members[other].job for other in descendants(pid, read_processes()) if other in members}
        if not wanted:
            return [{"job": {}, "ranks": [_described(pid, Member((), 0, None, 0, 0))]}]
    if wanted is not None:
        members = {other: member for other, member in members.items() if member.job in wanted}
    found: "Dict[Tuple[str, ...], Dict[int, int]]" = {}
    for other in _leaders(members):
        found.setdefault(members[other].job, {}).setdefault(members[other].rank, other)
    return [
        {
            "job": {name: job[at] for at, name in enumerate(SAME_JOB) if job[at]},
            "ranks": [_described(leader, members[leader]) for _, leader in sorted(ranks.items())],
        }
        for job, ranks in sorted(found.items())
    ]


def _environ(pid: int) -> "Dict[str, str]":
    process = proc.read_process(pid)
    if process is None or process.state in "ZX":
        raise CallRefused("no-process", "cannot inspect pid %d: there is no such process" % pid)
    listed = proc.read_environ(pid)
    if listed is None:
        why = "it is another user's process: run this as that user or as root"
        if os.geteuid() == 0:
            why = "root may not read its environment here, for lack of capabilities: run this outside of the container"
        raise CallRefused("not-yours", "cannot inspect pid %d: %s" % (pid, why))
    return _mapped(listed)


def _mapped(listed: "List[bytes]") -> "Dict[str, str]":
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in listed)
    return {name: value for name, _, value in pairs}


def _member(environ: "Dict[str, str]", named: bool) -> "Optional[Member]":
    """Return the rank of a process, by the first launcher whose variables it has.

    ``named``: the user named it, so that the world size may be missing and an srun of one task counts.
    """
    for launcher, (rank, size, local_rank) in enumerate(_LAUNCHERS):
        if not environ.get(rank, "").isdigit():
            continue
        count = int(environ[size]) if environ.get(size, "").isdigit() else None
        if not named and (count is None or (launcher and count < 2)):
            continue  # a step of Slurm with one task is no distributed job
        local = environ.get(local_rank, "")
        job = tuple(environ.get(name, "") for name in SAME_JOB)
        return Member(job, int(environ[rank]), count, int(local if local.isdigit() else environ[rank]), launcher)
    return None


def _leaders(members: "Dict[int, Member]") -> "List[int]":
    """Return one process per rank, oldest first: the outermost Python, not a shell or launcher around it."""
    parents = {pid: stat.parent for pid, stat in ((pid, proc.read_process(pid)) for pid in members) if stat is not None}
    wrappers: "Set[int]" = set()  # have a rank of another launcher below
    for pid, parent in parents.items():
        above = parent
        while above in parents:
            if members[above].launcher > members[pid].launcher:
                wrappers.add(above)
            above = parents[above]
    found = []
    for pid in sorted(parents):
        above = parents[pid]
        if pid in wrappers:
            continue
        if above in parents and above not in wrappers and members[above][:2] == members[pid][:2]:
            continue
        found.append(_python_below(pid, parents, members))
    return found


def _python_below(pid: int, parents: "Dict[int, int]", members: "Dict[int, Member]") -> int:
    """Return ``pid`` if it is Python, else the first Python of its rank below it (``bash -c 'python … | tee'``)."""
    level = [pid]
    while level:
        python = next((one for one in level if _is_python(one)), None)
        if python is not None:
            return python
        level = [p for p, above in sorted(parents.items()) if above in level and members[p][:2] == members[pid][:2]]
    return pid


def _is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink("/proc/%d/exe" % pid)).startswith(("python", "pypy"))
    except OSError:
        return False


def _described(pid: int, member: "Member") -> "Dict[str, Any]":
    try:
        uid: "Optional[int]" = os.stat("/proc/%d" % pid).st_uid
        command = proc.read("/proc/%d/cmdline" % pid, 4 * proc.COMMAND_LIMIT).decode("utf-8", "replace")
    except OSError:
        uid, command = None, ""  # it has just ended
    return {
        "rank": member.rank,
        "size": member.size,
        "local_rank": member.local_rank,
        "pid": pid,
        "uid": uid,
        "command": command.replace("\0", " ").strip()[: proc.COMMAND_LIMIT],
    }
