"""A keeper that was started early and is not needed: closing it may be interrupted and repeated."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from gpuboard.keeper import client
from tests.interrupts import interrupted


def test_a_close_that_is_interrupted_is_repeated(tmp_path: Path) -> None:
    numbers = count()

    def close() -> None:
        started = client.start_early({"XDG_STATE_HOME": str(tmp_path / str(next(numbers)))})
        try:
            started.link()
        finally:
            try:
                started.close()
            finally:
                started.close()
        assert started.pipe < 0
        assert started.connection is None

    for at, raised in interrupted(client, close):
        assert type(raised) is KeyboardInterrupt, (at, raised)
