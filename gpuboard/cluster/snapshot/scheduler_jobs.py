"""The scheduler's answer joined with what a node says of its GPUs: who was given which one. Pure.

Slurm's numbers (IDX) are places in its list of a node's GPUs: NVML's order where slurmd finds them by itself
(AutoDetect=nvml), else the order in which gres.conf names device files. It hands them to jobs as CUDA's indexes, which
are NVML's ("GPUs want it to match the order they enumerate on the PCI bus", common_gres_set_env); files count only in
device cgroups. So the n-th GPU in NVML's order is number n, where the scheduler has as many there as the node. Where
device files are numbered in another order that is said, and the processes of the jobs may show that files count. Where
both have different counts, device files tell, where they are known; a job without a number that fits is found by its
processes, and what cannot be told makes GPUs doubtful, never free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from gpuboard.model.gpu import GpuStatic
from gpuboard.model.schedule import Grant, Schedule, SchedulerJob, SchedulerNode
from gpuboard.model.state import Job, Ruling
from gpuboard.model.text import clean

BY_ORDER = "by order: the node does not tell its device files"
OTHER_ORDER = "by order: device files are numbered in another order there"
BY_PROCESSES = "by device file: the job's processes are on these"
_OTHER_COUNT = "Slurm counts other GPUs there than the node has"
# What keeps a node's idle GPUs from everybody, and what leaves open what is the case there (Slurm's node states).
_WITHHELD = ("drain", "drained", "draining", "fail", "failing", "maint", "maintenance", "reserved", "planned",
             "blocked", "reboot", "reboot_issued", "reboot_requested")  # fmt: skip
_DOUBTFUL = ("down", "not_responding", "unknown", "future", "error", "power_down", "powered_down", "powering_down",
             "powering_up", "no_respond", "invalid", "invalid_reg", "unregistered")  # fmt: skip
_GPUS_MAX = 1024  # of one node that only the scheduler shows: beyond that its line is nonsense

Held = tuple[SchedulerJob, Grant]


class Slots(msgspec.Struct, frozen=True):
    """A node's GPUs as the scheduler may count them: UUIDs, MIG devices in place of the GPU they are of."""

    uuids: tuple[str, ...]  # in NVML's order
    minors: tuple[int | None, ...]
    note: str = ""


def by_node(schedule: Schedule) -> dict[str, list[Held]]:
    """Return what jobs hold, by node, each node's in the order of the job numbers."""
    found: dict[str, list[Held]] = {}
    for job in sorted(schedule.jobs, key=lambda job: job.number):
        for grant in job.grants:
            found.setdefault(grant.node, []).append((job, grant))
    return found


def names(schedule: Schedule) -> dict[str, str]:
    """Return the scheduler's name for a node by every name it may have elsewhere; the scheduler's own come first."""
    found: dict[str, str] = {name: name for name in schedule.nodes}
    for node in schedule.nodes.values():
        for other in (node.hostname, node.address, node.name.partition(".")[0], node.hostname.partition(".")[0]):
            if other and not other.startswith("127."):
                found.setdefault(other, node.name)
    return found


def numbers(schedule: Schedule) -> frozenset[int]:
    """Return the numbers of all jobs that hold something, and those by which heterogeneous ones call themselves."""
    leaders = (job.id.partition("+") for job in schedule.jobs)
    return frozenset({job.number for job in schedule.jobs} | {int(lead) for lead, plus, _ in leaders if plus})


def known_as(names: Mapping[str, str], *said: str) -> str | None:
    """Return the scheduler's name of a node that is called any of these, whole or without its domain."""
    return next((names[name] for word in said for name in (word, word.partition(".")[0]) if name in names), None)


def slots(gpus: Sequence[GpuStatic], total: int) -> Slots:
    """Return a node's GPUs (in NVML's order) as a scheduler counts them that has ``total`` there."""
    files = [gpu.minor for gpu in gpus if gpu.minor is not None]
    note = BY_ORDER if len(files) < len(gpus) else OTHER_ORDER if files != sorted(files) else ""
    if any(gpu.mig for gpu in gpus) and total != len(gpus):
        uuids = [[device.uuid for device in gpu.mig or []] or [gpu.uuid] for gpu in gpus]
        minors = [gpu.minor for gpu, of in zip(gpus, uuids, strict=True) for _ in of]
        return Slots(tuple(uuid for of in uuids for uuid in of), tuple(minors), note)
    return Slots(tuple(gpu.uuid for gpu in gpus), tuple(gpu.minor for gpu in gpus), note)


