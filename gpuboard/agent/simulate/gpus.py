"""Simulated GPUs: their readings follow from a description and the clock. The user's own claims on them are real.

The description: ``{"cluster": "demo-1000-4242", "model": "NVIDIA H100 80GB HBM3", "count": 8, "memory": 85899345920,
"power": [70, 700], "links": [18, 8], "mig": {"5": [["3g.40gb", 42949672960]]}, "epoch": 1767225600.0, "at": null,
"script": {…}}``; only ``cluster`` is required. ``power``: idle and limit in W; ``links``: NVLinks between two GPUs of
an island, GPUs per island; ``epoch``: when the script's time was 0, in epoch seconds; ``at``: a fixed script time, in
place of the clock. The script is that of gpuboard/agent/simulate/life.py, or in short ``"busy": {"2": {"user": "bob",
"command": "python train.py", "memory": 34359738368, "utilization": 87}}``.

Claims of other users come with the script. They are shown, and block requests, like real ones, but have no files.
Ranks of a run on a lease of the user are real processes and are shown on its GPUs.
"""

import math
import os
import time

from gpuboard.agent.claims import store as claims
from gpuboard.agent.event_loop import poll
from gpuboard.agent.simulate import life
from gpuboard.agent.simulate.ranks import ranks

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Optional, Tuple

GIB = life.GIB


def prefix(description: "Dict[str, Any]", node: str) -> str:
    """Return the prefix of the UUIDs of a node's simulated GPUs."""
    return "SIM-%s-%s-" % (description["cluster"], node)


