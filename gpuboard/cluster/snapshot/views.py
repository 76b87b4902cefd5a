"""Readings + claims + scheduler + now → NodeView and GpuView (pure). All text of nodes and claims is cleaned here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import intern  # thousands of GPUs share few names, and they are counted every second
from typing import Any

import msgspec

from gpuboard.agent.nvml.terms import NO_DRIVER
from gpuboard.model.gpu import GpuReading, GpuStatic, Load, MigReading, MigStatic, NodeState, Process, Xid
from gpuboard.model.reading import Claim, Hello, Reading, Static
from gpuboard.model.snapshot import (
    GpuView,
    JobView,
    MigView,
    NodeView,
    ProcessView,
    SchedulerView,
    XidView,
)
from gpuboard.model.state import Facts, Job, Ruling, Thresholds, Verdict, judge, nvml_error
from gpuboard.model.text import clean
from gpuboard.model.units import iso

XIDS_MAX = 8  # shown per GPU
SLOWEST_S = 300.0  # longest interval accepted from an agent: where it queries nvidia-smi, the agent sets the interval
_NO_CLAIMS: dict[str, list[Claim]] = {}
_NOTHING: list[Any] = []  # shared and never changed: 40,000 empty lists would evict useful data from the caches
_MADE_S = 5.0  # a scheduler's answer is evidence about a claim's job only if queried this much later than the claim
_NO_LOAD = Load()
_LATEST = 4e9  # epoch seconds, in 2096: later times are invented, and datetime has an end


class NodeFacts(msgspec.Struct, frozen=True, gc=False):
    """All that a feed knows of its node. Times: this process's monotonic clock."""

    name: str
    error: str | None = None  # why there is no connection, or no first answer; with the remedy
    hello: Hello | None = None
    static: Static | None = None
    known: dict[str, GpuStatic] = {}  # by UUID: every GPU that this node has listed, unless replaced; text cleaned
    reading: Reading | None = None  # the newest
    previous: Reading | None = None  # the one before, if no reading is missing between them
    arrived: float = 0.0  # when the newest reading arrived
    last_busy: dict[str, float] = {}  # UUID -> when it was last in use, newly reserved, or first seen
    narrow: dict[str, str] = {}  # UUID -> how its PCIe link is too narrow in the newest reading
    closed: bool = False  # no route is permitted: only the scheduler shows the node


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """The scheduler's data on a node; built by ``scheduler_join``, which cleans its text."""

    state: str | None = None
    reason: str = ""
    reservation: str = ""
    gpus: dict[str, Ruling] = {}  # by UUID
    shown: list[GpuStatic] = []  # its GPUs where no agent lists all of them; []: those that the node lists
    doubt: str = ""  # why the state of its GPUs is unknown
    error: str | None = None  # why there is no current answer
    asked: float = 0.0  # when that answer was queried; monotonic
    jobs: frozenset[int] | None = None  # all jobs that hold something; None: there may be others on the node


class View(msgspec.Struct, frozen=True):
    """The clocks and settings that a snapshot depends on."""

    now: float  # monotonic
    at: float  # epoch seconds
    cluster: str
    thresholds: Thresholds
    users: dict[str, str]  # a node's name of a user -> the name to show
    interval_s: float | None
    one_shot: bool
    scheduled: Mapping[str, Scheduled] = {}  # by node, for the nodes known to the scheduler
    scheduler: SchedulerView | None = None


class Held(msgspec.Struct, frozen=True):
    """What is reserved in the whole cluster."""

    claims: dict[str, dict[str, list[Claim]]]  # live claims by the node that stores them and the GPU they name
    leases: frozenset[tuple[str, str]]  # (id, owner) of all live leases: any user can reuse an id

    def on(self, node: str) -> dict[str, list[Claim]]:
        """Return the claims stored on a node by GPU. They count on that node only: users can differ between nodes."""
        return self.claims.get(node, _NO_CLAIMS)


def inert_static(gpu: GpuStatic) -> GpuStatic:
    """Return a GPU's facts with all text cleaned; done once on arrival, because they rarely change."""
    devices = gpu.mig and [
        msgspec.structs.replace(device, uuid=clean(device.uuid, 96), profile=clean(device.profile, 32))
        for device in gpu.mig
    ]
    return msgspec.structs.replace(
        gpu,
        uuid=clean(gpu.uuid, 96),
        name=intern(clean(gpu.name, 96)),
        pci_bus_id=clean(gpu.pci_bus_id, 32),
        links={clean(peer, 96): count for peer, count in gpu.links.items()},
        pci={clean(peer, 96): level for peer, level in gpu.pci.items()},
        mig=devices,
    )


