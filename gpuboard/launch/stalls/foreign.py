"""Jobs that gpuboard need not have started (torchrun, srun, by hand): the ranks of one job over its nodes (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from gpuboard.launch.stalls.evidence import Inspection, RankEvidence
from gpuboard.launch.stalls.verdict import Explanation, diagnose, explain
from gpuboard.launch.stalls.waits import RankStatus, activity
from gpuboard.model.gpu import Count
from gpuboard.model.text import clean
from gpuboard.model.units import ranges

_WHERE = "name every node of the job with --node; a rank that is on none of them has ended or was not started"
_ACTIVE = 0.05  # share of a core that counts as activity (agent/launch/watch/signs.py)
_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")  # a MASTER_ADDR that means another job on each node


class JobProcess(msgspec.Struct, frozen=True):
    """A rank's process. ``size``: WORLD_SIZE of its environment."""

    rank: Count
    pid: Count
    local_rank: Count
    size: Count | None = None
    uid: Count | None = None
    command: str = ""


class NodeJob(msgspec.Struct, frozen=True):
    """A job's part on one node. ``job``: the variables that its processes share, as MASTER_ADDR."""

    job: dict[str, str]
    ranks: list[JobProcess]


class NodeJobs(msgspec.Struct, frozen=True):
    """The answer to ``jobs`` of role ``runs``. ``pyspy``: whether the node has py-spy."""

    jobs: list[NodeJob]
    pyspy: bool = False
    ptrace_scope: int = 0


class Placed(msgspec.Struct, frozen=True):
    """A rank's process and what was found about it. ``evidence`` None: its node did not answer the inspection."""

    node: str
    process: JobProcess
    evidence: RankEvidence | None


class ForeignJob(msgspec.Struct, frozen=True):
    """One job on the nodes that were asked."""

    job: dict[str, str]
    ranks: list[Placed]

    @property
    def size(self) -> int | None:
        """Its number of ranks by WORLD_SIZE, None if that is not known."""
        sizes = Counter(one.process.size for one in self.ranks if one.process.size is not None)
        return sizes.most_common(1)[0][0] if sizes else None

    def title(self) -> str:
        """``job at 10.0.0.1:29500: 2 of 8 ranks on gpu01``."""
        address = ":".join(self.job[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in self.job)
        names = {"SLURM_JOB_ID": "Slurm job", "TORCHELASTIC_RUN_ID": "torchrun id", "GPUBOARD_RUN": "gpuboard run"}
        values = ((words, self.job.get(name, "none")) for name, words in names.items())  # torchrun's default: none
        known = ", ".join(f"{words} {clean(value, 80)}" for words, value in values if value != "none")
        nodes = ", ".join(dict.fromkeys(clean(one.node, 60) for one in self.ranks))
        of = f" of {self.size}" if self.size is not None else ""
        at = f" at {clean(address, 120)}" if address else ""
        return f"job{at}{f' ({known})' if known else ''}: {len(self.ranks)}{of} ranks on {nodes}"


def joined(found: Mapping[str, NodeJobs], inspections: Mapping[str, Inspection]) -> list[ForeignJob]:
    """Return the jobs on all nodes: parts with the same variables are one job. ``inspections``: by node, of the ranks
    of all its jobs in their order, numbered from 0."""
    jobs: dict[object, ForeignJob] = {}
    for node, answer in found.items():
        evidence = {one.rank: one for one in inspections[node].ranks} if node in inspections else {}
        number = 0
        for part in answer.jobs:
            placed = []
            for process in part.ranks:
                seen = evidence.get(number)
                number += 1
                own = msgspec.structs.replace(seen, rank=process.rank) if seen is not None else None
                placed.append(Placed(node, process, own))
            local = not part.job or part.job.get("MASTER_ADDR", "").startswith(_LOOPBACK)
            key = (tuple(sorted(part.job.items())), node if local else None)
            before = jobs[key].ranks if key in jobs else []
            jobs[key] = ForeignJob(part.job, [*before, *placed])
    return list(jobs.values())


def explain_job(job: ForeignJob) -> Explanation:
    """Return what the ranks of a job are doing and what blocks, as far as they were found."""
    statuses: dict[int, RankStatus] = {}
    evidence: dict[int, RankEvidence] = {}
    for one in job.ranks:
        rank = one.process.rank
        seen = one.evidence
        active = seen is not None and ((seen.cpu or 0.0) > _ACTIVE or seen.moved_bytes > 0)
        status = RankStatus(rank, one.node, one.process.local_rank, joined=True, quiet_s=None if active else 1.0)
        if rank not in statuses:
            statuses[rank] = status
            if seen is not None:
                evidence[rank] = seen
    found = explain(list(statuses.values()), evidence)
    absent = sorted(set(range(job.size)) - statuses.keys()) if job.size is not None else []
    wrong = _contradiction(job)
    if wrong is not None:
        found = msgspec.structs.replace(found, verdict=wrong[0], remedy=wrong[1])
    elif absent:
        activities = {rank: activity(status, evidence.get(rank)) for rank, status in statuses.items()}
        stall = diagnose(activities)
        passed = {rank: seen.joins_as for rank, seen in evidence.items() if seen.joins_as is not None}
        right = bool(passed) and all(numbers == (rank, job.size) for rank, numbers in passed.items())
        if stall is not None and (stall.kind == "stall-network" or right):  # those found agree: the others are missing
            words = f"waiting for {_ranks(absent)}, which {'was' if len(absent) == 1 else 'were'} not found"
            found = msgspec.structs.replace(found, verdict=words, remedy=_WHERE)
    missing = list(found.missing)
    if absent:
        missing.append(
            f"{_ranks(absent)} of {job.size}: not found on {', '.join(dict.fromkeys(one.node for one in job.ranks))}; "
            "they have ended, were not started, are on other nodes, or are another user's"
        )
    if any("torch/distributed/" in frame.file for one in evidence.values() for frame in one.stack):
        own = job.job.get("GPUBOARD_RUN")
        remedy = f"; `gpuboard explain {clean(own, 40)}` sees them" if own else ""
        missing.append(f"numbers and shapes of collectives: only `gpuboard launch` can read them{remedy}")
    return msgspec.structs.replace(found, missing=missing)


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {ranges(numbers)}"


def _contradiction(job: ForeignJob) -> tuple[str, str] | None:
    """Return what makes it impossible that the ranks find each other, and the remedy; None if nothing does."""
    places: dict[int, list[Placed]] = {}
    for one in job.ranks:
        places.setdefault(one.process.rank, []).append(one)
    for rank, several in sorted(places.items()):
        if len(several) > 1:
            where = ", ".join(f"{clean(one.node, 60)} (pid {one.process.pid})" for one in several)
            words = f"rank {rank} runs {len(several)} times: {where}"
            return words, "give every process its own RANK (torchrun: --node-rank)"
    sizes: dict[int, Placed] = {}
    for one in job.ranks:
        if one.process.size is not None:
            sizes.setdefault(one.process.size, one)
    if len(sizes) > 1:
        each = ", ".join(f"{size} on {clean(one.node, 60)} (rank {one.process.rank})" for size, one in sizes.items())
        return f"WORLD_SIZE differs: {each}", "start every node with the same number of nodes and processes per node"
    beyond = [rank for rank in places if job.size is not None and rank >= job.size]
    if beyond:
        return f"{_ranks(sorted(beyond))}: out of range, as WORLD_SIZE is {job.size}", "ranks are numbered from 0"
    return None
