"""One rank's output: both streams, followed and searched, of any size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input, Static

from gpuboard.board.background import Background
from gpuboard.board.screens.base import BoardScreen
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.log_view import LogView
from gpuboard.launch.runs.index import RunEntry, log_trouble
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from gpuboard.board.scene import Scene
    from gpuboard.launch.runs.remote import RemoteRun

_POLL_S = 0.25
_STATE_S = 1.0
_STREAMS = ("both", "out", "err")
_SIDE = 16  # cells per left or right


class LogScreen(BoardScreen):
    """The logs of a rank of a run."""

    TITLE_WORDS = "Log"
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back", id="log.back"),
        Binding("f", "follow", "Follow", id="log.follow"),
        Binding("slash", "search", "Search", id="log.search"),
        Binding("n", "find(False)", "Next", id="log.next"),
        Binding("N", "find(True)", "Previous", id="log.previous", show=False),
        Binding("left_square_bracket", "rank(-1)", "Previous rank", id="log.rank-before", show=False),
        Binding("right_square_bracket", "rank(1)", "Next rank", id="log.rank-next"),
        Binding("s", "streams", "Streams", id="log.streams"),
        Binding("tab", "other", "Other stream", id="log.other", show=False),
        Binding("z", "wrap", "Wrap", id="log.wrap"),
        Binding("g,home", "top", "Top", id="log.top", show=False),
        Binding("G,end", "bottom", "End", id="log.end"),
        Binding("up,k", "rows(-1)", "Up", id="log.up", show=False),
        Binding("down,j", "rows(1)", "Down", id="log.down", show=False),
        Binding("pageup,b", "pages(-1)", "Page up", id="log.page-up", show=False),
        Binding("pagedown,space", "pages(1)", "Page down", id="log.page-down", show=False),
        Binding("left", "right(-1)", "Left", id="log.left", show=False),
        Binding("right", "right(1)", "Right", id="log.right", show=False),
    ]
    CSS = """
    LogScreen #head, LogScreen #trouble, LogScreen #message { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    LogScreen #head, LogScreen #trouble, LogScreen #message { padding: 0 1; }
    LogScreen #trouble, LogScreen #message, LogScreen #words { display: none; }
    LogScreen #words { height: 1; }
    LogScreen #trouble.-shown, LogScreen #message.-shown, LogScreen #words.-shown { display: block; }
    """

    def __init__(self, entry: RunEntry, rank: int, stream: str | None = None) -> None:
        """``stream``: the active one, ``out`` or ``err``; by default the first."""
        super().__init__()
        self._first = stream
        self._entry = entry
        self._rank = rank
        self._streams = _STREAMS[0]
        self._far: RemoteRun | None = None  # where the logs are on a node
        self._background: Background[tuple[RunEntry | None, str]] = Background(self)

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Static(id="trouble", markup=False)
        yield LogView("stdout", id="out")
        yield LogView("stderr", id="err")
        yield Static(id="message", markup=False)
        yield Input(placeholder="search … (case-sensitive if it has capitals)", id="words", compact=True)
        yield Footer()

    def on_mount(self) -> None:
        """Show the end of both streams and follow them."""
        self._far = self.board.core.runbook.far(self._entry)
        for view in self.views:
            view.active = view.id == self._first
        self._open()
        self.set_interval(_POLL_S if self._far is None else self._far.poll_s, self._poll)
        self.set_interval(_STATE_S, self._look)

    @property
    def views(self) -> list[LogView]:
        """The streams that are shown."""
        return [view for view in self.query(LogView) if view.display]

    @property
    def active(self) -> LogView:
        return next((view for view in self.views if view.active), self.views[0])

    def show(self, scene: Scene) -> None:
        """Nothing to draw: logs do not depend on the cluster."""

    def restyle(self) -> None:
        self._head()

    def _open(self) -> None:
        self._pick(self.active)
        for stream in ("out", "err"):
            path = Path(self._entry.view.folder) / f"rank-{self._rank}.{stream}"
            self.query_one(f"#{stream}", LogView).open(path, self._far)
        self._show_message("")
        self._head()
        self._look()

    def _head(self) -> None:
        look, view = self.board.look, self._entry.view
        rank = next((rank for rank in view.ranks if rank.rank == self._rank), None)
        where = f"{clean(rank.node)}:{rank.index}" if rank is not None else "?"
        state = clean(rank.state) if rank is not None else "?"
        text = Text.assemble(
            (f"Rank {self._rank}", look.style("title")),
            f" of {len(view.ranks)}  {where}  ",
            (state, look.style("bad" if state == "failed" else "good" if state in {"running", "done"} else "")),
            (f"  run {view.id}, {clean(view.state)}  {clean(view.target)}", look.style("dim")),
            no_wrap=True,
            overflow="ellipsis",
        )
        self.query_one("#head", Static).update(text)
        for each in self.query(LogView):
            each.live = self._entry.live

    def _poll(self) -> None:
        if self.is_current:
            for view in self.views:
                view.poll()

    def _look(self) -> None:
        """Read the rank's state, and whether its log is complete."""
        if not self.is_current:
            return
        book, run, folder = self.board.core.runbook, self._entry.view.id, Path(self._entry.view.folder)

        def then(found: tuple[RunEntry | None, str]) -> None:
            entry, trouble = found
            self._entry = entry or self._entry
            self._head()
            self._show_line("#trouble", trouble, "warn")

        far = self._far is not None

        def work() -> tuple[RunEntry | None, str]:
            entry = book.one(run)
            if far:
                return entry, f"{clean(entry.view.node or '')}: {entry.unread}" if entry and entry.unread else ""
            return entry, log_trouble(folder)

        self._background.ask(work, then)

    def _show_message(self, words: str) -> None:
        self._show_line("#message", words, "dim")

    def _show_line(self, where: str, words: str, role: str) -> None:
        line = self.query_one(where, Static)
        line.set_class(bool(words), "-shown")
        line.update(Text(words, self.board.look.style(role), no_wrap=True, overflow="ellipsis"))

    def _pick(self, view: LogView) -> None:
        for other in self.query(LogView):
            other.active = other is view
            other.refresh()

    def on_log_view_stream_picked(self, message: LogView.StreamPicked) -> None:
        self._pick(message.view)

    def on_log_view_notified(self, message: LogView.Notified) -> None:
        self._show_message(message.words)

    # Actions

    def action_back(self) -> None:
        """Close the search field, else stop a running search, else leave the screen."""
        words = self.query_one("#words", Input)
        if words.has_class("-shown"):
            words.remove_class("-shown")
            self.set_focus(None)
        elif searching := [view for view in self.views if view.searching]:
            searching[0].stop_search()
            self._show_message("search stopped")
        else:
            self.app.pop_screen()

    def action_follow(self) -> None:
        if self.active.follow:
            self.active.stay()
        else:
            self.active.bottom()

    def action_search(self) -> None:
        words = self.query_one("#words", Input)
        words.add_class("-shown")
        words.value = self.active.words
        self.set_focus(words)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Search downwards, or upwards from the end."""
        event.stop()
        self.query_one("#words", Input).remove_class("-shown")
        self.set_focus(None)
        self._show_message("")
        page = self.active.page
        self._search(event.value, backwards=page is not None and page.at_end)

    def _search(self, words: str, *, backwards: bool) -> None:
        """Search the visible streams for ``words``, from the position in the active one unless it is empty."""
        first, *others = sorted(self.views, key=lambda view: (view.page is None, not view.active))
        for view in (first, *others):
            view.stop_search()
        for view in others:
            view.highlight(words)
        first.search(words, backwards=backwards, others=others)

    def action_find(self, backwards: bool) -> None:
        if self.active.words:
            self._search(self.active.words, backwards=backwards)
        else:
            self.action_search()

    def action_rank(self, step: int) -> None:
        ranks = [rank.rank for rank in self._entry.view.ranks]
        if ranks:
            at = ranks.index(self._rank) if self._rank in ranks else 0
            self._rank = ranks[(at + step) % len(ranks)]
            self._open()

    def action_streams(self) -> None:
        """Show both streams, stdout alone, stderr alone."""
        self._streams = _STREAMS[(_STREAMS.index(self._streams) + 1) % len(_STREAMS)]
        for view in self.query(LogView):
            view.display = self._streams in {"both", view.id}
        self._pick(self.active)

    def action_other(self) -> None:
        """Make the other stream the active one."""
        views = self.views
        self._pick(views[(views.index(self.active) + 1) % len(views)])

    def action_wrap(self) -> None:
        for view in self.query(LogView):
            view.toggle_wrap()

    def action_top(self) -> None:
        self.active.top()

    def action_bottom(self) -> None:
        self.active.bottom()

    def action_rows(self, rows: int) -> None:
        self.active.move(rows)

    def action_pages(self, pages: int) -> None:
        """Go a screenful up or down."""
        self.active.move_pages(pages)

    def action_right(self, steps: int) -> None:
        self.active.move_right(steps * _SIDE)
