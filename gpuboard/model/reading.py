"""The messages of the agent of a node: its readings, with the claims that are stored there."""

# No postponed annotations: msgspec would compile each of them, at every start.

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpuboard.model.decoding import from_json
from gpuboard.model.gpu import Count, GpuReading, GpuStatic, Load, Number, Sensors
from gpuboard.model.late import Late, base_of


class ClaimHolder(msgspec.Struct, frozen=True, gc=False):
    """The process that a lease ends with. Pids are reused; boot id and start time make it unique."""

    host: str
    boot_id: str
    pid: Count
    start: Count  # field 22 of /proc/PID/stat, clock ticks since boot


class Claim(msgspec.Struct, frozen=True, gc=False, rename={"since": "from"}):
    """One claim file, evaluated with the node's clock. ``uid`` is the file's owner, not what the file claims."""

    lease: str
    uuid: str
    uid: Count
    owner: str  # the node's name for uid, or its digits
    state: str  # "live" | "lapsed" | "garbage"
    since: Number  # epoch seconds
    until: Number
    remaining_s: Number = 0.0  # until it ends, by the node's clock (never a difference of two hosts' clocks)
    age_s: Number = 0.0  # since its keeper's last heartbeat
    share: Count | None = None  # bytes of the GPU's memory; None: the whole GPU
    holder: ClaimHolder | None = None  # None: detached
    purpose: str = ""
    host: str = ""  # where it was made
    job: str | None = None  # the Slurm job in which it was made; "123.1": requeued once
    nodes: list[str] = []  # every node of the lease
    gpus: Count = 0  # number of GPUs in the lease, so that missing claims are noticed
    disputed_with: list[str] = []  # ids of the leases it conflicts with
    reason: str = ""  # why it is garbage, expired or disputed


class Hello(msgspec.Struct, frozen=True, gc=False, tag_field="t", tag="hello"):
    """The agent's first message."""

    hostname: str
    boot_id: str
    uid: Count
    user: str
    pid: Count
    python: str
    addresses: list[str] = []  # of the node, without loopback
    job: str | None = None  # the Slurm job whose cgroup it is in; with device cgroups NVML shows only that job's GPUs
    shm_free: Count | None = None  # bytes of /dev/shm; None: unknown
    ptrace_scope: Count = 0  # kernel.yama.ptrace_scope where it applies to the user


class Static(msgspec.Struct, frozen=True, gc=False, tag_field="t", tag="static"):
    """Facts read once per NVML start; sent before the first reading and after every change."""

    gpus: list[GpuStatic] = []
    driver: str | None = None
    cuda: str | None = None
    source: str = "nvml"  # "nvml" | "nvidia-smi" | "simulated"


class Reading(msgspec.Struct, frozen=True, gc=False, tag_field="t", tag="reading"):
    """One tick of one node."""

    seq: Count
    at: Number  # the node's clock, epoch seconds (shown, never compared with this host's)
    interval_s: Number  # between two readings; 0: only on request
    gpus: Sequence[GpuReading] = []
    nvml_error: str | None = None  # NVML as a whole: not installed, driver mismatch, hung
    claims: list[Claim] = []
    claims_error: str | None = None  # why this node cannot store claims
    cpu_percent: Number | None = None
    memory_used: Count | None = None
    memory_total: Count | None = None
    load1: Number | None = None
    net_received: Number | None = None  # bytes per second, of the physical interfaces, without RDMA
    net_sent: Number | None = None


