"""Network traffic of the host, from the counters of its physical interfaces (/proc/net/dev).

Bridges, bonds, tunnels and the interfaces of containers have no device in /sys: their traffic passes a physical one or
stays on the host. RDMA (InfiniBand, RoCE) bypasses these counters.
"""

import os
import time

from gpuboard.agent import proc

MYPY = False
if MYPY:
    from typing import Callable, Dict, Optional, Tuple

_LIMIT = 1024 * 1024  # bytes of /proc/net/dev: 8,000 interfaces
_SPAN_S = 0.4  # rates are measured over this time at least


class Traffic:
    """Bytes per second since the previous reading."""

    def __init__(
        self, root: str = "/proc", sys_root: str = "/sys", clock: "Callable[[], float]" = time.monotonic
    ) -> None:
        self._path = root + "/net/dev"
        self._sys = sys_root + "/class/net/"
        self._clock = clock
        self._physical: "Dict[str, bool]" = {}
        self._before: "Optional[Tuple[float, Dict[str, Tuple[int, int]]]]" = None
        self._rates = (None, None)  # type: Tuple[Optional[float], Optional[float]]

    def reading(self) -> "Dict[str, Optional[float]]":
        """Return ``net_received`` and ``net_sent``, bytes per second; None at first and where they cannot be read."""
        now, before = self._clock(), self._before
        if before is None or now - before[0] >= _SPAN_S:
            counters = self._counters()
            self._rates = None, None
            # an interface that is new or was reset counts from the next reading on
            steps = (
                [_steps(counters[name], before[1][name]) for name in counters if name in before[1]] if before else []
            )
            if before is not None and steps:
                seconds = now - before[0]
                self._rates = sum(step[0] for step in steps) / seconds, sum(step[1] for step in steps) / seconds
            self._before = now, counters
        return {"net_received": self._rates[0], "net_sent": self._rates[1]}

    def _counters(self) -> "Dict[str, Tuple[int, int]]":
        try:
            lines = proc.read(self._path, _LIMIT).decode("ascii", "replace").split("\n")[2:]
        except OSError:
            return {}
        found = {}  # type: Dict[str, Tuple[int, int]]
        known = {}  # type: Dict[str, bool]
        for line in lines:
            name, _, numbers = line.strip().rpartition(":")
            fields = numbers.split()
            if not name or len(fields) < 9 or not (fields[0].isdigit() and fields[8].isdigit()):
                continue
            if name not in self._physical:
                self._physical[name] = os.path.exists(self._sys + name + "/device")
            known[name] = self._physical[name]
            if known[name]:
                found[name] = int(fields[0]), int(fields[8])
        self._physical = known
        return found


def _steps(now: "Tuple[int, int]", before: "Tuple[int, int]") -> "Tuple[int, int]":
    return max(0, now[0] - before[0]), max(0, now[1] - before[1])
