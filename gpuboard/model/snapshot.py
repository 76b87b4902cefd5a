"""The cluster at one moment, in the shape that ``status --json`` prints (schema 1; keys are added, never renamed).

Memory in bytes (used without reserved), temperature in °C, power in W, utilization in percent; None = not available.
"""

# No postponed annotations: msgspec would compile each of them, at every start.

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from gpuboard.model.gpu import Flag, GpuReading, GpuState, NodeState, Sensors
from gpuboard.model.late import Late, base_of
from gpuboard.model.reading import GpuNumbers
from gpuboard.model.units import format_duration

_DELAY_S = 5.0  # values of a GPU older than this at its node's reading do not count as current


class ProcessView(msgspec.Struct, frozen=True, gc=False):
    """A process on a GPU, as shown."""

    pid: int
    user: str | None
    command: str
    memory: int | None
    type: str
    runtime_s: float | None = None
    lease: str | None = None
    job: str | None = None
    container: str | None = None
    started: float | None = None  # epoch seconds by the node's clock; identifies the process together with the pid
    uid: int | None = None
    rogue: bool = False  # its user holds the GPU neither by a lease nor by a job
    sm_percent: int | None = None  # of the GPU's time, newest sample of the driver; None where it reports none
    cpu_percent: float | None = None  # of one CPU, since the previous reading; its own threads, not its children
    host_memory: int | None = None  # resident in the host's memory, shared pages included


class XidView(msgspec.Struct, frozen=True, gc=False):
    """An error that the driver has reported for a GPU since the agent started."""

    code: int  # NVIDIA's XID number
    at: str  # ISO 8601, by the node's clock
    age_s: float


class JobView(msgspec.Struct, frozen=True, gc=False):
    """A scheduler's job that holds a GPU."""

    id: str
    user: str
    partition: str
    until: str | None


class MigView(msgspec.Struct, frozen=True, gc=False):
    """A MIG device."""

    uuid: str
    profile: str
    state: GpuState
    reason: str
    memory_used: int | None
    memory_total: int | None
    leases: list[str] = []
    jobs: list[JobView] = []
    processes: list[ProcessView] | None = None  # also among those of its GPU; None: not readable


class GpuView(msgspec.Struct, frozen=True, gc=False):
    """A GPU with its state, the reason for it, and its newest reading."""

    index: int
    uuid: str
    name: str
    pci_bus_id: str
    state: GpuState
    reason: str
    flags: list[Flag] = []
    memory_used: int | None = None
    memory_total: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    processes: list[ProcessView] | None = None
    leases: list[str] = []
    jobs: list[JobView] = []
    mig: list[MigView] = []
    memory_shared: bool = False  # its memory is the host's, and so are memory_used and memory_total
    sick: list[str] = []  # the reasons for the flag "sick"
    # For the allocator and the detail view; beyond the contract's minimum.
    numa_node: int | None = None
    links: dict[str, int] = {}
    pci: dict[str, int] = {}
    throttle: list[str] = []
    compute_mode: int | None = None
    sensors: Sensors | None = None  # clocks, fan, performance state, video engines
    # Health, with its evidence; None: not readable.
    error: str | None = None  # NVML's words for a failure of this GPU
    delay_s: float = 0.0  # how much older these values are than the node's reading (a call hangs)
    memory_reserved: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool | None = None  # a row remap (or page retirement) waits for a reset
    remap_failed: bool | None = None
    recovery_action: str | None = None  # "none": nothing to do
    xids: list[XidView] | None = None  # the newest few, newest first


def mig_number(gpu: GpuView, uuid: str) -> int | None:
    """Return the number on ``gpu`` of the MIG device with this UUID; None: it has no such device."""
    return next((number for number, device in enumerate(gpu.mig) if device.uuid == uuid), None)


def usable_memory(part: GpuView | MigView) -> int | None:
    """Return the bytes that programs can use: all but what the driver reserves; None: unknown."""
    reserved = (part.memory_reserved or 0) if isinstance(part, GpuView) else 0
    return None if part.memory_total is None else part.memory_total - reserved


def free_memory(part: GpuView | MigView) -> int | None:
    """Return the bytes that programs can still use; None: unknown."""
    usable = usable_memory(part)
    return None if usable is None or part.memory_used is None else usable - part.memory_used


GpuValues = GpuView | GpuReading | GpuNumbers  # what has the numbers of a GPU, by the same names


