"""Output of ranks: whole lines, readable progress bars, bounded memory, complete logs."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from gpuboard.launch.output import MAX_LINE, LineSplitter, Logs, Relay, Screen


class Terminal(io.StringIO):
    """A stream whose isatty() is true."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("pieces", "lines", "partial"),
    [
        (["a\nb", "c\n"], ["a", "bc"], ""),
        (["a\r\n"], ["a"], ""),
        (["\r10%", "\r20%"], [], "20%"),
        (["10%\r", "20%\r"], [], "20%"),
        (["10%\r20%\r", "\n"], ["20%"], ""),
        (["\r100%\ndone\n"], ["100%", "done"], ""),
        (["\x1b[31mred\x1b[0m\x1b[2K\x1b[1A\n"], ["\x1b[31mred\x1b[0m"], ""),
        (["name? "], [], "name? "),
        (["a\n\nb\n"], ["a", "", "b"], ""),
    ],
)
def test_lines_are_as_a_terminal_shows_them(pieces: list[str], lines: list[str], partial: str) -> None:
    cut = LineSplitter()
    assert [line for piece in pieces for line in cut.feed(piece)] == lines
    assert cut.partial == partial


def test_a_progress_bar_needs_no_memory() -> None:
    cut = LineSplitter()
    for step in range(10_000):
        assert cut.feed(f"\r{step:>80}%") == []
    assert cut.partial.strip() == "9999%"
    assert len(cut.close()[0]) == 81


def test_an_endless_line_is_split() -> None:
    cut = LineSplitter()
    assert [len(line) for line in cut.feed("x" * (2 * MAX_LINE + 5))] == [MAX_LINE, MAX_LINE]
    assert cut.close() == ["x" * 5]


def relay(folder: Path, out: TextIO, err: TextIO, ranks: int = 2) -> tuple[Relay, Screen]:
    """Return a relay to two streams; the clock moves a second each time it is read."""
    ticks = iter(range(1_000_000))
    screen = Screen(out, err, clock=lambda: float(next(ticks)))
    labels = {rank: f"gpu01:{rank}" for rank in range(ranks)}
    return Relay(
        labels, Logs(folder, lambda _: None), screen, mark=lambda _, line: "! " if "peer" in line else ""
    ), screen


def test_binary_data_does_not_break_a_terminal_and_is_unchanged_in_a_pipe(tmp_path: Path) -> None:
    shown, piped = Terminal(), io.StringIO()
    both, screen = relay(tmp_path, shown, piped)
    for stream in ("out", "err"):
        both.output(0, stream, "a\x1b[31mred\x0e\x1bc\x1b]0;title\x07\x9b\tb\n".encode())
    screen.close()
    assert shown.getvalue() == "[rank 0 gpu01:0] a\x1b[31mredc]0;title\tb\x1b[0m\n"
    assert piped.getvalue() == "[rank 0 gpu01:0] a\x1b[31mred\x0e\x1bc\x1b]0;title\x07\x9b\tb\n"


