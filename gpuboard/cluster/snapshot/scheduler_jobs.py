"""Joins the scheduler's answer with a node's GPUs: which job holds which GPU. Pure.

Slurm's index (IDX) is a position in its list of a node's GPUs: NVML's order where slurmd detects them
(AutoDetect=nvml), else the order of the device files in gres.conf. Slurm passes it to jobs as CUDA's index, which is
NVML's ("GPUs want it to match the order they enumerate on the PCI bus", common_gres_set_env); device files matter only
to device cgroups.

* Same count in the scheduler and on the node: index n is the n-th GPU in NVML's order. If the device files are numbered
  in another order, a note reports it, and the jobs' processes can prove that the index follows the device files.
* Different counts: the device files decide, where they are known.
* A job without a matching index is found by its processes. GPUs that remain ambiguous are unknown, never free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from gpuboard.model.gpu import GpuStatic
from gpuboard.model.schedule import Grant, Schedule, SchedulerJob, SchedulerNode
from gpuboard.model.state import Job, Ruling
from gpuboard.model.text import clean

BY_ORDER = "by order: the node does not report its device files"
OTHER_ORDER = "by order: device files are numbered in another order there"
BY_PROCESSES = "by device file: the job's processes are on these"
# Slurm's node states that withhold idle GPUs from every user, and those that make the state of its GPUs unknown.
_WITHHELD = ("drain", "drained", "draining", "fail", "failing", "maint", "maintenance", "reserved", "planned",
             "blocked", "reboot", "reboot_issued", "reboot_requested")  # fmt: skip
_DOUBTFUL = ("down", "not_responding", "unknown", "future", "error", "power_down", "powered_down", "powering_down",
             "powering_up", "no_respond", "invalid", "invalid_reg", "unregistered")  # fmt: skip
_GPUS_MAX = 1024  # of one node that only the scheduler shows: a larger count is invalid

Held = tuple[SchedulerJob, Grant]


class Slots(msgspec.Struct, frozen=True):
    """A node's GPUs as the scheduler may count them; MIG devices take the place of their GPU."""

    uuids: tuple[str, ...]  # in NVML's order
    minors: tuple[int | None, ...]
    note: str = ""


def by_node(schedule: Schedule) -> dict[str, list[Held]]:
    """Return what jobs hold, by node, sorted by job number."""
    found: dict[str, list[Held]] = {}
    for job in sorted(schedule.jobs, key=lambda job: job.number):
        for grant in job.grants:
            found.setdefault(grant.node, []).append((job, grant))
    return found


def names(schedule: Schedule) -> dict[str, str]:
    """Return the scheduler's name of a node by every name that others may use; its own names take precedence."""
    found: dict[str, str] = {name: name for name in schedule.nodes}
    for node in schedule.nodes.values():
        for other in (node.hostname, node.address, node.name.partition(".")[0], node.hostname.partition(".")[0]):
            if other and not other.startswith("127."):
                found.setdefault(other, node.name)
    return found


def numbers(schedule: Schedule) -> frozenset[int]:
    """Return the numbers of all jobs that hold something, including the leaders' numbers of heterogeneous jobs."""
    leaders = (job.id.partition("+") for job in schedule.jobs)
    return frozenset({job.number for job in schedule.jobs} | {int(lead) for lead, plus, _ in leaders if plus})


def known_as(names: Mapping[str, str], *aliases: str) -> str | None:
    """Return the scheduler's name of a node with any of these names, with or without its domain."""
    return next((names[name] for word in aliases for name in (word, word.partition(".")[0]) if name in names), None)


def slots(gpus: Sequence[GpuStatic], total: int) -> Slots:
    """Return a node's GPUs (given in NVML's order) as a scheduler with ``total`` GPUs there counts them."""
    files = [gpu.minor for gpu in gpus if gpu.minor is not None]
    note = BY_ORDER if len(files) < len(gpus) else OTHER_ORDER if files != sorted(files) else ""
    if any(gpu.mig for gpu in gpus) and total != len(gpus):
        uuids = [[device.uuid for device in gpu.mig or []] or [gpu.uuid] for gpu in gpus]
        minors = [gpu.minor for gpu, of in zip(gpus, uuids, strict=True) for _ in of]
        return Slots(tuple(uuid for of in uuids for uuid in of), tuple(minors), note)
    return Slots(tuple(gpu.uuid for gpu in gpus), tuple(gpu.minor for gpu in gpus), note)


