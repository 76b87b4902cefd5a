"""A GPU's static facts and its readings, as reported by the agent on its node.

These are the wire types: the agent sends JSON objects with exactly these keys, and msgspec checks every one, because
what a node sends is untrusted. Unknown is None, never 0. Memory in bytes, temperature in °C, power in W.
"""

# No postponed annotations: msgspec would compile each of them, at every start.

import re
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

# Numbers from a node. The bounds cover what an agent forwards of claims (agent/claims/rules.py) and file times, which
# any user of the node can choose. Larger numbers are malformed: sums, divisions or dates with them would raise.
Count = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Number = Annotated[float, msgspec.Meta(ge=-1e20, le=1e20)]


# Closed vocabularies. What a node sends stays ``str``: a newer agent may know another word.
GpuState = Literal["allocated", "broken", "mig", "unknown", "reserved", "busy", "occupied", "free"]
Flag = Literal["rogue", "idle", "overdue", "disputed", "sick", "mig"]
NodeState = Literal["up", "stale", "unreachable"]


class Process(msgspec.Struct, frozen=True, gc=False):
    """A process on a GPU. ``user`` is None when its owner is hidden: PID namespace, permission, root in a container."""

    pid: Count
    type: str  # "compute" | "graphics"
    memory: Count | None = None  # bytes on this GPU; None where the driver does not report it (MIG, some containers)
    uid: Count | None = None
    system: bool = False  # its owner is a system account of the node, root included
    user: str | None = None
    name: str = ""  # the executable's comm
    command: str = ""  # the command line, at most 512 characters
    started: Number | None = None  # epoch seconds by the node's clock
    lease: str | None = None  # its GPUBOARD_LEASE, where its environment can be read
    job: str | None = None  # Slurm job id from its cgroup
    container: str | None = None  # container id (12 hex digits) from its cgroup


