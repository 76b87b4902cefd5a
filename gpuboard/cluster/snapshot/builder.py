"""SnapshotBuilder: readings + claims + scheduler → Snapshot, with a memo of the last one.

From one second to the next nearly every GPU changes in numbers only: utilization, temperature, power, run times of
its processes. The memo keeps what each view was made from, without its numbers: judging a GPU and making its view
takes 9 µs. While that is the same, the new numbers are put into the view when somebody looks at it (``MovedGpus``),
which a board does for the nodes that it shows. Even the comparison is saved where readings have the same ``base_of``
their GPUs, which the feed keeps while only numbers change. The first snapshot of a builder judges everything; over
random histories the tests compare each later one with the first one of a new builder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpuboard.cluster.snapshot.views import (
    Held,
    NodeFacts,
    Scheduled,
    View,
    gpu_view,
    idle_for_s,
    in_order,
    is_unseen,
    loads_of,
    node_claims,
    node_view,
    runtime_s,
    stale_after_s,
    standing,
)
from gpuboard.model.gpu import GpuReading, GpuStatic, Load
from gpuboard.model.late import base_of
from gpuboard.model.reading import Claim, GpuNumbers, Reading, numbers_of, without_details
from gpuboard.model.snapshot import GpuValues, GpuView, MovedGpus, NodeView, Snapshot
from gpuboard.model.state import Thresholds, claims_words, counted, rests_on_memory, unused
from gpuboard.model.text import clean
from gpuboard.model.units import iso

_NO_CLAIMS: list[Claim] = []
_NO_LOADS: list[Load] = []


class _GpuMemo(msgspec.Struct, gc=False):
    """A GPU's last view, where the next one may differ in numbers only."""

    stable: GpuReading  # its newest two readings without their numbers
    in_use: bool  # by a process that counts: then neither memory nor utilization decides anything
    shared: bool  # its memory is the host's
    of_lease: bool  # one of its processes names a lease
    claims: list[Claim]
    allocated: bool  # to a job
    unused: bool  # long enough that a held GPU is called idle
    base: GpuReading | None = None  # one that was compared with ``stable``: mostly the same in the next reading


class _NodeMemo:
    """A node's last view."""

    def __init__(self, facts: NodeFacts, scheduled: Scheduled | None) -> None:
        self.facts = facts
        self.scheduled = scheduled
        self.order: list[GpuStatic] = in_order(facts, scheduled)
        self.uuids = [gpu.uuid for gpu in self.order]
        self.gpus: list[_GpuMemo | None] = [None] * len(self.order)
        self.judged: list[GpuView] = []  # the GPUs of the last view, with numbers of any reading
        self.base: Sequence[GpuReading] | None = None  # of the newest reading's GPUs, if it has these, in this order
        self.stable: Reading | None = None
        self.view: NodeView | None = None  # None: not made yet
        self.held: Mapping[str, Sequence[Claim]] = {}  # the claims in the view of a node that is not read
        self.known = False  # every GPU has a memo
        self.constant = False  # … and none changes before the next reading
        self.by_numbers: list[tuple[int, _GpuMemo]] = []  # GPUs that memory and utilization can make others, by place
        self.by_time: list[tuple[str, _GpuMemo]] = []  # … that become idle while they are held, by UUID
        self.claimed: list[tuple[int, _GpuMemo]] = []

    def note(self) -> None:
        """Note what can change the GPUs, after they were judged."""
        known = [(place, last) for place, last in enumerate(self.gpus) if last is not None]
        self.claimed = [(place, last) for place, last in known if last.claims]
        self.known = len(known) == len(self.gpus)
        self.by_numbers = [(place, last) for place, last in known if not last.in_use]
        self.by_time = [(self.uuids[place], last) for place, last in known if last.allocated or last.claims]
        self.constant = self.known and not self.by_time


