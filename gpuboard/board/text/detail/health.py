"""A GPU's health with its evidence (pure). What could not be read is shown as unknown, never as good."""

from __future__ import annotations

from typing import NamedTuple

from gpuboard.model.gpu import SERIOUS_THROTTLE, THROTTLE_WORDS, xid_words
from gpuboard.model.snapshot import GpuView, XidView
from gpuboard.model.units import format_duration

NOT_READABLE = "not readable"


class Evidence(NamedTuple):
    """One health check. ``role`` of Look: good, warn, bad, unknown, or dim for neither."""

    name: str
    words: str
    role: str


def evidence(gpu: GpuView) -> list[Evidence]:
    """Return all health checks of a GPU, in a fixed order."""
    found = [_ecc(gpu), _remap(gpu), _recovery(gpu), _throttle(gpu), _pcie(gpu), _xids(gpu)]
    if gpu.error is not None:
        return [Evidence("NVML", gpu.error, "bad"), *found]
    return found


def _ecc(gpu: GpuView) -> Evidence:
    count = gpu.ecc_uncorrected
    if count is None:
        return Evidence("ECC", NOT_READABLE, "unknown")
    words = f"{count} uncorrected since the driver loaded"
    return Evidence("ECC", words, "bad" if count else "good")


def _remap(gpu: GpuView) -> Evidence:
    if gpu.remap_failed:
        return Evidence("Row remap", "failed: the GPU needs replacement", "bad")
    if gpu.remap_pending:
        return Evidence("Row remap", "pending: takes effect with the next reset of the GPU", "warn")
    if gpu.remap_pending is None:
        return Evidence("Row remap", NOT_READABLE, "unknown")
    return Evidence("Row remap", "none pending" if gpu.remap_failed is None else "none pending, none failed", "good")


def _recovery(gpu: GpuView) -> Evidence:
    action = gpu.recovery_action
    if action is None:
        return Evidence("Recovery", NOT_READABLE, "unknown")
    return Evidence("Recovery", "none" if action == "none" else f"requested by the driver: {action}",
                    "good" if action == "none" else "bad")  # fmt: skip


def _throttle(gpu: GpuView) -> Evidence:
    if not gpu.throttle:
        silent = gpu.error is not None or gpu.utilization is gpu.temperature is gpu.power is None
        return Evidence("Clocks", NOT_READABLE if silent else "not slowed down", "unknown" if silent else "good")
    words = "; ".join(THROTTLE_WORDS.get(word, word) for word in gpu.throttle)
    return Evidence("Clocks", words, "warn" if SERIOUS_THROTTLE & set(gpu.throttle) else "dim")


def _pcie(gpu: GpuView) -> Evidence:
    if gpu.pcie_generation is None and gpu.pcie_width is None:
        return Evidence("PCIe", NOT_READABLE, "unknown")
    now = f"generation {_or_unknown(gpu.pcie_generation)}, x{_or_unknown(gpu.pcie_width)}"
    most = f"at most {_or_unknown(gpu.pcie_generation_max)}, x{_or_unknown(gpu.pcie_width_max)}"
    below = gpu.pcie_width is not None and gpu.pcie_width_max is not None and 0 < gpu.pcie_width < gpu.pcie_width_max
    slow = (gpu.pcie_generation or 0) < (gpu.pcie_generation_max or 0)
    note = " (it rises under load)" if slow and not below else ""
    if narrow := next((words for words in gpu.sick if words.startswith("PCIe")), ""):
        return Evidence("PCIe", f"{now} now; {most}; {narrow.partition(': ')[2]}", "warn")
    role = "dim" if below else "good"  # many slots and boards have no more
    return Evidence("PCIe", f"{now} now; {most}{note}", role)


def _xids(gpu: GpuView) -> Evidence:
    if gpu.xids is None:
        return Evidence("XID", "not readable: the driver does not report them", "unknown")
    if not gpu.xids:
        return Evidence("XID", "none while gpuboard was connected", "good")
    return Evidence("XID", "; ".join(_xid(xid) for xid in gpu.xids), "warn")


def _xid(xid: XidView) -> str:
    return f"{xid.code}, {format_duration(xid.age_s)} ago: {xid_words(xid.code).split(': ', 1)[1]}"


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else str(value)
