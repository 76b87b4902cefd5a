"""The field of a filter: completion while typing, what is wrong with the text, and which filter is in force."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.suggester import Suggester
from textual.widgets import Input

from gpuboard.board.background import Background
from gpuboard.board.filter.completion import Completion, complete
from gpuboard.board.filter.language import Key, Language, Query, QueryError, names_groups
from gpuboard.board.text.cells import fit, width
from gpuboard.board.text.lines import wrapped
from gpuboard.board.widgets.pane import Lines, Runs

Values = Callable[[Key[Any]], Iterable[str]]  # a key's values in the rows
_NOTE_S = 0.2  # a look-up is shown after this long: groups known to ClusterShell take less


class FilterInput(Input):
    """The line of text. Its suggestion is drawn dim behind the cursor; tab or right takes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "take", "Complete", id="filter.complete"),
        Binding("down", "rows", "To the rows", id="filter.rows"),
    ]

    class Left(Message):
        """The user goes to the rows."""

    def __init__(self, field: FilterField, hint: str) -> None:
        super().__init__(placeholder=hint, id="filter", compact=True, select_on_focus=False, disabled=True)
        self._field = field
        self.suggester = _Suggester(field)

    def action_take(self) -> None:
        """Take the first candidate; without one, go to the rows."""
        if texts := self._field.completion.texts:
            self._set(texts[0])
        else:
            self.action_rows()

    def action_cursor_right(self, select: bool = False) -> None:
        """Take the suggestion at the end of the text."""
        if not select and self.cursor_at_end and (text := self._field.suggestion) is not None:
            self._set(text)
        else:
            super().action_cursor_right(select)

    def _set(self, text: str) -> None:
        self.value = text
        self.cursor_position = len(text)

    def action_rows(self) -> None:
        self.post_message(self.Left())


class _Suggester(Suggester):
    def __init__(self, field: FilterField) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._field = field

    async def get_suggestion(self, value: str) -> str | None:
        """Return the whole text with the first candidate."""
        return self._field.suggestion


def _parse(language: Language[Any], text: str) -> tuple[Query[Any], str]:
    """Return the query of a text, or of its valid part with the error."""
    try:
        return language.parse(text), ""
    except QueryError as error:
        return language.valid_part(text, error), error.words


