"""Simulated GPUs: what they say follows from a description and the clock alone. Claims on them are real.

The description: ``{"cluster": "demo-1000-4242", "model": "NVIDIA H100 80GB HBM3", "count": 8, "memory": 85899345920,
"busy": {"2": {"user": "bob", "command": "python train.py", "memory": 34359738368, "utilization": 87}}}``; ``memory``
and every key of a busy GPU may be left out.
"""

import math
import time

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Optional

GIB = 2**30
_LINKS = 18  # an H100 behind NVSwitch


def prefix(description: "Dict[str, Any]", node: str) -> str:
    """Return what the UUIDs of a node's simulated GPUs start with."""
    return "SIM-%s-%s-" % (description["cluster"], node)


class Simulated:
    """Stands where a Probe would: the same methods, and never anything to wait for."""

    source = "simulated"
    driver = "simulated"
    cuda: "Optional[str]" = None
    error: "Optional[str]" = None

    def __init__(self, description: "Dict[str, Any]", node: str) -> None:
        self.description = description
        self.start_of_uuid = prefix(description, node)
        self.count = int(description.get("count", 8))
        self.memory = int(description.get("memory", 80 * GIB))
        self.version = 1
        self.done = 0

    def start(self) -> int:
        """Return the number of the first pass, which is complete at once."""
        return self.ask()

    def stop(self) -> None:
        """Nothing to stop."""

    def fds(self) -> "List[int]":
        return []

    def on_readable(self, fd: int) -> None:
        raise AssertionError("fd %d is not ours" % fd)

    def check(self, now: float) -> "Optional[float]":
        """Return when to call again: never."""
        return None

    def pids(self) -> "List[int]":
        return []

    def ask(self) -> int:
        self.done += 1
        return self.done

    def statics(self) -> "List[Dict[str, Any]]":
        uuids = [self.start_of_uuid + str(k) for k in range(self.count)]
        return [
            {
                "index": k,
                "uuid": uuid,
                "name": self.description.get("model", "NVIDIA H100 80GB HBM3"),
                "pci_bus_id": "00000000:%02X:00.0" % (16 + k),
                "memory_total": self.memory,
                "memory_reserved": 0,
                "pcie_generation_max": 5,
                "pcie_width_max": 16,
                "numa_node": 2 * k // self.count,
                "cpus": None,
                "links": {peer: _LINKS for peer in uuids if peer != uuid},
                "pci": {
                    peer: 20 if 2 * k // self.count == 2 * j // self.count else 10
                    for j, peer in enumerate(uuids)
                    if j != k
                },
                "mig": None,
            }
            for k, uuid in enumerate(uuids)
        ]

    def readings(self, now: float, describe: "Callable[..., Any]") -> "List[Dict[str, Any]]":
        """Return the GpuReadings; they move with the clock, slowly, as real ones do."""
        busy = self.description.get("busy") or {}
        return [self._reading(k, busy.get(str(k))) for k in range(self.count)]

    def _reading(self, k: int, busy: "Optional[Dict[str, Any]]") -> "Dict[str, Any]":
        at = time.time()
        wave = math.sin(at / 7 + k)
        utilization = 0
        processes: "List[Dict[str, Any]]" = []
        if busy is not None:
            utilization = min(100, max(5, int(busy.get("utilization", 90) + 6 * wave)))
            memory = int(busy.get("memory", self.memory // 2))
            processes.append(
                {
                    "pid": 40000 + k,
                    "type": "compute",
                    "memory": memory,
                    "uid": int(busy.get("uid", 1000)),
                    "user": str(busy.get("user", "bob")),
                    "name": "python",
                    "command": str(busy.get("command", "python train.py")),
                    "started": at - at % 86400,
                }
            )
        return {
            "uuid": self.start_of_uuid + str(k),
            "memory_used": sum(p["memory"] for p in processes),
            "utilization": utilization,
            "temperature": int(31 + utilization * 0.35 + wave),
            "power": round(70 + utilization * 5.8 + 3 * wave, 1),
            "power_limit": 700.0,
            "compute_mode": 0,
            "processes": processes,
            "pcie_generation": 5,
            "pcie_width": 16,
            "ecc_uncorrected": 0,
            "remap_pending": False,
            "remap_failed": False,
            "recovery_action": "none",
        }
