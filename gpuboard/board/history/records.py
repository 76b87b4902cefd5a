"""One moment of all GPUs and nodes in a few bytes each, and what several moments amount to (pure).

A record has a plane per quantity: a byte per GPU and one per node, by column. 0 is unknown, and so is a column that a
plane is too short for: columns are only added, so that old records stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from math import sqrt
from operator import itemgetter, methodcaller
from typing import NamedTuple

from gpuboard.model.snapshot import NodeView, has_current_values, judged, newest_values
from gpuboard.model.state import AWAITS_SECOND

UTILIZATION, PEAK, MEMORY, TEMPERATURE, POWER, FREE = range(6)  # the planes
PLANES = 6
PARTS = 250  # parts (of memory, of free time) are kept in 250ths
_LOAD_STEPS = 100  # up to 645
_NET_STEP = 5e5  # bytes per second; up to 32 GB/s
_MEANS = {UTILIZATION, POWER, FREE}  # over several records; of the others the peak
_NODE = "node:"  # before a node's name in the columns
_WATT_STEPS = 25  # (code - 1)^2 / 25 W: 0 to 2,560 W, within 1.3 % from 250 W

# What the code of each plane means for a GPU; None: unknown
DECODE: tuple[tuple[float | None, ...], ...] = (
    (None, *range(255)),
    (None, *range(255)),
    (None, *(code / PARTS for code in range(255))),
    (None, *range(255)),
    (None, *(round(code * code / _WATT_STEPS) for code in range(255))),
    (None, *(code / PARTS for code in range(255))),
)
# The planes of a node: CPU, its peak, memory, load, network (received and sent), nothing
_DECODE_NODE: tuple[tuple[float | None, ...], ...] = (
    *DECODE[:TEMPERATURE],
    (None, *(code * code / _LOAD_STEPS for code in range(255))),
    (None, *(code * code * _NET_STEP for code in range(255))),
    DECODE[FREE],
)
_SQUARES = (0, *(code * code for code in range(255)))


class Samples(NamedTuple):
    """One GPU's samples, oldest first, all of one length; None is a gap. Times are epoch seconds.

    Of a span whose samples are buckets, a time is the bucket's begin; utilization and power are means, the rest peaks.
    """

    times: tuple[float, ...] = ()
    utilization: tuple[float | None, ...] = ()  # percent
    memory: tuple[float | None, ...] = ()  # used / total
    temperature: tuple[float | None, ...] = ()  # °C
    power: tuple[float | None, ...] = ()  # W
    peak: tuple[float | None, ...] = ()  # of utilization, percent


class HostSamples(NamedTuple):
    """A node's samples, oldest first, all of one length; as Samples: CPU and network are means, the rest peaks."""

    times: tuple[float, ...] = ()
    cpu: tuple[float | None, ...] = ()  # percent
    memory: tuple[float | None, ...] = ()  # used / total
    load: tuple[float | None, ...] = ()  # of one minute, tasks
    network: tuple[float | None, ...] = ()  # received and sent, bytes per second
    peak: tuple[float | None, ...] = ()  # of the CPU, percent


class HistoryRecord(NamedTuple):
    """All GPUs at one time, or in the bucket that begins then. ``planes`` are of bytes."""

    at: float  # epoch seconds
    planes: tuple[bytes, ...]


class Past(NamedTuple):
    """The records of several spans, and the column of each GPU in them."""

    records: tuple[tuple[HistoryRecord, ...], ...]  # of each span, oldest first
    columns: dict[str, int]  # by UUID, in the order of the columns


