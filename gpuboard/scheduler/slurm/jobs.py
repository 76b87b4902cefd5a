"""What `scontrol show job -d` and `squeue` print → jobs. Pure; raises only Unreadable.

Formats: the printers of Slurm 20.02 to 26.05 (api/job_info.c, later scontrol/info_job.c) and recordings of 22.05.

**Forgery.** Slurm prints text that users choose (a job's name, account, command, folder, comment, mail address) without
escaping, including blanks, ``Key=`` and line ends, in every form of `scontrol`. So a job's text can contain anything
that looks like a record of Slurm. The defences:

* The name comes before, all other free text after the part with the owner and the resources. That part begins with the
  only ``UserId=…(uid) GroupId=`` and ends at the only ``MinCPUsNode=``; in it every needed key occurs exactly once. If
  one occurs more often, the record is *ambiguous* and none of its values is used.
* A line end in a text can begin a forged record. It can remove neither a real job's record nor the nodes' list of GPUs
  in use. So it shows as a duplicate job, as a GPU with two holders, or as a GPU that its node lists as free
  (consistency.py). `squeue`, in columns without free text, then decides.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gpuboard import nodesets
from gpuboard.model.schedule import Grant, SchedulerJob
from gpuboard.model.text import clean
from gpuboard.scheduler.slurm.gres import resources
from gpuboard.scheduler.slurm.records import Unreadable, moment, records, user_name, value
from gpuboard.transport.slurm.srun_errors import ENDED

_HEAD = re.compile(
    r"(\d{1,10}) (?:ArrayJobId=(\d{1,10}) ArrayTaskId=(\S+) (?:ArrayTaskThrottle=\d+ )?"
    r"|HetJobId=(\d{1,10}) HetJobOffset=(\d{1,10}) )?JobName=",
    re.ASCII,
)
_OWNER = re.compile(r" UserId=([^=\n]{0,256}?)\((\d{1,10})\) GroupId=")
_END = re.compile(r" MinCPUsNode=\d")
_ONCE = ("JobState=", "StartTime=", " EndTime=", "Partition=", " NodeList=")
_HELD = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\d+ GRES(?:_IDX)?=(\S*)")
_NAME_ENDS = (" HetJobIdSet=", " SLUID=")  # keys that may come between a job's name and its user
_COMMENT = re.compile(
    r" Comment=(.*?)\s+(?:Extra|StdErr|StdIn|StdOut|Switches|BurstBuffer|Power|Gres[A-Z]\w+|KillO\w+|Spread\w+|"
    r"\w+PerTres|\w+PerTRES|Tres\w+|MailUser|Container|SELinuxContext|ResvPorts)=",
    re.DOTALL,
)
_HOLDS_NOTHING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "REVOKED"})

TRUE_JOB = "%A|%U|%T|%P|%S|%e|%N|%u"  # format for `squeue`
_TRUE_JOB = re.compile(
    r"(\d{1,10})\|(\d{1,10})\|(\w+)\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|(.*)", re.ASCII
)  # fmt: skip


class Runs(NamedTuple):
    """The nodes of a running job, whatever it holds."""

    uid: int
    nodes: str  # as Slurm folds them


class Piece(NamedTuple):
    """What looks like a record of `scontrol show job -d`."""

    number: int  # 0: unreadable
    id: str = ""
    job: SchedulerJob | None = None  # None: it holds nothing, or that is unknown
    clear: bool = True  # readable and unambiguous
    whole: bool = True  # it has all parts of a record, perhaps some twice
    runs: Runs | None = None


class TrueJob(NamedTuple):
    """A job as `squeue` prints it."""

    uid: int
    user: str
    state: str
    partition: str
    started: float | None
    until: float | None
    nodes: tuple[str, ...]

    @property
    def ended(self) -> bool:
        """Whether it holds nothing any more; Slurm lists such jobs for some minutes."""
        return self.state.upper() in ENDED


def effective_state(state: str, reason: str) -> str:
    """Return a job's state; CONFIGURING in its prolog: it starts no step, pam_slurm_adopt accepts no login."""
    return "CONFIGURING" if (state, reason) == ("RUNNING", "Prolog") else state


