"""A window into one log on the Line API. All reading happens in the background, one piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from gpuboard.board.background import Background
from gpuboard.board.text.cells import fit_runs
from gpuboard.board.text.detail.log_line import bytes_words, spans
from gpuboard.board.widgets.log_file import LogFile, LogGone, LogPosition, Match, Page, Window, find_in
from gpuboard.board.widgets.on_board import OnBoard
from gpuboard.errors import GpuboardError

if TYPE_CHECKING:
    from gpuboard.launch.runs.access import RunAccess

Read = Callable[[LogFile, LogPosition, Window], Page]
Shown = tuple[Window, tuple[int, int, int]]  # the window, and the file's stamp when it was read
_WHEEL_ROWS = 3


class LogView(OnBoard, Widget):
    """One stream of one rank: a title line with the position, and the visible part."""

    DEFAULT_CSS = """
    LogView { height: 1fr; }
    LogView.-empty { height: 1; }
    """

    live = reactive(True)  # whether the log may still grow

    class StreamPicked(Message):
        """The user chose this stream by a click, or a search found its match there.

        ``scrolled``: the click was on the scroll bar.
        """

        def __init__(self, view: LogView, *, scrolled: bool = False) -> None:
            super().__init__()
            self.view = view
            self.scrolled = scrolled

    class Notified(Message):
        """A message about the log or about a search in it."""

        def __init__(self, words: str) -> None:
            super().__init__()
            self.words = words

    def __init__(self, title: str, *, id: str) -> None:
        super().__init__(id=id)
        self.title = title
        self.page: Page | None = None
        self.gone = ""  # why the log cannot be read
        self.follow = True
        self.active = False
        self.wrap = False
        self.left = 0
        self.words = ""  # that are searched for
        self.hit: int | None = None  # start of the line found last
        self._file: LogFile | None = None
        self._pending: list[Read] = []
        self._background: Background[tuple[Page | None, Shown | None, str]] = Background(self)
        self._shown: Shown | None = None  # of the page
        self._search = 0  # number of the newest search; older ones stop
        self.searching = False

    @property
    def window(self) -> Window:
        """The visible part: below the title, between the margin and the scroll bar."""
        width, height = max(1, self.size.width - 2), max(1, self.size.height - 1)
        return Window(width, height, self.wrap, 0 if self.wrap else self.left)

    def open(self, path: Path, far: RunAccess | None = None) -> None:
        """Show the end of the log at ``path``; ``far``: it is in the folder of this run, on another host."""
        self.stop_search()
        self._file = LogFile(path, far)
        self.page, self.gone, self.follow, self.left, self.hit = None, "", True, 0, None
        self._shown = None
        self._pending.clear()
        self.poll()

    # Moving

    def move(self, rows: int) -> None:
        """Scroll down by ``rows``, or up if negative."""
        if rows < 0:
            self.follow = False
        self._do(lambda file, place, window: file.page(place, window, rows))

    def move_pages(self, pages: int) -> None:
        """Scroll down by ``pages``, or up if negative; pages overlap by one row."""
        self.move(pages * max(1, self.window.height - 1))

    def move_right(self, cells: int) -> None:
        """Scroll right by ``cells``, or left if negative."""
        if not self.wrap:
            self.left = max(0, self.left + cells)
            self._reload()

    def top(self) -> None:
        self.follow = False
        self._do(lambda file, place, window: file.page(LogPosition(0), window))

    def bottom(self) -> None:
        self.follow = True
        self._do(lambda file, place, window: file.end(window))

    def stay(self) -> None:
        self.follow = False
        self.refresh()

    def toggle_wrap(self) -> None:
        self.wrap, self.left = not self.wrap, 0
        self._reload()

    def _reload(self) -> None:
        self._do(lambda file, place, window: file.end(window) if self.follow else file.page(place, window))

    def poll(self) -> None:
        if self._file is not None and self.size.width:
            self._pump(only_if_changed=True)

    def _do(self, read: Read) -> None:
        self._pending.append(read)
        self._pump()

    def _pump(self, *, only_if_changed: bool = False) -> None:
        if self._background.busy or self._file is None or not (self._pending or only_if_changed):
            return
        file, window, follow, seen = self._file, self.window, self.follow, self._shown
        place = self.page.place if self.page is not None else LogPosition(0)
        reads, self._pending = self._pending, []
        if not reads:
            reads = [lambda file, place, window: file.end(window) if follow else file.page(place, window)]

        def work() -> tuple[Page | None, Shown | None, str]:
            try:
                now = (window, file.stamp())
                if only_if_changed and now == seen:
                    return None, seen, ""
                page = None
                for read in reads:
                    page = read(file, place if page is None else page.place, window)
                return page, now, ""
            except LogGone as error:
                return None, None, str(error)

        self._background.ask(
            work, lambda found: self._read(file, *found), lambda error: self._read(file, None, None, str(error))
        )

    def _read(self, file: LogFile, page: Page | None, shown: Shown | None, gone: str) -> None:
        if file is not self._file:
            self.poll()
            return
        self._shown = shown
        if gone != self.gone or page is not None:
            if gone and self.page is not None and not self.gone:
                self.post_message(self.Notified(f"{self.title}: {gone}"))
            self.gone = gone
            if page is not None:
                if page.shrunk:
                    self.post_message(self.Notified(f"{self.title} was truncated to {bytes_words(page.size)}"))
                self.page = page
            self.set_class((bool(gone) and self.page is None) or (page is not None and page.size == 0), "-empty")
            self.refresh()
        if shown is not None and shown[0] != self.window:  # resized meanwhile
            self._reload()
        else:
            self._pump()

    # Searching

    def search(self, words: str, *, backwards: bool, others: Sequence[LogView] = ()) -> None:
        """Go to the next line with ``words``, down or up; a new search starts with the visible lines.

        After the end of this log it goes on in ``others``, then from the beginning of this one.
        """
        new = words != self.words
        self.words = words
        self.refresh()
        file, page = self._file, self.page
        if not words or file is None or page is None:
            return
        if new or self.hit not in {start for start, _ in page.rows}:
            self.hit = None
        if self.hit is None:
            seen = [start for start, row in page.rows if spans(row.plain, words)]
            if seen:
                self._found(file, seen[-1] if backwards else seen[0])
                return
        self.stop_search()
        self.searching = True
        number = self._search
        found_in = {view: view._file for view in (self, *others) if view._file is not None}
        views, files = list(found_in), list(found_in.values())
        sizes = [max(1, view.page.size if view.page else 1) for view in views]
        start = self.hit if self.hit is not None else page.place.start
        steps = 0

        def go_on(log: int, at: int) -> bool:
            nonlocal steps
            steps += 1
            if steps % 16 == 2:
                words_of = f"searching for {words!r} in {views[log].title}: {min(100, 100 * at // sizes[log])} %"
                self.post_message(self.Notified(f"{words_of} (escape stops)"))
            return self._search == number

        def work() -> Match | None:
            try:
                return find_in(files, words, start, backwards=backwards, go_on=go_on)
            except LogGone as error:
                raise GpuboardError(str(error)) from error

        def then(found: Match | None) -> None:
            if self._search != number:
                return
            self.searching = False
            if found is None:
                self.post_message(self.Notified(f"{words!r} was not found"))
                return
            view = views[found.log]
            self.post_message(self.Notified(
                f"found in {view.title}" if not view.active else
                "" if not found.wrapped else
                "wrapped to the end" if backwards else
                "wrapped to the beginning"
            ))  # fmt: skip
            view._found(files[found.log], found.start)

        def failed(error: GpuboardError) -> None:
            self.stop_search()
            self.post_message(self.Notified(str(error)))

        self.board.ask(work, then, failed)

    def stop_search(self) -> None:
        self._search += 1
        self.searching = False

    def highlight(self, words: str) -> None:
        """Highlight ``words`` without moving."""
        self.words = words
        self.refresh()

    def _found(self, file: LogFile, start: int) -> None:
        if file is not self._file:
            return
        self.hit = start
        self.follow = False
        if not self.active:
            self.post_message(self.StreamPicked(self))
        page = self.page
        if page is None or start not in {at for at, _ in page.rows}:
            self._do(lambda file, place, window: file.at(start, window, window.height // 3))
        self.refresh()

    # Drawing

    def render_line(self, y: int) -> Strip:
        base = self.visual_style.rich_style
        width = self.size.width
        if y == 0:
            return self._title_strip(base, width)
        page, look = self.page, self.board.look
        runs: list[tuple[str, Style]] = []
        if page is not None and y <= len(page.rows):
            start, row = page.rows[y - 1]
            runs = self._runs(start, row, base)
        fitted = [(" ", base), *fit_runs(runs, self.window.width, base, ellipsis=look.glyphs.ellipsis)]
        fitted.append((" ", base + look.style("cursor") if y - 1 == self._thumb() else base))
        return Strip([Segment(text, style) for text, style in fitted]).adjust_cell_length(width, base)

    def _runs(self, start: int, row: Text, base: Style) -> list[tuple[str, Style]]:
        look = self.board.look
        if self.words:
            found = look.style("marked") if start != self.hit else look.style("cursor")
            row = row.copy()
            for span in spans(row.plain, self.words):
                row.stylize(found + look.style("warn"), *span)
        if not row.spans:
            segments = [Segment(row.plain, base)]
        else:
            segments = [Segment(s.text, base + s.style if s.style else base) for s in row.render(self.app.console)]
        if self.left and not self.wrap:
            segments = list(Strip(segments).crop(self.left))
        return [(segment.text, segment.style or base) for segment in segments]

    def _title_strip(self, base: Style, width: int) -> Strip:
        look = self.board.look
        parts = [self.title]
        page = self.page
        if self.gone:
            parts.append(self.gone)
        elif page is None:
            parts.append("reading …")
        elif page.size == 0:
            parts.append("empty")
        else:
            parts.append(bytes_words(page.size))
            parts.append("end" if page.at_end else f"{100 * page.place.start // page.size} %")
            parts += ["following"] if self.follow and self.live else []
            parts += ["wrapped"] if self.wrap else [f"from column {self.left + 1}"] if self.left else []
        style = base + look.style("title" if self.active else "dim")
        text = f"{' · '.join(parts)} "
        line = look.glyphs.line
        runs = [(f"{line} ", style), (text, style), (line * width, base + look.style("dim"))]
        return Strip([Segment(t, s) for t, s in fit_runs(runs, width, base, ellipsis=line)])

    def _thumb(self) -> int:
        """Return the row of the scroll bar's thumb; -1 when the whole log is visible."""
        page, height = self.page, self.window.height
        if page is None or page.size == 0 or (page.at_end and page.place == LogPosition(0)):
            return -1
        return height - 1 if page.at_end else min(height - 1, page.place.start * height // page.size)

    # Mouse

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.move(_WHEEL_ROWS)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.move(-_WHEEL_ROWS)

    def on_click(self, event: events.Click) -> None:
        """Become the active stream; on the scroll bar, go to that position."""
        event.stop()
        scrolled = event.y >= 1 and event.x >= self.size.width - 1
        self.post_message(self.StreamPicked(self, scrolled=scrolled))
        if scrolled and self.page is not None:
            offset = self.page.size * (event.y - 1) // max(1, self.window.height - 1)
            self.follow = False
            self._do(lambda file, place, window: file.at(offset, window))

    def on_resize(self) -> None:
        if self.page is None:
            self.poll()
        else:
            self._reload()
