"""A past as bytes: a line with the version, then frames that are only appended (pure).

A frame is its length and checksum, then, compressed, a kind and its content: ``C`` more columns (UUIDs, a line each) or
``R`` a record (the index of its span, its time, its planes one after the other, of one length). An incomplete frame at
the end was being written when its writer was killed, or is being written now.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from gpuboard.board.history.records import PLANES, HistoryRecord, Past

VERSION = b"gpuboard history 1\n"
_HEAD = struct.Struct("<II")  # length of the compressed content, checksum of both
_RECORD = struct.Struct("<cBd")
_FRAME_MAX = 16 << 20  # bytes of a frame, compressed or not: 2.7 million GPUs


class Loaded(NamedTuple):
    """A past that was read."""

    past: Past
    end: int  # of the last whole frame
    error: str  # "", or why what follows cannot be read; not for a frame that is not complete


def columns_frame(uuids: Sequence[str]) -> bytes:
    """Return the frame that adds columns."""
    return _frame(b"C" + "\n".join(uuids).encode())


def record_frame(span: int, record: HistoryRecord) -> bytes:
    """Return the frame of a record; ``span``: the index of its span."""
    most = max(map(len, record.planes))
    planes = b"".join(plane.ljust(most, b"\0") for plane in record.planes)
    return _frame(_RECORD.pack(b"R", span, record.at) + planes)


def read(data: bytes, spans: int) -> Loaded:
    """Return what a file contains. ``spans``: their number. An empty file is an empty past."""
    columns: dict[str, int] = {}
    records: list[list[HistoryRecord]] = [[] for _ in range(spans)]
    end, error = 0, ""
    if VERSION.startswith(data[: len(VERSION)]):
        end = len(VERSION) if len(data) >= len(VERSION) else 0
    else:
        error = "not a history of this version"
    while end and not error and len(data) - end >= _HEAD.size:
        size, checksum = _HEAD.unpack_from(data, end)
        start = end + _HEAD.size
        content = data[start : start + size]
        if size == 0 or len(content) < size <= _FRAME_MAX:  # zeros: the system crashed before the frame was written
            break
        if size > _FRAME_MAX or checksum != _checksum(content) or not _add(_unpacked(content), columns, records):
            error = f"damaged at byte {end}"
        else:
            end = start + size
    return Loaded(Past(tuple(map(tuple, records)), columns), end, error)


def _add(content: bytes, columns: dict[str, int], records: list[list[HistoryRecord]]) -> bool:
    if content[:1] == b"C":
        for uuid in content[1:].decode(errors="replace").split("\n"):
            columns.setdefault(uuid, len(columns))
        return True
    if len(content) < _RECORD.size:
        return False
    kind, span, at = _RECORD.unpack_from(content)
    size, rest = divmod(len(content) - _RECORD.size, PLANES)
    if kind != b"R" or span >= len(records) or not isfinite(at) or rest or size > len(columns):
        return False
    starts = range(_RECORD.size, len(content), size) if size else ()
    records[span].append(HistoryRecord(at, tuple(content[start : start + size] for start in starts) or (b"",) * PLANES))
    return True


def _frame(content: bytes) -> bytes:
    packed = zlib.compress(content, 1)
    return _HEAD.pack(len(packed), _checksum(packed)) + packed


def _checksum(packed: bytes) -> int:
    return zlib.crc32(packed, len(packed))


def _unpacked(packed: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(packed, _FRAME_MAX)
    except zlib.error:
        return b""
