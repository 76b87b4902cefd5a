"""The state of a GPU: this and the previous reading, scheduler, leases and now → state, reason and flags.

One pure function, :func:`judge`; of its rules the first match wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import get_args

import msgspec

from gpuboard.model.gpu import (
    SERIOUS_THROTTLE,
    THROTTLE_WORDS,
    Flag,
    GpuReading,
    GpuState,
    GpuStatic,
    Process,
    xid_words,
)
from gpuboard.model.reading import Claim
from gpuboard.model.units import day_time, format_duration

STATES: tuple[GpuState, ...] = get_args(GpuState)

EXCLUSIVE = frozenset({1, 3})
PROHIBITED = 2
AWAITS_SECOND = "waiting for a second reading"  # the reason of a GPU that is not known to be free after the first one
# XID errors caused by programs, not by the GPU (NVIDIA's list of XID errors, "application").
_PROGRAMS_XIDS = frozenset({13, 31, 43, 45, 68, 109})


class Thresholds(msgspec.Struct, frozen=True, gc=False):
    """The thresholds of a GPU's state (config section ``[state]``)."""

    busy_utilization: int = 5  # percent
    occupied_memory: int = 512 * 2**20  # bytes
    stale_intervals: float = 3.0
    stale_min_s: float = 5.0
    idle_after_s: float = 900.0
    ignore_processes: tuple[str, ...] = (
        "Xorg", "Xwayland", "gnome-shell", "gnome-remote-de", "kwin_wayland", "kwin_x11", "plasmashell", "sddm-greeter",
        "nvidia-cuda-mps-server", "nvidia-cuda-mps", "nv-hostengine", "dcgmi", "dcgm-exporter", "nvidia-persiste",
    )  # fmt: skip
    ignore_below: int = 512 * 2**20  # bytes: a process of these names that uses more is not ignored


class Job(msgspec.Struct, frozen=True, gc=False):
    """A scheduler's job that holds a GPU."""

    id: str
    user: str
    partition: str = ""
    until: float | None = None  # epoch seconds; None: no limit
    words: str = ""  # further facts to show: "suspended", "2 shards", …
    number: str = ""  # the number in its processes' cgroups, which differs from the id for arrays


class Ruling(msgspec.Struct, frozen=True, gc=False):
    """The scheduler's data on one GPU, as text to show. All empty: no job holds it, and it is available."""

    jobs: tuple[Job, ...] = ()
    hidden: str = ""  # held by a job that the scheduler does not show
    doubt: str = ""  # why it is unknown whether a job holds it
    withheld: str = ""  # why the scheduler gives it to no job, although none holds it
    note: str = ""  # a reservation about this data: how the scheduler's index was matched with this GPU, …


class Facts(msgspec.Struct, frozen=True, gc=False):
    """Everything known of one GPU at one moment."""

    static: GpuStatic
    reading: GpuReading | None  # the newest one
    previous: GpuReading | None = None  # the one before; None with ``one_shot``
    age_s: float = 0.0  # of the newest reading
    interval_s: float = 1.0
    one_shot: bool = True  # one reading suffices to call a GPU free
    claims: tuple[Claim, ...] = ()  # live ones on this GPU
    claims_error: str | None = None
    ruling: Ruling | None = None  # None: no scheduler knows its node
    scheduler_error: str | None = None  # a configured scheduler without a current answer
    unseen: bool = False  # only the scheduler shows this GPU; no connection reads it
    leases: frozenset[tuple[str, str]] = frozenset()  # (id, owner) of all live leases, on any GPU
    narrow: str = ""  # how its PCIe link is too narrow, see narrow_links
    idle_for_s: float | None = None  # how long it has been unused, since this process reads it or since a new lease


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """A GPU's state, the reason for it, and flags."""

    state: GpuState
    reason: str
    flags: tuple[Flag, ...] = ()
    sick: tuple[str, ...] = ()  # the reasons for that flag
    rogue: tuple[int, ...] = ()  # the pids that are the reason for that flag


def counted(reading: GpuReading, limits: Thresholds) -> list[Process]:
    """Return the processes that make a GPU busy: all but small display servers and monitoring.

    Any user can choose a process's name: it is accepted for system accounts, and for processes with graphics only.
    """
    return [
        p
        for p in reading.processes or ()
        if not ((p.system or p.type == "graphics") and _is_service(p, reading, limits))
    ]


