"""The base class of the board's screens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.binding import ActiveBinding, Binding, BindingType
from textual.screen import Screen
from textual.widgets import Input, Static

from gpuboard.board.dialogs.base import Choose
from gpuboard.board.dialogs.saved_filters import open_save, open_saved
from gpuboard.board.filter.language import Key, Language, Query
from gpuboard.board.scene import Scene
from gpuboard.board.widgets.filter_field import FilterField, FilterInput
from gpuboard.board.widgets.grid import Grid
from gpuboard.board.widgets.on_board import OnBoard


class Notice(Static):
    """Lines at the top of a screen: the scene's label, and what is wrong with the cluster as a whole."""

    DEFAULT_CSS = """
    Notice { dock: top; height: auto; padding: 0 1; display: none; }
    """


class BoardScreen(OnBoard, Screen[None]):
    """A full screen that shows scenes. Every binding has an id, for remapping, help and palette."""

    TITLE_WORDS = ""  # its title in the help screen
    NOTICE = True  # whether to mount a Notice; False: the screen shows these lines itself
    INSTEAD_OF: ClassVar[frozenset[str]] = frozenset()  # ids of app actions whose keys this screen uses itself

    def __init__(self) -> None:
        super().__init__()
        self._notice: Notice | None = None  # once it is mounted

    def on_mount(self) -> None:
        if self.NOTICE and self.is_open:  # false where it was closed before it was drawn
            self._notice = Notice()
            self.mount(self._notice, before=0)

    def notice(self, scene: Scene) -> None:
        """Update the notice for ``scene``. Called before each ``show``."""
        if (widget := self._notice) is not None:
            lines = [Text(scene.label, self.board.look.style("warn"))] if scene.label else []
            lines += [Text(words, self.board.look.style("bad")) for words in scene.banners]
            widget.display = bool(lines)
            widget.update(Text("\n").join(lines))

    @abstractmethod
    def show(self, scene: Scene) -> None:
        """Draw ``scene``. Called for every new scene while this screen is on top, and when it returns there."""

    def on_screen_resume(self) -> None:
        """Show the newest scene after another screen was on top."""
        if self.board.scene is not None:
            self.notice(self.board.scene)
        self.redraw()

    def redraw(self) -> None:
        """Draw the newest scene again: what is shown of it has changed."""
        if self.board.scene is not None:
            self.show(self.board.scene)

    def on_resize(self) -> None:
        self.call_after_refresh(self.on_screen_resume)  # with the sizes of the new layout

    def restyle(self) -> None:
        """Redraw everything with the new ``app.look``."""
        self.on_screen_resume()

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """The bindings that footer, palette and help offer: not those of actions that this board cannot do."""
        refused = self.board.REFUSED
        return {key: one for key, one in super().active_bindings.items() if one.binding.action not in refused}

    def orders(self) -> Mapping[str, str]:
        """Return what the list can be sorted by, as key → words; the palette offers each."""
        return {}

    def order_by(self, key: str) -> None:
        """Sort the list by a key of ``orders``; by the same again: reversed."""

    def choose_order(self, now: str, *, down: bool) -> None:
        """Let the user choose from ``orders``; the one in use has its direction beside it."""
        mark = self.board.look.glyphs.down if down else self.board.look.glyphs.up
        options = [(key, f"{words} {mark}" if key == now else words) for key, words in self.orders().items()]
        self.board.open_dialog(Choose("Sort by", options), self.order_by)

    def go_to(self, key: str) -> None:
        """Put the cursor on a node (``node:NAME``) or a GPU (its UUID), if this screen has a row for it."""