def test_lines_are_labelled_and_logs_are_complete(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    both, screen = relay(tmp_path, out, err)
    both.output(0, "out", b"one\ntw")
    both.output(1, "out", b"\r5%\r10%")
    both.output(0, "out", b"o\n")
    both.output(1, "err", b"reset by peer\n")
    both.ended(1)
    screen.close()
    assert out.getvalue() == "[rank 0 gpu01:0] one\n[rank 0 gpu01:0] two\n[rank 1 gpu01:1] 10%\n"
    assert err.getvalue() == "[rank 1 gpu01:1] ! reset by peer\n"
    assert (tmp_path / "rank-0.out").read_text() == "one\ntwo\n"
    assert (tmp_path / "rank-1.out").read_bytes() == b"\r5%\r10%"
    assert (both.last_line, [*both.errors[1]]) == ({0: "two", 1: "10%"}, ["reset by peer"])


def test_output_of_a_single_rank_in_a_pipe_is_unchanged(tmp_path: Path) -> None:
    out, err = io.StringIO(), Terminal()
    one, screen = relay(tmp_path, out, err, ranks=1)
    one.output(0, "out", b"loss 0.3\n")
    one.output(0, "err", b"warning\n")
    screen.close()
    assert (out.getvalue(), err.getvalue()) == ("loss 0.3\n", "[rank 0 gpu01:0] warning\n")


def test_on_a_terminal_a_progress_bar_stays_below_the_lines(tmp_path: Path) -> None:
    out = err = Terminal()
    both, screen = relay(tmp_path, out, err)
    both.output(0, "err", b"\r50%")
    assert _written(screen, out) == "[rank 0 gpu01:0] 50%"
    both.output(1, "out", b"\x1b[31mline\n")
    screen.close()
    assert out.getvalue() == "[rank 0 gpu01:0] 50%\r\x1b[K[rank 1 gpu01:1] \x1b[31mline\x1b[0m\n"


@pytest.mark.parametrize(
    ("line", "drawn"),
    [
        ("訓練" * 15, "訓練" * 9 + "訓"),
        ("a\tb\t" + "c" * 30, "a       b       " + "c" * 23),
        ("\x1b[31m訓練", "\x1b[31m訓練\x1b[0m"),
    ],
    ids=["wide", "tabs", "colour"],
)
def test_an_unfinished_line_fits_into_the_terminal(line: str, drawn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapped line could not be erased."""
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    screen = Screen(out, out)
    screen.live("out", line)
    assert _written(screen, out) == drawn
    screen.close()


def _written(screen: Screen, stream: io.StringIO) -> str:
    """Return all output, once the queue is empty."""
    while screen.backlog:
        pass
    return stream.getvalue()


def test_a_closed_pipe_does_not_end_the_run(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as out:
        both, screen = relay(tmp_path, out, io.StringIO())
        both.output(0, "out", b"a\n")
        screen.close()
    assert (tmp_path / "rank-0.out").read_text() == "a\n"
    assert screen.backlog == 0


def test_a_write_that_is_interrupted_by_a_stop_loses_nothing() -> None:
    program = """
import sys
from gpuboard.launch.output import Writer
writer = Writer(print)
lines = [f"{number:06d} {'x' * 80}\\n" for number in range(20000)]
for first in range(0, len(lines), 500):
    writer.write(sys.stdout, "".join(lines[first : first + 500]))
writer.finish()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        read = b""
        while part := os.read(process.stdout.fileno(), 8192):
            read += part
            os.kill(process.pid, signal.SIGSTOP)  # the pipe is full: in the middle of a write
            # Not send_signal(), which takes the exit status of a process that has ended.
            if os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT):
                os.kill(process.pid, signal.SIGCONT)
    assert read.decode().splitlines() == [f"{number:06d} {'x' * 80}" for number in range(20000)]


def test_characters_that_the_terminal_lacks_are_replaced(tmp_path: Path) -> None:
    data = io.BytesIO()
    both, screen = relay(tmp_path, io.TextIOWrapper(data, encoding="latin-1"), io.StringIO())
    both.output(0, "out", "ä 🏖\n".encode())
    screen.close()
    assert data.getvalue() == "[rank 0 gpu01:0] ä ?\n".encode("latin-1")
    assert (tmp_path / "rank-0.out").read_text(encoding="utf-8") == "ä 🏖\n"


def test_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    messages: list[str] = []
    (tmp_path / "rank-0.out").symlink_to("/dev/full")
    logs = Logs(tmp_path, messages.append)
    logs.write(0, "out", b"a\n")
    logs.write(0, "out", b"b\n")
    assert messages == [
        f"logs are incomplete: {tmp_path}/rank-0.out: No space left on device; "
        "`gpuboard runs` may show an outdated state"
    ]


def test_a_log_that_cannot_be_written_in_full_is_reported(tmp_path: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from gpuboard.launch.output import Logs
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # a file system writes a part, too
Logs(Path(sys.argv[1]), print).write(0, "out", b"x" * 1800)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (tmp_path / "rank-0.out").stat().st_size == 1000
    assert done.stdout.startswith(f"logs are incomplete: {tmp_path}/rank-0.out: File too large")


def test_a_full_disk_that_only_close_reports_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS the server's answer to earlier writes comes with close()."""

    class Full(io.FileIO):
        def close(self) -> None:
            failed = not self.closed
            super().close()
            if failed:
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Full(path, "ab"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))  # one file is open at a time
    messages: list[str] = []
    logs = Logs(tmp_path, messages.append)
    for rank in range(2):
        logs.write(rank, "out", b"line\n")
    assert (tmp_path / "rank-1.out").stat().st_size == 5
    logs.close()
    assert logs.failed
    assert messages == [
        f"logs are incomplete: {tmp_path}/rank-0.out: No space left on device; "
        "`gpuboard runs` may show an outdated state"
    ]


def test_logs_of_more_ranks_than_files_may_be_open_close_the_least_recently_used(tmp_path: Path) -> None:
    def open_logs() -> set[str]:
        links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)]
        return {Path(link).name for link in links if link.startswith(str(tmp_path))}

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        logs = Logs(tmp_path, lambda _: None, "attempt 2")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for rank in [*range(64), 0, 64]:
        logs.write(rank, "out", b"line\n")
    assert open_logs() == {f"rank-{rank}.out" for rank in [0, *range(2, 65)]}
    logs.write(1, "out", b"more\n")
    assert (tmp_path / "rank-1.out").read_text() == "\nattempt 2\nline\nmore\n"
    logs.close()
    assert open_logs() == set()
