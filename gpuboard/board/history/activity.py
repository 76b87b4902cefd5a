"""The last five minutes of what drivers report beside the four readings: SM and tensor cores, PCIe, NVLink (pure).

Kept for all GPUs where there are few, elsewhere for those that were shown last: 300 readings each, 8 MB for 64 GPUs of
which 60 % are busy, 16 MB if every value is a large number (tracemalloc).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from gpuboard.board.history.records import is_current
from gpuboard.model.gpu import Sensors
from gpuboard.model.snapshot import NodeView

_GPUS_MOST = 64
PastSensors = tuple[tuple[float, Sensors | None], ...]  # (epoch seconds, None: not read), oldest first


class ActivityHistory:
    """The readings of at most 64 GPUs by UUID. Threads may add; others may read meanwhile."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._lock = threading.Lock()
        self._kept: dict[str, deque[tuple[float, Sensors | None]]] = {}  # the one shown last is the last

    def watch(self, uuid: str) -> None:
        """Keep the readings of a GPU that is shown, from now on; the one shown longest ago makes room."""
        with self._lock:
            self._kept[uuid] = self._kept.pop(uuid, deque())
            while len(self._kept) > _GPUS_MOST:
                del self._kept[next(iter(self._kept))]

    def of(self, uuid: str) -> PastSensors:
        """Return the readings of a GPU; none if they are not kept."""
        with self._lock:
            return tuple(self._kept.get(uuid, ()))

    def add(self, nodes: Sequence[NodeView], now: float) -> None:
        """Take the readings of this moment; after the clock was set back, everything later than now is dropped."""
        with self._lock:
            few = sum(len(node.gpus) for node in nodes) <= _GPUS_MOST
            if not few and not self._kept:
                return
            for node in nodes:
                for gpu in node.gpus:
                    past = self._kept.get(gpu.uuid)
                    if past is None:
                        if not few or gpu.sensors is None or len(self._kept) >= _GPUS_MOST:
                            continue
                        past = self._kept[gpu.uuid] = deque()
                    while past and past[-1][0] >= now:
                        past.pop()
                    while past and past[0][0] <= now - self._span_s:
                        past.popleft()
                    past.append((now, gpu.sensors if is_current(node, gpu) else None))