class Ruled(msgspec.Struct, frozen=True):
    """What the scheduler says of a node's GPUs and MIG devices, by UUID."""

    gpus: dict[str, Ruling]
    sure: bool  # its numbers told all; else jobs were looked for by their processes


def rule(
    node: SchedulerNode, held: Sequence[Held], gpus: Sequence[GpuStatic], seen: Mapping[str, Collection[str]]
) -> Ruled:
    """Return what the scheduler says of a node's GPUs.

    ``held``: what jobs hold there; ``seen``: UUID → numbers of jobs whose processes run on it, as the node tells them.
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
    adrift: list[Job] = []  # of each GPU that is held and cannot be told: who holds it
    for job, grant in held:
        shown = job_of(job)
        for gres in grant.gpus:
            told = [place[index] for index in gres.indexes or () if index in place]
            sure = sure and len(told) >= gres.count
            told += [uuid for uuid in own.uuids if shown.number in seen.get(uuid, ()) and uuid not in told]
            for uuid in told[: gres.count]:
                given[uuid][job.id] = shown
            adrift += [shown] * min(gres.count - len(told), len(own.uuids))
        for gres in grant.shards:
            part = msgspec.structs.replace(shown, words=_with_shards(shown.words, gres.count))
            told = [place[index] for index in gres.indexes or () if index in place]
            for uuid in told:
                given[uuid][job.id] = part
            adrift += [part] * (not told and gres.count > 0)
    unnamed, more = _unnamed(node, held, place)
    words = _unnamed_words(held)
    found = {uuid: Ruling(tuple(jobs.values()), note=note) for uuid, jobs in given.items() if jobs}
    found |= {uuid: Ruling(hidden=words, note=note) for uuid in unnamed if uuid not in found}
    rest = [uuid for uuid in own.uuids if uuid not in found]
    lost = len(adrift) + more
    if lost >= len(rest):  # then it is all of them, whichever is whose
        jobs = {job.id: job for job in adrift}
        swept = Ruling(tuple(jobs.values()), "" if jobs else words, note=note)
    else:
        withheld, doubt = node_words(node)
        if lost:
            who = " and ".join(sorted({f"job {job.id} of {job.user}" for job in adrift}) + [words] * (more > 0))
            doubt = doubt or f"{lost} of these {len(rest)} GPUs belong to {who}; which ones cannot be told from here"
        withheld = withheld or _ending_words(node, held)
        full = "Slurm has no CPU left to give on its node" if "allocated" in node.flags else ""
        swept = Ruling(doubt=doubt, withheld=withheld, note="; ".join(filter(None, (note if found else "", full))))
    return Ruled(found | dict.fromkeys(rest, swept), sure)


def alone(node: SchedulerNode) -> list[GpuStatic]:
    """Return the GPUs of a node that nothing but the scheduler shows, under names made from its numbers."""
    found: list[GpuStatic] = []
    for gres in node.gpus:
        name = clean(gres.type, 96) or "GPU"
        for index in range(len(found), min(len(found) + gres.count, _GPUS_MAX)):
            found.append(GpuStatic(index, f"slurm-{clean(node.name, 64)}-{index}", name, "", minor=index))
    return found


def whole(node: SchedulerNode, gpus: Sequence[GpuStatic], held: Sequence[Held], number: str) -> list[GpuStatic]:
    """Return all GPUs of a node that shows us those of job ``number`` alone (device cgroups).

    NVML counts such GPUs from 0: they get the scheduler's numbers, those of the job where its answer has them (by
    device file if files have just these numbers, else in NVML's order), else those of the device files. Empty where
    that cannot be told.
    """
    given = [gres for job, grant in held if str(job.number) == number for gres in grant.gpus]
    told = sorted(index for gres in given for index in gres.indexes or ())
    files = [gpu.minor for gpu in gpus if gpu.minor is not None]
    own = dict(zip(files, gpus, strict=False)) if len(files) == len(gpus) else {}
    if len(told) == len(gpus) and sorted(own) != told:
        own = dict(zip(told, gpus, strict=True))
    all_of_them = alone(node)
    if len(own) < len(gpus) or not own.keys() < {gpu.index for gpu in all_of_them}:
        return []
    return [
        msgspec.structs.replace(own[gpu.index], index=gpu.index, minor=gpu.index) if gpu.index in own else gpu
        for gpu in all_of_them
    ]


def job_of(job: SchedulerJob) -> Job:
    """Return a job as it is shown beside a GPU, its text made inert."""
    words = "" if job.state == "running" else clean(job.state.replace("_", " "), 64)
    return Job(clean(job.id, 64), clean(job.user, 64), clean(job.partition, 64), job.until, words, str(job.number))


def node_words(node: SchedulerNode) -> tuple[str, str]:
    """Return why nobody gets an idle GPU of a node, and why it is not known what is the case there; "" where not so."""
    flags = node.flags
    reason = f": {clean(node.reason, 200)}" if node.reason else ""
    down = next((f"Slurm: the node is {word.replace('_', ' ')}{reason}" for word in _DOUBTFUL if word in flags), "")
    doubt = down or (f"Slurm: {clean(node.doubt, 200)}" if node.doubt else "")
    word = next((word for word in _WITHHELD if word in flags), "")
    if not word:
        return "", doubt
    if word in {"maint", "maintenance", "reserved"} and node.reservation:
        return f"Slurm reservation {clean(node.reservation, 64)}{reason}", doubt
    said = {"drain": "drained", "maint": "in maintenance", "maintenance": "in maintenance", "fail": "failing"}
    return f"Slurm: {said.get(word, word.replace('_', ' '))}{reason}", doubt


def _ending_words(node: SchedulerNode, held: Sequence[Held]) -> str:
    """Return why nobody gets an idle GPU of a node where a job is ending: Slurm starts nothing there meanwhile."""
    if "completing" not in node.flags:
        return ""
    ending = sorted({clean(job.id, 64) for job, _ in held if job.state == "completing"})
    return f"Slurm: {'job ' + ', '.join(ending) if ending else 'a job'} is still ending there, and none begins before"


def _places(own: Slots, total: int) -> tuple[dict[int, str], str]:
    """Return the UUID of each of the scheduler's numbers, as far as that can be told, and what is to be said of it."""
    if total == len(own.uuids):
        return dict(enumerate(own.uuids)), own.note
    by_file = {minor: uuid for minor, uuid in zip(own.minors, own.uuids, strict=True) if minor is not None}
    if total > len(own.uuids) and len(by_file) == len(own.uuids):  # some are gone, or hidden by a device cgroup
        return by_file, f"by device file: {_OTHER_COUNT} ({total}, {len(own.uuids)})"
    return {}, f"{_OTHER_COUNT} ({total}, {len(own.uuids)})"


