"""A window into one log on the Line API. Everything that reads happens beside the UI, one thing after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from gpuboard.board.background import Background
from gpuboard.board.text.cells import fit_runs
from gpuboard.board.text.log_line import bytes_words, spans
from gpuboard.board.widgets.log_file import Found, LogFile, LogGone, LogPosition, Page, Window, find_in
from gpuboard.errors import GpuboardError

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp

Read = Callable[[LogFile, LogPosition, Window], Page]
Shown = tuple[Window, tuple[int, int, int]]  # the window, and the file's stamp when it was read
_WHEEL_ROWS = 3


class LogView(Widget):
    """One stream of one rank: a line that says what it is and where in it we are, and what it shows."""

    DEFAULT_CSS = """
    LogView { height: 1fr; }
    LogView.-empty { height: 1; }
    """

    class Picked(Message):
        """The person means this one: clicked or scrolled."""

        def __init__(self, view: LogView) -> None:
            super().__init__()
            self.view = view

    class Told(Message):
        """Something to say about the log or about what was looked for in it."""

        def __init__(self, words: str) -> None:
            super().__init__()
            self.words = words

    def __init__(self, title: str, *, id: str) -> None:
        super().__init__(id=id)
        self.title = title
        self.page: Page | None = None
        self.gone = ""  # why there is nothing to show
        self.follow = True
        self.active = False
        self.wrap = False
        self.left = 0
        self.words = ""  # looked for
        self.hit: int | None = None  # the line found last, by its start
        self._file: LogFile | None = None
        self._pending: list[Read] = []
        self._background: Background[tuple[Page | None, Shown | None, str]] = Background(self)
        self._shown: Shown | None = None  # the window and the file when it was last read
        self._search = 0  # the number of the newest search: older ones give up
        self.searching = False

    @property
    def board(self) -> BoardApp:
        """The app, typed."""
        return cast("BoardApp", self.app)

    @property
    def window(self) -> Window:
        """How it is looked at now: below the title, left of the scroll bar."""
        width, height = max(1, self.size.width - 1), max(1, self.size.height - 1)
        return Window(width, height, self.wrap, 0 if self.wrap else self.left)

    def open(self, path: Path) -> None:
        """Show the end of the log at ``path``."""
        self.stop_search()
        self._file = LogFile(path)
        self.page, self.gone, self.follow, self.left, self.hit = None, "", True, 0, None
        self._shown = None
        self._pending.clear()
        self.poll()

    # Moving

    def move(self, rows: int) -> None:
        """Go ``rows`` rows down, or up if negative."""
        if rows < 0:
            self.follow = False
        self._do(lambda file, place, window: file.page(place, window, rows))

    def move_pages(self, pages: int) -> None:
        """Go so many screenfuls down, or up if negative; one row stays in sight."""
        self.move(pages * max(1, self.window.height - 1))

    def move_right(self, cells: int) -> None:
        """Show what is further right, or left if negative."""
        if not self.wrap:
            self.left = max(0, self.left + cells)
            self._again()

    def top(self) -> None:
        """Go to the beginning."""
        self.follow = False
        self._do(lambda file, place, window: file.page(LogPosition(0), window))

    def bottom(self) -> None:
        """Go to the end and stay there."""
        self.follow = True
        self._do(lambda file, place, window: file.end(window))

    def stay(self) -> None:
        """Stay here, whatever is written below."""
        self.follow = False
        self.refresh()

    def toggle_wrap(self) -> None:
        """Break long lines, or cut them."""
        self.wrap, self.left = not self.wrap, 0
        self._again()

    def _again(self) -> None:
        self._do(lambda file, place, window: file.end(window) if self.follow else file.page(place, window))

    def poll(self) -> None:
        """Look whether the log has changed."""
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
        if file is not self._file or not self.is_attached:
            self.poll()
            return
        self._shown = shown
        if gone != self.gone or page is not None:
            if gone and self.page is not None and not self.gone:
                self.post_message(self.Told(f"{self.title}: {gone}"))
            self.gone = gone
            if page is not None:
                if page.shrunk:
                    self.post_message(self.Told(f"{self.title} was cut to {bytes_words(page.size)} while we looked"))
                self.page = page
            self.set_class((bool(gone) and self.page is None) or (page is not None and page.size == 0), "-empty")
            self.refresh()
        if shown is not None and shown[0] != self.window:  # resized meanwhile
            self._again()
        else:
            self._pump()

    # Searching

    def search(self, words: str, *, backwards: bool, others: Sequence[LogView] = ()) -> None:
        """Go to the next line that shows ``words``, below or above; first of all to one that is in sight.

        After the end of this log come ``others``, then the beginning of this one; the one it is found in is picked.
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
                words_of = f"looking for {words!r} in {views[log].title}: {min(100, 100 * at // sizes[log])} %"
                self.post_message(self.Told(f"{words_of} (escape: stop)"))
            return self._search == number

        def work() -> Found | None:
            try:
                return find_in(files, words, start, backwards=backwards, go_on=go_on)
            except LogGone as error:
                raise GpuboardError(str(error)) from error

        def then(found: Found | None) -> None:
            if self._search != number:
                return
            self.searching = False
            if found is None:
                self.post_message(self.Told(f"{words!r} is not in this log"))
                return
            view = views[found.log]
            self.post_message(self.Told(
                f"found in {view.title}" if not view.active else
                "" if not found.wrapped else
                "found beyond the beginning, from the end on" if backwards else
                "found beyond the end, from the beginning on"
            ))  # fmt: skip
            view._found(files[found.log], found.start)

        def failed(error: GpuboardError) -> None:
            self.stop_search()
            self.post_message(self.Told(str(error)))

        self.board.ask(work, then, failed)

    def stop_search(self) -> None:
        """Give up a search that is under way."""
        self._search += 1
        self.searching = False

    def highlight(self, words: str) -> None:
        """Show where ``words`` stand; go nowhere."""
        self.words = words
        self.refresh()

    def _found(self, file: LogFile, start: int) -> None:
        if file is not self._file:
            return
        self.hit = start
        self.follow = False
        if not self.active:
            self.post_message(self.Picked(self))
        page = self.page
        if page is None or start not in {at for at, _ in page.rows}:
            self._do(lambda file, place, window: file.at(start, window, window.height // 3))
        self.refresh()

    # Drawing

    def render_line(self, y: int) -> Strip:
        """Return one line of the widget."""
        base = self.visual_style.rich_style
        width = self.size.width
        if y == 0:
            return self._title_strip(base, width)
        page, look = self.page, self.board.look
        room = max(1, width - 1)
        runs: list[tuple[str, Style]] = []
        if page is not None and y <= len(page.rows):
            start, row = page.rows[y - 1]
            runs = self._runs(start, row, base)
        fitted = fit_runs(runs, room, base, ellipsis=look.glyphs.ellipsis)
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
            parts.append("nothing was written here")
        else:
            parts.append(bytes_words(page.size))
            parts.append("end" if page.at_end else f"{100 * page.place.start // page.size} %")
            parts += ["following"] if self.follow else []
            parts += ["wrapped"] if self.wrap else [f"from column {self.left + 1}"] if self.left else []
        style = base + look.style("title" if self.active else "dim")
        text = f"{' · '.join(parts)} "
        line = look.glyphs.line
        runs = [(f"{line} ", style), (text, style), (line * width, base + look.style("dim"))]
        return Strip([Segment(t, s) for t, s in fit_runs(runs, width, base, ellipsis=line)])

    def _thumb(self) -> int:
        """Return the row in which the scroll bar shows where we are; -1 when all of it is in sight."""
        page, height = self.page, self.window.height
        if page is None or page.size == 0 or (page.at_end and page.place == LogPosition(0)):
            return -1
        return height - 1 if page.at_end else min(height - 1, page.place.start * height // page.size)

    # Mouse

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Three rows down."""
        event.stop()
        self.move(_WHEEL_ROWS)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Three rows up."""
        event.stop()
        self.move(-_WHEEL_ROWS)

    def on_click(self, event: events.Click) -> None:
        """Take the keys; on the scroll bar: go there."""
        event.stop()
        self.post_message(self.Picked(self))
        if event.y >= 1 and event.x >= self.size.width - 1 and self.page is not None:
            offset = self.page.size * (event.y - 1) // max(1, self.window.height - 1)
            self.follow = False
            self._do(lambda file, place, window: file.at(offset, window))

    def on_resize(self) -> None:
        """Read what fits now."""
        if self.page is None:
            self.poll()
        else:
            self._again()