class SnapshotBuilder:
    """Builds the snapshots of one fleet. For any thread."""

    def __init__(self, make_way: Callable[[], None] = lambda: None) -> None:
        """``make_way``: called for each node of a snapshot; may sleep."""
        self._make_way = make_way
        self._lock = threading.Lock()
        self._nodes: dict[str, _NodeMemo] = {}
        self._claims: dict[str, tuple[Reading, list[Claim]]] = {}
        self._leases: frozenset[tuple[str, str]] = frozenset()
        self._settings: object = None

    def snapshot(self, nodes: Sequence[NodeFacts], view: View) -> Snapshot:
        """Return the cluster at one moment."""
        with self._lock:
            settings = (view.thresholds, view.users, view.interval_s, view.one_shot)
            if settings != self._settings:
                self._nodes.clear()
                self._claims.clear()
                self._settings = settings
            claims = ((facts, self._claims_of(facts, view.users)) for facts in nodes)
            held = _held(
                (facts.name, standing(found, facts, view.scheduled.get(facts.name))) for facts, found in claims
            )
            same_leases = held.leases == self._leases
            self._leases = held.leases
            return Snapshot(
                schema=1,
                at=iso(view.at),
                cluster=view.cluster,
                nodes=[self._node(facts, held, same_leases, view) for facts in nodes],
                scheduler=view.scheduler,
            )

    def claims(self, facts: NodeFacts, users: Mapping[str, str]) -> list[Claim]:
        """Return the claims in a node's newest reading, as ``node_claims`` does."""
        with self._lock:
            return self._claims_of(facts, users)

    def _claims_of(self, facts: NodeFacts, users: Mapping[str, str]) -> list[Claim]:
        reading = facts.reading
        if reading is None or not reading.claims:
            return []
        last = self._claims.get(facts.name)
        if last is not None and last[0] is reading:
            return last[1]
        if last is not None and _same_claims(last[0].claims, reading.claims):
            found = [
                replace(cleaned, remaining_s=claim.remaining_s, age_s=claim.age_s)
                for cleaned, claim in zip(last[1], reading.claims, strict=True)
            ]
        else:
            found = node_claims(facts, users)
        self._claims[facts.name] = (reading, found)
        return found

    def _node(self, facts: NodeFacts, held: Held, same_leases: bool, view: View) -> NodeView:
        self._make_way()
        reading = facts.reading
        age_s = max(0.0, view.now - facts.arrived)
        scheduled = view.scheduled.get(facts.name)
        on_gpus = held.on(facts.name)  # which the scheduler's jobs can change without a new reading
        memo = self._nodes.get(facts.name)
        if memo is not None and _rules_alike(memo.scheduled, scheduled):
            memo.scheduled = scheduled
        else:
            memo = None
        if is_unseen(facts, view):
            if memo is not None and memo.view is not None and memo.facts is facts and memo.held == on_gpus:
                memo.view = replace(memo.view, age_s=view.scheduler.age_s if view.scheduler else None)
                return memo.view
            memo = self._nodes[facts.name] = _NodeMemo(facts, scheduled)
            memo.view = node_view(facts, _gpus(memo, facts, held, same_leases, view), view)
            memo.held = on_gpus
            return memo.view
        if reading is None or age_s > stale_after_s(facts, view):
            self._nodes.pop(facts.name, None)
            return node_view(facts, _gpus(_NodeMemo(facts, scheduled), facts, held, same_leases, view), view)
        stable = _without_numbers(reading)
        if memo is None or memo.stable != stable or not _same_frame(memo.facts, facts):
            memo = self._nodes[facts.name] = _NodeMemo(facts, scheduled)
        if memo.view and memo.constant and not on_gpus and same_leases and facts is memo.facts:
            gpus = memo.view.gpus
        else:
            gpus = _gpus(memo, facts, held, same_leases, view)
        if memo.view is None:
            memo.view = node_view(facts, gpus, view)
        else:
            memo.view = replace(
                memo.view,
                age_s=round(age_s, 3),
                cpu_percent=reading.cpu_percent,
                memory_used=reading.memory_used,
                memory_total=reading.memory_total,
                load1=reading.load1,
                net_received=reading.net_received,
                net_sent=reading.net_sent,
                gpus=gpus,
            )
        memo.facts, memo.stable = facts, stable
        return memo.view


def _held(on_nodes: Iterable[tuple[str, Sequence[Claim]]]) -> Held:
    """Return what the claims on all nodes hold; ``on_nodes``: by name."""
    claims: dict[str, dict[str, list[Claim]]] = {}
    for node, on_node in on_nodes:
        for claim in on_node:
            if claim.state == "live":
                claims.setdefault(node, {}).setdefault(claim.uuid, []).append(claim)
    live = (claim for on_node in claims.values() for on_gpu in on_node.values() for claim in on_gpu)
    return Held(claims, frozenset((claim.lease, claim.owner) for claim in live))