def sample(nodes: Sequence[NodeView], columns: Mapping[str, int], at: float, *, first: bool = False) -> HistoryRecord:
    """Return a record of nodes, which all have ``columns``. Readings are untrusted: they are clamped.

    ``first``: of this board; which GPUs are free may not be known yet, and then is of none: the others alone would
    look like a full cluster.
    """
    utilization, memory, temperature, power, free = (bytearray(len(columns)) for _ in range(5))
    for node in nodes:
        if node.state == "up":
            column = columns[_NODE + node.name]
            if node.cpu_percent is not None:
                utilization[column] = 1 + round(min(max(node.cpu_percent, 0.0), 100.0))
            if node.memory_used is not None and node.memory_total:
                memory[column] = 1 + min(max(node.memory_used * PARTS // node.memory_total, 0), PARTS)
            if node.load1 is not None:
                temperature[column] = _root_code(node.load1 * _LOAD_STEPS)
            if node.net_received is not None and node.net_sent is not None:
                power[column] = _root_code((node.net_received + node.net_sent) / _NET_STEP)
        for gpu, new in newest_values(node):  # conditions in place of min, max and sqrt save a third of the time
            column = columns[gpu.uuid]
            if gpu.mig:
                free[column] = 1 + round(PARTS * sum(one.state == "free" for one in gpu.mig) / len(gpu.mig))
            elif gpu.state != "unknown":
                free[column] = 1 + PARTS if gpu.state == "free" else 1
            if not has_current_values(node, gpu):
                continue
            used, total, watts = new.memory_used, gpu.memory_total, new.power
            if (percent := new.utilization) is not None:
                utilization[column] = 1 + percent if 0 <= percent <= 100 else 101 if percent > 0 else 1
            if used is not None and total:
                memory[column] = 1 + used * PARTS // total if 0 <= used <= total else 1 + PARTS if used > 0 else 1
            if (degrees := new.temperature) is not None:
                temperature[column] = 1 + degrees if 0 <= degrees <= 254 else 255 if degrees > 0 else 1
            if watts is not None:
                power[column] = (
                    _WATT_CODES[round(watts)] if 0 <= watts < _WATTS - 1 else _root_code(watts * _WATT_STEPS)
                )
    if first and any(gpu.reason == AWAITS_SECOND for node in nodes for gpu in judged(node)):
        free = bytearray(len(columns))
    shared = bytes(utilization)
    return HistoryRecord(at, (shared, shared, bytes(memory), bytes(temperature), bytes(power), bytes(free)))


def keys(nodes: Iterable[NodeView]) -> dict[str, int]:
    """Return the keys of columns that nodes and their GPUs have, and how many MIG devices each has."""
    found = {}
    for node in nodes:
        found[_NODE + node.name] = 0
        for gpu in judged(node):
            found[gpu.uuid] = len(gpu.mig)
    return found


def host_key(name: str) -> str:
    """Return the column of a node itself."""
    return _NODE + name


def is_host(key: str) -> bool:
    """Return whether a column is a node's."""
    return key.startswith(_NODE)


def decoded(
    records: Iterable[HistoryRecord], plane: int, number: int = 0, *, host: bool = False
) -> tuple[float | None, ...]:
    """Return the values of a plane in column ``number`` of records, of a GPU or a node."""
    table = (_DECODE_NODE if host else DECODE)[plane]
    all_codes = [record.planes[plane] for record in records]
    return tuple([table[codes[number]] if number < len(codes) else None for codes in all_codes])


def merged(records: Sequence[HistoryRecord], at: float) -> HistoryRecord:
    """Return the means and peaks of several records as one of time ``at``; unknown values do not count."""
    return HistoryRecord(
        at, tuple(_merged([record.planes[plane] for record in records], plane) for plane in range(PLANES))
    )


def column(record: HistoryRecord, number: int) -> HistoryRecord:
    """Return a record of one GPU, in column 0."""
    return HistoryRecord(record.at, tuple(plane[number : number + 1] for plane in record.planes))


def select(record: HistoryRecord, numbers: Sequence[int], size: int) -> HistoryRecord:
    """Return a record of the given columns of ``size``, in their order; the column ``size`` itself is unknown."""
    pick = itemgetter(*numbers, size)  # one more than asked for: with one alone it would not return a tuple
    return HistoryRecord(record.at, tuple(bytes(pick(plane.ljust(size + 1, b"\0")))[:-1] for plane in record.planes))


def only(past: Past, kept: Collection[str]) -> Past:
    """Return a past without the other GPUs."""
    return _arranged(past, [uuid for uuid in past.columns if uuid in kept])


def join(first: Past, second: Past) -> Past:
    """Return the records of both; where both have a value, the higher one. The columns of ``first`` stay."""
    uuids = list(first.columns | second.columns)
    spans = []
    for one, other in zip(first.records, _arranged(second, uuids).records, strict=True):
        records = {record.at: record for record in one}
        for record in other:
            mine = records.get(record.at)
            records[record.at] = record if mine is None else _higher(mine, record)
        spans.append(tuple(records[at] for at in sorted(records)))
    return Past(tuple(spans), {uuid: number for number, uuid in enumerate(uuids)})


def _arranged(past: Past, uuids: Sequence[str]) -> Past:
    """Return a past with these columns."""
    size = len(past.columns)
    numbers = [past.columns.get(uuid, size) for uuid in uuids]
    columns = {uuid: number for number, uuid in enumerate(uuids)}
    if numbers[:size] == list(range(size)):
        return Past(past.records, columns)
    return Past(tuple(tuple(select(record, numbers, size) for record in each) for each in past.records), columns)


def _higher(one: HistoryRecord, other: HistoryRecord) -> HistoryRecord:
    most = len(max(one.planes[0], other.planes[0], key=len))
    pairs = zip(one.planes, other.planes, strict=True)
    planes = (bytes(map(max, first.ljust(most, b"\0"), second.ljust(most, b"\0"))) for first, second in pairs)
    return HistoryRecord(one.at, tuple(planes))


def known(plane: bytes) -> bytes:
    """Return the codes of a plane without the unknown ones."""
    return plane.translate(None, b"\0")


def _merged(planes: Sequence[bytes], plane: int) -> bytes:
    most = max(map(len, planes))
    padded = [codes.ljust(most, b"\0") for codes in planes]
    if plane not in _MEANS:
        return bytes(map(max, *padded, repeat(0)))
    counts = map(len(planes).__sub__, map(methodcaller("count", 0), zip(*padded, strict=True)))
    if plane == POWER:  # codes are roots
        sums = map(sum, zip(*(map(_SQUARES.__getitem__, codes) for codes in padded), strict=True))
        return bytes(count and 1 + round(sqrt(total / count)) for total, count in zip(sums, counts, strict=True))
    sums = map(sum, zip(*padded, strict=True))
    return bytes(total and round(total / count) for total, count in zip(sums, counts, strict=True))


def _root_code(square: float) -> int:
    return 1 + round(sqrt(min(max(square, 0.0), 254.0**2)))


_WATTS = 2560
_WATT_CODES = bytes(_root_code(watts * _WATT_STEPS) for watts in range(_WATTS))