def node_claims(facts: NodeFacts, users: Mapping[str, str]) -> list[Claim]:
    """Return the claims in a node's newest reading, text cleaned, users by the names to show."""
    if facts.reading is None:
        return []
    return [
        msgspec.structs.replace(
            claim,
            lease=clean(claim.lease, 64),
            uuid=clean(claim.uuid, 96),
            owner=_user(claim.owner, users),
            purpose=clean(claim.purpose),
            host=clean(claim.host, 255),
            nodes=[clean(name, 255) for name in claim.nodes],
            disputed_with=[clean(lease, 64) for lease in claim.disputed_with],
            reason=clean(claim.reason),
        )
        for claim in facts.reading.claims
    ]


def standing(claims: list[Claim], facts: NodeFacts, scheduled: Scheduled | None) -> list[Claim]:
    """Return a node's claims without those made in jobs that have ended according to the scheduler.

    So they do not block the GPUs' next user; without a scheduler's answer they expire. The answer is evidence only if
    it was queried after the claim was made, and if it covers all that is held on the node.
    """
    if scheduled is None or scheduled.jobs is None or not any(claim.job for claim in claims):
        return claims
    offset = facts.arrived - (facts.reading.at if facts.reading else 0.0)  # node's clock → ours, plus transit time
    return [
        claim
        for claim in claims
        if (number := job_number(claim.job)) is None
        or number in scheduled.jobs
        or scheduled.asked <= min(facts.arrived, offset + claim.since) + _MADE_S
    ]


def job_number(tag: str | None) -> int | None:
    """Return the number of the job that a claim was made in (``123``, ``123.1``); None if it names none."""
    digits = (tag or "").partition(".")[0]
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 10 else None


def interval_s(facts: NodeFacts, view: View) -> float:
    """Return a node's interval: as configured, or as reported by its agent where that is longer."""
    reported = facts.reading.interval_s if facts.reading else 0.0
    return max(view.interval_s or 0.0, min(reported, SLOWEST_S))


def stale_after_s(facts: NodeFacts, view: View) -> float:
    """Return the age at which a node's newest reading is stale."""
    return max(view.thresholds.stale_min_s, view.thresholds.stale_intervals * interval_s(facts, view))


def in_order(facts: NodeFacts, scheduled: Scheduled | None = None) -> list[GpuStatic]:
    """Return every GPU that the node has ever listed, by NVML's index; or the scheduler's list, where it has one."""
    if scheduled is not None and scheduled.shown:
        return scheduled.shown
    return sorted(facts.known.values(), key=lambda gpu: (gpu.index, gpu.uuid))


def node_view(facts: NodeFacts, gpus: Sequence[GpuView], view: View) -> NodeView:
    """Return a node's view with the views of its GPUs."""
    if is_unseen(facts, view):
        return _unseen_view(facts, gpus, view)
    reading, static, hello = facts.reading, facts.static, facts.hello
    scheduled = view.scheduled.get(facts.name)
    age_s = max(0.0, view.now - facts.arrived) if reading else None
    state: NodeState
    if age_s is not None and age_s <= stale_after_s(facts, view):
        state, error = "up", facts.error
    elif facts.error is not None or reading is None:
        state, error = "unreachable", facts.error or "no answer yet"
    else:
        state, error = "stale", f"no reading for {age_s:.0f} s"
    if error is None and reading is not None and reading.nvml_error:
        error = nvml_error(reading.nvml_error)
    return NodeView(
        name=facts.name,
        state=state,
        scheduler_state=scheduled.state if scheduled else None,
        scheduler_reason=scheduled.reason or None if scheduled else None,
        scheduler_reservation=scheduled.reservation or None if scheduled else None,
        error=None if error is None else clean(error),
        age_s=None if age_s is None else round(age_s, 3),
        source=_short(static.source) or "nvml" if static else "nvml",
        driver=_short(static.driver) if static else None,
        cuda=_short(static.cuda) if static else None,
        cpu_percent=reading.cpu_percent if reading else None,
        memory_used=reading.memory_used if reading else None,
        memory_total=reading.memory_total if reading else None,
        gpus=gpus,
        hostname=_short(hello.hostname, 255) if hello else None,
        addresses=[clean(address, 64) for address in hello.addresses] if hello else [],
        claims_error=_short(reading.claims_error, 512) if reading else None,
        load1=reading.load1 if reading else None,
        net_received=reading.net_received if reading else None,
        net_sent=reading.net_sent if reading else None,
        connected=hello is not None and facts.error is None,
        connecting=state == "unreachable" and _is_awaited(facts),
    )


