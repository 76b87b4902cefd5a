"""When each rank called its newest collectives, and how busy it is: from these the head sees which rank is slow."""

import os
import time
from collections import Counter

from gpuboard.agent import proc
from gpuboard.agent.launch.rank.recorder import collectives
from gpuboard.agent.launch.watch.inspection import flight_recorders
from gpuboard.agent.launch.watch.signs import children, load

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Tuple

_NEWEST = 2000  # collectives of a process group: as many as the flight recorder keeps of all groups
_WINDOWS = (_NEWEST, 500, 100)  # the newest of them alone may repeat
# Calls that do not belong to each step, those for a log line or a flag: their share of the most frequent call, elements
_RARE, _SMALL = 0.2, 1024
_TRANSFERS = 0.1  # share of the collectives: as many sends and receives belong to the steps
_STEPS = 60  # where no sequence repeats: parts of equal length
_ANSWER_S = 2.0  # of all ranks' worker servers
_SAMPLE_S = 0.5  # of CPU time
_REPEATS = 4  # that a sequence of collectives needs to count as a step


def look(ranks: "List[Tuple[int, int, str]]") -> "Dict[str, Any]":
    """Return when ``ranks`` (rank, pid, path of its worker server) called collectives: docs/launch-protocol.md."""
    started = time.monotonic()
    before = {pid: _cpu_s(pid) for _, pid, _ in ranks}
    delayed_s = {pid: _delayed_s(pid) for _, pid, _ in ranks}
    traces = {rank: flight_recorders(pid, path, started + _ANSWER_S) for rank, pid, path in ranks}
    time.sleep(max(0.0, started + _SAMPLE_S - time.monotonic()))
    elapsed = time.monotonic() - started
    found = []
    for rank, pid, _ in ranks:
        own_s, workers = _cpu_s(pid)
        shares = [
            (cpu_s - before[pid][1][child]) / elapsed for child, cpu_s in workers.items() if child in before[pid][1]
        ]
        found.append(
            {
                "rank": rank,
                "cpu": round((own_s - before[pid][0]) / elapsed, 3),
                "workers": [round(share, 2) for share in shares],
                "delayed": round(max(0.0, _delayed_s(pid) - delayed_s[pid]) / elapsed, 3),
                **_read(traces[rank]),
            }
        )
    return {"ranks": found, "load": load()}


def _cpu_s(pid: int) -> "Tuple[float, Dict[int, float]]":
    """Return the CPU seconds of a rank and of each process directly below it, for example its DataLoader workers."""
    own = proc.read_process(pid)
    below = {child: proc.read_process(child) for child in children(pid)}
    return own.cpu_s if own else 0.0, {child: seen.cpu_s for child, seen in below.items() if seen}


def _delayed_s(pid: int) -> float:
    """Return for how long the threads of a process have been runnable without a CPU (proc(5), schedstat)."""
    found = 0.0
    try:
        for thread in os.listdir("/proc/%d/task" % pid):
            found += int(proc.read("/proc/%d/task/%s/schedstat" % (pid, thread), 128).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        pass  # it has ended, or a kernel without CONFIG_SCHED_INFO
    return found


def _read(traces: "List[Dict[str, Any]]") -> "Dict[str, Any]":
    try:
        if traces:
            groups = [group for trace in traces for group in arrivals(trace)]
            return {"groups": groups, "transfers": any(map(transfers, traces))}
    except (ValueError, KeyError, TypeError, IndexError):
        pass  # another format of another torch
    return {"groups": None, "transfers": False}


def transfers(trace: "Dict[str, Any]") -> bool:
    """Return whether a rank sends and receives in its steps, as in a pipeline.

    gloo has no entries for these, but counts them in ``pg_status``.
    """
    entries = trace.get("entries", [])
    newest: "Dict[str, int]" = {}
    for entry in entries:
        if not entry["is_p2p"]:
            newest[str(entry["pg_id"])] = int(entry["collective_seq_id"])
    counted = {
        str(name): int(found["last_enqueued_collective"]) for name, found in (trace.get("pg_status") or {}).items()
    }
    beside = sum(max(0, count - newest.get(name, 0)) for name, count in counted.items())
    return beside > _TRANSFERS * sum(newest.values()) or sum(entry["is_p2p"] for entry in entries) > _TRANSFERS * len(
        entries
    )


def arrivals(trace: "Dict[str, Any]") -> "List[Dict[str, Any]]":
    """Return, for each process group in a trace, when its newest collectives were called, by this node's clock.

    ``gaps_us`` are the times between them, ``steps`` the places among them where a step of the training starts.
    Point-to-point operations are left out.
    """
    found = []
    for entries in collectives(trace):
        newest = entries[-_NEWEST:]
        called = [int(entry["time_created_ns"]) // 1000 for entry in newest]
        first, last = int(newest[0]["collective_seq_id"]), int(newest[-1]["collective_seq_id"])
        if last - first != len(newest) - 1:
            continue  # another order of another torch
        found.append(
            {
                "name": str(newest[0]["process_group"][0]),
                "first": first,
                "called_us": called[0],
                "gaps_us": [called[i] - called[i - 1] for i in range(1, len(called))],
                "steps": steps([(str(entry["profiling_name"]), entry["input_sizes"]) for entry in newest]),
            }
        )
    return found


def steps(calls: "List[Tuple[str, List[List[int]]]]") -> "List[int]":
    """Return the places of ``calls`` (operation, sizes) where steps start: where the shortest sequence starts again.

    >>> steps([("all_reduce", [[5000]]), ("all_reduce", [[8]])] * 5)
    [0, 2, 4, 6, 8]
    """
    small = [sum(_elements(size) for size in sizes) <= _SMALL for _, sizes in calls]
    for named in ([(operation, str(sizes)) for operation, sizes in calls], [(operation, "") for operation, _ in calls]):
        for window in _WINDOWS:
            start = max(0, len(named) - window)
            counts = Counter(named[start:])
            rare = _RARE * max(counts.values())
            places = [i for i in range(start, len(named)) if counts[named[i]] > rare or not small[i]]
            length, first = _period([named[i] for i in places])
            if length:
                return places[first::length]
    return list(range(0, len(calls), max(1, len(calls) // _STEPS)))


def _elements(size: "List[int]") -> int:
    found = 1
    for length in size:
        found *= int(length)
    return found


def _period(calls: "List[Tuple[str, str]]") -> "Tuple[int, int]":
    """Return the length of the shortest sequence that makes up the later half of ``calls`` or more, and where it starts
    to repeat; 0 without one. A run starts with other calls (DistributedDataParallel compares and sends its parameters).
    """
    for length in range(1, len(calls) // _REPEATS + 1):
        first = len(calls) - length
        while first and calls[first - 1] == calls[first - 1 + length]:
            first -= 1
        if len(calls) - first >= max(_REPEATS * length, len(calls) / 2):
            return length, first
    return 0, 0