def jobs(text: str) -> list[Piece]:
    """Return the jobs of `scontrol show job -d`, in its order. Raises Unreadable."""
    found: list[Piece] = []
    for record in records(text, "JobId", "scontrol show job", "No jobs in the system"):
        head = _HEAD.match(record)
        if head is None:
            found.append(Piece(0, clear=False, whole=False))
            continue
        number = int(head[1])
        shown = f"{head[2]}_{clean(head[3], 64)}" if head[2] else f"{head[4]}+{head[5]}" if head[4] else head[1]
        try:
            job, runs = _job(record, head.end(), number, shown)
            found.append(Piece(number, shown, job, runs=runs))
        except ValueError:
            whole = _OWNER.search(record) is not None and _END.search(record) is not None
            found.append(Piece(number, shown, clear=False, whole=whole))
    return found


def _job(record: str, named: int, number: int, shown: str) -> tuple[SchedulerJob | None, Runs | None]:
    """Return a job, None where it holds nothing, and where it runs; its name begins at ``named``.

    Raises ValueError where the record is ambiguous or unreadable.
    """
    owner = _only(_OWNER, " UserId=", record)
    end = _only(_END, " MinCPUsNode=", record)
    if not named <= owner.start() < end.start():
        raise ValueError("the parts of the record are not in Slurm's order")
    part = record[owner.end() : end.start()]
    state = value(part, " JobState=") or ""
    if state in _HOLDS_NOTHING and part.count("JobState=") == 1:
        return None, None
    for key in _ONCE:
        if part.count(key) != 1:
            raise ValueError(f"not one{key}")
    rest = part[part.index(" NodeList=") :]
    details = _HELD.findall(rest)
    if part.count(" Nodes=") != len(details) or part.count(" JOB_GRES=") > 1:
        raise ValueError("its resources on its nodes cannot be read")
    grants = [grant for names, field in details for grant in _grants(names, field)]
    if state == "COMPLETING":  # its GPUs are no longer listed, but its processes may still run there
        had = resources(value(rest, " JOB_GRES=") or "")
        if not grants and (had.gpus or had.shards):
            grants = [Grant(name) for name in nodesets.listed(value(rest, " NodeList=") or "")]
    else:
        grants = [grant for grant in grants if grant.gpus or grant.shards]
    state = effective_state(state, value(part, " Reason=") or "")
    uid = int(owner[2])
    runs = Runs(uid, value(rest, " NodeList=") or "") if state == "RUNNING" else None
    if not grants:
        return None, runs
    name = record[named : owner.start()]
    for word in _NAME_ENDS:
        name = name.partition(word)[0]
    job = SchedulerJob(
        id=shown,
        number=number,
        user=user_name(owner[1], uid),
        uid=uid,
        name=clean(name, 256),
        partition=clean(value(part, "Partition=") or "", 96),
        state=clean(state.lower(), 64),
        grants=tuple(grants),
        started=moment(value(part, "StartTime=") or ""),
        until=moment(value(part, " EndTime=") or ""),
        comment=_comment(record[end.start() :]),
    )
    return job, runs


def _only(pattern: re.Pattern[str], word: str, text: str) -> re.Match[str]:
    """Return the only match of ``pattern``, which begins with ``word``. Raises ValueError for none or several."""
    at = text.find(word)
    once = at >= 0 and text.find(word, at + 1) < 0  # nearly always
    found = [pattern.match(text, at)] if once else list(pattern.finditer(text))
    if len(found) != 1 or found[0] is None:
        raise ValueError(f"not one{word}")
    return found[0]


def _grants(names: str, field: str) -> list[Grant]:
    held = resources(field)
    gpus = tuple(gres for gres in held.gpus if gres.count)
    shards = tuple(gres for gres in held.shards if gres.count)
    return [Grant(name, gpus, shards) for name in nodesets.listed(names)]


def _comment(tail: str) -> str:
    """Return a job's comment, which its owner alone can choose."""
    match = _COMMENT.search(tail) if " Comment=" in tail else None
    return clean(match[1], 1024) if match else ""


def true_jobs(text: str) -> dict[int, TrueJob]:
    """Return the jobs of `squeue` in the format TRUE_JOB, without a headline. Raises Unreadable."""
    found: dict[int, TrueJob] = {}
    for line in text.splitlines():
        match = _TRUE_JOB.fullmatch(line)
        try:
            if match is None:
                raise ValueError
            number, uid, state, partition, started, until, names, user = match.groups()
            held = nodesets.listed(names) if names else ()
        except ValueError:
            raise Unreadable(f"`squeue` printed a line that cannot be read: {clean(line, 120)!r}") from None
        who = user_name(user, int(uid))
        ends = moment(started), moment(until)
        found[int(number)] = TrueJob(int(uid), who, state.lower(), clean(partition, 96), *ends, held)
    return found
