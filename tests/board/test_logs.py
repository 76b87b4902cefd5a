"""Logs of ranks: windows into files of any size, hostile text, following, searching, files that go wrong."""

from __future__ import annotations

import os
import random
import subprocess
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.cells import cell_len
from textual import events
from textual.pilot import Pilot
from textual.widgets import Input

from gpuboard.board.app import BoardApp
from gpuboard.board.screens.logs import LogScreen
from gpuboard.board.text.detail.log_line import bytes_words, drawn, matches, spans, visible
from gpuboard.board.widgets import log_file
from gpuboard.board.widgets.log_file import LogFile, LogGone, LogPosition, Match, Window, find_in
from gpuboard.board.widgets.log_view import LogView
from gpuboard.launch.runs.folder import HeadProcess, RankView, RunState, RunView
from gpuboard.launch.runs.index import RunEntry, log_trouble
from tests.board import lab, made

W = Window(80, 10)


def texts(page: log_file.Page) -> list[str]:
    return [row.plain for _, row in page.rows]


def go_on(_: int) -> bool:
    return True


# Windows into a file


def test_lines_are_the_same_forwards_and_backwards_whatever_is_in_the_file(tmp_path: Path) -> None:
    block = 8
    path = tmp_path / "log"
    rng = random.Random(1)
    for _ in range(400):
        data = bytes(rng.choice(rng.choice([b"ab\n", b"abcdefgh\n"])) for _ in range(rng.randrange(1, 90)))
        path.write_bytes(data)
        starts = [
            at
            for at in range(len(data))
            if at == 0 or data[at - 1] == 10 or (at % block == 0 and 10 not in data[at - block : at])
        ]
        with log_file._Reader(path, log_file.ReadSizes(block, 4 * block)) as file:
            assert [file.next_start(start) for start in starts] == [*starts[1:], len(data)], data
            for offset in range(1, len(data) + 1):
                assert file.start_of(offset) == max(start for start in starts if start < offset), (data, offset)


def test_every_page_is_a_part_of_the_whole_wrapped_or_not(tmp_path: Path) -> None:
    path = tmp_path / "log"
    rng = random.Random(2)
    lines = ["".join(rng.choice("ab漢é ") for _ in range(rng.randrange(0, 200))) for _ in range(60)]
    path.write_text("\n".join(lines))
    for wrap in (False, True):
        window = Window(20, 7, wrap)
        whole = [row.plain for line in lines for row in drawn(line, 20 if wrap else None, 20)]
        log = LogFile(path)
        page = log.end(window)
        assert (texts(page), page.at_end) == (whole[-7:], True)
        up, at = page, len(whole) - 7
        for _ in range(80):
            step = rng.randrange(1, 6)
            up, at = log.page(up.place, window, -step), max(0, at - step)
            assert texts(up) == whole[at : at + 7]
        down, at = log.page(LogPosition(0), window), 0
        for _ in range(80):
            step = rng.randrange(1, 6)
            down, at = log.page(down.place, window, step), min(len(whole) - 7, at + step)
            assert texts(down) == whole[at : at + 7]
            assert down.at_end == (at == len(whole) - 7)