class GpuNumbers(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What changes of a GPU at nearly every reading, with ``GpuDetails``; as in ``GpuReading``."""

    memory_used: Count | None = None
    utilization: Count | None = None
    temperature: Count | None = None
    power: Number | None = None
    pcie_generation: Count | None = None


class GpuDetails(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What also changes, and matters only where the GPU is shown."""

    sensors: Sensors | None = None
    loads: list[Load] = []


_NO_DETAILS = GpuDetails()
T = TypeVar("T", GpuReading, GpuReading | None)


class ReadingDelta(msgspec.Struct, frozen=True, gc=False, tag_field="t", tag="delta"):
    """A reading that differs from the reading ``of`` in numbers and claims alone."""

    seq: Count
    of: Count  # the ``seq`` of the last whole reading
    at: Number
    gpus: list[GpuNumbers] = []  # in the order of that reading
    details: msgspec.Raw = msgspec.Raw(b"[]")  # GpuDetails of each: most are never looked at, so decoded late
    claims: list[Claim] = []
    cpu_percent: Number | None = None
    memory_used: Count | None = None
    memory_total: Count | None = None
    load1: Number | None = None
    net_received: Number | None = None
    net_sent: Number | None = None


class LateDelta:
    """A delta as it arrived: most of a large cluster's are never looked at, so they are decoded late."""

    __slots__ = ("_decode", "_line")

    def __init__(self, line: bytes, decode: Callable[[bytes], ReadingDelta]) -> None:
        self._line = line
        self._decode = decode

    def decode(self) -> ReadingDelta:
        """Return the delta. Raises what ``decode`` does."""
        return self._decode(self._line)


def applied(delta: ReadingDelta, old: Reading) -> Reading:
    """Return the reading that a delta describes; ``old`` is of the same connection, and has as many GPUs."""
    base, numbers = base_of(old.gpus), delta.gpus
    details = delta.details.copy()  # a Raw keeps the whole line
    return replace(
        old,
        seq=delta.seq,
        at=delta.at,
        gpus=_MovedGpus(base, numbers, lambda: list(map(_moved, base, numbers, _decoded(details, len(base))))),
        claims=delta.claims,
        cpu_percent=delta.cpu_percent,
        memory_used=delta.memory_used,
        memory_total=delta.memory_total,
        load1=delta.load1,
        net_received=delta.net_received,
        net_sent=delta.net_sent,
    )


class _MovedGpus(Late[GpuReading]):
    """GPUs of earlier readings with the numbers of this one."""

    __slots__ = ("numbers",)

    def __init__(
        self,
        base: Sequence[GpuReading],
        numbers: Sequence[GpuReading | GpuNumbers],
        make: Callable[[], list[GpuReading]],
    ) -> None:
        self.numbers = numbers
        super().__init__(base, make)


def _decoded(details: msgspec.Raw, count: int) -> list[GpuDetails]:
    """Return the details of ``count`` GPUs; none where they are malformed, as the node's agent is not trusted."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = from_json(details, list[GpuDetails])
        if len(found) == count:
            return found
    return [_NO_DETAILS] * count


def numbers_of(gpus: Sequence[T]) -> Sequence[T | GpuReading | GpuNumbers]:
    """Return the numbers of each GPU of a reading; the same as its parts, which need not be made for them."""
    return gpus.numbers if isinstance(gpus, _MovedGpus) else gpus


def without_details(gpus: Sequence[T], place: int) -> T:
    """Return a GPU of a reading; details that are not decoded are left out: its state does not depend on them."""
    if isinstance(gpus, _MovedGpus):
        numbers = gpus.numbers[place]
        return _moved(gpus.base[place], numbers, _NO_DETAILS) if isinstance(numbers, GpuNumbers) else numbers
    return gpus[place]


def _moved(gpu: GpuReading, numbers: GpuReading | GpuNumbers, details: GpuReading | GpuDetails) -> GpuReading:
    """Return a GPU's reading with other numbers."""
    return replace(
        gpu,
        memory_used=numbers.memory_used,
        utilization=numbers.utilization,
        temperature=numbers.temperature,
        power=numbers.power,
        pcie_generation=numbers.pcie_generation,
        sensors=details.sensors,
        loads=details.loads,
    )


def shared(new: Reading, old: Reading | None) -> Reading:
    """Return a reading equal to ``new`` that shares with ``old`` the parts of GPUs in which only numbers have changed.

    Where that is so of all GPUs, in the same order, ``base_of`` their lists is the same object.

    The readings of 1,000 nodes of 8 busy GPUs make 40 MB of objects a second, more than a processor's caches hold.
    Sharing what is unchanged saves cache misses: a snapshot takes 31 ms instead of 50.
    """
    if old is None or len(new.gpus) != len(old.gpus):
        return new
    before = base_of(old.gpus)
    gpus, base, steady = [], [], True
    for one, gpu in zip(before, new.gpus, strict=True):
        moved = _moved(one, gpu, gpu)
        same = moved == gpu
        gpus.append(moved if same else gpu)
        base.append(one if same else gpu)
        steady = steady and same
    return replace(new, gpus=_MovedGpus(before if steady else base, gpus, lambda: gpus))


class CallError(msgspec.Struct, frozen=True, gc=False):
    """Why a call to the agent failed. ``kind`` is for programs, ``message`` for people."""

    kind: str
    message: str
    detail: msgspec.Raw = msgspec.Raw(b"null")


class Reply(msgspec.Struct, frozen=True, gc=False, tag_field="t", tag="reply"):
    """The answer to call ``id``: either ``value`` or ``error``."""

    id: Count
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: CallError | None = None


class Event(msgspec.Struct, frozen=True, gc=False, tag_field="t", tag="event"):
    """Something that happened on a node during a launch; ``data`` depends on ``kind`` (docs/launch-protocol.md)."""

    kind: str
    data: msgspec.Raw = msgspec.Raw(b"null")


Pushed = Hello | Static | Reading | ReadingDelta | LateDelta | Event  # sent without a call
Message = Hello | Static | Reading | ReadingDelta | Event | Reply  # what a line is decoded into
