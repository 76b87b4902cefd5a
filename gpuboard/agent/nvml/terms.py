"""The names of NVML's numbers in readings (gpuboard/model/gpu.py); pure. The numbers are those of nvml.h."""

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Set, Tuple

# Values of an NVML process's mark that are not GPUs.
NO_GPU = 255  # between GPUs
XIDS = 254  # reading the errors of all GPUs
RATES = 253  # measuring what GPUs do beyond utilization
RATE_SPAN_S = 0.4  # shortest time over which that is measured

# NVML_TOPOLOGY_* (INTERNAL 0 … SYSTEM 50) → the levels of NVIDIA's best-effort rule
LEVELS = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}

_THROTTLE = (
    (0x08, "hw_slowdown"),
    (0x40, "hw_thermal"),
    (0x80, "hw_power_brake"),
    (0x20, "sw_thermal"),
    (0x04, "sw_power_cap"),
)
_RECOVERY = {
    0: "none",
    1: "GPU reset",
    2: "node reboot",
    3: "drain of peer-to-peer traffic",
    4: "drain and GPU reset",
    5: "recovery of the IMEX domain",
    6: "bus reset",
    7: "system reboot",
}
# GPUs of a system on a chip, whose only memory is the host's. Those of Grace (GH200, GB200) have memory of their own.
_UNIFIED = frozenset(("GB10", "Orin", "Thor", "Xavier", "Tegra", "nvgpu"))  # words of their names
_PAUSE_S, _PAUSES = 5.0, 10.0
NO_DRIVER = "no NVIDIA driver here (libnvidia-ml.so.1 not found)"
_WORDS = {
    9: "the NVIDIA driver is not loaded on this node",
    12: NO_DRIVER,
    15: "GPU is lost: it has fallen off the bus or cannot be reached",
    18: "driver/library version mismatch: the driver was updated; reload its kernel modules or reboot",
}


def pause_s(took_s: float) -> float:
    """Return the seconds between the starts of two runs of nvidia-smi, when one takes ``took_s``.

    A run costs 30 to 1,000 ms of CPU time and holds locks of the driver.
    """
    return max(_PAUSE_S, _PAUSES * took_s)


def words(code: int, default: str) -> str:
    """Return the message for an NVML return code."""
    return _WORDS.get(code, default)


def shares_memory(name: str) -> bool:
    """Return whether a GPU of this name uses the host's memory, which NVML does not report."""
    return not _UNIFIED.isdisjoint("".join(char if char.isalnum() else " " for char in name).split())


def sharing(statics: "List[Dict[str, Any]]") -> "Set[str]":
    """Return the UUIDs of the GPUs whose memory is the host's."""
    return {gpu["uuid"] for gpu in statics if gpu.get("memory_shared")}


def lent(found: "List[Dict[str, Any]]", shared: "Set[str]", name: str, size: "Optional[int]") -> "List[Dict[str, Any]]":
    """Return GpuStatics or GpuReadings where ``name`` of the GPUs that share the host's memory is ``size``."""
    return [dict(gpu, **{name: size}) if gpu["uuid"] in shared else gpu for gpu in found] if shared else found


def throttle(reasons: int) -> "List[str]":
    """Return the names of the throttle reasons that matter to a GPU's user."""
    return [word for bit, word in _THROTTLE if reasons & bit]


def recovery(action: int) -> str:
    """Return the name of a recovery action; "none": nothing to do."""
    return _RECOVERY.get(action, "action %d" % action)


def text(value: "Any") -> "Optional[str]":
    """Return bytes or str as str."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def watts(milliwatts: "Optional[int]") -> "Optional[float]":
    """Return NVML's milliwatts as watts."""
    return None if milliwatts is None else milliwatts / 1000.0


def pci_key(address: str) -> "Tuple[int, ...]":
    """Return domain, bus and device as numbers, since the domain is written with 4 or 8 digits; () for other text."""
    try:
        return tuple(int(part, 16) for part in address.split(".", 1)[0].split(":"))
    except ValueError:
        return ()


def bits(mask: "Any") -> "List[int]":
    """Return the numbers of the bits that are set in 64-bit words, lowest first."""
    return [w * 64 + bit for w, word in enumerate(mask) for bit in range(64) if word >> bit & 1]


def lowest(mask: "Any") -> "Optional[int]":
    """Return the number of the lowest bit set; None for no mask or an empty one."""
    return next(iter(bits(mask or ())), None)


def cpu_list(mask: "Any") -> "Optional[str]":
    """Return a set of CPUs as ``0-15,32-47``; None for no mask or an empty one."""
    ranges: "List[List[int]]" = []
    for cpu in bits(mask or ()):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else "%d-%d" % (a, b) for a, b in ranges) or None
