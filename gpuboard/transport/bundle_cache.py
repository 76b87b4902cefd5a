"""The bundles that a process has made, kept for later ones: making and compiling one takes 0.1 s."""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections.abc import Sequence
from functools import cached_property

import msgspec

from gpuboard import files, paths
from gpuboard.agent.bundle_loader import BYTECODE
from gpuboard.model.decoding import from_msgpack

_BYTES_MAX = 4 * 1024 * 1024


class _Kept(msgspec.Struct):
    made_from: bytes
    check: int  # CRC-32 of ``data``: a file may be torn by a crash of the machine
    data: bytes


class KeptBundle:
    """The file of one bundle in the user's cache folder. Nothing here raises: without it the bundle is made again."""

    def __init__(self, name: str, sources: Sequence[str | os.PathLike[str]]) -> None:
        """``sources``: the files that it is made from; none: nothing is kept."""
        self._sources = sources
        self._path = paths.cache_dir(os.environ) / f"bundle-{name}-{sys.implementation.cache_tag}"

    @cached_property
    def usable(self) -> bool:
        """Whether a bundle can be kept."""
        with contextlib.suppress(OSError):
            paths.make_private(self._path.parent)
            return bool(self._made_from) and os.access(self._path.parent, os.W_OK)
        return False

    def load(self) -> bytes | None:
        """Return the bundle that was stored; None where nothing is stored, or its sources have changed since."""
        try:
            with files.open_private(self._path) as file:
                kept = from_msgpack(file.read(_BYTES_MAX), _Kept)
        except (OSError, ValueError, msgspec.MsgspecError):
            return None
        whole = kept.made_from == self._made_from and zlib.crc32(kept.data) == kept.check
        return kept.data if whole else None

    def store(self, data: bytes) -> None:
        """Keep a bundle."""
        if self.usable:
            kept = _Kept(self._made_from, zlib.crc32(data), data)
            with contextlib.suppress(OSError):  # a full disk
                files.write_private(self._path, msgspec.msgpack.encode(kept))

    @cached_property
    def _made_from(self) -> bytes:
        """The kind of bytecode, then path, times of change and size of each source; b"" where a bundle is not kept."""
        try:
            facts = [(os.fsencode(path), os.stat(path)) for path in self._sources]
        except OSError:
            return b""
        # An installer may set the times of files to a fixed value, but not when their inodes were changed.
        lines = (
            b"%b %d %d %d\n" % (path, status.st_mtime_ns, status.st_ctime_ns, status.st_size) for path, status in facts
        )
        return BYTECODE + b"".join(lines) if facts else b""
