"""How much one node may send. A node that exceeds a limit loses its connection; no other node is affected.

An agent sends at most one reading a second, of a few kB. Claims that hostile users leave on its node make readings
larger, never more frequent. One line of the largest size a second stays well within the limits.
"""

# No postponed annotations: msgspec would compile each of them, at every start.

import msgspec

from gpuboard.model.decoding import json_decoder
from gpuboard.model.reading import Reading, ReadingDelta, Reply, Static
from gpuboard.transport.base import TransportError

GPUS = 256
MIG_DEVICES = 64  # of a GPU
MIG_DEVICES_IN_ALL = 1024
PROCESSES = 8192  # in all; more than one user can usually start
CLAIMS = 4096
ENTRIES = 1024  # of any other list: links, errors, addresses
MESSAGE = 1024 * 1024  # bytes of a message that is neither reading nor reply

# Token bucket, in bytes: refill per second, and burst. The burst is what networks and agents buffer for a client that
# is suspended for hours.
RATE, BURST = 6 * 1024 * 1024, 20 * 1024 * 1024
PIECE, DECODED = 16 * 1024, 16 * 1024  # charged for each chunk received and each message decoded: small ones cost CPU

_LIST = ord("[")  # begins the numbers of a GPU in a delta
_LARGE = 256 * 1024  # bytes of a line; the lists of longer ones are counted before objects are created


class _Outline(msgspec.Struct, gc=False):
    gpus: list[msgspec.Raw] = []
    details: list[msgspec.Raw] = []
    claims: list[msgspec.Raw] = []


class _GpuOutline(msgspec.Struct, gc=False):
    processes: list[msgspec.Raw] | None = None
    loads: list[msgspec.Raw] = []
    mig: list[msgspec.Raw] | None = None


class _DetailsOutline(msgspec.Struct, gc=False, array_like=True):
    sensors: msgspec.Raw = msgspec.Raw()
    loads: list[msgspec.Raw] = []


_outline = json_decoder(_Outline)
_gpu_outline = json_decoder(_GpuOutline)
_details_outline = json_decoder(list[_DetailsOutline])


class Exceeded(TransportError):
    """A node sent more than the limits allow."""

    def __init__(self, words: str) -> None:
        remedy = "gpuboard retries later; check what `python3` runs there"
        super().__init__("limits", words, remedy)


class Budget:
    """The token bucket of one connection. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._at: float | None = None

    def spend(self, count: int, now: float) -> None:
        """Take ``count`` tokens. Raises Exceeded."""
        since_s = 0.0 if self._at is None else now - self._at
        self._at = now
        self._left = min(BURST, self._left + since_s * RATE) - count
        if self._left < 0:
            raise Exceeded("sent more data than an agent may")


def check_line(line: memoryview) -> None:
    """Raise Exceeded or msgspec.DecodeError for a line that must not be decoded into objects."""
    if len(line) > _LARGE:
        found = _outline.decode(line)
        _at_most(GPUS, max(len(found.gpus), len(found.details)), "GPUs")
        _at_most(CLAIMS, len(found.claims), "claims")
        lists = [*found.gpus, *found.details, *found.claims]
        if lists and len(line) - sum(memoryview(raw).nbytes for raw in lists) > _LARGE:  # other keys are short
            raise Exceeded(f"sent a line of {len(line)} bytes, many of which belong to no GPU or claim")
        for raw in found.gpus:
            if memoryview(raw)[0] == _LIST:
                continue
            gpu = _gpu_outline.decode(raw)
            _at_most(PROCESSES, max(len(gpu.processes or ()), len(gpu.loads)), "processes")
            _at_most(MIG_DEVICES, len(gpu.mig or ()), "MIG devices of a GPU")


def check_message(message: object, size: int) -> None:
    """Raise Exceeded for a message with longer lists than any node has; ``size``: bytes of its line.

    Raises msgspec.DecodeError for a delta of a long line with malformed details.
    """
    if type(message) is ReadingDelta:
        _at_most(GPUS, len(message.gpus), "GPUs")
        _at_most(CLAIMS, len(message.claims), "claims")
        if size > PROCESSES:  # each load takes a byte and more: the usual line is not read here
            details = _details_outline.decode(message.details)
            _at_most(GPUS, len(details), "GPUs")
            _at_most(PROCESSES, sum(len(gpu.loads) for gpu in details), "processes")
    elif type(message) is Reading:
        _at_most(GPUS, len(message.gpus), "GPUs")
        _at_most(CLAIMS, len(message.claims), "claims")
        processes = loads = devices = 0
        for gpu in message.gpus:
            processes += len(gpu.processes or ())
            loads += len(gpu.loads)
            if gpu.mig:
                _at_most(MIG_DEVICES, len(gpu.mig), "MIG devices of a GPU")
                devices += len(gpu.mig)
                processes += sum(len(part.processes or ()) for part in gpu.mig)
            if gpu.throttle or gpu.xids:
                _at_most(ENTRIES, max(len(gpu.throttle), len(gpu.xids or ())), "errors of a GPU")
        _at_most(MIG_DEVICES_IN_ALL, devices, "MIG devices")
        _at_most(PROCESSES, max(processes, loads), "processes")
    elif type(message) is not Reply:
        _at_most(MESSAGE, size, "bytes of facts")
        if type(message) is Static:
            _at_most(GPUS, len(message.gpus), "GPUs")
            _at_most(MIG_DEVICES, max((len(gpu.mig or ()) for gpu in message.gpus), default=0), "MIG devices of a GPU")
            _at_most(MIG_DEVICES_IN_ALL, sum(len(gpu.mig or ()) for gpu in message.gpus), "MIG devices")
            for each in message.gpus:
                _at_most(ENTRIES, max(len(each.links), len(each.pci)), "links of a GPU")


def _at_most(limit: int, count: int, what: str) -> None:
    if count > limit:
        raise Exceeded(f"lists {count} {what}; at most {limit} are accepted")
