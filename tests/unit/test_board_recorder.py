"""The history on disk: what survives a restart, damage, two boards and a full disk; how large it gets."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuboard.board.history import DAY, HOUR, History, Samples, codec, recorder
from gpuboard.board.history.recorder import Recorder
from gpuboard.model.snapshot import NodeView, Snapshot
from tests.board.made import gpu, node

ROOT = Path(__file__).parents[2]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}


class Board:
    """A history and its recorder, without their thread; time goes by as it is told."""

    def __init__(self, env: dict[str, str], *names: str) -> None:
        self.history = History()
        self.told: list[str] = []
        self.recorder = Recorder(self.history, env, self.told.append)
        self.nodes = [node(name, [gpu(name, index, utilization=50) for index in range(2)]) for name in names]

    def run(self, since: float, seconds: int, nodes: list[NodeView] | None = None) -> None:
        """Take a sample every 10 s."""
        for second in range(0, seconds, 10):
            self.history.add(Snapshot(1, "", "lab", nodes or self.nodes), since + second)

    def of(self, name: str = "n") -> tuple[Samples, Samples]:
        return self.history.of(f"GPU-{name}-0", HOUR), self.history.of(f"GPU-{name}-0", DAY)


def now() -> float:
    """Return a begin of five minutes, half an hour ago."""
    return (time.time() - 1800) // 300 * 300


def file_of(env: dict[str, str], number: int = 0) -> Path:
    return recorder.folder(env) / f"{os.uname().nodename}-{number}.ring"


def written(env: dict[str, str], *names: str, since: float, seconds: int = 900) -> Board:
    board = Board(env, *names)
    board.run(since, seconds + 10)
    board.recorder.write()
    return board


def test_what_one_board_wrote_the_next_one_shows(env: dict[str, str]) -> None:
    since = now()
    first = written(env, "n", since=since)
    second = Board(env, "n")
    second.recorder.load()
    hour, day = second.of()
    assert hour.times == tuple(since + at for at in range(0, 900, 30)) == first.of()[0].times[:-1]
    assert day.times == (since, since + 300, since + 600)
    assert (set(hour.utilization), set(day.power), second.told) == ({50}, {71}, [])
    second.run(since + 1500, 310)
    hour, day = second.of()
    assert day.times == (since, since + 300, since + 600, since + 1500, since + 1800)
    assert hour.times[29:31] == (since + 870, since + 1500)


def test_records_are_appended_and_gpus_come_later(env: dict[str, str]) -> None:
    since = now()
    board = written(env, "n", since=since, seconds=300)
    begin = file_of(env).read_bytes()
    inode = file_of(env).stat().st_ino
    board.nodes += [node("m", [gpu("m", 0, utilization=80)])]
    board.run(since + 310, 300)
    board.recorder.write()
    assert (file_of(env).read_bytes()[: len(begin)], file_of(env).stat().st_ino) == (begin, inode)
    assert file_of(env).stat().st_mode & 0o777 == 0o600
    other = Board(env)
    other.recorder.load()
    assert other.of("n")[1].times == (since, since + 300)
    assert set(other.of("m")[0].utilization[11:]) == {80}


def test_of_a_file_cut_at_any_byte_whole_records_are_kept(env: dict[str, str]) -> None:
    since = now()
    written(env, "n", since=since, seconds=600)
    data = file_of(env).read_bytes()
    file_of(env).unlink()
    past = codec.read(data, 3).past
    counts = []
    for size in range(len(data) + 1):
        found = codec.read(data[:size], 3)
        assert found.error == "" and found.end <= size
        counts.append(len(found.past.records[1]) + len(found.past.records[2]))
        assert all(record in past.records[span] for span in (1, 2) for record in found.past.records[span])
    assert counts == sorted(counts) and counts[-1] == 20 + 2
    for size in (5, len(codec.VERSION) + 1, len(data) - 3):  # a board begins with it
        file_of(env).write_bytes(data[:size])
        board = Board(env, "n")
        board.recorder.load()
        board.run(since + 900, 310)
        board.recorder.write()
        after = codec.read(file_of(env).read_bytes(), 3)
        assert (board.told, after.error, after.past.records[1][-1].at) == ([], "", since + 1170)
        file_of(env).unlink()


def test_a_damaged_file_is_set_aside_and_what_comes_before_is_kept(env: dict[str, str]) -> None:
    since = now()
    written(env, "n", since=since)
    data = bytearray(file_of(env).read_bytes())
    for at in range(len(codec.VERSION), len(data), 7):
        data[at] ^= 0x55
        found = codec.read(bytes(data), 3)
        assert found.end <= at and all(record.at <= since + 900 for span in found.past.records for record in span)
        data[at] ^= 0x55
    data[-10] ^= 0x55
    file_of(env).unlink()  # the first board still has a lock on it
    file_of(env, 1).write_bytes(data)
    file_of(env, 0).write_bytes(b"gpuboard history 7\nwhatever")
    damaged = Board(env, "n")
    damaged.recorder.load()
    assert damaged.of()[0].times[0] == since
    damaged.run(since + 900, 40)
    damaged.recorder.write()
    [told] = damaged.told
    assert told == f"{file_of(env)}: not a history of this version; set aside as {file_of(env).name}.bad"
    assert Path(f"{file_of(env)}.bad").read_bytes() == b"gpuboard history 7\nwhatever"
    assert codec.read(file_of(env).read_bytes(), 3).past.records[1][0].at == since
    other = Board(env, "n")
    other.run(since + 900, 40)
    other.recorder.write()
    assert len(other.told) == 1 and ": damaged at byte " in other.told[0]
    assert codec.read(file_of(env, 1).read_bytes(), 3).error == ""


def test_two_boards_write_files_of_their_own_and_read_both(env: dict[str, str]) -> None:
    since = now()
    boards = [written(env, name, since=since, seconds=300) for name in "abcde"]
    assert sorted(path.name for path in recorder.folder(env).iterdir()) == [file_of(env, k).name for k in range(4)]
    assert [board.told for board in boards] == [[]] * 5
    last = Board(env)
    last.recorder.load()
    assert [len(last.of(name)[1].times) for name in "abcde"] == [1, 1, 1, 1, 0]


def test_a_file_that_was_removed_is_written_again(env: dict[str, str]) -> None:
    since = now()
    board = written(env, "n", since=since, seconds=300)
    file_of(env).unlink()
    board.run(since + 310, 300)
    board.recorder.write()
    assert len(codec.read(file_of(env).read_bytes(), 3).past.records[1]) == 20
    assert board.told == []


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Let no file grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_a_message_and_nothing_is_missing_later(env: dict[str, str]) -> None:
    since = now()
    board = written(env, "n", since=since, seconds=300)
    size = file_of(env).stat().st_size
    with disk_of(size + 20):
        board.run(since + 310, 300)
        board.recorder.write()
        board.recorder.write()
    assert board.told == [f"{recorder.folder(env)}: File too large; graphs of the last day are kept in memory only"]
    assert codec.read(file_of(env).read_bytes(), 3).end == size == file_of(env).stat().st_size
    board.recorder.write()
    assert len(codec.read(file_of(env).read_bytes(), 3).past.records[1]) == 20
    other = Board(env, "m")
    other.run(since, 100)
    with disk_of(10):
        other.recorder.write()
    assert len(other.told) == 1 and not list(recorder.folder(env).glob("*.new"))


def test_a_folder_that_cannot_be_written_is_a_message(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "gpuboard").write_text("a file")
    board = written(env, "n", since=now(), seconds=60)
    board.recorder.load()
    assert len(board.told) == 1 and "kept in memory only" in board.told[0]


def test_the_file_is_bounded(env: dict[str, str]) -> None:
    board, since = Board(env, "n"), now() - 2 * 86400
    most = 0
    for hours in range(0, 48, 2):
        board.run(since + hours * 3600, 7200)
        board.recorder.write()
        most = max(most, file_of(env).stat().st_size)
    assert most < 192 << 10
    assert len(board.of()[1].times) == 289


def test_a_board_that_is_killed_leaves_whole_records(env: dict[str, str]) -> None:
    since = now()
    code = f"""
        import sys
        from tests.unit.test_board_recorder import Board
        board = Board({env!r}, *map(str, range(20)))
        for k in range(10**6):
            board.run({since - 40000} + 300 * k % 40000, 300)
            board.recorder.write()
            print(k, flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        while writer.stdout.readline() not in {"40\n", ""}:
            pass
        writer.send_signal(signal.SIGKILL)
    found = codec.read(file_of(env).read_bytes(), 3)
    assert found.error == "" and len(found.past.records[1]) >= 100
    board = Board(env, "0")
    board.recorder.load()
    board.run(since, 60)
    board.recorder.write()  # the kernel has released the lock
    assert board.told == [] and not file_of(env, 1).exists()
