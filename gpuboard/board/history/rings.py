"""The last five minutes, hour and day of every GPU and of the cluster, in memory (pure).

For N GPUs: 5 bytes x N each second for five minutes (each 5 s above 2,048 GPUs), 6 bytes x N per bucket of 30 s for an
hour and of 5 min for a day: 23 MB for 8,000 GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeVar

from gpuboard.board.history.activity import ActivityHistory
from gpuboard.board.history.bins import slices
from gpuboard.board.history.records import (
    DECODE,
    FREE,
    MEMORY,
    PARTS,
    PEAK,
    POWER,
    TEMPERATURE,
    UTILIZATION,
    HistoryRecord,
    HostSamples,
    Past,
    Samples,
    column,
    decoded,
    host_key,
    is_host,
    join,
    keys,
    known,
    merged,
    only,
    sample,
    select,
)
from gpuboard.model.snapshot import Snapshot

T = TypeVar("T")


class Span(NamedTuple):
    """A length of the past, and what its samples are."""

    name: str
    seconds: float
    bucket_s: float  # 0: single samples


FIVE_MINUTES = Span("5 min", 300.0, 0.0)
HOUR = Span("1 h", 3600.0, 30.0)
DAY = Span("24 h", 86400.0, 300.0)
SPANS = (FIVE_MINUTES, HOUR, DAY)
SPAN_S = FIVE_MINUTES.seconds

_PERIODS_S = ((512, 1.0), (2048, 2.0))  # (GPUs at most, seconds per sample), …
_PERIOD_S = 5.0  # … and above that
_SHOWN = (UTILIZATION, MEMORY, TEMPERATURE, POWER, PEAK)  # the fields of Samples and HostSamples
_PEAKS_KEPT = 256  # curves
_SPARE = 64  # GPUs that are gone are kept, up to as many as there are and this number


class Cluster(NamedTuple):
    """The whole cluster, oldest first, all of one length. Times are epoch seconds, of a bucket its begin."""

    times: tuple[float, ...] = ()
    utilization: tuple[float | None, ...] = ()  # mean of the GPUs that were read, percent
    free: tuple[float | None, ...] = ()  # GPUs; one in MIG mode counts as its devices, as many as it has now
    known: tuple[int, ...] = ()  # GPUs whose state was known, counted as above


class _Total(NamedTuple):
    utilization: float | None
    free: float | None
    known: int


class History:
    """The past of all GPUs. Threads may add and load; others may read meanwhile."""

    def __init__(self) -> None:
        self.activity = ActivityHistory(SPAN_S)
        self._lock = threading.Lock()
        self.past = Past(((),) * len(SPANS), {})  # all records; replaced as a whole: readers need no lock
        self._totals: dict[int, tuple[HistoryRecord, _Total]] = {}  # by the id of a record, which is kept with it
        self._own: frozenset[str] = frozenset()  # columns seen here: loaded records may have others
        self._devices: dict[str, int] = {}  # how many MIG devices a GPU has, by its UUID
        self._loaded: frozenset[str] = frozenset()
        self._due = float("-inf")
        self._changes = 0  # how often samples were taken away, added below others or given other columns
        # by GPU, plane, bins
        self._peaks: dict[tuple[str, int, int], tuple[tuple[int, float], list[float | None]]] = {}
        self._sliced: tuple[tuple[HistoryRecord, ...], dict[int, list[tuple[int, int]]]] = ((), {})  # for ``_slices``

    def add(self, snapshot: Snapshot, now: float) -> bool:
        """Take a sample if one is due; return whether it was taken.

        ``now``: epoch seconds. After the clock was set back, everything later than now is dropped.
        """
        with self._lock:
            taken = self._add(snapshot, now)
        if taken:
            self.activity.add(snapshot.nodes, now)
        return taken

    def load(self, kept: Past, now: float) -> None:
        """Add a past from a file; where both know a bucket of a GPU, the higher values count."""
        with self._lock:
            past = join(self.past, kept)
            samples, hour, day = past.records
            days = {record.at: record for record in day}
            for begin in {_begin(record.at, DAY) for record in hour} - days.keys():
                if begin + DAY.bucket_s <= now:  # a board ended before this bucket did
                    days[begin] = merged([record for record in hour if _begin(record.at, DAY) == begin], begin)
            found = [tuple(record for record in samples if record.at > now - FIVE_MINUTES.seconds)]
            for span, records in ((HOUR, hour), (DAY, [days[at] for at in sorted(days)])):
                found.append(tuple(record for record in records if _oldest(span, now) < record.at <= now))
            self.past = Past(tuple(found), past.columns)
            self._changes += 1
            self._loaded |= kept.columns.keys()
            self._totals = {}

    @property
    def newest_at(self) -> float:
        """When the newest sample was taken, in epoch seconds; 0: there is none."""
        samples = self.past.records[0]
        return samples[-1].at if samples else 0.0

    def of(self, uuid: str, span: Span = FIVE_MINUTES) -> Samples:
        """Return the samples of a GPU over ``span``, the unfinished bucket included; empty when there are none."""
        times, values = self._of(uuid, span)
        return Samples(times, *values)

    def host(self, name: str, span: Span = FIVE_MINUTES) -> HostSamples:
        """Return the samples of a node itself, as ``of`` those of a GPU."""
        times, values = self._of(host_key(name), span, host=True)
        return HostSamples(times, *values)

    def _of(
        self, key: str, span: Span, *, host: bool = False
    ) -> tuple[tuple[float, ...], list[tuple[float | None, ...]]]:
        spans, columns = self.past
        number = columns.get(key)
        if number is None:
            return (), [() for _ in _SHOWN]
        records, begin = spans[SPANS.index(span)], _newest(spans, span)
        newest = _unfinished(spans, span, lambda record: column(record, number), lambda parts: merged(parts, begin))
        last = [newest] if newest is not None else []
        times = tuple([record.at for record in [*records, *last]])
        return times, [decoded(records, plane, number, host=host) + decoded(last, plane, host=host) for plane in _SHOWN]

    def means(self, uuids: Sequence[str], bins: int) -> list[float | None]:
        """Return the mean utilization of GPUs over the last minutes, oldest first; None where there is no sample.

        Bins are SPAN_S / ``bins`` long and begin at multiples of that, so that a drawn line only shifts. A sample holds
        until the next one, over at most 2.5 periods: samples come unevenly.
        """
        records, columns = self.past.records[0], self.past.columns
        numbers = [columns[uuid] for uuid in uuids if uuid in columns]
        first, size = min(numbers, default=0), len(numbers)
        planes = [record.planes[UTILIZATION] for record in records]
        if numbers != list(range(first, first + size)):  # not the usual case, the GPUs of one node or one GPU
            alone = [HistoryRecord(record.at, record.planes[: UTILIZATION + 1]) for record in records]
            planes, first = [select(record, numbers, len(columns)).planes[UTILIZATION] for record in alone], 0
        data = b"".join([plane[first : first + size].ljust(size, b"\0") for plane in planes])
        codes = [data[begin * size : end * size].translate(None, b"\0") for begin, end in self._slices(records, bins)]
        return [(sum(part) - len(part)) / len(part) if part else None for part in codes[1:]]

    def peaks(self, uuid: str, plane: int, bins: int) -> list[float | None]:
        """Return the highest value of a GPU in bins as those of ``means``, up to the newest that has ended."""
        changes = self._changes
        records, columns = self.past.records[0], self.past.columns
        number = columns.get(uuid)
        if number is None or not records:
            return [None] * bins
        newest = changes, records[-1].at * bins // SPAN_S
        kept = self._peaks.get((uuid, plane, bins))
        if kept is not None and kept[0] == newest:
            return kept[1]
        codes = [record.planes[plane] for record in records]
        own = [each[number] if number < len(each) else 0 for each in codes]
        found = [DECODE[plane][max(own[first:end], default=0)] for first, end in self._slices(records, bins)[:-1]]
        if len(self._peaks) > _PEAKS_KEPT:
            self._peaks = {}
        self._peaks[uuid, plane, bins] = newest, found
        return found

    def _slices(self, records: tuple[HistoryRecord, ...], bins: int) -> list[tuple[int, int]]:
        """Return the records of each of ``bins`` + 1 bins, or the one before that holds; computed once for all GPUs."""
        if self._sliced[0] is not records:
            self._sliced = records, {}
        found = self._sliced[1].get(bins)
        if found is None:
            found = self._sliced[1][bins] = slices([record.at for record in records], SPAN_S / bins, bins + 1)
        return found

    def cluster(self, span: Span = FIVE_MINUTES) -> Cluster:
        """Return the samples of all GPUs of this board over ``span``, the unfinished bucket included."""
        past = self.past
        total, of_span = self._totals_in(past), past.records[SPANS.index(span)]
        times, found = [record.at for record in of_span], [*map(total, of_span)]
        newest = _unfinished(past.records, span, total, _mean)
        if newest is not None:
            times.append(_newest(past.records, span))
            found.append(newest)
        if len(self._totals) > 2 * sum(map(len, past.records)):
            self._totals = {}
        return _cluster(times, found)

    def newest(self) -> Cluster:
        """Return the newest sample of all GPUs of this board; empty before the first."""
        past = self.past
        samples = past.records[0][-1:]
        return _cluster([record.at for record in samples], [*map(self._totals_in(past), samples)])

    def _totals_in(self, past: Past) -> Callable[[HistoryRecord], _Total]:
        """Return what counts the GPUs of this board in a record of ``past``, each record once."""
        own, totals = self._own, self._totals
        gpus = {key: number for key, number in past.columns.items() if key in own and not is_host(key)}
        numbers = list(gpus.values())
        devices = [(at, self._devices[key]) for at, key in enumerate(gpus) if key in self._devices]

        def total(record: HistoryRecord) -> _Total:
            kept = totals.get(id(record))
            if kept is None:
                needed = HistoryRecord(record.at, (record.planes[UTILIZATION], record.planes[FREE]))
                used, free = select(needed, numbers, len(past.columns)).planes
                kept = totals[id(record)] = record, _total(used, free, devices)
            return kept[1]

        return total

    def _add(self, snapshot: Snapshot, now: float) -> bool:
        samples = self.past.records[0]
        if samples and now < samples[-1].at:
            self._set_back(now)
        if now < self._due or not any(node.gpus for node in snapshot.nodes):
            return False
        self._close(now)
        own = keys(snapshot.nodes)
        if len(self.past.columns) > _SPARE + 2 * len(own) + len(self._loaded):
            self.past = only(self.past, own.keys() | self._loaded)
            self._changes += 1
        records, columns = self.past
        if not own.keys() <= columns.keys():
            added = [key for key in own if key not in columns]
            columns = columns | {key: number for number, key in enumerate(added, len(columns))}
        new = sample(snapshot.nodes, columns, now, first=not self._own)
        newest = tuple(one for one in records[0] if one.at > now - FIVE_MINUTES.seconds)
        self.past = Past(((*newest, new), *records[1:]), columns)
        devices = dict(filter(itemgetter(1), (self._devices | own).items()))
        if devices != self._devices or not own.keys() <= self._own:
            self._own = self._own.union(own)
            self._devices = devices
            self._totals = {}
        gpus = sum(len(node.gpus) for node in snapshot.nodes)
        period_s = next((period_s for most, period_s in _PERIODS_S if gpus <= most), _PERIOD_S)
        late_s = now - self._due
        on_time = late_s if late_s < period_s / 2 else 0.0  # scenes come unevenly: a late one does not delay the next
        self._due = now + period_s - on_time
        return True

    def _close(self, now: float) -> None:
        """Make the records of the buckets that have ended since the newest sample."""
        records, columns = self.past
        if not records[0]:
            return
        kept = list(records)
        for index, span in enumerate(SPANS[1:], 1):
            begin = _begin(records[0][-1].at, span)
            if begin == _begin(now, span):
                break
            parts = [record for record in kept[index - 1] if _begin(record.at, span) == begin]
            before = [record for record in kept[index] if _oldest(span, now) < record.at < begin]
            kept[index] = (*before, merged(parts, begin))
        self.past = Past(tuple(kept), columns)

    def _set_back(self, now: float) -> None:
        records, columns = self.past
        ended = (
            tuple(record for record in each if record.at + span.bucket_s <= now)
            for each, span in zip(records, SPANS, strict=True)
        )
        self.past = Past(tuple(ended), columns)
        self._changes += 1
        self._due = now


def _newest(records: Sequence[tuple[HistoryRecord, ...]], span: Span) -> float:
    return _begin(records[0][-1].at, span) if records[0] and span.bucket_s else 0.0


def _oldest(span: Span, now: float) -> float:
    """Return the time from which on buckets of a span are kept."""
    return now - span.seconds - span.bucket_s


def _begin(at: float, span: Span) -> float:
    return at // span.bucket_s * span.bucket_s


def _unfinished(
    records: Sequence[tuple[HistoryRecord, ...]],
    span: Span,
    part: Callable[[HistoryRecord], T],
    merge: Callable[[list[T]], T],
) -> T | None:
    """Return what the newest bucket of a span amounts to until now, from the parts of finer spans; None for samples."""
    found: list[T] = []
    if records[0]:
        for finer, each in zip(records[: SPANS.index(span)], SPANS[1:], strict=False):
            begin = _begin(records[0][-1].at, each)
            found = [part(record) for record in finer if record.at >= begin] + ([merge(found)] if found else [])
    return merge(found) if found else None


def _cluster(times: Sequence[float], found: Sequence[_Total]) -> Cluster:
    return Cluster(tuple(times), *zip(*found, strict=True)) if found else Cluster()


def _total(utilization: bytes, freedom: bytes, devices: Sequence[tuple[int, int]]) -> _Total:
    """Return what all GPUs amount to; ``devices``: the position of each in MIG mode, and how many devices it has."""
    used, free = known(utilization), known(freedom)
    parts, number = sum(free) - len(free), len(free)
    for at, count in devices:
        if code := freedom[at]:
            parts += (count - 1) * (code - 1)
            number += count - 1
    return _Total(
        sum(used) / len(used) - 1 if used else None,
        round(parts / PARTS, 2) if free else None,
        number,
    )


def _mean(totals: Sequence[_Total]) -> _Total:
    used = [total.utilization for total in totals if total.utilization is not None]
    free = [total.free for total in totals if total.free is not None]
    return _Total(
        sum(used) / len(used) if used else None,
        round(sum(free) / len(free), 2) if free else None,
        max(total.known for total in totals),
    )
