"""The last five minutes of each GPU in ring buffers of five bytes per sample (pure; 12 MB for 8,000 GPUs)."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from gpuboard.model.snapshot import GpuView, NodeView, Snapshot

SPAN_S = 300.0
_SLOTS = 310  # more than a reader uses, so that it never reads the slot being written
_DELAY_S = 5.0  # values of a GPU older than this at its node's reading do not count as current
_PERIODS_S = ((512, 1.0), (2048, 2.0))  # (GPUs at most, seconds per sample), …
_PERIOD_S = 5.0  # … and above that
_SAMPLE = Struct("<BBBH")  # utilization, memory, temperature, power; the largest value of each means unknown
_BYTE, _SHORT = 0xFF, 0xFFFF
_GAP = _SAMPLE.pack(_BYTE, _BYTE, _BYTE, _SHORT)
_PARTS = 250  # memory is kept in 250ths


class Samples(NamedTuple):
    """One GPU's samples, oldest first, all of one length; None is a gap. Times are of the clock given to ``add``."""

    times: tuple[float, ...] = ()
    utilization: tuple[int | None, ...] = ()  # percent
    memory: tuple[float | None, ...] = ()  # used / total
    temperature: tuple[int | None, ...] = ()  # °C
    power: tuple[int | None, ...] = ()  # W


class _Ring:
    __slots__ = ("data", "last")

    def __init__(self, number: int) -> None:
        self.data = bytearray(_GAP * _SLOTS)
        self.last = number - 1  # the number of the newest sample in it


class History:
    """Readings of the last five minutes. One thread adds; others may read meanwhile."""

    def __init__(self) -> None:
        self._times = array("d", bytes(8 * _SLOTS))
        self._count = 0  # samples so far
        self._rings: dict[str, _Ring] = {}
        self._due = float("-inf")

    def add(self, snapshot: Snapshot, now: float) -> bool:
        """Take a sample if one is due; return whether it was taken.

        ``now``: monotonic seconds.
        """
        if now < self._due or not any(node.gpus for node in snapshot.nodes):
            return False
        number = self._count
        slot = number % _SLOTS
        rings = self._rings
        for node in snapshot.nodes:
            for gpu in node.gpus:
                ring = rings.get(gpu.uuid)
                if ring is None:
                    ring = rings[gpu.uuid] = _Ring(number)
                elif ring.last < number - 1:
                    _forget(ring, number)
                if is_current(node, gpu):
                    _put(ring.data, slot * _SAMPLE.size, gpu)
                else:
                    ring.data[slot * _SAMPLE.size : (slot + 1) * _SAMPLE.size] = _GAP
                ring.last = number
        self._times[slot] = now
        self._count = number + 1
        period_s = next((period_s for most, period_s in _PERIODS_S if len(rings) <= most), _PERIOD_S)
        late_s = now - self._due
        on_time = (
            late_s if late_s < period_s / 2 else 0.0
        )  # scenes come unevenly: a late sample does not delay the next
        self._due = now + period_s - on_time
        if slot == 0:
            for uuid in [uuid for uuid, ring in rings.items() if number - ring.last >= _SLOTS]:
                del rings[uuid]
        return True

    def of(self, uuid: str) -> Samples:
        """Return the samples of a GPU; empty when there are none."""
        ring = self._rings.get(uuid)
        count = self._count
        if ring is None or not count:
            return Samples()
        since = self._times[(count - 1) % _SLOTS] - SPAN_S
        numbers = [n for n in range(max(0, count - _SLOTS), count) if self._times[n % _SLOTS] > since]
        last = ring.last
        cells = [_SAMPLE.unpack_from(ring.data, n % _SLOTS * _SAMPLE.size) if n <= last else None for n in numbers]
        rows = [cell or (_BYTE, _BYTE, _BYTE, _SHORT) for cell in cells]
        return Samples(
            tuple(self._times[n % _SLOTS] for n in numbers),
            tuple(None if row[0] == _BYTE else row[0] for row in rows),
            tuple(None if row[1] == _BYTE else row[1] / _PARTS for row in rows),
            tuple(None if row[2] == _BYTE else row[2] for row in rows),
            tuple(None if row[3] == _SHORT else row[3] for row in rows),
        )

    def utilization(self, uuid: str, count: int) -> tuple[int | None, ...]:
        """Return the newest ``count`` samples of a GPU's utilization, oldest first; None where there is no sample."""
        ring = self._rings.get(uuid)
        first = self._count - min(count, _SLOTS)
        if ring is None:
            return (None,) * count
        found = [
            ring.data[n % _SLOTS * _SAMPLE.size] if 0 <= n <= ring.last else _BYTE for n in range(first, self._count)
        ]
        return (None,) * (count - len(found)) + tuple(None if value == _BYTE else value for value in found)

    def means(self, uuids: Sequence[str], bins: int) -> list[float | None]:
        """Return the mean utilization of GPUs over the last minutes, oldest first; None where there is no sample.

        Bins are SPAN_S / ``bins`` long and begin at multiples of that, so that a drawn line only shifts. A single bin
        without a sample has the value before it: samples come unevenly.
        """
        count = self._count
        first = count % _SLOTS  # the oldest slot
        times = self._times[first:] + self._times[:first]
        bin_s = SPAN_S / bins
        newest = times[-1] // bin_s
        edges = [bisect_left(times, (newest + 1 - back) * bin_s) for back in range(bins, 0, -1)] + [_SLOTS]
        sums, samples = [0] * bins, [0] * bins
        for uuid in uuids:
            ring = self._rings.get(uuid)
            if ring is None:
                continue
            data = ring.data[:: _SAMPLE.size]
            data = (data[first:] + data[:first])[: max(0, _SLOTS - (count - 1 - ring.last))]
            for at in range(bins):
                part = data[edges[at] : edges[at + 1]]
                unknown = part.count(_BYTE)
                sums[at] += sum(part) - _BYTE * unknown
                samples[at] += len(part) - unknown
        found = [total / number if number else None for total, number in zip(sums, samples, strict=True)]
        for at in range(1, bins - 1):
            if found[at] is None and samples[at - 1] and samples[at + 1]:
                found[at] = found[at - 1]
        return found


def is_current(node: NodeView, gpu: GpuView) -> bool:
    """Return whether a GPU's values are current: its node is up and NVML answers for this GPU."""
    return node.state == "up" and gpu.error is None and gpu.delay_s <= _DELAY_S


def _forget(ring: _Ring, number: int) -> None:
    """Write gaps for the samples in which the GPU was missing."""
    for missed in range(max(ring.last + 1, number - _SLOTS), number):
        at = missed % _SLOTS * _SAMPLE.size
        ring.data[at : at + _SAMPLE.size] = _GAP


def _put(data: bytearray, at: int, gpu: GpuView) -> None:
    used, total, power = gpu.memory_used, gpu.memory_total, gpu.power
    utilization, temperature = gpu.utilization, gpu.temperature
    # Untrusted input: clamp it to what fits
    _SAMPLE.pack_into(
        data,
        at,
        _BYTE if utilization is None else min(max(utilization, 0), 100),
        _BYTE if used is None or not total else min(max(used * _PARTS // total, 0), _PARTS),
        _BYTE if temperature is None else min(max(temperature, 0), _BYTE - 1),
        _SHORT if power is None else int(min(max(power, 0.0), _SHORT - 1)),
    )