def hides_gpus(node: NodeView) -> bool:
    """Return whether a node of which no GPU is known may have some; one without a driver has none."""
    lists_all = node.state == "up" and (node.error in {None, nvml_error(NO_DRIVER)} or node.source == "slurm")
    return not node.gpus and not lists_all


def is_unseen(facts: NodeFacts, view: View) -> bool:
    """Return whether only the scheduler shows a node: it was never read, or no route to it is permitted now."""
    return facts.name in view.scheduled and (facts.closed or facts.reading is None)


def _is_awaited(facts: NodeFacts) -> bool:
    return facts.reading is None and facts.error is None and not facts.closed


def _unseen_view(facts: NodeFacts, gpus: Sequence[GpuView], view: View) -> NodeView:
    scheduled = view.scheduled[facts.name]
    error = scheduled.doubt or facts.error
    state: NodeState = "up"
    if scheduled.error is not None:
        state, error = ("stale" if scheduled.state else "unreachable"), facts.error or f"scheduler: {scheduled.error}"
    elif scheduled.doubt:
        state = "unreachable"
    return NodeView(
        name=facts.name,
        state=state,
        scheduler_state=scheduled.state,
        scheduler_reason=scheduled.reason or None,
        scheduler_reservation=scheduled.reservation or None,
        error=None if error is None else clean(error),
        age_s=view.scheduler.age_s if view.scheduler else None,
        source="slurm",
        gpus=gpus,
        connecting=state == "unreachable" and not scheduled.doubt and _is_awaited(facts),
    )


def gpu_view(
    static: GpuStatic, readings: tuple[GpuReading | None, GpuReading | None], facts: NodeFacts, held: Held, view: View
) -> GpuView:
    """Return one GPU, judged; ``readings``: from its node's newest reading and from the one before."""
    now, before = readings
    scheduled = view.scheduled.get(facts.name)
    unseen = is_unseen(facts, view) or (static.uuid not in facts.known and _shows_others(facts))
    reading = None if unseen else _reading_of(static, now, facts, facts.reading)
    previous = None if view.one_shot else _reading_of(static, before, facts, facts.previous)
    about = Facts(
        static=static,
        reading=_named(reading, view.users),
        previous=_named(previous, view.users),
        age_s=max(0.0, view.now - facts.arrived) if facts.reading else 0.0,
        interval_s=interval_s(facts, view) or 1.0,
        one_shot=view.one_shot,
        claims=tuple(held.on(facts.name).get(static.uuid, ())),
        claims_error=facts.reading.claims_error if facts.reading else None,
        ruling=_ruling(scheduled, static.uuid, view.users),
        scheduler_error=scheduled.error if scheduled else None,
        unseen=unseen,
        leases=held.leases,
        narrow=facts.narrow.get(static.uuid, ""),
        idle_for_s=idle_for_s(static.uuid, facts, view),
    )
    verdict = judge(about, view.thresholds)
    mig = [_mig(device, about, facts, held, view) for device in static.mig or []]
    processes = _processes(reading, verdict, facts, view)
    flags = list(verdict.flags)
    if mig:
        processes = _with_those_of_devices(processes, mig)
        if "rogue" not in flags and any(process.rogue for process in processes or ()):
            flags.insert(0, "rogue")
    return GpuView(
        index=static.index,
        uuid=static.uuid,
        name=static.name,
        pci_bus_id=static.pci_bus_id,
        state=verdict.state,
        reason=clean(verdict.reason),
        flags=flags or _NOTHING,
        sick=list(verdict.sick) or _NOTHING,
        memory_used=reading.memory_used if reading else None,
        memory_total=static.memory_total,
        memory_shared=static.memory_shared,
        utilization=reading.utilization if reading else None,
        temperature=reading.temperature if reading else None,
        power=reading.power if reading else None,
        power_limit=reading.power_limit if reading else None,
        processes=processes,
        leases=[claim.lease for claim in about.claims] or _NOTHING,
        jobs=_jobs(about.ruling) or _NOTHING,
        mig=mig or _NOTHING,
        numa_node=static.numa_node,
        links=static.links,
        pci=static.pci,
        throttle=([clean(word, 32) for word in reading.throttle] if reading else None) or _NOTHING,
        compute_mode=reading.compute_mode if reading else None,
        error=_short(reading.error, 512) if reading else None,
        delay_s=reading.delay_s if reading else 0.0,
        memory_reserved=static.memory_reserved,
        pcie_generation=reading.pcie_generation if reading else None,
        pcie_generation_max=static.pcie_generation_max,
        pcie_width=reading.pcie_width if reading else None,
        pcie_width_max=static.pcie_width_max,
        ecc_uncorrected=reading.ecc_uncorrected if reading else None,
        remap_pending=reading.remap_pending if reading else None,
        remap_failed=reading.remap_failed if reading else None,
        sensors=reading.sensors if reading else None,
        recovery_action=_short(reading.recovery_action) if reading else None,
        xids=_xids(reading.xids, facts) if reading else None,
    )