class Ruled(msgspec.Struct, frozen=True):
    """The scheduler's data on a node's GPUs and MIG devices, by UUID."""

    gpus: dict[str, Ruling]
    sure: bool  # its indexes decided everything; False: the jobs' processes were evidence too


def rule(
    node: SchedulerNode, held: Sequence[Held], gpus: Sequence[GpuStatic], seen: Mapping[str, Collection[str]]
) -> Ruled:
    """Return the scheduler's data on a node's GPUs.

    ``held``: what jobs hold there; ``seen``: UUID → numbers of the jobs whose processes run on it, from the reading.
    """
    total = sum(gres.count for gres in node.gpus)
    own = slots(gpus, total)
    place, note = _places(own, total)
    sure = note != OTHER_ORDER
    if not sure:
        by_file = dict(enumerate(slots(sorted(gpus, key=lambda gpu: gpu.minor or 0), total).uuids))
        if _found(by_file, held, seen) > _found(place, held, seen):
            place, note = by_file, BY_PROCESSES
    given: dict[str, dict[str, Job]] = {uuid: {} for uuid in own.uuids}
    unplaced: list[Job] = []  # for each held GPU that cannot be identified: its job
    for job, grant in held:
        shown = job_of(job)
        for gres in grant.gpus:
            placed = [place[index] for index in gres.indexes or () if index in place]
            sure = sure and len(placed) >= gres.count
            placed += [uuid for uuid in own.uuids if shown.number in seen.get(uuid, ()) and uuid not in placed]
            for uuid in placed[: gres.count]:
                given[uuid][job.id] = shown
            unplaced += [shown] * min(gres.count - len(placed), len(own.uuids))
        for gres in grant.shards:
            part = msgspec.structs.replace(shown, words=_with_shards(shown.words, gres.count))
            placed = [place[index] for index in gres.indexes or () if index in place]
            for uuid in placed:
                given[uuid][job.id] = part
            unplaced += [part] * (not placed and gres.count > 0)
    unnamed, more = _unnamed(node, held, place)
    words = _unnamed_words(held)
    found = {uuid: Ruling(tuple(jobs.values()), note=note) for uuid, jobs in given.items() if jobs}
    found |= {uuid: Ruling(hidden=words, note=note) for uuid in unnamed if uuid not in found}
    rest = [uuid for uuid in own.uuids if uuid not in found]
    lost = len(unplaced) + more
    if lost >= len(rest):  # all that are left are held, whichever job has which
        jobs = {job.id: job for job in unplaced}
        swept = Ruling(tuple(jobs.values()), "" if jobs else words, note=note)
    else:
        withheld, doubt = node_words(node)
        if lost:
            who = " and ".join(sorted({f"job {job.id} of {job.user}" for job in unplaced}) + [words] * (more > 0))
            doubt = doubt or f"{lost} of these {len(rest)} GPUs belong to {who}; which ones is unknown"
        withheld = withheld or _ending_words(node, held)
        full = "Slurm has no CPU left on its node" if "allocated" in node.flags else ""
        swept = Ruling(doubt=doubt, withheld=withheld, note="; ".join(filter(None, (note if found else "", full))))
    return Ruled(found | dict.fromkeys(rest, swept), sure)


def alone(node: SchedulerNode) -> list[GpuStatic]:
    """Return the GPUs of a node that only the scheduler shows, with UUIDs made from its indexes."""
    found: list[GpuStatic] = []
    for gres in node.gpus:
        name = clean(gres.type, 96) or "GPU"
        for index in range(len(found), min(len(found) + gres.count, _GPUS_MAX)):
            found.append(GpuStatic(index, f"slurm-{clean(node.name, 64)}-{index}", name, "", minor=index))
    return found


def whole(node: SchedulerNode, gpus: Sequence[GpuStatic], held: Sequence[Held], number: str) -> list[GpuStatic]:
    """Return all GPUs of a node whose device cgroup shows this process only those of job ``number``.

    NVML counts such GPUs from 0. They get the scheduler's indexes: those of the job, if its answer has them (by device
    file if the files have exactly these numbers, else in NVML's order), else the device files' numbers. Empty if
    neither is known.
    """
    given = [gres for job, grant in held if str(job.number) == number for gres in grant.gpus]
    indexes = sorted(index for gres in given for index in gres.indexes or ())
    files = [gpu.minor for gpu in gpus if gpu.minor is not None]
    own = dict(zip(files, gpus, strict=False)) if len(files) == len(gpus) else {}
    if len(indexes) == len(gpus) and sorted(own) != indexes:
        own = dict(zip(indexes, gpus, strict=True))
    all_of_them = alone(node)
    if len(own) < len(gpus) or not own.keys() < {gpu.index for gpu in all_of_them}:
        return []
    return [
        msgspec.structs.replace(own[gpu.index], index=gpu.index, minor=gpu.index) if gpu.index in own else gpu
        for gpu in all_of_them
    ]


