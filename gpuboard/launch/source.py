"""Where a run's rank map comes from: a file, a lease, or a part of one (pure but for reading the file)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gpuboard.errors import UsageError
from gpuboard.model.rankmap import RankMap
from gpuboard.model.text import clean


def read_rank_map(path: Path) -> RankMap:
    """Return the rank map in a file, typed but not yet checked. Raises UsageError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RankMap)
    except OSError as error:
        raise UsageError(f"{path}: the rank map cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not a rank map: {clean(str(error))}") from error