def rests_on_memory(reading: GpuReading, limits: Thresholds) -> bool:
    """Return whether a GPU's memory in use decides which of its processes count."""
    return any(p.memory is None and p.name in limits.ignore_processes for p in reading.processes or ())


def _is_service(process: Process, reading: GpuReading, limits: Thresholds) -> bool:
    """Return whether a process has the name and the size of a display server or of monitoring.

    If the driver does not report its memory, the whole GPU's must be small, or explained by another process.
    """
    if process.name not in limits.ignore_processes:
        return False
    if process.memory is not None:
        return process.memory < limits.ignore_below
    others = any(p.name not in limits.ignore_processes for p in reading.processes or ())
    return others or (reading.memory_used is not None and reading.memory_used < limits.ignore_below)


def claims_words(claims: Sequence[Claim]) -> str:
    """Return who holds a reserved GPU, the time left, and the purpose."""
    return "; ".join(_claim_words(claim) for claim in claims)


def unused(idle_for_s: float | None, thresholds: Thresholds) -> bool:
    """Return whether a held GPU has been unused long enough to be called idle."""
    return idle_for_s is not None and idle_for_s >= thresholds.idle_after_s


def judge(facts: Facts, thresholds: Thresholds) -> Verdict:
    """Return the state of a GPU with its reason and flags."""
    strangers = _strangers(facts, thresholds)
    state, reason = _state(facts, strangers, thresholds)
    sick = () if facts.reading is None or state == "broken" else tuple(_sick(facts.reading, facts.narrow))
    flags = _flags(facts, strangers, thresholds)
    if sick:
        flags.append("sick")
    if facts.static.mig is not None:
        flags.append("mig")
    return Verdict(state, reason, tuple(flags), sick, tuple(p.pid for p in strangers))


def _state(facts: Facts, strangers: Sequence[Process], limits: Thresholds) -> tuple[GpuState, str]:
    reading, ruling = facts.reading, facts.ruling
    if ruling is not None and (ruling.jobs or ruling.hidden):
        return "allocated", _allocated(facts, ruling, strangers, limits)
    if reading is not None and (broken := _broken(reading)):
        return "broken", broken
    unknown = _unknown(facts, limits)
    if facts.static.mig is not None:
        return "mig", _mig(facts, unknown)
    if unknown:
        return "unknown", unknown
    if facts.claims:
        return "reserved", claims_words(facts.claims)
    if ruling is not None and ruling.withheld:
        return "reserved", ruling.withheld
    if reading is None:  # _unknown allows that only where only the scheduler shows the GPU
        return "free", noted("free for Slurm; NVML not seen", ruling)
    if busy := _busy(reading, limits):
        return "busy", busy if ruling is None else _against(ruling, busy, reading)
    if _occupied(facts.static, reading, limits):
        used = (reading.memory_used or 0) / 2**30
        return "occupied", f"{used:.1f} GiB in use by a process that is not visible here"
    if not facts.one_shot:
        if facts.previous is None:
            return "unknown", AWAITS_SECOND
        if earlier := _broken(facts.previous) or _unreadable(facts.static, facts.previous):
            return "unknown", f"a moment ago: {earlier}"
        if earlier := _busy(facts.previous, limits):
            return "busy", f"a moment ago: {earlier}"
        if _occupied(facts.static, facts.previous, limits):
            return "occupied", "a moment ago: memory in use by a process that is not visible here"
    return "free", noted("no process, no reservation", ruling)


def _mig(facts: Facts, unknown: str | None) -> str:
    """Return the reason shown for a GPU in MIG mode; its devices have their own states."""
    words = "in MIG mode: its devices can be reserved" if facts.static.mig else "in MIG mode"
    if not facts.static.mig and not unknown:
        words += ", without devices"
    return "; ".join(filter(None, (words, unknown, claims_words(facts.claims))))


def noted(words: str, ruling: Ruling | None) -> str:
    """Return ``words`` with a ruling's note."""
    return f"{words}; {ruling.note}" if ruling is not None and ruling.note else words


