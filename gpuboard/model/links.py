"""How two GPUs of one node are connected, in the words of ``nvidia-smi topo -m`` (pure)."""

from __future__ import annotations

from gpuboard.model.snapshot import GpuView

LEVELS = {10: "SYS", 20: "NODE", 30: "PHB", 40: "PXB", 50: "PIX", 60: "PSB"}
SELF, UNKNOWN = "X", "?"


def link(gpu: GpuView, other: GpuView) -> str:
    """Return how two GPUs of one node are connected: NV with the number of links, a PCIe level, or ``?``."""
    if gpu.uuid == other.uuid:
        return SELF
    count = gpu.links.get(other.uuid) or other.links.get(gpu.uuid)
    if count:
        return f"NV{count}"
    level = gpu.pci.get(other.uuid, other.pci.get(gpu.uuid))
    return UNKNOWN if level is None else LEVELS.get(level, UNKNOWN)