def test_two_gigabytes_open_at_once_and_cost_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(2 * 2**30)  # sparse: one line of zeros
        file.seek(2 * 2**30)
        file.writelines(b"\nline %d" % number for number in range(1000))
    log = LogFile(path)
    tracemalloc.start()
    try:
        assert texts(log.end(W))[-1] == "line 999"
        assert log.page(LogPosition(0), W).rows[0][0] == 0
        assert log.at(10**9, W).rows[0][0] == 10**9 // log_file.SIZES.block * log_file.SIZES.block
        assert log.page(log.end(W).place, W, -500).rows[0][1].plain == "line 490"
        end = log.end(W).place.start
        assert log.find("LINE 1".lower(), end, backwards=True, go_on=go_on) == log.find(
            "line 199", 2 * 2**30 + 1, backwards=False, go_on=go_on
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 * 2**20, peak


def test_a_log_that_grows_is_cut_or_removed_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log"
    log = LogFile(path)
    with pytest.raises(LogGone, match="the run's folder was removed"):
        log.end(W)
    path.parent.mkdir()
    with pytest.raises(LogGone, match="empty"):
        log.end(W)
    path.write_text("".join(f"{n}\n" for n in range(100)))
    first = log.end(W)
    assert texts(first) == [str(n) for n in range(90, 100)]
    with path.open("a") as file:
        file.write("more\n")
    assert texts(log.page(first.place, W)) == texts(first), "where we are, nothing has changed"
    assert texts(log.page(first.place, W, 5))[-1] == "more"
    path.write_text("new\n")
    cut = log.page(first.place, W)
    assert (texts(cut), cut.shrunk, cut.size) == (["new"], True, 4)
    path.unlink()
    with pytest.raises(LogGone, match="empty"):
        log.page(cut.place, W)
    path.mkdir()
    with pytest.raises(LogGone, match="cannot be read: Is a directory"):
        log.end(W)


def test_a_search_passes_every_log_goes_round_and_can_be_stopped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logs = [LogFile(path, sizes=log_file.ReadSizes(search=16))]
    path.write_text("Loss 1\nstep\nloss 2\n\x1b[31mlo\x1b[0mss 3\nhidden loss\rshown\nlast")
    starts = {"Loss 1": 0, "loss 2": 12}

    def find(words: str, start: int, *, backwards: bool = False) -> int | None:
        found = find_in(logs, words, start, backwards=backwards, go_on=lambda log, at: True)
        return found and found.start

    assert [find("loss", 0), find("loss", 12)] == [starts["loss 2"], starts["Loss 1"]], "on from the beginning"
    assert find("Loss", 12) == 0, "a capital counts"
    assert find("Loss", 0) == 0, "the only one, all the way round"
    assert [find("loss", 12, backwards=True), find("loss", 0, backwards=True)] == [0, 12]
    assert find("hidden", 0) is None, "what was written over is not there to be seen"
    assert find("nowhere", 12) is None
    assert find("last", 0) == path.read_bytes().index(b"last")
    seen: list[int] = []

    def once(at: int) -> bool:
        seen.append(at)
        return len(seen) < 2

    assert find_in(logs, "last", 0, backwards=False, go_on=lambda _, at: once(at)) is None
    assert len(seen) <= 3, "asked once more for the other part, and no more"


def test_a_search_goes_from_the_end_of_one_log_to_the_other_and_round(tmp_path: Path) -> None:
    out, err, gone = (LogFile(tmp_path / name) for name in ("out", "err", "gone"))
    out.path.write_text("error A\nerror B\nlast\n")
    err.path.write_text("first\nerror C\n")

    def find(logs: list[LogFile], start: int, *, backwards: bool = False) -> Match | None:
        return find_in(logs, "error", start, backwards=backwards, go_on=lambda log, at: True)

    assert find([out, err], 0) == Match(0, 8, False)
    assert find([out, err], 8) == Match(1, 6, False)
    assert find([err, out], 6) == Match(1, 0, False), "the first line counts, too"
    assert find([out, err], 0, backwards=True) == Match(1, 6, False)
    assert find([err, out], 6, backwards=True) == Match(1, 8, False)
    assert find([out, gone], 8) == Match(0, 0, True), "nothing was written to the other"
    with pytest.raises(LogGone):
        find([gone, out], 0)


# Lines


def test_colours_stay_and_every_other_escape_is_inert() -> None:
    hostile = (
        "a\x1b]0;title\x07b\x1b[2Jc\x1b[31mred\x1b[0m\x9b5;5Hd\x1bPq#1\x1b\\e\x1b(0f\x1bcg\x1b[?1049hh\x00\x08\x7fi\x1b"
    )
    (row,) = drawn(hostile, None, 80)
    assert row.plain == "abcreddefgh   i"
    assert [(span.start, span.end, str(span.style)) for span in row.spans] == [(3, 6, "color(1)")]
    assert drawn("plain [red]no markup[/]", None, 80)[0].plain == "plain [red]no markup[/]"
    assert drawn("[/x]", None, 80)[0].plain == "[/x]"


@pytest.mark.parametrize(
    "text",
    [
        "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "\x1b[38;5;999999999m", "\x1b[²m", "\x1b[;;;;m",
        "\x1b[38:2::1:2:3mx", "\u202eright to left", "zero\u200bwidth", "👩\u200d👩\u200d👧 family", "🇩🇪",
        "e" + "\u0301" * 500, "\ud7ff\ufffe", "\x85\u2028x", "\x0b\x0c\x1c\x1d", "漢字" * 100, "\x1b[31m" * 3000,
        "\t" * 40,
    ],
)  # fmt: skip
def test_rows_of_any_line_have_the_stated_width(text: str) -> None:
    for row in drawn(text, 20, 20):
        assert cell_len(row.plain) <= 20
        assert all(char.isprintable() for char in row.plain)
    assert len(drawn(text, None, 20)) == 1


def test_tabs_stand_in_columns_and_bars_show_what_they_show_last() -> None:
    assert drawn("a\tb\t漢\tc", None, 80)[0].plain == "a       b       漢      c"
    assert drawn("\x1b[1ma\x1b[0m\tb", None, 80)[0].plain == "a       b"
    assert visible("10 %\r50 %\r100 %\r\n") == "100 %"
    assert visible("") == ""


def test_a_very_long_line_is_drawn_only_as_far_as_it_is_seen() -> None:
    (row,) = drawn("é" * 100_000, None, 100)
    assert 100 <= len(row.plain) < 10_000


def test_text_of_matches_and_sizes() -> None:
    assert spans("Loss loss", "loss") == [(0, 4), (5, 9)]
    assert spans("Loss loss", "Loss") == [(0, 4)]
    assert spans("a.b axb", "a.b") == [(0, 3)]
    assert spans("x", "") == []
    assert matches("\x1b[31mlo\x1b[0mss", "loss")
    assert [bytes_words(n) for n in (0, 999, 1000, 123456, 2 * 10**9, 10**15)] == [
        "0 B", "999 B", "1.0 kB", "123 kB", "2.0 GB", "1000 TB",
    ]  # fmt: skip


# The screen


class Lab:
    """A log screen over a run's folder that the test writes."""

    def __init__(self, app: BoardApp, pilot: Pilot[int], folder: Path) -> None:
        self.app = app
        self.pilot = pilot
        self.folder = folder

    @property
    def out(self) -> LogView:
        return self.app.screen.query_one("#out", LogView)

    @property
    def err(self) -> LogView:
        return self.app.screen.query_one("#err", LogView)

    def write(self, text: str, stream: str = "out", rank: int = 0) -> None:
        with (self.folder / f"rank-{rank}.{stream}").open("a") as file:
            file.write(text)

    def rows(self, view: LogView | None = None) -> list[str]:
        view = view or self.out
        text = lab.screen(self.app).split("\n")
        rows = text[view.region.y + 1 : view.region.bottom]
        assert all(row[:1] in {"", " "} for row in rows)  # in the second column, as all lists
        return [row[1:] for row in rows]

    def title(self, view: LogView | None = None) -> str:
        return lab.screen(self.app).split("\n")[(view or self.out).region.y].strip("─ ")

    async def until(self, condition: Callable[[], object]) -> None:
        await lab.settle(self.pilot, condition)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)


@asynccontextmanager
async def opened(
    tmp_path: Path, size: tuple[int, int] = (100, 30), out: str = "", err: str = "", *, state: RunState = "running"
) -> AsyncIterator[Lab]:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    ranks = [RankView(rank, "gpu01", rank, rank + 4, 100 + rank, "running") for rank in range(3)]
    head = HeadProcess("h", "b", 1, 1)
    view = RunView("rabc2345", None, "train.py", made.AT, state, None, ranks, [], head, str(folder))
    async with made.still(tmp_path, made.scene(), size) as (app, pilot):
        found = Lab(app, pilot, folder)
        for text, stream in ((out, "out"), (err, "err")):
            if text:
                found.write(text, stream)
        app.push_screen(LogScreen(RunEntry(view, 0.0, False), 0))
        await lab.settle(pilot, lambda: isinstance(app.screen, LogScreen) and app.screen.is_mounted)
        await found.until(lambda: all(view.page is not None or view.gone for view in (found.out, found.err)))
        yield found


def numbered(first: int, last: int) -> str:
    return "".join(f"line {number}\n" for number in range(first, last))


async def test_a_log_is_followed_until_one_scrolls_and_again_from_its_end(tmp_path: Path) -> None:
    async with opened(tmp_path, out=numbered(0, 1000)) as log:
        await log.until(lambda: "line 999" in log.rows())
        assert "Rank 0 of 3  gpu01:4  running" in lab.screen(log.app)
        assert "following" in log.title()
        log.write(numbered(1000, 1010))
        await log.until(lambda: "line 1009" in log.rows())
        await log.press("up")
        await log.until(lambda: [row for row in log.rows() if row][-1] == "line 1008")
        log.write(numbered(1010, 1020))
        await log.until(lambda: log.out.page is not None and log.out.page.size > 9_050)
        assert [row for row in log.rows() if row][-1] == "line 1008", "who reads is not disturbed"
        assert "following" not in log.title()
        await log.press("f")
        await log.until(lambda: "line 1019" in log.rows() and "following" in log.title())
        await log.press("f")
        await log.until(lambda: "following" not in log.title())
        await log.press("G")
        await log.until(lambda: "following" in log.title())
        await log.press("home")
        await log.until(lambda: log.rows()[0] == "line 0")
        await log.press("pagedown")
        await log.until(lambda: log.rows()[0] == f"line {log.out.window.height - 1}")
        await log.press("pageup")
        await log.until(lambda: log.rows()[0] == "line 0")


async def test_the_log_of_a_run_that_has_ended_is_not_followed(tmp_path: Path) -> None:
    async with opened(tmp_path, out=numbered(0, 1000), state="done") as log:
        await log.until(lambda: "line 999" in log.rows())
        assert log.title() == "stdout · 8.9 kB · end"


async def test_what_is_looked_for_is_found_highlighted_and_gone_through(tmp_path: Path) -> None:
    lines = [f"step {n}{' Error here' if n % 300 == 7 else ''}" for n in range(1000)]
    async with opened(tmp_path, out="\n".join(lines)) as log:
        await log.until(lambda: "step 999" in log.rows())
        await log.press("slash", *"error", "enter")
        await log.until(lambda: any("step 907 Error" in row for row in log.rows()))
        assert "following" not in log.title(), "from the end on the newest is the one to find"
        await log.press("N")
        await log.until(lambda: any("step 607 Error" in row for row in log.rows()))
        await log.press("n")
        await log.until(lambda: any("step 907 Error" in row for row in log.rows()))
        await log.press("n")
        await log.until(lambda: any("step 7 Error" in row for row in log.rows()))
        assert "wrapped to the beginning" in lab.screen(log.app)
        strip = log.out.render_line(1 + log.rows().index("step 7 Error here"))
        styles = {segment.text: segment.style for segment in strip}
        assert styles["Error"] is not None
        assert styles["Error"] != styles[" here"]
        await log.press("slash", *"nothing like this", "enter")
        await log.until(lambda: "was not found" in lab.screen(log.app))
        await log.press("slash")
        assert log.app.focused is log.app.screen.query_one("#words", Input)
        await log.press("escape")
        assert isinstance(log.app.screen, LogScreen), "the first escape closes the line alone"
        await log.press("escape")
        await log.until(lambda: not isinstance(log.app.screen, LogScreen))


async def test_what_is_in_the_other_stream_is_found_and_its_stream_picked(tmp_path: Path) -> None:
    err = "".join(f"err {n}{' Traceback' if n == 40 else ''}\n" for n in range(900))
    async with opened(tmp_path, out=numbered(0, 500), err=err) as log:
        await log.until(lambda: "line 499" in log.rows() and "err 899" in log.rows(log.err))
        assert log.out.active
        await log.press("slash", *"traceback", "enter")
        await log.until(lambda: "err 40 Traceback" in log.rows(log.err) and log.err.active)
        assert "found in stderr" in lab.screen(log.app)
        await log.press("slash", *(["backspace"] * 9), *"line 3", "enter")
        await log.until(lambda: log.out.active and any(row.startswith("line 3") for row in log.rows()))
    (tmp_path / "run" / "rank-0.out").unlink()
    async with opened(tmp_path, err=err) as log:  # nothing was written to stdout, which the keys are for
        await log.until(lambda: "err 899" in log.rows(log.err))
        await log.press("slash", *"traceback", "enter")
        await log.until(lambda: "err 40 Traceback" in log.rows(log.err) and log.err.active)


async def test_ranks_and_streams_change_by_key(tmp_path: Path) -> None:
    async with opened(tmp_path, out="zero out\n", err="zero err\n") as log:
        log.write("one out\n", rank=1)
        log.write("two err\n", "err", rank=2)
        await log.until(lambda: "zero out" in log.rows() and "zero err" in log.rows(log.err))
        await log.press("right_square_bracket")
        await log.until(lambda: "one out" in log.rows() and "empty" in log.title(log.err))
        await log.until(lambda: log.err.size.height == 1)  # what has nothing to show takes one line
        await log.press("left_square_bracket", "left_square_bracket")
        await log.until(lambda: "two err" in log.rows(log.err) and "Rank 2 of 3" in lab.screen(log.app))
        await log.press("s")
        await log.until(lambda: not log.err.display and log.out.display)
        await log.press("s")
        await log.until(lambda: log.err.display and not log.out.display)
        await log.press("s")
        await log.until(lambda: log.err.display and log.out.display)
        assert log.err.active
        await log.press("tab")
        assert log.out.active


async def test_long_lines_are_wrapped_or_cut_and_scrolled(tmp_path: Path) -> None:
    async with opened(tmp_path, (80, 24), out="".join(f"{n:03}" for n in range(60)) + "\nshort\n") as log:
        await log.until(lambda: "short" in log.rows())
        assert log.rows()[0].endswith("02402…")
        await log.press("right")
        await log.until(lambda: log.rows()[0].startswith("05006007"))
        assert "from column 17" in log.title()
        await log.press("z")
        await log.until(lambda: log.rows()[2].endswith("059"))
        assert log.rows()[3] == "short"
        assert "wrapped" in log.title()


async def test_the_mouse_scrolls_jumps_and_chooses_a_stream(tmp_path: Path) -> None:
    async with opened(tmp_path, out=numbered(0, 1000), err=numbered(0, 3)) as log:
        await log.until(lambda: "line 999" in log.rows())
        height = log.out.window.height
        wheel = events.MouseScrollUp(log.out, 5, 5, 0, -1, 0, False, False, False)
        log.out.post_message(wheel)
        await log.until(lambda: [row for row in log.rows() if row][-1] == "line 996")
        await log.pilot.click(log.out, offset=(log.out.size.width - 1, 1 + (height - 1) // 2))
        await log.until(lambda: log.rows()[0].startswith("line 4") or log.rows()[0].startswith("line 5"))
        await log.pilot.click(log.err, offset=(5, 1))
        await log.until(lambda: log.err.active)
        await log.pilot.click(log.out, offset=(5, 1))
        await log.until(lambda: log.out.active)


async def test_hostile_lines_leave_every_column_in_its_place(tmp_path: Path) -> None:
    hostile = [
        "\x1b]0;evil\x07[/red] [bold]", "\x1b[2J\x1b[H", "漢字" * 60, "é\u0301\u0301\u0301\u0301", "\u202eabc",
        "👩\u200d👩\u200d👧🇩🇪", "tab\there", "a\rb\rc", "\x1b[999;999H", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
        "x" * 10_000, "\x00\x01\x02",
    ]  # fmt: skip
    async with opened(tmp_path, (80, 40), out="\n".join(hostile) + "\nlast\n") as log:
        await log.until(lambda: "last" in log.rows())
        for y in range(log.out.size.height):
            strip = log.out.render_line(y)
            assert strip.cell_length == 80
            assert all(char.isprintable() or char == "\u200e" for char in strip.text), strip.text
        await log.press("z")
        await log.until(lambda: log.out.wrap and log.out.page is not None and len(log.out.page.rows) > 12)
        assert all(log.out.render_line(y).cell_length == 80 for y in range(log.out.size.height))


async def test_a_log_cut_or_removed_while_it_is_open_is_reported(tmp_path: Path) -> None:
    async with opened(tmp_path, out=numbered(0, 100)) as log:
        await log.until(lambda: "line 99" in log.rows())
        (log.folder / "rank-0.out").write_text("again\n")
        await log.until(lambda: "stdout was truncated to" in lab.screen(log.app))
        await log.until(lambda: log.rows()[:1] == ["again"])  # it may have been read before it was written again
        (log.folder / "rank-0.out").unlink()
        await log.until(lambda: "empty" in log.title())
        (log.folder / "head.log").write_text(
            "2026-01-31T12:00:00Z gpuboard: logs are incomplete: rank-0.out: No space left on device\n"
        )
        await log.until(lambda: "logs are incomplete: rank-0.out: No space left" in lab.screen(log.app))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_full_disk_is_known(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", tmp_path], check=True)
    try:
        assert log_trouble(tmp_path) == ""
        with pytest.raises(OSError, match="No space left on device"):
            (tmp_path / "rank-0.out").write_bytes(bytes(2**16))
        assert log_trouble(tmp_path) == f"the disk of {tmp_path} is full: output of the ranks is lost; free some space"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


async def test_at_80_by_24_there_is_room_for_all(tmp_path: Path) -> None:
    async with opened(tmp_path, (80, 24), out=numbered(0, 100), err=numbered(0, 100)) as log:
        await log.until(lambda: "line 99" in log.rows() and "line 99" in log.rows(log.err))
        assert min(len(log.rows()), len(log.rows(log.err))) >= 8