def _allocated(facts: Facts, ruling: Ruling, strangers: Sequence[Process], limits: Thresholds) -> str:
    """Return which job holds a GPU, and observations that contradict it."""
    words = [_job_words(job) for job in ruling.jobs] or [ruling.hidden]
    if strangers:
        first = strangers[0]
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        words.append(f"{first.user}: {first.name or 'process'} (pid {first.pid}){more} does not belong to that job")
    if foreign := _overlapping(facts):
        words.append("also reserved: " + ", ".join(f"{claim.owner} ({claim.lease})" for claim in foreign))
    if facts.reading is not None and not counted(facts.reading, limits) and unused(facts.idle_for_s, limits):
        words.append(f"unused for {format_duration(limits.idle_after_s)} and more")
    return noted("; ".join(words), ruling)


def _job_words(job: Job) -> str:
    words = f"job {job.id} of {job.user}" + (f" in {job.partition}" if job.partition else "")
    if job.until is not None:
        words += f", until {day_time(job.until)}"
    return words + (f", {job.words}" if job.words else "")


def _against(ruling: Ruling, busy: str, reading: GpuReading) -> str:
    """Return why a GPU is busy that no job holds."""
    if jobs := sorted({process.job for process in reading.processes or [] if process.job}):
        return noted(f"{busy}, of job {', '.join(jobs)}, which Slurm's last answer does not list here", ruling)
    return noted(f"free for Slurm, yet in use: {busy}", ruling)


def _overlapping(facts: Facts) -> list[Claim]:
    """Return the claims of users other than the jobs' owners; within a job its owner may reserve."""
    users = {job.user for job in facts.ruling.jobs} if facts.ruling else set()
    return [claim for claim in facts.claims if users and claim.owner not in users]


def _strangers(facts: Facts, limits: Thresholds) -> list[Process]:
    """Return the processes of users who hold the GPU neither by a job nor by a lease; unknown owners do not count.

    A process belongs to its uid, whatever its GPUBOARD_LEASE is: any user can set that. Exception: root in a container
    may be the holder, so there the variable is accepted.
    """
    reading, jobs = facts.reading, facts.ruling.jobs if facts.ruling else ()
    holders = {claim.owner for claim in facts.claims} | {job.user for job in jobs}
    if reading is None or not holders:
        return []
    leases = {claim.lease for claim in facts.claims}
    ids = {name for job in jobs for name in (job.id, job.number)}
    return [
        p
        for p in reading.processes or ()
        if p.user is not None
        and p.user not in holders
        and p.job not in ids
        and not (p.uid == 0 and p.container is not None and p.lease in leases)
        and not (p.system and _is_service(p, reading, limits))
    ]


def _broken(reading: GpuReading) -> str | None:
    if reading.lost:
        return f"GPU lost: {(reading.error or 'fallen off the bus').removeprefix('GPU is lost: ')}"
    if reading.remap_failed:
        return "row remapping failed: the GPU needs replacement"
    if reading.recovery_action not in {None, "none"}:
        return f"the driver requests: {reading.recovery_action}"
    return None


def _unknown(facts: Facts, limits: Thresholds) -> str | None:
    reading = facts.reading
    if reading is None:
        if facts.unseen:
            return _scheduler_unknown(facts)
        return "no reading of this GPU yet"
    limit_s = max(limits.stale_min_s, limits.stale_intervals * facts.interval_s)
    age_s = facts.age_s + reading.delay_s
    if age_s > limit_s:
        old = f"last reading is {age_s:.0f} s old"
        if reading.error and reading.delay_s > facts.age_s:  # the error, not the connection, is why it is old
            return f"{nvml_error(reading.error)}; {old}"
        return old
    if unreadable := _unreadable(facts.static, reading):
        return unreadable
    if unknown := _scheduler_unknown(facts):
        return unknown
    if facts.claims_error:
        return f"reservations: {facts.claims_error}"
    return None


def _scheduler_unknown(facts: Facts) -> str | None:
    if facts.scheduler_error:
        return f"scheduler: {facts.scheduler_error}"
    return facts.ruling.doubt or None if facts.ruling is not None else None


def nvml_error(text: str) -> str:
    """Return an error of NVML as it is shown.

    >>> nvml_error("Unknown Error"), nvml_error("NVML hangs")
    ('NVML: Unknown Error', 'NVML hangs')
    """
    return text if text.startswith("NVML ") else f"NVML: {text}"


def _unreadable(static: GpuStatic, reading: GpuReading) -> str | None:
    """Return which values a decision needs that this reading lacks."""
    if reading.error:
        return nvml_error(reading.error)
    if static.mig is not None:
        return None  # a MIG parent's own lists are always empty
    needed = {"memory": reading.memory_used, "processes": reading.processes, "compute mode": reading.compute_mode}
    missing = [word for word, value in needed.items() if value is None]
    return f"not readable: {', '.join(missing)}" if missing else None