def _gpus(memo: _NodeMemo, facts: NodeFacts, held: Held, same_leases: bool, view: View) -> Sequence[GpuView]:
    """Return a node's GPUs: with other numbers where that is enough, else judged."""
    reading, previous, limits, on_gpus = facts.reading, facts.previous, view.thresholds, held.on(facts.name)
    # What the GPUs of ``memo`` were compared with last time is not compared again.
    followed = previous is memo.facts.reading or facts is memo.facts or view.one_shot
    compared = (reading,) if followed else (reading, previous)
    if reading is not None and same_leases and _stays(memo, compared, facts, on_gpus, view):
        return _with_later_numbers(memo, numbers_of(reading.gpus), on_gpus, reading, view)
    now, before = _aligned(reading, memo.uuids), _aligned(None if followed else previous, memo.uuids)
    memo.base = base_of(reading.gpus) if reading is not None and now is reading.gpus else None
    again: dict[int, GpuView] = {}  # judged now, by their places
    whole: dict[int, GpuView] = {}  # … from all that was read of them
    newest = zip(base_of(now), numbers_of(now), strict=True)
    earlier = zip(base_of(before), numbers_of(before), strict=True)
    for place, (uuid, last, one, another) in enumerate(zip(memo.uuids, memo.gpus, newest, earlier, strict=True)):
        claims = on_gpus.get(uuid, _NO_CLAIMS)
        if (
            last is not None
            and _decides_the_same(*one, last, limits)
            and (followed or _decides_the_same(*another, last, limits))
            and (claims is last.claims or _same_claims(claims, last.claims))
            and ((not claims and not last.allocated) or unused(idle_for_s(uuid, facts, view), limits) == last.unused)
            and (same_leases or not last.of_lease)
        ):
            last.claims, last.base = claims, one[0]
        else:
            static = memo.order[place]
            more = one[0] is not None and _is_more_than_numbers(one[0], static, limits)
            later = isinstance(one[1], GpuNumbers) and not more
            gpu = without_details(now, place) if later else now[place]
            readings = (gpu, without_details(_aligned(previous, memo.uuids), place))
            made = again[place] = gpu_view(static, readings, facts, held, view)
            if not later:
                whole[place] = made
            memo.gpus[place] = None if more else _gpu_memo(readings, facts, claims, made, view)
    if again:
        memo.judged = [again.get(place, old) for place, old in enumerate(memo.judged or again.values())]
        memo.note()
    if reading is None or len(whole) == len(now):
        return memo.judged
    numbers = [whole.get(place) or gpu or memo.judged[place] for place, gpu in enumerate(numbers_of(now))]
    return _with_later_numbers(memo, numbers, on_gpus, reading, view)


def _stays(
    memo: _NodeMemo,
    readings: Sequence[Reading | None],
    facts: NodeFacts,
    on_gpus: Mapping[str, Sequence[Claim]],
    view: View,
) -> bool:
    """Return whether no GPU is judged again, as only numbers have changed: nearly always."""
    if not memo.known or memo.base is None or len(memo.claimed) != len(on_gpus):
        return False
    limits, busy = view.thresholds, facts.last_busy
    for reading in readings:
        if reading is None or base_of(reading.gpus) is not memo.base:
            return False
        numbers = numbers_of(reading.gpus)
        for one in numbers:  # loops: all() of a generator takes longer, for each of 8,000 GPUs
            if one.memory_used is None:
                return False
        for place, last in memo.by_numbers:
            if not _is_quiet(numbers[place], last, limits):
                return False
    for uuid, last in memo.by_time:  # as ``unused`` of ``idle_for_s``, without two calls for each GPU
        if (view.now - busy.get(uuid, view.now) >= limits.idle_after_s) != last.unused:
            return False
    return all(_same_claims(on_gpus.get(memo.uuids[place], _NO_CLAIMS), last.claims) for place, last in memo.claimed)


def _with_later_numbers(
    memo: _NodeMemo, numbers: Sequence[GpuValues], on_gpus: Mapping[str, Sequence[Claim]], reading: Reading, view: View
) -> Sequence[GpuView]:
    """Return the views of a memo with other numbers, which callers of the Python interface get at once.

    ``numbers``: a view's own where it was judged now, and GpuNumbers only where ``reading`` has the same GPUs in order.
    """
    judged = memo.judged

    def make() -> list[GpuView]:
        found = []
        for place, (one, new) in enumerate(zip(judged, numbers, strict=True)):
            gpu = reading.gpus[place] if isinstance(new, GpuNumbers) else new
            held = on_gpus.get(one.uuid, _NO_CLAIMS)
            found.append(gpu if isinstance(gpu, GpuView) else _with_numbers(one, gpu, held, reading.at))
        return found

    return make() if view.one_shot else MovedGpus(judged, numbers, make)


def _aligned(reading: Reading | None, uuids: list[str]) -> Sequence[GpuReading | None]:
    """Return a reading's GPUs with these UUIDs (the first of duplicates); nearly always they are all, in this order."""
    gpus = reading.gpus if reading else ()
    if [gpu.uuid for gpu in base_of(gpus)] == uuids:
        return gpus
    found = {gpu.uuid: gpu for gpu in reversed(gpus)}
    return [found.get(uuid) for uuid in uuids]