class Simulated:
    """Has the methods of monitor.Probe; never waits, unless the simulated node hangs."""

    source = "simulated"
    slow_s = period_s = 0.0
    driver = "simulated"
    cuda: "Optional[str]" = None
    error: "Optional[str]" = None

    def __init__(self, description: "Dict[str, Any]", node: str, fd: "Optional[int]" = None) -> None:
        """``fd``: the client's; a node that hangs ends when it is closed."""
        self.description = description
        self.start_of_uuid = prefix(description, node)
        self.count = int(description.get("count", 8))
        self.memory = int(description.get("memory", 80 * GIB))
        self.power = [float(w) for w in description.get("power", (70, 700))]
        self.mig: "Dict[str, Any]" = description.get("mig") or {}
        self.script = description.get("script") or {"jobs": _busy(description, self.memory)}
        self.host = SimulatedHost(self)
        self.version = 1
        self._midnight = time.time() // 86400.0 * 86400.0  # default of ``epoch``, the same in all agents
        self.done = 0
        self._fd = fd
        self._folder: "Optional[SimulatedFolder]" = None

    def start(self) -> int:
        """Return the number of the first pass, which is complete at once."""
        self.check(0.0)
        return self.ask()

    def stop(self) -> None:
        """Nothing to stop."""

    def fds(self) -> "List[int]":
        return []

    def on_readable(self, fd: int) -> None:
        raise AssertionError("fd %d is not watched" % fd)

    def check(self, now: float) -> "Optional[float]":
        """Block while the node hangs and the client is connected; return when to call again: never."""
        left_s = life.hang_left_s(self.script, self.clock()[0])
        if left_s > 0 and self._fd is not None:
            poll({self._fd: 0}, None if self.description.get("at") is not None else left_s)  # 0: its end only
        return None

    def pids(self) -> "List[int]":
        return []

    def look(self, uuid: "Optional[str]") -> None:
        """Do nothing: every reading has all values."""

    def ask(self) -> int:
        self.done += 1
        return self.done

    def clock(self) -> "Tuple[float, float]":
        """Return (the script's time, epoch seconds now)."""
        now = time.time()
        at = self.description.get("at")
        return (now - float(self.description.get("epoch", self._midnight)) if at is None else float(at)), now

    def folder(self, path: str) -> "SimulatedFolder":
        """Return the folder of claims on these GPUs, real and simulated."""
        self._folder = SimulatedFolder(path, self)
        return self._folder

    def uuid(self, gpu: str) -> str:
        """Return the UUID of a GPU (``"5"``) or MIG device (``"5/1"``)."""
        return self.start_of_uuid + gpu.replace("/", "-mig")

    def gpus(self) -> "List[str]":
        """Return all GPUs and MIG devices as scripts write them."""
        devices = ["%s/%d" % (gpu, d) for gpu in sorted(self.mig) for d in range(len(self.mig[gpu]))]
        return [str(k) for k in range(self.count)] + devices

    def statics(self) -> "List[Dict[str, Any]]":
        links, island = self.description.get("links", (18, self.count))
        uuids = [self.uuid(str(k)) for k in range(self.count)]
        return [
            {
                "index": k,
                "uuid": uuid,
                "name": self.description.get("model", "NVIDIA H100 80GB HBM3"),
                "pci_bus_id": "00000000:%02X:00.0" % (16 + k),
                "memory_total": self.memory,
                "memory_reserved": 0,
                "pcie_generation_max": int(self.description.get("pcie", 5)),
                "pcie_width_max": 16,
                "numa_node": 2 * k // self.count,
                "cpus": None,
                "links": {peer: links for j, peer in enumerate(uuids) if j != k and j // island == k // island},
                "pci": {
                    peer: 20 if 2 * k // self.count == 2 * j // self.count else 10
                    for j, peer in enumerate(uuids)
                    if j != k
                },
                "mig": self._mig_statics(str(k)),
            }
            for k, uuid in enumerate(uuids)
        ]

    def _mig_statics(self, gpu: str) -> "Optional[List[Dict[str, Any]]]":
        if gpu not in self.mig:
            return None
        return [
            {"uuid": self.uuid("%s/%d" % (gpu, d)), "profile": profile, "memory_total": memory, "gpu_instance": d + 1}
            for d, (profile, memory) in enumerate(self.mig[gpu])
        ]

    def readings(self, now: float, describe: "Callable[..., Any]") -> "List[Dict[str, Any]]":
        """Return the GpuReadings; they change slowly with the clock, like real ones."""
        t, at = self.clock()
        real = self._folder.real() if self._folder is not None else []
        ours = ranks([c for c in real if c["uid"] == os.geteuid()]) if real else {}
        since = {one["uuid"]: one["from"] - at + t for one in real}
        return [self._reading(str(k), t, at, since, ours) for k in range(self.count)]

    def _reading(
        self, gpu: str, t: float, at: float, since: "Dict[str, float]", ours: "Dict[str, Any]"
    ) -> "Dict[str, Any]":
        uuid = self.uuid(gpu)
        taken_at = since.get(uuid)
        faults = life.going_on(self.script, "faults", gpu, t)
        xids = [
            {"code": code, "at": round(at - (t - start), 2)} for start, f in faults for code in f.get("xids", ())[::-1]
        ]
        instead: "Dict[str, Any]" = {}
        for _, fault in faults:
            instead.update(fault["reading"])
        if instead.get("lost"):
            return dict(instead, uuid=uuid, xids=xids)  # a lost GPU has no other values
        utilization = life.gpu_utilization(self.script, gpu, t, taken_at)
        heat = life.heat(self.script, gpu, t, taken_at)
        processes = self._processes(gpu, t, at, taken_at)
        seed = life.seed_of(self.script, gpu)
        loads = [life.load(job, gpu, start, t, seed) for start, job in life.jobs_on(self.script, gpu, t, taken_at)]
        wave = life.noise(seed, t)
        if uuid in ours:
            processes.append(ours[uuid])
            utilization = int(70 + 9 * wave)
            loads.append([utilization, None, None])
            heat = utilization / 100.0
        idle, limit = self.power
        found = {
            "uuid": uuid,
            "memory_used": sum(p["memory"] for p in processes),
            "utilization": utilization,
            "temperature": int(31 + 40 * heat + wave),
            "power": round(idle + (limit - idle) * 0.0088 * utilization + idle * 0.03 * wave, 1),
            "power_limit": limit,
            "compute_mode": 0,
            "processes": processes,
            "loads": loads,
            "throttle": [],
            "pcie_generation": int(self.description.get("pcie", 5)),
            "pcie_width": 16,
            "ecc_uncorrected": 0,
            "remap_pending": False,
            "remap_failed": False,
            "recovery_action": "none",
            "sensors": self._sensors(gpu, utilization, wave),
            "xids": xids,
        }
        if gpu in self.mig:
            found["mig"] = [self._mig_reading("%s/%d" % (gpu, d), t, at, since) for d in range(len(self.mig[gpu]))]
            found.update(processes=[], loads=[], utilization=None)  # a MIG parent has none
            found["memory_used"] = sum(device["memory_used"] for device in found["mig"])
        found.update(instead)
        return found

    def _sensors(self, gpu: str, utilization: int, wave: float) -> "Dict[str, Any]":
        found = {
            "performance_state": 0,
            "sm_clock": int(345 + 16.35 * utilization),
            "sm_clock_max": 1980,
            "memory_clock": 2619,
            "encoder": 0,
            "decoder": 0,
        }
        if gpu in self.mig:
            return found
        moved = max(0, int(1e7 * utilization * (4 + wave)))  # bytes/s
        found.update(pcie_sent=moved // 4, pcie_received=moved)
        links, island = self.description.get("links", (18, self.count))
        if links and island > 1:
            most = links * 25 * 10**9
            found.update(nvlink_sent=35 * moved, nvlink_received=34 * moved, nvlink_max=most)
        model = self.description.get("model", "H100")
        if any(name in model for name in ("H100", "H200", "B200")):  # those with GPM
            tensor = max(0, int(utilization * 0.6 + 3 * wave)) if utilization else 0
            found.update(
                sm_activity=utilization * 88 // 100,
                sm_occupancy=utilization * 41 // 100,
                tensor_activity=tensor,
                tensor_hmma=tensor,
                dram_activity=utilization * 47 // 100,
            )
        return found

    def _mig_reading(self, device: str, t: float, at: float, since: "Dict[str, float]") -> "Dict[str, Any]":
        uuid = self.uuid(device)
        processes = self._processes(device, t, at, since.get(uuid))
        return {"uuid": uuid, "memory_used": sum(p["memory"] for p in processes), "processes": processes}

    def _processes(self, gpu: str, t: float, at: float, taken_at: "Optional[float]") -> "List[Dict[str, Any]]":
        jobs = life.jobs_on(self.script, gpu, t, taken_at)
        return [life.process(job, gpu, start, t, at) for start, job in jobs]


class SimulatedFolder(claims.Folder):
    """The folder of claims on one node's simulated GPUs, and the claims of simulated users."""

    def __init__(self, path: str, probe: Simulated) -> None:
        claims.Folder.__init__(self, path, probe.start_of_uuid)
        self._probe = probe

    def read(self) -> "Tuple[List[Dict[str, Any]], Optional[str]]":
        found, error = claims.Folder.read(self)
        return found + ([] if error else self.others(_live(found))), error

    def real(self) -> "List[Dict[str, Any]]":
        """Return the live claims that are files."""
        return _live(claims.Folder.read(self)[0])

    def veto(self, op: str, args: "Dict[str, Any]") -> None:
        """Refuse GPUs and leases of simulated users, as the protocol does for real ones."""
        others = self.others(self.real())
        if op == "take":
            in_the_way = [one for one in others if one["uuid"] in args["uuids"]]
            if in_the_way:
                words = ", ".join(sorted({"%s by %s (%s)" % (c["uuid"], c["owner"], c["lease"]) for c in in_the_way}))
                raise claims.Refuse("conflict", "already claimed: %s" % words, {"claims": in_the_way})
        elif op in ("release", "renew"):
            theirs = [one for one in others if one["lease"] == args["lease"]]
            if theirs:
                raise claims.Refuse(
                    "not-yours", "%s belongs to %s, who is simulated" % (args["lease"], theirs[0]["owner"])
                )

    def others(self, real: "List[Dict[str, Any]]") -> "List[Dict[str, Any]]":
        """Return the claims of simulated users, without those that would start after a real one."""
        t, at = self._probe.clock()
        since = {one["uuid"]: one["from"] - at + t for one in real}
        found = []
        for gpu in self._probe.gpus():
            uuid = self._probe.uuid(gpu)
            for start, element in life.going_on(self._probe.script, "claims", gpu, t):
                one = None if start >= since.get(uuid, math.inf) else life.claim(element, uuid, start, t, at)
                if one is not None:
                    found.append(one)
        return found


class SimulatedHost:
    """Load and memory of the simulated node, by the number of its jobs."""

    def __init__(self, probe: Simulated) -> None:
        self._probe = probe

    def reading(self) -> "Dict[str, Any]":
        """Return ``cpu_percent, memory_used, memory_total, load1, net_received, net_sent``."""
        probe = self._probe
        t, _ = probe.clock()
        jobs = sum(len(life.going_on(probe.script, "jobs", gpu, t)) for gpu in probe.gpus())
        wave = life.noise(float(probe.count), t)
        total = 128 * GIB * max(1, probe.count)
        return {
            "cpu_percent": round(4 + 70.0 * jobs / max(1, probe.count) * (1 + 0.1 * wave), 1),
            "memory_used": int(total * (0.06 + 0.5 * jobs / max(1, probe.count) + 0.005 * wave)),
            "memory_total": total,
            "load1": round(max(0.1, 12 * jobs + 3 * wave), 2),
            "net_received": round(2e8 * jobs * (1 + 0.5 * wave) + 2e4),
            "net_sent": round(4e7 * jobs * (1 + 0.5 * wave) + 1e4),
        }


def _live(found: "List[Dict[str, Any]]") -> "List[Dict[str, Any]]":
    return [one for one in found if one["state"] == "live"]


def _busy(description: "Dict[str, Any]", memory: int) -> "List[Dict[str, Any]]":
    """Return the script's jobs for the short form: each runs forever."""
    return [
        {
            "gpus": [gpu],
            "from": -86400.0,
            "until": None,
            "user": str(busy.get("user", "bob")),
            "uid": int(busy.get("uid", 1000)),
            "pid": life.PIDS + int(gpu),
            "command": str(busy.get("command", "python train.py")),
            "memory": int(busy.get("memory", memory // 2)),
            "utilization": int(busy.get("utilization", 90)),
        }
        for gpu, busy in (description.get("busy") or {}).items()
    ]
