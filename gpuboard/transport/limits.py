"""How much one node may send. What goes beyond it is no agent's, and costs the node its connection, nobody else.

An agent sends a reading each second or more seldom, a few kB of it; claims that hostile users leave on its node make it
larger, never more frequent. The largest line that there may be, once a second, is well within the limits.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpuboard.model.reading import Reading, Reply, Static
from gpuboard.transport.base import TransportError

GPUS = 256
MIG_DEVICES = 64  # of a GPU
MIG_DEVICES_IN_ALL = 1024
PROCESSES = 8192  # in all; so many that one user can hardly start them
CLAIMS = 4096
ENTRIES = 1024  # of any other list: links, errors, addresses
MESSAGE = 1024 * 1024  # bytes of a message that is neither reading nor reply

# Token bucket, in bytes. A piece costs more than its bytes, and so does a message: one at a time is work too. The burst
# is what networks and agents hold back for a client that is suspended for hours.
RATE, BURST = 6 * 1024 * 1024, 20 * 1024 * 1024  # a second; at once
PIECE, DECODED = 16 * 1024, 16 * 1024

_LARGE = 256 * 1024  # bytes of a line whose lists are counted before objects are made of them


class _Outline(msgspec.Struct, gc=False):
    gpus: list[msgspec.Raw] = []
    claims: list[msgspec.Raw] = []


class _GpuOutline(msgspec.Struct, gc=False):
    processes: list[msgspec.Raw] | None = None
    mig: list[msgspec.Raw] | None = None


_outline = msgspec.json.Decoder(_Outline)
_gpu_outline = msgspec.json.Decoder(_GpuOutline)


class Exceeded(TransportError):
    """A node sends more than it may."""

    def __init__(self, words: str) -> None:
        super().__init__("limits", words, "it is left alone for a while; its agent is not the one that was sent there")


class Budget:
    """The token bucket of one connection. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._at: float | None = None

    def spend(self, count: int, now: float) -> None:
        """Take ``count`` bytes' worth. Raises Exceeded."""
        since_s = 0.0 if self._at is None else now - self._at
        self._at = now
        self._left = min(BURST, self._left + since_s * RATE) - count
        if self._left < 0:
            raise Exceeded("sends more than any node has to say")


def check_line(line: memoryview) -> None:
    """Raise Exceeded, and msgspec.DecodeError, for a line of which no objects should be made at all."""
    if len(line) > _LARGE:
        found = _outline.decode(line)
        _at_most(GPUS, len(found.gpus), "GPUs")
        _at_most(CLAIMS, len(found.claims), "claims")
        for gpu in map(_gpu_outline.decode, found.gpus):
            _at_most(PROCESSES, len(gpu.processes or ()), "processes")
            _at_most(MIG_DEVICES, len(gpu.mig or ()), "MIG devices of a GPU")


def check_message(message: object, size: int) -> None:
    """Raise Exceeded for a message that lists more than any node has; ``size``: bytes of its line."""
    if type(message) is Reading:
        _at_most(GPUS, len(message.gpus), "GPUs")
        _at_most(CLAIMS, len(message.claims), "claims")
        _devices(len(gpu.mig) for gpu in message.gpus)
        processes = sum(len(gpu.processes or ()) for gpu in message.gpus)
        processes += sum(len(part.processes or ()) for gpu in message.gpus for part in gpu.mig)
        _at_most(PROCESSES, processes, "processes")
        for gpu in message.gpus:
            _at_most(ENTRIES, max(len(gpu.throttle), len(gpu.xids or ())), "errors of a GPU")
    elif type(message) is not Reply:
        _at_most(MESSAGE, size, "bytes of facts")
        if type(message) is Static:
            _at_most(GPUS, len(message.gpus), "GPUs")
            _devices(len(gpu.mig or ()) for gpu in message.gpus)
            for each in message.gpus:
                _at_most(ENTRIES, max(len(each.links), len(each.pci)), "links of a GPU")


def _devices(counts: Iterable[int]) -> None:
    in_all = 0
    for count in counts:
        _at_most(MIG_DEVICES, count, "MIG devices of a GPU")
        in_all += count
    _at_most(MIG_DEVICES_IN_ALL, in_all, "MIG devices")


def _at_most(limit: int, count: int, what: str) -> None:
    if count > limit:
        raise Exceeded(f"lists {count} {what}; at most {limit} are accepted")