class FilteredScreen(BoardScreen):
    """A screen with a filter for its rows.

    A subclass declares ``LANGUAGE``, composes ``filter_field()`` above the rows, shows the rows for which
    ``query.matches`` holds, and implements ``filter_rows``.
    """

    LANGUAGE: ClassVar[Language[Any]]
    FILTERED = "rows"  # what is filtered; saved filters are kept for each
    FILTER_HINT = ""  # an example, shown in the empty field
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", id="filter.open"),
        Binding("F", "saved_filters", "Saved filters", id="filter.saved", show=False),
        Binding("ctrl+o", "save_filter", "Save filter", id="filter.save", show=False),
    ]

    def filter_field(self) -> FilterField:
        return FilterField(self.LANGUAGE, self._values, self.FILTER_HINT, self.filter_changed)

    @property
    def field(self) -> FilterField:
        return self.query_one(FilterField)

    @property
    def query_in_force(self) -> Query[Any]:
        """The filter of the rows."""
        return self.field.query_in_force

    @abstractmethod
    def filter_rows(self) -> Iterable[tuple[Any, ...]]:
        """Return every row, filtered or not, as the arguments of the language's predicates."""

    @property
    def grid(self) -> Grid:
        """The rows."""
        return self.query_one(Grid)

    def filter_changed(self) -> None:
        """Show the rows of the filter that is in force now."""
        self.redraw()

    def _values(self, key: Key[Any]) -> Iterable[str]:
        offers = key.offers
        return () if offers is None else {value for row in self.filter_rows() for value in offers(*row) if value}

    def action_filter(self) -> None:
        self.field.open()

    def action_saved_filters(self) -> None:
        open_saved(self)

    def action_save_filter(self) -> None:
        open_save(self)

    def use_filter(self, text: str) -> None:
        self.field.put(text)
        self.set_focus(self.grid)

    def clear_filter(self) -> bool:
        """Clear and close the filter; return whether it was open."""
        was_open = self.field.is_open
        if was_open:
            self.set_focus(self.grid)
            self.field.close()
        return was_open

    def action_back(self) -> None:
        """Clear the filter, or, without one, leave the screen."""
        if not self.clear_filter():
            self.board.pop_screen()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide ``/`` from the footer while a filter is typed: it is text then."""
        typing = isinstance(self.focused, FilterInput)
        return not (action == "filter" and typing) and super().check_action(action, parameters)

    @on(FilterInput.Left)
    @on(Input.Submitted, "#filter")
    def _to_the_rows(self) -> None:
        """Return to the rows; close an empty filter."""
        if self.field.input.value.strip():
            self.set_focus(self.grid)
        else:
            self.clear_filter()


class SortedScreen(FilteredScreen):
    """A screen with a list that the user sorts: by its titles, a menu, the palette.

    A subclass binds ``sort`` and ``reverse``, returns its ``orders``, the usual one first, and implements
    ``current_order`` and ``set_order``.
    """

    DOWN_FIRST: ClassVar[Collection[str]] = ()  # orders in which usually the highest value is of interest
    BY_COLUMN: ClassVar[Mapping[str, str]] = {}  # order by column, where the keys differ

    @property
    @abstractmethod
    def current_order(self) -> tuple[str, bool]:
        """The order of the list, "" for the usual one, and whether it is downwards."""

    @abstractmethod
    def set_order(self, key: str, *, down: bool) -> None:
        """Show the list in an order of ``orders``."""

    @on(Grid.Sorted)
    def _title_clicked(self, message: Grid.Sorted) -> None:
        key = self.BY_COLUMN.get(message.key, message.key)
        if message.grid is self.grid and key in self.orders():
            self.order_by(key)

    def order_by(self, key: str) -> None:
        """Sort first in the usual direction, then reversed."""
        now, down = self.current_order
        self._sort(key, down=not down if key == now else key in self.DOWN_FIRST)

    def action_sort(self) -> None:
        now, down = self.current_order
        self.choose_order(now or next(iter(self.orders())), down=down)

    def action_reverse(self) -> None:
        now, down = self.current_order
        self._sort(now or next(iter(self.orders())), down=not down)

    def _sort(self, key: str, *, down: bool) -> None:
        self.set_order(key, down=down)
        self.grid.to_top()