class FilterField(Vertical):
    """A filter in ``language``. Closed, it takes no room and its filter is empty."""

    DEFAULT_CSS = """
    FilterField { height: auto; display: none; }
    FilterField.-open { display: block; }
    FilterField #filter { height: 1; border: none; padding: 0 1; }
    FilterField Input > .input--suggestion, FilterField Input > .input--placeholder { color: auto 65%; }
    FilterField Input:ansi > .input--suggestion, FilterField Input:ansi > .input--placeholder {
        color: ansi_default; text-style: dim;
    }
    """

    def __init__(self, language: Language[Any], values: Values, hint: str, changed: Callable[[], None]) -> None:
        """``changed``: called after the text has changed."""
        super().__init__()
        self._changed = changed
        self._language = language
        self._values = values
        self._hint = hint
        self._known: tuple[Key[Any], tuple[str, ...]] | None = None  # of the key that was completed last
        self._error = ""  # why the text is not in force
        self._word = ""  # the last word, while it may become a key: not in force either
        self._used = ""  # the text without that word
        self._lookups: Background[tuple[Query[Any], str]] = Background(self)
        self.query_in_force: Query[Any] = language.parse("")

    def compose(self) -> ComposeResult:
        yield FilterInput(self, self._hint)
        yield Lines(id="offers")
        yield Lines(id="wrong")

    @property
    def input(self) -> FilterInput:
        return self.query_one(FilterInput)

    @property
    def is_open(self) -> bool:
        return self.has_class("-open")

    @property
    def typing(self) -> bool:
        """Whether keys go into the field."""
        return self.is_open and self.input.has_focus

    @property
    def wrong(self) -> bool:
        """Whether the text is not the filter in force."""
        return bool(self._error or self._word)

    def open(self) -> None:
        self._show(True)
        self.input.focus()

    def finish(self) -> None:
        """Take the text as it is: nothing more is typed."""
        if self._word:
            self._word = ""
            self._use(self.input.value)

    def close(self) -> None:
        self._show(False)
        self.put("")

    def put(self, text: str) -> None:
        """Set the filter; the field is open where it is not empty."""
        if text:
            self._show(True)
        with self.input.prevent(Input.Changed):
            self.input.value = text
        self.input.cursor_position = len(text)
        self._word = ""
        self._use(text)

    def _show(self, is_open: bool) -> None:
        self.set_class(is_open, "-open")
        self.input.disabled = not is_open  # else keys pressed early would go into it

    # Completion

    @property
    def completion(self) -> Completion:
        """How the text can go on at its end."""
        text = self.input.value
        return complete(text, self._language, self._offered) if self.input.cursor_at_end else Completion()

    @property
    def suggestion(self) -> str | None:
        """The text with the first candidate, if it only adds to what is typed."""
        text, found = self.input.value, self.completion.texts
        return found[0] if found and found[0].casefold().startswith(text.casefold()) else None

    def _offered(self, key: Key[Any]) -> Iterable[str]:
        """Return a key's values: read once per key, as a thousand nodes have many."""
        if self._known is None or self._known[0] is not key:
            self._known = key, tuple(self._values(key))
        return self._known[1]

    # What is typed

    @on(Input.Changed)
    def _typed(self) -> None:
        """Filter while the user types; a last word that may become a key waits until it is finished."""
        text = self.input.value
        at = self.completion.word if self.typing else None
        self._word = "" if at is None else text[at:]
        self._use(text if at is None else text[:at].rstrip("-").rstrip())

    def _use(self, text: str) -> None:
        """Filter by ``text``; where it is invalid show why, and which part of it is in force.

        While groups of nodes are looked up, the filter before stays in force: that may take seconds.
        """
        self._used = text
        if not names_groups(text):
            self._parsed(*_parse(self._language, text))
            return
        self._error = "looking up groups of nodes"
        self.set_timer(_NOTE_S, self._draw)

        def found(result: tuple[Query[Any], str]) -> None:
            if text == self._used:
                self._parsed(*result)
            elif names_groups(self._used):
                self._use(self._used)

        self._lookups.ask(lambda: _parse(self._language, text), found)

    def _parsed(self, query: Query[Any], error: str) -> None:
        self.query_in_force, self._error = query, error
        self._draw()
        self._changed()

    def _draw(self) -> None:
        """Show candidates while the field has the focus, then what is wrong."""
        wide = self.app.size.width - 3
        found, offers = self.completion, self.query_one("#offers", Lines)
        words = "  ".join(found.names) or ("" if self._error else found.hint)
        lead = "  tab: " if found.texts else "  "
        room = min(width(words), wide + 2 - len(lead))
        offers.set_lines([((lead, "dim"), (fit(words, room), ""))] if self.typing and words else [])
        wrong: list[Runs] = []
        if self.wrong:
            force = self.query_in_force.text
            words = f"in force: {force}" if force else "no filter is in force"
            if self._error:
                wrong = [((f"  {line}", "warn"),) for line in wrapped(self._error, wide, most=4)]
                wrong.append(((f"  {fit(words, min(width(words), wide))}", "title"),))
            else:
                excludes = self.input.value.removesuffix(self._word).endswith("-")
                then = f'enter or a space {"leaves out" if excludes else "looks for"} "{self._word}"; '
                wrong.append(((f"  {then}", "dim"), (fit(words, min(width(words), wide - width(then))), "dim")))
        self.query_one("#wrong", Lines).set_lines(wrong)

    def on_descendant_focus(self) -> None:
        """Offer values of the rows that there are now."""
        self._known = None
        self._draw()

    def on_descendant_blur(self) -> None:
        self.finish()
        self._draw()

    def on_resize(self) -> None:
        self._draw()