def _shows_others(facts: NodeFacts) -> bool:
    """Return whether a node may have more GPUs than it lists: it lists some, or none because a job confines its agent.

    An agent that lists none and reports an error, or is in no job, has lost them.
    """
    reading = facts.reading
    confined = facts.hello is not None and facts.hello.job is not None
    return bool(facts.known) or (confined and (reading is None or not reading.nvml_error))


def idle_for_s(uuid: str, facts: NodeFacts, view: View) -> float | None:
    """Return how long a GPU has been unused since this process reads it; a new lease restarts that time."""
    busy_at = facts.last_busy.get(uuid)
    return None if busy_at is None else max(0.0, view.now - busy_at)


def _reading_of(
    static: GpuStatic, found: GpuReading | None, facts: NodeFacts, reading: Reading | None
) -> GpuReading | None:
    """Return a GPU's part of ``reading``. A GPU that NVML no longer lists has fallen off the bus."""
    if reading is None:
        return None
    if found is not None:
        return found if found.delay_s >= 0 else msgspec.structs.replace(found, error="the reading's age is negative")
    if reading.nvml_error:
        return GpuReading(uuid=static.uuid, error=reading.nvml_error)
    listed = facts.static is not None and any(clean(gpu.uuid, 96) == static.uuid for gpu in facts.static.gpus)
    if listed:
        return GpuReading(uuid=static.uuid, error="missing from the newest reading")
    return GpuReading(uuid=static.uuid, error="NVML no longer lists it", lost=True)


def _ruling(scheduled: Scheduled | None, uuid: str, users: Mapping[str, str]) -> Ruling | None:
    """Return the scheduler's data on a GPU, users by the names to show."""
    ruling = scheduled and scheduled.gpus.get(uuid)
    if not ruling or not users or not ruling.jobs:
        return ruling or None
    jobs = tuple(msgspec.structs.replace(job, user=_user(job.user, users)) for job in ruling.jobs)
    return msgspec.structs.replace(ruling, jobs=jobs)


def _jobs(ruling: Ruling | None) -> list[JobView]:
    return [_job(job) for job in ruling.jobs] if ruling else []


def _job(job: Job) -> JobView:
    return JobView(job.id, job.user, job.partition, None if job.until is None else iso(job.until))


def _mig(device: MigStatic, parent: Facts, facts: NodeFacts, held: Held, view: View) -> MigView:
    """Judge a MIG device like a GPU: by its memory and processes, and by its parent's mode, health and claims."""
    assert parent.static.mig is not None
    static = GpuStatic(
        index=parent.static.index, uuid=device.uuid, name="", pci_bus_id="", memory_total=device.memory_total
    )
    reading = _mig_reading(device.uuid, parent.reading)
    own = list(held.on(facts.name).get(device.uuid, ()))
    about = msgspec.structs.replace(
        parent,
        static=static,
        reading=_named(reading, view.users),
        previous=_named(_mig_reading(device.uuid, parent.previous), view.users),
        claims=(*own, *parent.claims),
        ruling=_ruling(view.scheduled.get(facts.name), device.uuid, view.users) or parent.ruling,
        idle_for_s=None,
    )
    verdict = judge(about, view.thresholds)
    return MigView(
        uuid=device.uuid,
        profile=device.profile,
        state=verdict.state,
        reason=clean(verdict.reason),
        memory_used=reading.memory_used if reading else None,
        memory_total=device.memory_total,
        leases=[claim.lease for claim in about.claims],
        jobs=_jobs(about.ruling),
        processes=_processes(reading, verdict, facts, view),
    )