def _busy(reading: GpuReading, limits: Thresholds) -> str | None:
    processes = counted(reading, limits)
    if processes:
        first = max(processes, key=lambda p: p.memory or 0)
        more = f" and {len(processes) - 1} more" if len(processes) > 1 else ""
        return f"{first.user or 'owner hidden'}: {first.name or 'process'} (pid {first.pid}){more}"
    if reading.utilization is not None and reading.utilization >= limits.busy_utilization:
        return f"{reading.utilization} % utilization, no process visible"
    if reading.compute_mode == PROHIBITED:
        return "compute mode: prohibited"
    if reading.compute_mode in EXCLUSIVE and reading.processes:
        return "compute mode: exclusive, and a process holds it"
    return None


def _occupied(static: GpuStatic, reading: GpuReading, limits: Thresholds) -> bool:
    """Return whether memory in use proves a process; shared host memory proves nothing."""
    return not static.memory_shared and (reading.memory_used or 0) > limits.occupied_memory


def _claim_words(claim: Claim) -> str:
    left = max(0, int(claim.remaining_s))
    span = f"{left // 3600}h{left % 3600 // 60:02d}m" if left >= 3600 else f"{left // 60}m{left % 60:02d}s"
    return f"{claim.owner}, {span} left" + (f": {claim.purpose}" if claim.purpose else "")


def _flags(facts: Facts, strangers: Sequence[Process], limits: Thresholds) -> list[Flag]:
    flags: list[Flag] = []
    reading = facts.reading
    processes = counted(reading, limits) if reading is not None else []
    given = facts.ruling is not None and bool(facts.ruling.jobs or facts.ruling.hidden)
    if strangers:
        flags.append("rogue")
    if (facts.claims or given) and reading is not None and not processes and unused(facts.idle_for_s, limits):
        flags.append("idle")
    if not facts.claims and any(_is_overdue(p, facts.leases) for p in processes):
        flags.append("overdue")
    if any(claim.disputed_with for claim in facts.claims) or _overlapping(facts):
        flags.append("disputed")
    return flags


def _is_overdue(process: Process, leases: frozenset[tuple[str, str]]) -> bool:
    """Return whether the lease in a process's environment has ended; root in a container may act for any owner."""
    if process.lease is None or (process.lease, process.user) in leases:
        return False
    return process.uid != 0 or all(process.lease != lease for lease, _ in leases)


def _sick(reading: GpuReading, narrow: str) -> Iterator[str]:
    """Yield the health problems of a GPU that still works."""
    if errors := reading.ecc_uncorrected:
        yield f"{errors} uncorrected ECC error{'s' * (errors != 1)} since the driver was loaded"
    if reading.remap_pending:
        yield "row remap pending; reset the GPU"
    yield from (THROTTLE_WORDS[word] for word in reading.throttle if word in SERIOUS_THROTTLE)
    if narrow:
        yield narrow
    codes = dict.fromkeys(xid.code for xid in reading.xids or () if xid.code not in _PROGRAMS_XIDS)
    yield from map(xid_words, codes)


def narrow_links(
    gpus: Iterable[GpuStatic], readings: Iterable[GpuReading], widest: Mapping[str, int]
) -> dict[str, str]:
    """Return by UUID how a GPU's PCIe link is too narrow: narrower than before, or than most of its model.

    ``gpus``: those of one node; ``widest``: each link's largest width so far. A width below the GPU's maximum proves
    nothing: many boards and slots have fewer lanes.
    """
    names = {gpu.uuid: gpu.name for gpu in gpus}
    widths = {reading.uuid: reading.pcie_width for reading in readings if reading.pcie_width}
    found: dict[str, str] = {}
    for uuid, width in widths.items():
        alike = [other for peer, other in widths.items() if names.get(peer) == names.get(uuid)]
        wider = [other for other in alike if other > width]
        if width < widest.get(uuid, 0):
            found[uuid] = f"PCIe x{width} of x{widest[uuid]}: narrower than before"
        elif len(alike) > 2 and 2 * len(wider) > len(alike):
            usual = max(wider, key=wider.count)
            found[uuid] = f"PCIe x{width} of x{usual}: narrower than most of its model on this node"
    return found