def job_of(job: SchedulerJob) -> Job:
    """Return a job as it is shown beside a GPU, text cleaned."""
    words = "" if job.state == "running" else clean(job.state.replace("_", " "), 64)
    return Job(clean(job.id, 64), clean(job.user, 64), clean(job.partition, 64), job.until, words, str(job.number))


def node_words(node: SchedulerNode) -> tuple[str, str]:
    """Return why a node's idle GPUs are withheld from every user, and why their state is unknown; "" if not."""
    flags = node.flags
    reason = f": {clean(node.reason, 200)}" if node.reason else ""
    down = next((f"Slurm: the node is {word.replace('_', ' ')}{reason}" for word in _DOUBTFUL if word in flags), "")
    prefix = "Slurm: " if node.doubt and "Slurm" not in node.doubt else ""
    doubt = down or prefix + clean(node.doubt, 200)
    word = next((word for word in _WITHHELD if word in flags), "")
    if not word:
        return "", doubt
    if word in {"maint", "maintenance", "reserved"} and node.reservation:
        return f"Slurm reservation {clean(node.reservation, 64)}{reason}", doubt
    shown = {"drain": "drained", "maint": "in maintenance", "maintenance": "in maintenance", "fail": "failing"}
    return f"Slurm: {shown.get(word, word.replace('_', ' '))}{reason}", doubt


def _ending_words(node: SchedulerNode, held: Sequence[Held]) -> str:
    """Return why a node's idle GPUs are withheld while a job is completing there: Slurm starts no job meanwhile."""
    if "completing" not in node.flags:
        return ""
    ending = sorted({clean(job.id, 64) for job, _ in held if job.state == "completing"})
    who = f"job {', '.join(ending)}" if ending else "a job"
    return f"Slurm: {who} is still completing there; no job starts before it ends"


def _places(own: Slots, total: int) -> tuple[dict[int, str], str]:
    """Return the UUID of each of the scheduler's indexes, as far as known, and a note on how it was found."""
    if total == len(own.uuids):
        return dict(enumerate(own.uuids)), own.note
    other_count = f"Slurm counts {total} GPUs there, the node lists {len(own.uuids)}"
    by_file = {minor: uuid for minor, uuid in zip(own.minors, own.uuids, strict=True) if minor is not None}
    if total > len(own.uuids) and len(by_file) == len(own.uuids):  # some are lost, or hidden by a device cgroup
        return by_file, f"by device file: {other_count}"
    return {}, other_count


def _found(place: Mapping[int, str], held: Sequence[Held], seen: Mapping[str, Collection[str]]) -> int:
    """Return how many held GPUs run a process of their job, if ``place`` is right."""
    return sum(
        str(job.number) in seen.get(place.get(index, ""), ())
        for job, grant in held
        for gres in grant.gpus
        for index in gres.indexes or ()
    )


def _unnamed(node: SchedulerNode, held: Sequence[Held], place: Mapping[int, str]) -> tuple[set[str], int]:
    """Return the allocated GPUs whose job is hidden from this user, and how many more of them cannot be identified."""
    covered = {i for _, grant in held for gres in (*grant.gpus, *grant.shards) for i in gres.indexes or ()}
    found: set[str] = set()
    more = 0
    for gres in (*node.used, *(shard for shard in node.used_shards if shard.indexes is not None)):
        if gres.indexes is None:
            more += max(0, gres.count - sum(o.count for _, grant in held for o in grant.gpus if o.type == gres.type))
            continue
        rest = [index for index in gres.indexes if index not in covered]
        found.update(place[index] for index in rest if index in place)
        more += sum(index not in place for index in rest)
    return found, more


def _unnamed_words(held: Sequence[Held]) -> str:
    ending = sorted({job.id for job, _ in held if job.state == "completing"})
    return f"job {', '.join(ending)}, which is ending" if ending else "a job that Slurm does not show you"


def _with_shards(words: str, count: int) -> str:
    return ", ".join(filter(None, (words, f"{count} shard{'s' if count != 1 else ''}")))
