"""Filters saved by name: save the one in force, choose one, delete one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import Button, OptionList

from gpuboard.board.dialogs.base import Choose, Dialog, Field, button
from gpuboard.board.preferences import SavedFilter
from gpuboard.board.text.cells import fit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuboard.board.app import BoardApp
    from gpuboard.board.screens.base import FilteredScreen

_NAME_MOST = 20  # characters
_MOST = 50  # saved filters of one kind


def saved(board: BoardApp, rows: str) -> list[SavedFilter]:
    """Return the saved filters of one kind of rows, by name."""
    return sorted((one for one in board.preferences.filters if one.rows == rows), key=lambda one: one.name.casefold())


def open_saved(screen: FilteredScreen) -> None:
    """Let the user choose a saved filter, or delete one."""
    board = screen.board
    if not (known := saved(board, screen.FILTERED)):
        board.notify(f"no saved filters for {screen.FILTERED}; / filters, ctrl-o saves", markup=False)
        return
    texts = {one.name: one.text for one in known}
    board.open_dialog(SavedFilters(screen.FILTERED, known), lambda name: screen.use_filter(texts[name]))


def open_save(screen: FilteredScreen) -> None:
    """Ask for a name for the filter in force."""
    screen.field.finish()
    board, text = screen.board, screen.query_in_force.text.strip()
    if not text or screen.field.wrong:
        board.notify("no valid filter to save; / filters", markup=False)
        return
    known = {one.name: one.text for one in saved(board, screen.FILTERED)}
    board.open_dialog(SaveFilter(screen.FILTERED, text, known), lambda _: screen.set_focus(screen.grid))


class SavedFilters(Choose):
    """The saved filters of one kind of rows; the result is the chosen one's name."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("d", "delete", "Delete", id="dialog.delete-filter")]

    def __init__(self, rows: str, known: Sequence[SavedFilter]) -> None:
        super().__init__(f"Saved filters for {rows}", [(one.name, _line(one)) for one in known])
        self._rows = rows

    def buttons(self) -> Iterator[Button]:
        yield button("Delete (d)", "delete")
        yield from super().buttons()

    def action_delete(self) -> None:
        options = self.query_one(OptionList)
        option = options.highlighted_option
        if option is None:
            return
        kept = [one for one in self.board.preferences.filters if (one.rows, one.name) != (self._rows, option.id)]
        self.board.remember(filters=tuple(kept))
        options.remove_option(option.id or "")
        if not options.option_count:
            self.dismiss(None)


class SaveFilter(Dialog[str]):
    """Asks for a name. ``known``: the saved filters by name."""

    def __init__(self, rows: str, text: str, known: dict[str, str]) -> None:
        super().__init__(
            f"Save this filter for {rows}", [Field("name", "Name", example="free H100", check=self._check)], verb="Save"
        )
        self._rows, self._text, self._known = rows, text, known

    def _check(self, name: str) -> str:
        if not name:
            return "a name is needed"
        if len(name) > _NAME_MOST:
            return f"at most {_NAME_MOST} characters"
        return f"{_MOST} are saved: delete one" if len(self._known) >= _MOST and name not in self._known else ""

    def changed(self) -> None:
        """Show the filter, and whether it replaces another."""
        name, text = self.values["name"], self._text
        if name in self._known and self._known[name] != text:
            self.show_message(f"Will replace {name}: {self._known[name]}\nby: {text}", "warn")
        else:
            self.show_message(f"Will save: {text}", "good")

    def commit(self, values: dict[str, str]) -> None:
        """Save it, also for the next start."""
        new = SavedFilter(values["name"], self._text, self._rows)
        others = [one for one in self.board.preferences.filters if (one.rows, one.name) != (new.rows, new.name)]
        self.board.remember(filters=(*others, new))
        self.board.notify(f"{new.name}: {new.text}", title="Filter saved; F shows all", markup=False)
        self.dismiss(new.name)


def _line(one: SavedFilter) -> Text:
    return Text.assemble((fit(one.name, _NAME_MOST), "bold"), "  ", one.text, no_wrap=True, overflow="ellipsis")
