"""The file of events: several boards, kill -9, rotation, garbage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboard.board.overview.store import SIZE_MAX, EventStore, append, read
from gpuboard.model.units import iso
from gpuboard.recording.events import ClusterEvent
from tests.waiting import until

WRITER = """
import sys
from pathlib import Path
from gpuboard.recording.events import ClusterEvent
from gpuboard.board.overview.store import append
file, by = Path(sys.argv[1]), sys.argv[2]
number = 0
while number < 400:  # together fewer than are kept
    at, node = "2026-01-31T12:00:00.000Z", f"gpu{number % 100}"
    append(file, [ClusterEvent(at, "xid", (node,), str(number), by, "x" * 200, by)])
    number += 1
    print(number, flush=True)
"""


def event(second: float, words: str = "", by: str = "", kind: str = "xid") -> ClusterEvent:
    return ClusterEvent(iso(1e9 + second), kind, ("gpu01",), "0", words=words, by=by)


def test_lines_of_two_boards_and_one_killed_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "state" / "events.jsonl"
    boards = [
        subprocess.Popen([sys.executable, "-c", WRITER, file, by], stdout=subprocess.PIPE, text=True) for by in "ab"
    ]
    for board in boards:
        for _ in range(100):
            assert board.stdout is not None
            assert board.stdout.readline()
    for board in boards:
        board.send_signal(signal.SIGKILL)
        board.communicate()
    assert file.stat().st_mode & 0o777 == 0o600
    found = read(file)
    for by in "ab":
        numbers = [int(one.gpus) for one in found if one.user == by]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= 100


def test_half_a_line_costs_only_itself(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    append(file, [event(0, "first")])
    with file.open("ab") as half:
        half.write(b'{"at":"2026-01-31T12:00:00Z","kind":"lo')
    append(file, [event(1, "second")])
    with file.open("ab") as garbage:
        garbage.write(b'\xff\xfe\n[[[[\n{"at":"yesterday","kind":"lost"}\n{"at":3}\n' + b"[" * 100_000 + b"\n")
    append(file, [event(2, "\x1b[31mthird\u202e")])
    assert [one.words for one in read(file)] == ["first", "second", "[31mthird"]


def test_the_file_is_bounded_and_its_newest_events_stay(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    for number in range(30):
        append(file, [event(100 * number + part, "x" * 500) for part in range(100)])
    kept = sorted(tmp_path.iterdir())
    assert [one.name for one in kept] == ["events.jsonl", "events.jsonl.1"]
    assert all(one.stat().st_size <= SIZE_MAX + 100 * 1024 for one in kept)
    found = read(file)
    assert found[-1] == event(2999, "x" * 500)
    assert [one.at for one in found] == sorted(one.at for one in found)


def test_what_two_boards_have_seen_is_listed_once(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    append(file, [event(0, by="a"), event(1.5, by="b"), event(10, by="a"), event(11, by="b"), event(60, by="b")])
    assert [(one.by, one.at) for one in read(file)] == [("a", iso(1e9)), ("a", iso(1e9 + 10)), ("b", iso(1e9 + 60))]


def test_a_store_reads_what_another_wrote_about_its_nodes(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    first = EventStore(file, ["gpu01"])
    first.start()
    first.add([event(0, "kept"), ClusterEvent(iso(1e9), "lost", ("other01",))])
    until(lambda: file.exists() and len(read(file)) == 2)
    second = EventStore(file, ["gpu01", "gpu02"])
    second.add([event(50, "new")])
    second.start()
    until(lambda: len(second.events) == 2)
    assert [one.words for one in second.events] == ["kept", "new"]
    assert not second.problem


def test_a_file_that_cannot_be_used_is_reported_and_nothing_else_fails(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    store = EventStore(tmp_path / "events.jsonl", ["gpu01"])
    store.start()
    store.add([event(0)])
    until(lambda: "events.jsonl" in store.problem)
    assert len(store.events) == 1
    with pytest.raises(OSError, match="directory"):
        append(tmp_path, [event(0)])


def test_a_file_that_can_be_written_again_is_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.mkdir()
    read_once = EventStore(file, ["gpu01"])
    read_once.start()
    until(lambda: "older events are not shown" in read_once.problem)
    file.rmdir()
    store = EventStore(file, ["gpu01"])
    store.start()
    store.add([event(0)])
    until(file.exists)
    file.unlink()
    file.mkdir()
    store.add([event(50)])
    until(lambda: "events are not kept" in store.problem)
    file.rmdir()
    for each in (store, read_once):
        each.add([event(100)])
    until(lambda: not store.problem and len(file.read_bytes().splitlines()) == 2)
    assert "older events are not shown" in read_once.problem
