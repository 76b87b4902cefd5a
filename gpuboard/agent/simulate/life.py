"""The state of simulated GPUs at one moment: jobs, claims, faults. Pure.

A *script* is ``{"period": 900.0, "jobs": […], "claims": […], "faults": […], "hangs": [[70.0, 110.0]]}``; times are
seconds of the simulation, and elements with an end repeat each ``period``. A GPU is written as its index, a MIG device
as ``"5/1"`` (GPU 5, device 1).

    job    {"gpus": ["0", "1"], "from": 12.0, "until": 300.0, "user": "alice", "uid": 2000001, "pid": 4200001,
            "command": "python train.py", "memory": 64424509440, "utilization": 92}; may have ``shape`` (``train``,
            ``serve`` or ``notebook``), ``lease``, ``container``, ``type``, and ``rogue``: ignores reservations
    claim  {"gpus": ["0"], "from": 0.0, "until": null, "user": "alice", "uid": 2000001, "lease": "k3f9qa",
            "purpose": "ablation", "for_s": 28800.0, "nodes": ["sim01"], "count": 1}; ``until`` null: until it ends
    fault  {"gpus": ["3"], "from": 45.0, "until": 700.0, "reading": {"lost": true, "error": "GPU is lost"}}: values
            that replace those of readings; may have ``xids``, codes that the driver reports when it begins
"""

import math

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional

    Script = Dict[str, Any]

GIB = 2**30
PIDS = 4200000  # above the kernel's highest pid: signals to simulated processes reach none
_START_S = 4.0  # a program imports before it touches its GPU
_RAMP_S = 10.0  # then allocates its memory over this time
_START_MEMORY = 500 * 2**20
_CHECKPOINT_S, _SAVING_S = 75.0, 4.0  # training pauses for checkpoints
_HEAT_S = (0.0, 5.0, 11.0, 18.0)  # temperatures follow the load of the last seconds
_KEPT_S = 30.0  # interval of heartbeats


def began(element: "Dict[str, Any]", t: float, period: float) -> "Optional[float]":
    """Return the start of the occurrence of ``element`` at ``t``, None when there is none."""
    start, until = float(element["from"]), element.get("until")
    if until is None:
        return start if t >= start else None
    start += math.floor((t - start) / period) * period
    return start if t < start + float(until) - float(element["from"]) else None


def going_on(script: "Script", kind: str, gpu: str, t: float) -> "List[Any]":
    """Return (start, element) of all current elements of ``kind`` on a GPU or MIG device."""
    found = []
    for element in script.get(kind, ()):
        if gpu in element["gpus"]:
            start = began(element, t, float(script.get("period", 900.0)))
            if start is not None:
                found.append((start, element))
    return found


def hang_left_s(script: "Script", t: float) -> float:
    """Return the seconds that the node will still hang, 0 when it works."""
    for start, until in script.get("hangs", ()):
        begin = began({"from": start, "until": until}, t, float(script.get("period", 900.0)))
        if begin is not None:
            return float(begin + until - start - t)
    return 0.0


def noise(seed: float, x: float) -> float:
    """Return a value in -1 … 1 that changes smoothly with ``x`` and depends on the seed."""
    return (math.sin(x / 6.7 + seed) + math.sin(x / 2.3 + 2.1 * seed) + math.sin(x / 17.0 + 3.7 * seed)) / 3


def memory_of(job: "Dict[str, Any]", elapsed_s: float) -> int:
    """Return the memory of a job after ``elapsed_s``, in bytes: little first, then all."""
    share = min(1.0, max(0.0, (elapsed_s - _START_S) / _RAMP_S))
    return int(_START_MEMORY + share * max(0, int(job["memory"]) - _START_MEMORY))


def utilization_of(job: "Dict[str, Any]", elapsed_s: float, seed: float) -> float:
    """Return a job's utilization of its GPU after ``elapsed_s``, in percent."""
    level, shape = float(job["utilization"]), job.get("shape", "train")
    if elapsed_s < _START_S + _RAMP_S:
        return 0.0 if elapsed_s < _START_S else level * 0.3
    wave = noise(seed, elapsed_s)
    if shape == "notebook":  # short computations with pauses
        return level + 12 * wave if noise(seed + 1.0, elapsed_s / 4) > 0.25 else 0.0
    if shape == "serve":
        return level * (1 + 0.5 * wave)
    saving = elapsed_s % _CHECKPOINT_S > _CHECKPOINT_S - _SAVING_S  # all its GPUs are idle meanwhile
    return level * 0.1 if saving else level + 5 * wave