def _mig_reading(uuid: str, parent: GpuReading | None) -> GpuReading | None:
    if parent is None:
        return None
    found: MigReading | None = next((device for device in parent.mig if device.uuid == uuid), None)
    return msgspec.structs.replace(
        parent,
        uuid=uuid,
        error=parent.error or (found.error if found else "missing from the newest reading"),
        memory_used=found.memory_used if found else None,
        processes=found.processes if found else None,
        utilization=None,  # not measured for MIG devices
        loads=[],  # as above
        mig=[],
    )


def _named(reading: GpuReading | None, users: Mapping[str, str]) -> GpuReading | None:
    """Return a reading with its processes' users by the names to show, comparable with claims' owners."""
    if reading is None or not reading.processes or not users:
        return reading
    named = [p if p.user is None else msgspec.structs.replace(p, user=_user(p.user, users)) for p in reading.processes]
    return msgspec.structs.replace(reading, processes=named)


def loads_of(reading: GpuReading, count: int) -> Sequence[Load]:
    """Return the load of each of the ``count`` processes of a GPU; nothing is known of those that it lists none for."""
    loads = reading.loads
    return loads if len(loads) == count else [*loads, *[_NO_LOAD] * count][:count]


def _processes(reading: GpuReading | None, verdict: Verdict, facts: NodeFacts, view: View) -> list[ProcessView] | None:
    processes = reading.processes if reading else None
    if reading is None or processes is None:
        return None
    return [
        _process(process, load, process.pid in verdict.rogue, facts, view)
        for process, load in zip(processes, loads_of(reading, len(processes)), strict=True)
    ]


def _with_those_of_devices(processes: list[ProcessView] | None, devices: Sequence[MigView]) -> list[ProcessView] | None:
    """Return the processes of a GPU in MIG mode: NVML lists those of its devices for privileged callers only.

    None where neither they nor those of all devices could be read.
    """
    if processes is None and any(device.processes is None for device in devices):
        return None
    of_devices = {(one.pid, one.started): one for device in devices for one in device.processes or ()}
    found = []
    for own in processes or ():
        same = of_devices.pop((own.pid, own.started), None)
        found.append(msgspec.structs.replace(own, rogue=True) if same is not None and same.rogue else own)
    return [*found, *of_devices.values()]


def _process(process: Process, load: Load, rogue: bool, facts: NodeFacts, view: View) -> ProcessView:
    return ProcessView(
        pid=process.pid,
        user=None if process.user is None else _user(process.user, view.users),
        command=clean(process.command or process.name),
        memory=process.memory,
        type=clean(process.type, 16),
        runtime_s=runtime_s(process.started, facts.reading.at) if facts.reading else None,
        lease=_short(process.lease),
        job=_short(process.job),
        container=_short(process.container),
        started=process.started,
        uid=process.uid,
        rogue=rogue,
        sm_percent=load.sm_percent,
        cpu_percent=load.cpu_percent,
        host_memory=load.host_memory,
    )


def runtime_s(started: float | None, at: float) -> float | None:
    """Return a process's run time at ``at``, in tenths of a second; both times by the node's clock."""
    if started is None:
        return None
    return int((at - started) * 10 + 0.5) / 10 if at > started else 0.0  # round() takes four times as long


def _xids(xids: list[Xid] | None, facts: NodeFacts) -> list[XidView] | None:
    if not xids or facts.reading is None:
        return None if xids is None else _NOTHING
    now = facts.reading.at  # by the node's clock, like ``xid.at``
    return [
        XidView(xid.code, iso(min(max(0.0, xid.at), _LATEST)), max(0.0, round(now - xid.at, 1)))
        for xid in xids[:XIDS_MAX]
    ]


def _user(name: str, users: Mapping[str, str]) -> str:
    return clean(users.get(name, name), 64)


def _short(text: str | None, limit: int = 96) -> str | None:
    return None if text is None else clean(text, limit)