class Load(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a process uses now. Changes at every reading, so it is listed beside the processes."""

    sm_percent: Count | None = None  # of the GPU's time in which its kernels ran, newest sample of the driver
    cpu_percent: Number | None = None  # of one CPU since the previous reading; its own threads, not its children
    host_memory: Count | None = None  # bytes resident in the host's memory, shared pages included (RSS)


def is_mig(uuid: str) -> bool:
    """Return whether a UUID is a MIG device's: NVIDIA's begin with ``MIG-``, the demo's are a GPU's with ``-mig0``."""
    return uuid.startswith("MIG-") or (uuid.startswith("SIM-") and "-mig" in uuid)


_MAKERS = frozenset({"nvidia", "tesla", "geforce", "quadro", "graphics", "device", "generation", "corporation"})
_PACKAGE = re.compile(r"(SXM\d?|HBM\d?e?)", re.IGNORECASE)  # a part of the name that only repeats the model
THROTTLE_WORDS = {
    "hw_slowdown": "slowed down by the hardware",
    "hw_thermal": "too hot, slowed down by the hardware",
    "hw_power_brake": "power brake: requested by the power supply",
    "sw_thermal": "too hot, slowed down by the driver",
    "sw_power_cap": "at its power limit",
}
SERIOUS_THROTTLE = {"hw_thermal", "hw_power_brake", "sw_thermal"}
# The most frequent entries of NVIDIA's list of XID errors.
_XIDS = {
    13: "exception in the graphics engine, mostly caused by a program",
    31: "memory page fault, mostly caused by a program",
    43: "stopped processing, caused by a program",
    45: "cleaned up after an earlier error or a killed program",
    48: "double-bit ECC error",
    61: "internal microcontroller: breakpoint or warning",
    62: "internal microcontroller halted",
    63: "a row remap or page retirement was recorded",
    64: "a row remap or page retirement could not be recorded",
    68: "exception in the video engine, mostly caused by a program",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timed out, mostly caused by a program",
    119: "the GPU system processor (GSP) does not answer",
    120: "the GPU system processor (GSP) has failed",
}


def xid_words(code: int) -> str:
    """Return an XID error with its meaning, if known."""
    return f"XID {code}: {_XIDS.get(code, 'see the list of XID errors in NVIDIA’s documentation')}"


@lru_cache(maxsize=1024)
def short_model(name: str) -> str:
    """Return a GPU's usual name: ``NVIDIA H100 80GB HBM3`` → ``H100 80GB``."""
    words = [word for word in re.split(r"[\s-]+", name) if word and word.lower() not in _MAKERS]
    return " ".join(word for word in words if not _PACKAGE.fullmatch(word)) or name or "?"


def cuda_name(index: int, uuid: str) -> str:
    """Return a GPU's name for CUDA_VISIBLE_DEVICES: CUDA does not accept UUIDs without a prefix (Jetson)."""
    return uuid if uuid.startswith(("GPU-", "MIG-", "SIM-")) else str(index)


class MigStatic(msgspec.Struct, frozen=True, gc=False):
    """A MIG device of a GPU."""

    uuid: str
    profile: str  # "3g.40gb"
    memory_total: Count | None = None
    gpu_instance: Count | None = None
    compute_instance: Count | None = None


class GpuStatic(msgspec.Struct, frozen=True, gc=False):
    """Facts about a GPU that do not change while the driver stays loaded."""

    index: Count
    uuid: str
    name: str
    pci_bus_id: str
    memory_total: Count | None = None  # bytes, including reserved memory
    memory_reserved: Count | None = None  # bytes
    pcie_generation_max: Count | None = None
    pcie_width_max: Count | None = None
    numa_node: Count | None = None
    cpus: str | None = None  # "0-15,32-47"
    links: dict[str, Count] = {}  # peer UUID -> number of active NVLinks (through a switch: of either GPU's)
    pci: dict[str, Count] = {}  # peer UUID -> 10 SYS, 20 NODE, 30 PHB, 40 PXB, 50 PIX, 60 PSB
    mig: list[MigStatic] | None = None  # None: MIG not enabled; []: enabled, no devices
    minor: Count | None = None  # the number of its device file, /dev/nvidia0
    memory_shared: bool = False  # it uses the host's memory, whose size is in memory_total and in its readings


class Sensors(msgspec.Struct, frozen=True, gc=False):
    """Values that decide nothing; None where the driver reports none."""

    performance_state: Count | None = None  # 0: P0, the fastest
    sm_clock: Count | None = None  # MHz
    sm_clock_max: Count | None = None
    memory_clock: Count | None = None
    fan: Count | None = None  # percent of its highest speed
    encoder: Count | None = None  # percent of the last sample period in which it ran
    decoder: Count | None = None
    # Averages between two readings, in percent; GPM of Hopper and later.
    sm_activity: Count | None = None  # of the SMs that had a warp
    sm_occupancy: Count | None = None  # of the warps that the SMs can have
    tensor_activity: Count | None = None  # of the time in which tensor cores worked, in any format
    tensor_hmma: Count | None = None  # the same with 16-bit floats
    tensor_imma: Count | None = None  # with integers
    tensor_dmma: Count | None = None  # with FP64
    dram_activity: Count | None = None  # of the memory's bandwidth
    # Bytes per second, by the GPU; without GPM only while the GPU is shown.
    pcie_sent: Count | None = None
    pcie_received: Count | None = None
    nvlink_sent: Count | None = None  # all links
    nvlink_received: Count | None = None
    nvlink_max: Count | None = None  # of all active links, in each direction; only while the GPU is shown


class MigReading(msgspec.Struct, frozen=True, gc=False):
    """The reading of a MIG device."""

    uuid: str
    memory_used: Count | None = None
    processes: list[Process] | None = None
    error: str | None = None


class Xid(msgspec.Struct, frozen=True, gc=False):
    """An error that the driver reported for a GPU (NVIDIA's XID)."""

    code: Count
    at: Number  # epoch seconds by the node's clock, when the agent got it


class GpuReading(msgspec.Struct, frozen=True, gc=False):
    """The reading of one GPU. A field is None when NVML has no value; ``error`` is set when the whole GPU failed.

    Fields that change at nearly every reading are also in ``GpuNumbers`` or ``GpuDetails`` of reading.py and in the
    snapshot builder, so that such a change costs no new decision about the GPU's state. All places: "A value of a GPU"
    in docs/common-changes.md.
    """

    uuid: str
    error: str | None = None  # NVML's words for a failure of this GPU
    lost: bool = False  # GPU is lost or has fallen off the bus
    delay_s: Number = 0.0  # how much older the values are than the reading they come in (a call hangs)
    memory_used: Count | None = None  # bytes, without reserved memory
    utilization: Count | None = None  # percent of the last sample period in which a kernel ran
    temperature: Count | None = None
    power: Number | None = None
    power_limit: Number | None = None  # the enforced limit
    compute_mode: Count | None = None  # 0 default, 1 exclusive thread, 2 prohibited, 3 exclusive process
    processes: list[Process] | None = None  # None: the list could not be read
    sensors: Sensors | None = None
    loads: list[Load] = []  # of the processes, in their order; [] where the source does not report them
    throttle: list[str] = []  # "hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal", "sw_power_cap"
    pcie_generation: Count | None = None
    pcie_width: Count | None = None
    ecc_uncorrected: Count | None = None  # volatile, since the driver was loaded
    remap_pending: bool | None = None  # a row remap (or page retirement) waits for a reset
    remap_failed: bool | None = None
    recovery_action: str | None = None  # None or "none": nothing to do; else NVML's recommended action
    mig: list[MigReading] = []
    xids: list[Xid] | None = None  # since the agent started, newest first; None: the driver does not report them
