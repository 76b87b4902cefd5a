"""The help screen: every key by screen, letters and flags, the filter. Generated from the bindings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from gpuboard.board import keys
from gpuboard.board.scene import Scene
from gpuboard.board.screens.base import BoardScreen
from gpuboard.board.screens.runs import RunsScreen
from gpuboard.board.text.detail.ranks import RANK_LETTERS
from gpuboard.board.text.format import FLAG_MARKS, flag_role
from gpuboard.board.theme.styles import LETTERS
from gpuboard.board.widgets.footer import Footer

STATE_WORDS = {
    "free": "no process, no reservation",
    "reserved": "held by a lease",
    "allocated": "held by a job of the scheduler",
    "busy": "in use without a reservation",
    "occupied": "memory in use, owner not visible",
    "mig": "in MIG mode; M2: 2 of its devices free",
    "unknown": "no current reading; never free",
    "broken": "lost, failed or needs recovery",
}
RANK_WORDS = {
    "waiting": "not started",
    "gate": "ready; preflight has not finished",
    "importing": "imports torch",
    "running": "runs, or loads data",
    "waits": "for others, in a collective or at init",
    "behind": "others wait for it",
    "stopped": "by SIGSTOP, ctrl-Z or a debugger",
    "blocked": "in uninterruptible sleep (driver or disk)",
    "failed": "X! failed first",
    "killed": "ended with the run",
    "lost": "its node is lost",
    "done": "exit code 0",
}
FLAG_WORDS = {
    "rogue": "another user's process runs on it",
    "idle": "held, but unused for a while",
    "overdue": "the lease ended, its processes did not",
    "disputed": "claims contradict each other",
    "sick": "fault (ECC, heat, PCIe, XID): see the GPU",
}
FILTER_WORDS = (
    ("alice", "any text with the word"),
    ("user:alice -state:busy", "and; - negates; user:me"),
    ("mem>40G util<5 temp>=80", "numbers: < <= > >="),
    ("model:H100 node:gpu[01-04]", "part of a name; a nodeset"),
    ("flag:idle,rogue", "or; more in the docs"),
)
MOUSE_WORDS = (
    ("click", "move the cursor; press a footer key"),
    ("double click", "open it"),
    ("ctrl-click", "or right-click: select or deselect"),
    ("drag", "select from there to here"),
    ("click on a title", "sort by it; again: reverse"),
    ("click on a count", "only these GPUs; again: all"),
)
_COLUMN = 58  # cells of one column of the screen, at least
_KEYS, _SIGNS = 13, 16  # cells for the keys, and for a letter or mark with its name
_WORDS = 22  # cells for the description; the binding's id follows


class HelpScreen(BoardScreen):
    """All keys, grouped by screen; the one it was opened from comes first."""

    TITLE_WORDS = "Help"
    INSTEAD_OF = frozenset({"app.quit", "app.help"})
    DEFAULT_CSS = """
    HelpScreen #scroll { scrollbar-size-vertical: 1; padding: 0 1; }
    HelpScreen #words { width: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1", "app.pop_screen", "Close", id="help.close"),
        Binding("up,k", "scroll(-1)", "Up", id="help.up", show=False),
        Binding("down,j", "scroll(1)", "Down", id="help.down", show=False),
        Binding("pageup", "scroll(-20)", "Page up", id="help.page-up", show=False),
        Binding("pagedown,space", "scroll(20)", "Page down", id="help.page-down", show=False),
        Binding("home", "scroll(-9999)", "Top", id="help.top", show=False),
        Binding("end", "scroll(9999)", "End", id="help.end", show=False),
    ]

    def __init__(self, opened_from: str) -> None:
        super().__init__()
        self._opened_from = opened_from
        self._cells = 0  # for the columns together

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="scroll", can_focus=False):
            yield Static(id="words", markup=False)
        yield Footer()

    def show(self, scene: Scene) -> None:
        """Nothing to draw: the help does not depend on the cluster."""

    def on_resize(self) -> None:
        """Lay the sections out in as many columns as fit."""
        if self._cells != (cells := self.size.width - 3):
            self._cells = cells
            self.draw()

    def draw(self) -> None:
        legends = [self._legend(), self._ranks()]
        if self._opened_from == RunsScreen.TITLE_WORDS:
            legends.reverse()
        here, others = self._keys()
        sections = [*here, legends[0], *others, legends[1], self._mouse(), self._filters()]
        self.query_one("#words", Static).update(_in_columns(sections, self._cells))

    def action_scroll(self, lines: int) -> None:
        self.query_one("#scroll").scroll_relative(y=lines, animate=False)

    def _keys(self) -> tuple[list[list[Text]], list[list[Text]]]:
        """Return the keys of the screen it was opened from, and those of all others, by section.

        Left out are actions that this board cannot do, with those of the screens that they would open.
        """
        keys.load_screens()
        by_section: dict[str, list[Text]] = {}
        for action in keys.actions():
            if action.description and not {action.name, action.id.partition(".")[0]} & self.board.REFUSED:
                line = self._line(self._shown(action), action.description.ljust(_WORDS))
                by_section.setdefault(action.section, []).append(
                    line.append(f" {action.id}", self.board.look.style("dim"))
                )
        general = ("Everywhere", "Lists")
        here = {active.binding.id for active in self.app.screen_stack[-2].active_bindings.values()}
        active = (action.section for action in keys.actions() if action.id in here and action.section not in general)
        first = [name for name in dict.fromkeys((self._opened_from, *active, *general)) if name in by_section]
        last = ("Dialogs", "Help")
        others = [*(name for name in by_section if name not in {*first, *last}), *last]
        sections = {name: [self._title(name), *lines] for name, lines in by_section.items()}
        return [sections[name] for name in first], [sections[name] for name in others]

    def _shown(self, action: keys.Action) -> str:
        """Return the current keys of an action."""
        remapped = self.board.keymap.get(action.id)
        found = remapped.split(",") if remapped else action.keys
        return " ".join(self.board.get_key_display(Binding(key, "", "")) for key in found)

    def _legend(self) -> list[Text]:
        look = self.board.look
        lines = [self._title("States")]
        for state, words in STATE_WORDS.items():
            line = Text(f"  {LETTERS[state]} {state}".ljust(_SIGNS), look.style(state))
            lines.append(line.append(words, look.style("")))
        lines += [Text(), self._title("Flags")]
        for flag, words in FLAG_WORDS.items():
            mark = Text(f"  {FLAG_MARKS[flag]} {flag}".ljust(_SIGNS), look.style(flag_role(flag)))
            lines.append(mark.append(words, look.style("")))
        return lines

    def _ranks(self) -> list[Text]:
        look, lines = self.board.look, [self._title("Ranks of a run")]
        for word, words in RANK_WORDS.items():
            letter, role = RANK_LETTERS[word]
            lines.append(Text(f"  {letter} {word}".ljust(_SIGNS), look.style(role)).append(words, look.style("")))
        return lines

    def _mouse(self) -> list[Text]:
        return [self._title("Mouse"), *(self._line(*pair, width=20) for pair in MOUSE_WORDS)]

    def _filters(self) -> list[Text]:
        return [self._title("Filter"), *(self._line(*pair, width=30) for pair in FILTER_WORDS)]

    def _title(self, words: str) -> Text:
        return Text(words, self.board.look.style("group"))

    def _line(self, left: str, words: str, width: int = _KEYS) -> Text:
        return Text(f"  {left}".ljust(width), self.board.look.style("title")).append(f" {words}", "not bold")


def _in_columns(sections: Sequence[list[Text]], cells: int) -> Text:
    """Lay whole sections out in as many columns as fit into ``cells``, of about the same length."""
    columns = max(1, cells // _COLUMN)
    total = sum(len(section) + 1 for section in sections)
    laid: list[list[Text]] = [[]]
    for section in sections:
        if len(laid) < columns and len(laid[-1]) + len(section) // 2 > total / columns:
            laid.append([])
        laid[-1] += [*section, Text()]
    if len(laid) == 1:
        return Text("\n").join(laid[0])
    lines = []
    for row in range(max(len(column) for column in laid)):
        line = Text()
        for column in laid:
            cell = column[row].copy() if row < len(column) else Text()
            cell.truncate(cells // columns - 1, overflow="ellipsis", pad=True)
            line.append_text(cell).append(" ")
        lines.append(line)
    return Text("\n").join(lines)
