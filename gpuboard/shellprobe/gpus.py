"""The GPUs of a node without python3, as listings of nvidia-smi show them one after the other (pure)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gpuboard.agent.smi import parse as smi


class Gpus:
    """What is known of them: facts that stay, and the newest values with their age."""

    def __init__(self) -> None:
        self.driver: str | None = None
        self.cuda: str | None = None
        self.pids: list[int] = []  # of their processes
        self._count = 0
        self._indexes: dict[str, int] = {}
        self._facts: dict[int, dict[str, Any]] = {}
        self._values: dict[int, tuple[dict[str, Any], float]] = {}

    def take(self, listing: smi.Listing, began: float) -> None:
        """Take a listing that nvidia-smi began at ``began`` (monotonic)."""
        self._indexes |= listing.number(self._indexes)
        if listing.count != self._count:  # the indexes may mean other GPUs now
            self._facts, self._values = {}, {}
        self._count = listing.count
        self.driver, self.cuda = listing.driver or self.driver, listing.cuda or self.cuda
        for gpu in listing.gpus:
            assert gpu.index is not None  # it has just been numbered
            if "error" not in gpu.facts:
                self._facts[gpu.index] = gpu.facts
            self._values[gpu.index] = (gpu.values, began)
        listed = [values.get("processes") or [] for values, _ in self._values.values()]
        self.pids = sorted({pid for processes in listed for pid, _, _ in processes})

    def statics(self, hostname: str) -> list[dict[str, Any]]:
        """Return the GpuStatic of every GPU; one that was never readable has a name that says so."""
        return [self._facts.get(k) or _unread(hostname, k) for k in range(self._count)]

    def readings(self, hostname: str, described: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the GpuReading of every GPU; ``described``: what is known of processes."""
        found = []
        now = time.monotonic()
        for k in range(self._count):
            uuid = (self._facts.get(k) or _unread(hostname, k))["uuid"]
            if k not in self._values:
                found.append({"uuid": uuid, "error": "not listed by nvidia-smi"})
                continue
            values, began = self._values[k]
            reading = {**values, "uuid": uuid, "delay_s": round(now - began, 2)}
            if (processes := values.get("processes")) is not None:
                reading["processes"] = [
                    {"pid": pid, "type": kind, "memory": memory, **described.get(pid, {})}
                    for pid, kind, memory in processes
                ]
            found.append(reading)
        return found


def _unread(hostname: str, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"unread-{hostname}-{index}",
        "name": "GPU that cannot be read",
        "pci_bus_id": "",
    }
