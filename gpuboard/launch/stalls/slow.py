"""The words about a rank that the others wait for, and what is beside it: CPU, DataLoader workers, load, GPU (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from gpuboard.launch.runs.folder import RankView
from gpuboard.launch.stalls.pace import GroupPace, RankReading
from gpuboard.model.gpu import SERIOUS_THROTTLE, THROTTLE_WORDS
from gpuboard.model.snapshot import GpuView, Snapshot
from gpuboard.model.text import clean
from gpuboard.model.units import ranges

_BUSY = 0.8  # share of a core from which on a process computes without pause
_IDLE = 0.2  # of a core: below, a rank waits for something else
_CROWDED = 1.5  # tasks per CPU

Ranks = Mapping[int, RankView]
Readings = Mapping[int, RankReading]
Loads = Mapping[str, float | None]


def slow_text(pace: GroupPace, ranks: Ranks, *, so_far: bool = False) -> str:
    """Return the verdict as one sentence; ``so_far``: it is known of few steps."""
    others = "rank waits" if len(pace.ranks) - len(pace.slow) == 1 else "ranks wait"
    step = f"each of the last {pace.steps} steps" if so_far else "each step"
    waited = f"{duration(pace.late_s)} of {duration(pace.step_s)} in {step}"
    return f"slow: the other {others} {waited} for {_who(pace.slow, ranks)}"


def duration(length_s: float) -> str:
    """Return a time in a step as text.

    >>> duration(0.0414), duration(1.26), duration(75)
    ('41 ms', '1.3 s', '75 s')
    """
    if length_s < 1:
        return f"{length_s * 1000:.{0 if length_s >= 0.01 else 1}f} ms"
    return f"{length_s:.{0 if length_s >= 10 else 1}f} s"


def pace_lines(pace: GroupPace, ranks: Ranks) -> list[str]:
    """Return what each rank does in a step, for `gpuboard explain`."""
    named = f"{duration(pace.step_s)} per step"
    group = "" if pace.group == "0" else f" of process group {clean(pace.group, 40)}"
    lines = [f"{named}, the median of {pace.steps} steps{group}:"]
    for one in pace.ranks:
        slow = ", the others wait for it" if one.rank in pace.slow else ""
        words = f"own time {duration(one.own_s)}, waits {duration(one.wait_s)}{slow}"
        lines.append(f"  {_who((one.rank,), ranks)}: {words}")
    return lines


def evidence(pace: GroupPace, ranks: Ranks, readings: Readings, loads: Loads, snapshot: Snapshot | None) -> list[str]:
    """Return what is known of the slow ranks beside the others, one line each; facts that are unknown are left out."""
    others = [one.rank for one in pace.ranks if one.rank not in pace.slow]
    own = {one.rank: one.own_s for one in pace.ranks}

    def beside(show: Callable[[float], str], values: Mapping[int, float]) -> str:
        theirs = f"; the others {_span(show, values, others)}" if values.keys() & set(others) else ""
        return f"{_span(show, values, pace.slow)}{theirs}"

    lines = [f"own time per step: {beside(duration, own)}"]
    cpu = {rank: reading.cpu for rank, reading in readings.items()}
    if cpu.keys() >= set(pace.slow):
        lines.append(f"CPU: {beside(_percent, cpu)} of a core")
    workers = {rank: mean_of(reading.workers) for rank, reading in readings.items() if reading.workers}
    if workers.keys() & set(pace.slow):
        count = len(readings[next(rank for rank in pace.slow if rank in workers)].workers)
        lines.append(
            f"DataLoader workers and other child processes: {count}, each {beside(_percent, workers)} of a core"
        )
    nodes = {ranks[rank].node for rank in pace.slow}
    lines.append(_load(loads, nodes))
    lines += _gpus(pace, ranks, snapshot, others)
    return [line for line in lines if line]


def remedy(pace: GroupPace, ranks: Ranks, readings: Readings, loads: Loads, snapshot: Snapshot | None) -> str:
    """Return what to do, by what stands out."""
    gpus = _by_rank(ranks, snapshot)
    hot = [rank for rank in pace.slow if rank in gpus and SERIOUS_THROTTLE & set(gpus[rank].throttle)]
    if hot:
        return f"its GPU runs with lowered clocks: check the cooling and power of {clean(ranks[hot[0]].node, 60)}"
    first = readings.get(pace.slow[0])
    if first is not None and first.workers and mean_of(first.workers) > _BUSY:
        return "its DataLoader workers are busy all the time: more workers, less work per item, or faster storage"
    if first is not None and first.cpu + sum(first.workers) < _IDLE:
        return f"it hardly computes ({_percent(first.cpu)} of a core): it waits for data, a file system or a device"
    crowded = [node for node, load in loads.items() if load is not None and load > _CROWDED]
    if ranks[pace.slow[0]].node in crowded:
        return f"CPUs of {clean(ranks[pace.slow[0]].node, 60)} are scarce: see `top` there for what else runs"
    return "`gpuboard explain --stacks` shows where it is; compare its data (batch size, lengths) with the others'"


def mean_of(values: Collection[float]) -> float:
    """Return the mean, 0 without values."""
    return sum(values) / len(values) if values else 0.0


def _who(slow: Collection[int], ranks: Ranks) -> str:
    if len(slow) == 1:
        view = ranks[next(iter(slow))]
        return f"rank {view.rank} ({clean(view.node, 60)}:{view.index})"
    nodes = list(dict.fromkeys(clean(ranks[rank].node, 60) for rank in slow))
    return f"ranks {ranges(list(slow))} ({', '.join(nodes[:4])}{', …' if len(nodes) > 4 else ''})"


def _span(show: Callable[[float], str], values: Mapping[int, float], of: Collection[int]) -> str:
    found = [values[rank] for rank in of if rank in values]
    least, most = show(min(found)), show(max(found))
    return least if least == most else f"{least} to {most}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _load(loads: Loads, nodes: Collection[str]) -> str:
    slow = [f"{clean(node, 60)} {load:.1f}" for node, load in loads.items() if node in nodes and load is not None]
    others = {
        number: load for number, (node, load) in enumerate(loads.items()) if node not in nodes and load is not None
    }
    theirs = f"; the other nodes {_span('{:.1f}'.format, others, list(others))}" if others else ""
    return f"load: {', '.join(slow[:4])}{theirs} tasks per CPU" if slow else ""


def _by_rank(ranks: Ranks, snapshot: Snapshot | None) -> dict[int, GpuView]:
    gpus = {(node.name, gpu.index): gpu for node in (snapshot.nodes if snapshot else ()) for gpu in node.gpus}
    return {rank: gpus[view.node, view.index] for rank, view in ranks.items() if (view.node, view.index) in gpus}


def _gpus(pace: GroupPace, ranks: Ranks, snapshot: Snapshot | None, others: Collection[int]) -> list[str]:
    """Return temperature, power, load and clocks of each slow rank's GPU, beside others of its model."""
    gpus = _by_rank(ranks, snapshot)
    lines = []
    for rank in pace.slow[:4]:
        gpu = gpus.get(rank)
        if gpu is None:
            continue
        same = {number: gpus[number] for number in others if number in gpus and gpus[number].name == gpu.name}
        parts = []
        for name, unit in (("temperature", "°C"), ("power", "W"), ("utilization", "%")):
            value = getattr(gpu, name)
            values = {number: float(v) for number, one in same.items() if (v := getattr(one, name)) is not None}
            if value is not None:
                theirs = f" (the others {_span('{:.0f}'.format, values, list(values))})" if values else ""
                parts.append(f"{value:.0f} {unit}{theirs}")
        parts += [THROTTLE_WORDS.get(word, clean(word, 60)) for word in gpu.throttle]
        parts += [clean(words, 200) for words in gpu.sick if words not in parts]
        lines.append(f"GPU {clean(ranks[rank].node, 60)}:{gpu.index}: {', '.join(parts)}")
    return lines