def _same_frame(last: NodeFacts, facts: NodeFacts) -> bool:
    """Return whether everything besides its readings that a node's view depends on is unchanged."""
    return (
        last.known is facts.known
        and last.static is facts.static
        and last.hello is facts.hello
        and last.narrow == facts.narrow
        and last.error == facts.error
    )


def _rules_alike(one: Scheduled | None, other: Scheduled | None) -> bool:
    """Return whether two answers of the scheduler are alike for a node; what is left out only ends claims."""
    if one is None or other is None or one is other:
        return one is other
    return replace(one, asked=other.asked, jobs=other.jobs) == other


def _without_numbers(reading: Reading) -> Reading:
    return replace(
        reading,
        seq=0,
        at=0.0,
        gpus=[],
        claims=[],
        cpu_percent=None,
        memory_used=None,
        memory_total=None,
        load1=None,
        net_received=None,
        net_sent=None,
    )


def _gpu_without_numbers(gpu: GpuReading) -> GpuReading:
    return replace(
        gpu,
        memory_used=None,
        utilization=None,
        temperature=None,
        power=None,
        pcie_generation=None,
        sensors=None,
        loads=_NO_LOADS,
    )


def _decides_the_same(
    base: GpuReading | None, gpu: GpuReading | GpuNumbers | None, last: _GpuMemo, limits: Thresholds
) -> bool:
    """Return whether a GPU would be judged as it was; it differs from ``base`` in numbers alone."""
    if base is None or gpu is None:
        return False
    return (base is last.base or _gpu_without_numbers(base) == last.stable) and _is_quiet(gpu, last, limits)


def _is_more_than_numbers(gpu: GpuReading, static: GpuStatic, limits: Thresholds) -> bool:
    """Return whether ages, MIG devices or processes of unknown memory change a GPU's view: rare."""
    return bool(gpu.delay_s or gpu.xids) or static.mig is not None or rests_on_memory(gpu, limits)


def _is_quiet(gpu: GpuReading | GpuNumbers, last: _GpuMemo, limits: Thresholds) -> bool:
    """Return whether memory and utilization decide nothing: something else does, or they are as of an idle GPU."""
    memory, utilization = gpu.memory_used, gpu.utilization
    return memory is not None and (
        last.in_use
        or (
            (memory <= limits.occupied_memory or last.shared)
            and (utilization is None or utilization < limits.busy_utilization)
        )
    )


def _same_claims(some: Sequence[Claim], others: Sequence[Claim]) -> bool:
    """Return whether claims are equal except for their times, which pass."""
    return len(some) == len(others) and all(
        replace(one, remaining_s=other.remaining_s, age_s=other.age_s) == other
        for one, other in zip(some, others, strict=True)
    )


def _with_numbers(view: GpuView, gpu: GpuReading, held: Sequence[Claim], at: float) -> GpuView:
    """Return a view with the newest numbers; ``at``: the node's clock."""
    processes = view.processes
    if processes:
        processes = [
            replace(
                process,
                runtime_s=runtime_s(process.started, at),
                sm_percent=load.sm_percent,
                cpu_percent=load.cpu_percent,
                host_memory=load.host_memory,
            )
            for process, load in zip(processes, loads_of(gpu, len(processes)), strict=True)
        ]
    return replace(
        view,
        reason=clean(claims_words(held)) if view.state == "reserved" and held else view.reason,
        memory_used=gpu.memory_used,
        utilization=gpu.utilization,
        temperature=gpu.temperature,
        power=gpu.power,
        pcie_generation=gpu.pcie_generation,
        sensors=gpu.sensors,
        processes=processes,
    )


def _gpu_memo(
    readings: tuple[GpuReading | None, GpuReading | None],
    facts: NodeFacts,
    claims: list[Claim],
    made: GpuView,
    view: View,
) -> _GpuMemo | None:
    """Return what the next view of a GPU can be made from; None where the GPU must be judged again."""
    gpu, before = readings
    if gpu is None:
        return None
    in_use = bool(counted(gpu, view.thresholds))
    is_unused = unused(idle_for_s(made.uuid, facts, view), view.thresholds)
    memo = _GpuMemo(
        stable=_gpu_without_numbers(gpu),
        in_use=in_use,
        shared=made.memory_shared,
        of_lease=any(process.lease is not None for process in gpu.processes or ()),
        claims=claims,
        allocated=made.state == "allocated",
        unused=is_unused,
    )
    if not _is_quiet(gpu, memo, view.thresholds):
        return None
    if view.one_shot:
        return memo
    return memo if before is not None and _decides_the_same(before, before, memo, view.thresholds) else None
