"""The past before a moment of a recording, for the graphs: after a jump it was not played."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

from gpuboard.board.history import DAY, FIVE_MINUTES, HOUR, History
from gpuboard.errors import GpuboardError
from gpuboard.recording.file import Cursor, Recording


def past_before(recording: Recording, at: float, history: History) -> Iterator[None]:
    """Add what a recording has before ``at`` to ``history``, the last minutes first. A step reads one frame.

    Five minutes get the samples that playing would give them, the hour one a bucket, the day the key frames. A damaged
    part ends what is read of either.
    """
    begin = (at - FIVE_MINUTES.seconds) // HOUR.bucket_s * HOUR.bucket_s  # no bucket is in both parts
    for moments in (_minutes, _hours):
        found = History()
        cursor = Cursor(recording)
        with contextlib.suppress(GpuboardError):
            for moment in moments(recording, begin, at):
                found.add(cursor.frame(moment).snapshot, moment)
                yield
        history.load(found.past, max(at, history.newest_at))
        history.activity.load(found.activity)


def _minutes(recording: Recording, begin: float, at: float) -> Iterable[float]:
    # A sample at ``at``, where a bucket ends there, ends that bucket: samples are 1 or 2 s apart.
    first = max(begin, math.ceil(recording.begin / 10) * 10.0)
    return (first + second for second in range(math.floor(at - first) + 1))


def _hours(recording: Recording, begin: float, at: float) -> Iterable[float]:
    yield from recording.key_moments(at - DAY.seconds, begin - HOUR.seconds)
    for number in reversed(range(int(HOUR.seconds / HOUR.bucket_s) + 1)):
        if (moment := begin - number * HOUR.bucket_s) >= recording.begin:
            yield moment
