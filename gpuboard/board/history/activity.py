"""The last five minutes of what drivers report beside the four readings: SM and tensor cores, PCIe, NVLink (pure).

Kept for all GPUs where there are few, elsewhere for those that were shown last: 300 readings each.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import deque
from collections.abc import Sequence

from gpuboard.model.gpu import Sensors
from gpuboard.model.snapshot import NodeView, has_current_values, judged

_GPUS_MOST = 64
_KEPT = ("sm_activity", "tensor_activity", "pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")
_PACKED = struct.Struct(f"{len(_KEPT)}q")  # an object per reading instead of up to 20: a third of the memory
_UNKNOWN = -1
PastSensors = tuple[tuple[float, Sensors | None], ...]  # (epoch seconds, None: not read), oldest first


class ActivityHistory:
    """The readings of at most 64 GPUs by UUID. Threads may add; others may read meanwhile."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._lock = threading.Lock()
        self._kept: dict[str, deque[tuple[float, bytes | None]]] = {}  # the one shown last is the last

    def watch(self, uuid: str) -> None:
        """Keep the readings of a GPU that is shown, from now on; the one shown longest ago makes room."""
        with self._lock:
            self._kept[uuid] = self._kept.pop(uuid, deque())
            while len(self._kept) > _GPUS_MOST:
                del self._kept[next(iter(self._kept))]

    def of(self, uuid: str) -> PastSensors:
        """Return the readings of a GPU, with activity and throughput only; none if they are not kept."""
        with self._lock:
            kept = tuple(self._kept.get(uuid, ()))
        return tuple((at, None if packed is None else _unpacked(packed)) for at, packed in kept)

    def add(self, nodes: Sequence[NodeView], now: float) -> None:
        """Take the readings of this moment; after the clock was set back, everything later than now is dropped."""
        with self._lock:
            few = sum(len(node.gpus) for node in nodes) <= _GPUS_MOST
            if not few and not self._kept:
                return
            for node in nodes:
                for place, gpu in enumerate(judged(node)):
                    past = self._kept.get(gpu.uuid)
                    if past is None and not few:
                        continue
                    sensors = node.gpus[place].sensors
                    if past is None:
                        if sensors is None or len(self._kept) >= _GPUS_MOST:
                            continue
                        past = self._kept[gpu.uuid] = deque()
                    while past and past[-1][0] >= now:
                        past.pop()
                    while past and past[0][0] <= now - self._span_s:
                        past.popleft()
                    read = sensors if has_current_values(node, gpu) else None
                    past.append((now, None if read is None else _packed(read)))

    def load(self, earlier: ActivityHistory) -> None:
        """Put the readings of ``earlier`` before those that are kept here."""
        with self._lock, earlier._lock:
            for uuid, past in earlier._kept.items():
                own = self._kept.setdefault(uuid, deque())
                first, newest = (own[0][0], own[-1][0]) if own else (math.inf, past[-1][0])
                own.extendleft(one for one in reversed(past) if newest - self._span_s < one[0] < first)


def _packed(read: Sensors) -> bytes:
    values = (getattr(read, name) for name in _KEPT)
    return _PACKED.pack(*(_UNKNOWN if value is None else value for value in values))


def _unpacked(packed: bytes) -> Sensors:
    values = (None if value == _UNKNOWN else value for value in _PACKED.unpack(packed))
    return Sensors(**dict(zip(_KEPT, values, strict=True)))