def _found(place: Mapping[int, str], held: Sequence[Held], seen: Mapping[str, Collection[str]]) -> int:
    """Return on how many of the GPUs that jobs hold, if these are the places, their processes are."""
    return sum(
        str(job.number) in seen.get(place.get(index, ""), ())
        for job, grant in held
        for gres in grant.gpus
        for index in gres.indexes or ()
    )


def _unnamed(node: SchedulerNode, held: Sequence[Held], place: Mapping[int, str]) -> tuple[set[str], int]:
    """Return the GPUs that are given away, but to no job that we are shown, and how many more there are of them."""
    covered = {i for _, grant in held for gres in (*grant.gpus, *grant.shards) for i in gres.indexes or ()}
    told: set[str] = set()
    more = 0
    for gres in (*node.used, *(shard for shard in node.used_shards if shard.indexes is not None)):
        if gres.indexes is None:
            more += max(0, gres.count - sum(o.count for _, grant in held for o in grant.gpus if o.type == gres.type))
            continue
        rest = [index for index in gres.indexes if index not in covered]
        told.update(place[index] for index in rest if index in place)
        more += sum(index not in place for index in rest)
    return told, more


def _unnamed_words(held: Sequence[Held]) -> str:
    ending = sorted({job.id for job, _ in held if job.state == "completing"})
    return f"job {', '.join(ending)}, which is ending" if ending else "a job that Slurm does not show you"


def _with_shards(words: str, count: int) -> str:
    return ", ".join(filter(None, (words, f"{count} shard{'s' if count != 1 else ''}")))