class NodeView(msgspec.Struct, frozen=True, gc=False):
    """A node with its GPUs; one that was never read has none, and ``error`` has the reason."""

    name: str
    state: NodeState
    scheduler_state: str | None = None
    error: str | None = None
    age_s: float | None = None  # of the newest reading; None: never read
    source: str = "nvml"
    driver: str | None = None
    cuda: str | None = None
    cpu_percent: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    gpus: Sequence[GpuView] = []
    hostname: str | None = None  # the node's own name
    addresses: list[str] = []
    claims_error: str | None = None  # why reservations cannot be held here
    load1: float | None = None
    net_received: float | None = None  # bytes per second, of its physical interfaces, without RDMA
    net_sent: float | None = None
    connected: bool = False  # whether its agent is connected; if not, ``error`` has the reason
    scheduler_reason: str | None = None  # why it is drained or down, set by whom and when
    scheduler_reservation: str | None = None
    connecting: bool = False  # "unreachable" so far, while its first answer is pending


class MovedGpus(Late[GpuView]):
    """GPUs whose newest numbers are put in when one of them is first looked at."""

    __slots__ = ("numbers",)

    def __init__(
        self, judged: Sequence[GpuView], numbers: Sequence[GpuValues], make: Callable[[], list[GpuView]]
    ) -> None:
        """``numbers``: of each GPU, for those who need no view."""
        self.numbers = numbers
        super().__init__(judged, make)


def has_current_values(node: NodeView, gpu: GpuView) -> bool:
    """Return whether a GPU's values are current: its node is up and NVML answers for this GPU."""
    return node.state == "up" and gpu.error is None and gpu.delay_s <= _DELAY_S


def newest_values(node: NodeView) -> Iterable[tuple[GpuView, GpuValues]]:
    """Return each GPU of a node as ``judged`` does, and what has its newest numbers."""
    gpus = node.gpus
    return zip(gpus.base, gpus.numbers, strict=True) if isinstance(gpus, MovedGpus) else zip(gpus, gpus, strict=True)


def judged(node: NodeView) -> Sequence[GpuView]:
    """Return a node's GPUs where states, flags, names and jobs are enough: numbers may be of an earlier reading.

    The same object as long as only numbers have changed.
    """
    return base_of(node.gpus)


class SchedulerView(msgspec.Struct, frozen=True, gc=False):
    """The age and errors of the scheduler's answers."""

    name: str  # "slurm"
    age_s: float | None  # of its newest answer; None: it has not answered yet
    error: str | None = None  # why there is no newer one
    current: bool = False  # whether that answer is recent enough to count
    notes: list[str] = []  # parts of that answer that could not be read or contradict each other


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """Every node's newest reading, each with its age."""

    schema: int
    at: str
    cluster: str
    nodes: list[NodeView]
    scheduler: SchedulerView | None = None  # None: there is none


class Tally(msgspec.Struct, frozen=True):
    """Allocatable units by state: whole GPUs, and MIG devices in place of their GPU."""

    gpus: Counter[GpuState]
    devices: Counter[GpuState]

    @property
    def parts(self) -> list[tuple[str, Counter[GpuState]]]:
        """``7 GPUs`` and ``2 MIG devices``, each with its states; ``0 GPUs`` where there are neither."""
        gpus, devices = self.gpus.total(), self.devices.total()
        parts = [(f"{gpus} GPU{'s' * (gpus != 1)}", self.gpus)] if gpus or not devices else []
        return parts + ([(f"{devices} MIG device{'s' * (devices != 1)}", self.devices)] if devices else [])


def tally(gpus: Iterable[GpuView]) -> Tally:
    """Count GPUs. One in MIG mode counts as its devices; without devices as itself, which cannot be allocated."""
    whole: Counter[GpuState] = Counter()
    devices: Counter[GpuState] = Counter()
    for gpu in gpus:
        if gpu.mig:
            devices.update(device.state for device in gpu.mig)
        else:
            whole[gpu.state] += 1
    return Tally(whole, devices)


def shown_flags(gpu: GpuView) -> list[Flag]:
    """Return the flags that add to the state."""
    return [flag for flag in gpu.flags if flag != gpu.state]


def scheduler_words(seen: SchedulerView | None) -> str:
    """Return a message about a scheduler without a clear answer; "" when its answer is clear."""
    if seen is None or (seen.error is None and (seen.current or seen.age_s is None)):
        notes = seen.notes if seen is not None else []
        more = f"; and {len(notes) - 1} more" if len(notes) > 1 else ""
        return f"Slurm: {notes[0]}{more}" if notes else ""
    error = f": {seen.error}" if seen.error else ""
    if seen.age_s is None:
        return f"Slurm does not answer{error}; no GPU counts as free meanwhile"
    if seen.current:
        return f"Slurm's newest answer is {format_duration(seen.age_s)} old{error}"
    return f"no answer from Slurm for {format_duration(seen.age_s)}{error}; none of its GPUs counts as free meanwhile"
