"""Output of the shell on a node without python3 (gpuboard/shellprobe/script.py) → GPUs, processes and host; pure.

It is untrusted, like everything that nodes send: the owner of a process can put line ends into its name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from gpuboard.agent import proc
from gpuboard.agent.smi import parse as smi

Sections = Mapping[str, str]  # the text of each section of a frame

_OF_PROCESS = re.compile(r"/proc/(\d{1,10})/(?:status|cgroup|stat):(.*)", re.DOTALL)


class Gpus:
    """The GPUs of a node: their static facts, and their newest values with their age."""

    def __init__(self) -> None:
        self.driver: str | None = None
        self.cuda: str | None = None
        self._count = 0
        self._indexes: dict[str, int] = {}
        self._facts: dict[int, dict[str, Any]] = {}
        self._values: dict[int, tuple[dict[str, Any], float]] = {}

    def take(self, listing: smi.Listing, began: float) -> None:
        """Add a listing of the run of nvidia-smi that began at ``began`` (monotonic)."""
        self._indexes |= listing.number(self._indexes)
        if listing.count != self._count:  # the indexes may refer to other GPUs now
            self._facts, self._values = {}, {}
        self._count = listing.count
        self.driver, self.cuda = listing.driver or self.driver, listing.cuda or self.cuda
        for gpu in listing.gpus:
            assert gpu.index is not None  # it has just been numbered
            if "error" not in gpu.facts:
                self._facts[gpu.index] = gpu.facts
            self._values[gpu.index] = (gpu.values, began)

    def statics(self, hostname: str) -> list[dict[str, Any]]:
        """Return the GpuStatic of every GPU; a GPU that was never readable gets a placeholder."""
        return [self._facts.get(k) or _unread(hostname, k) for k in range(self._count)]

    def readings(self, hostname: str, described: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the GpuReading of every GPU; ``described``: the processes by pid."""
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


def words(text: str) -> dict[str, str]:
    """Return lines of name and value as a dict."""
    return {name: rest for name, _, rest in (line.partition(" ") for line in text.splitlines())}


def processes(sections: Sections) -> dict[int, dict[str, Any]]:
    """Return the processes by pid, with the fields of :class:`gpuboard.model.gpu.Process`.

    Processes that /proc does not show are missing. Their environment cannot be read, so their leases are unknown. A
    process of root in a container has a hidden owner, as with the agent.
    """
    users = dict(_user(line) for line in sections.get("users", "").splitlines() if line.count(":") >= 2)
    commands = dict(_command(line) for line in sections.get("args", "").splitlines())
    groups, stats = _by_process(sections.get("groups", "")), _by_process(sections.get("stats", ""))
    host = words(sections.get("host", ""))
    found: dict[int, dict[str, Any]] = {}
    for pid, lines in _by_process(sections.get("names", "")).items():
        status = dict(line.split(":\t", 1) for line in lines.split("\n") if ":\t" in line)
        uid = status.get("Uid", "").split("\t")[0]
        if not uid.isdecimal():
            continue
        job, container = proc.parse_cgroup(groups.get(pid, ""))
        found[pid] = {
            "uid": int(uid[:10]),
            "system": int(uid[:10]) < proc.FIRST_PERSON,
            "user": None if uid == "0" and container else users.get(uid, uid[:10]),
            "name": status.get("Name", ""),
            "command": commands.get(pid, "")[: proc.COMMAND_LIMIT],
            "started": _started(stats.get(pid, ""), host),
            "job": job,
            "container": container,
        }
    return found


def host(sections: Sections, before: tuple[int, int] | None) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """Return the host's load, with the fields of :class:`gpuboard.model.reading.Reading`, and its processor times.

    ``before``: the processor times of the previous frame.
    """
    text = sections.get("host", "")
    times = next((proc.cpu_times(line) for line in text.splitlines() if line.startswith("cpu ")), None)
    used, total = proc.memory(text)
    load = next((line.split()[0] for line in text.splitlines() if re.match(r"\d+\.\d+ \d+\.\d+ ", line)), None)
    at = words(text).get("at", "")
    return {
        "at": float(at) if re.fullmatch(r"\d{1,12}", at) else 0.0,
        "cpu_percent": proc.cpu_percent(before, times),
        "memory_used": used,
        "memory_total": total,
        "load1": None if load is None else float(load),
    }, times or before


def _by_process(text: str) -> dict[int, str]:
    """Return the lines of each process; the rest of a name after a line end belongs to the line before."""
    found: dict[int, list[str]] = {}
    for line in text.split("\n"):
        match = _OF_PROCESS.fullmatch(line)
        if match is not None:
            found.setdefault(int(match.group(1)), []).append(match.group(2))
    return {pid: "\n".join(lines) for pid, lines in found.items()}


def _started(stat: str, host: Mapping[str, str]) -> float | None:
    """Return the start time of a process, epoch seconds."""
    try:
        start = proc.parse_stat(stat.encode()).start
        return round(float(host["btime"]) + start / float(host["hz"]), 2)
    except (KeyError, ValueError, IndexError, ArithmeticError):
        return None


def _user(line: str) -> tuple[str, str]:
    fields = line.split(":")
    return fields[2], fields[0]


def _command(line: str) -> tuple[int, str]:
    pid, _, rest = line.strip().partition(" ")
    return int(pid) if pid.isdecimal() and len(pid) <= 10 else -1, rest.strip()
