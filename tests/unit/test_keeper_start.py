"""A keeper that was started early and is not needed: closing it may be interrupted and repeated."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from gpuboard.agent.proc import read_process
from gpuboard.keeper import client
from tests.interrupts import interrupted
from tests.waiting import until


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


def test_keepers_that_are_not_waited_for_leave_one_zombie_at_most(tmp_path: Path) -> None:
    """As on a board that runs for days, where reservations are given up."""

    def zombies() -> list[int]:
        return [pid for pid in pids if (process := read_process(pid)) is not None and process.state == "Z"]

    pids: list[int] = []
    for number in range(3):
        started = client.start_early({"XDG_STATE_HOME": str(tmp_path / str(number))})
        assert started.pid is not None
        pids.append(started.pid)
        started.close()
        until(lambda: zombies() == pids[-1:], "the end of the process that forks the keeper")