def gpu_utilization(script: "Script", gpu: str, t: float, taken_at: "Optional[float]") -> int:
    """Return a GPU's utilization in percent. ``taken_at``: start of a real claim (:func:`jobs_on`)."""
    total = sum(
        utilization_of(job, t - start, seed_of(script, gpu)) for start, job in jobs_on(script, gpu, t, taken_at)
    )
    return int(min(100.0, max(0.0, total)))


def heat(script: "Script", gpu: str, t: float, taken_at: "Optional[float]") -> float:
    """Return a GPU's load over the last seconds, 0 … 1, for its temperature."""
    return sum(gpu_utilization(script, gpu, t - s, taken_at) for s in _HEAT_S) / (100.0 * len(_HEAT_S))


def seed_of(script: "Script", gpu: str) -> float:
    """Return the seed of a GPU's noise."""
    return float(script.get("seed", 0)) + sum((k + 1) * ord(sign) for k, sign in enumerate(gpu)) * 0.61


def jobs_on(script: "Script", gpu: str, t: float, taken_at: "Optional[float]") -> "List[Any]":
    """Return (start, job) of the jobs on a GPU.

    ``taken_at``: start of a real claim; from then on only rogue simulated jobs start on it.
    """
    return [
        (start, job)
        for start, job in going_on(script, "jobs", gpu, t)
        if taken_at is None or start < taken_at or job.get("rogue")
    ]


def process(job: "Dict[str, Any]", gpu: str, start: float, t: float, now: float) -> "Dict[str, Any]":
    """Return a job's process on one GPU, with the keys of gpuboard.model.gpu.Process. ``now``: epoch seconds at t."""
    rank = job["gpus"].index(gpu)
    found = {
        "pid": int(job["pid"]) + rank,
        "type": job.get("type", "compute"),
        "memory": memory_of(job, t - start),
        "name": job["command"].split()[0].rsplit("/", 1)[-1][:15],
        "command": job["command"],
        "started": round(now - (t - start), 2),
    }  # type: Dict[str, Any]
    if job.get("user"):
        found.update(uid=int(job["uid"]), user=job["user"])
    for key in ("lease", "container"):
        if job.get(key):
            found[key] = job[key]
    return found


def load(job: "Dict[str, Any]", gpu: str, start: float, t: float, seed: float) -> "List[Optional[float]]":
    """Return the gpuboard.model.gpu.Load of a job's process: data loaders keep the host about as busy as the GPU."""
    busy = min(100.0, max(0.0, utilization_of(job, t - start, seed)))
    wave = noise(seed + job["gpus"].index(gpu), t)
    return [int(busy), round(max(0.0, 3 * busy + 20 * wave), 1), 2 * GIB + memory_of(job, t - start) // 4]


def claim(element: "Dict[str, Any]", uuid: str, start: float, t: float, now: float) -> "Optional[Dict[str, Any]]":
    """Return a simulated claim on one GPU for the wire (gpuboard.model.reading.Claim), None after its end."""
    elapsed_s = t - start
    left_s = float(element["for_s"]) - elapsed_s
    if left_s <= 0:
        return None
    pid = 3000 + sum((k + 3) * ord(sign) * 7 for k, sign in enumerate(element["lease"]))
    holder = {"host": "login1", "boot_id": "simulated", "pid": pid, "start": 1}
    return {
        "lease": element["lease"],
        "uuid": uuid,
        "uid": int(element["uid"]),
        "owner": element["user"],
        "state": "live",
        "from": now - elapsed_s,
        "until": now + left_s,
        "remaining_s": left_s,
        "age_s": elapsed_s % _KEPT_S,
        "share": None,
        "holder": holder,
        "purpose": element.get("purpose", ""),
        "host": "login1",
        "nodes": list(element["nodes"]),
        "gpus": int(element["count"]),
    }
