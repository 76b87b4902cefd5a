"""Dialogs over a screen: fields checked while typing, a choice from a list, a confirmation before harm."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import msgspec
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Click, DescendantFocus, Resize
from textual.message import Message
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input, Label, OptionList, Static
from textual.widgets.option_list import Option

from gpuboard.board.dialogs.request_form import lasting
from gpuboard.board.scene import Scene
from gpuboard.board.theme.styles import ASCII
from gpuboard.board.widgets.on_board import OnBoard
from gpuboard.model.units import is_whole, parse_duration, parse_size

if TYPE_CHECKING:
    from gpuboard.errors import GpuboardError

T = TypeVar("T")
U = TypeVar("U")
YES = "yes"  # the value of a toggle that is on; off: ""
_USUAL_S = 8 * 3600.0  # default duration of a lease, if the site allows it
_AROUND = 7  # lines of a dialog besides its fields and its message: frame, title, buttons, blank ones
_FIELDS_MOST = 12  # lines
_MESSAGE_LEAST, _MESSAGE_MOST = 2, 8  # lines


def _fine(_: str) -> str:
    return ""


class Field(msgspec.Struct, frozen=True):
    """One line of a dialog. ``check``: text → what is wrong with it, "" for nothing; shown beside the field."""

    key: str
    label: str
    value: str = ""
    hint: str = ""  # beside the field while it is valid
    example: str = ""  # in the field while it is empty
    check: Callable[[str], str] = _fine
    toggle: bool = False  # a check box; its value is YES or ""
    text: bool = False  # free text: takes the room of the hint, and typing goes on at its end instead of replacing it


def number(least: int, most: int, *, needed: bool = True) -> Callable[[str], str]:
    """Return a check for a whole number from ``least`` to ``most``; ``needed`` False: may be empty."""

    def check(text: str) -> str:
        text = text.strip()
        fine = is_whole(text) and least <= int(text) <= most if text else not needed
        return "" if fine else f"a number from {least} to {most}"

    return check


def duration(most_s: float) -> Callable[[str], str]:
    """Return a check for a duration (``30m``, ``8h``, ``2d``) of at most ``most_s`` seconds."""

    def check(text: str) -> str:
        try:
            seconds = parse_duration(text)
        except ValueError:
            return "write 30m, 8h, 2d or 1h30m"
        return f"longer than the {lasting(most_s)} allowed" if seconds > most_s else ""

    return check


def size(text: str) -> str:
    """Check a size in memory (``40GiB``); may be empty."""
    try:
        parse_size(text or "1GiB")
    except ValueError:
        return "write 40GiB or 512MiB"
    return ""


def lease_duration(label: str, most_s: float) -> Field:
    """Return the field ``for``: the duration of a lease, of at most ``most_s`` seconds."""
    usual, most = lasting(min(_USUAL_S, most_s)), f"at most {lasting(most_s)}"
    return Field("for", label, usual, most, "30m", duration(most_s))


Variant = Literal["default", "primary", "error"]


def button(words: str, action: str, variant: Variant = "default") -> Button:
    """Return a button that runs an ``action`` of its dialog; its id is the action's name."""
    return Button(Content(words), id=action, variant=variant, compact=True)


class Tick(Static, can_focus=True):
    """A check box whose mark shows its state without colour; textual's own shows an X in both states."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "tick", "Tick", id="dialog.tick", show=False)]

    class Changed(Message):
        """The box was changed."""

    def __init__(self, value: bool, name: str) -> None:
        super().__init__(id=name, markup=False)
        self.value = value

    def render(self) -> Text:
        return Text("[x] yes" if self.value else "[ ] no")

    def action_tick(self) -> None:
        self.value = not self.value
        self.refresh()
        self.post_message(self.Changed())

    def on_click(self, event: Click) -> None:
        event.stop()
        self.action_tick()


class Box(OnBoard, ModalScreen[T]):
    """A box in the middle of the screen below it."""

    DEFAULT_CSS = """
    Box { align: center middle; }
    Box #box {
        width: 76; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; padding: 0 1; background: $surface;
    }
    Box.-ascii #box { border: ascii $primary; }
    Box #title { text-style: bold; margin-bottom: 1; width: 100%; }
    Box #buttons { height: 1; margin-top: 1; align-horizontal: right; }
    Box #buttons Button { margin-left: 2; min-width: 10; }
    Box #buttons Button:focus { text-style: bold reverse; }
    Box #buttons Button:disabled {
        background: $foreground 12%; color: auto 70%; opacity: 1; text-opacity: 1; text-style: none;
    }
    Box #buttons Button:disabled:ansi { border: none !important; color: ansi_default; text-style: dim; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel", id="dialog.cancel"),
        Binding("ctrl+c", "cancel", "Cancel", id="dialog.interrupt", show=False),  # the app's is not reached from here
        Binding("right", "app.focus_next", "Next", id="dialog.right", show=False),
        Binding("left", "app.focus_previous", "Previous", id="dialog.left", show=False),
        Binding("down", "app.focus_next", "Next field", id="dialog.next", show=False),
        Binding("up", "app.focus_previous", "Previous field", id="dialog.previous", show=False),
        Binding("pageup", "page(-1)", "Page up", id="dialog.page-up", show=False),
        Binding("pagedown", "page(1)", "Page down", id="dialog.page-down", show=False),
    ]

    def __init__(self, title: str) -> None:
        super().__init__()
        self._heading = title

    def compose(self) -> ComposeResult:
        self.set_class(self.board.look.glyphs is ASCII, "-ascii")
        with Vertical(id="box"):
            yield Static(self._heading, id="title", markup=False)
            yield from self.inside()
            with Horizontal(id="buttons"):
                yield from self.buttons()

    def inside(self) -> ComposeResult:
        return iter(())

    def buttons(self) -> Iterator[Button]:
        yield button("Cancel", "cancel")

    @on(Button.Pressed)
    async def _pressed(self, event: Button.Pressed) -> None:
        event.stop()
        await self.run_action(event.button.id or "")

    def show(self, scene: Scene) -> None:
        """Handle a new scene while the dialog is open."""

    def dismiss(self, result: T | None = None) -> AwaitComplete:
        """Close, together with a palette above it, and return ``result``; once.

        textual's own closes the top screen: a second click or enter would close the screen below.
        """
        if self not in self.app.screen_stack:
            return AwaitComplete()
        while self.app.screen is not self:
            self.app.pop_screen()
        return super().dismiss(result)

    def action_cancel(self) -> None:
        self.dismiss(None)

    def action_page(self, by: int) -> None:
        """Scroll a text that is longer than its part of the dialog."""
        for area in self.query(VerticalScroll):
            area.scroll_relative(y=by * max(1, area.size.height - 1), animate=False)


class Dialog(Box[T]):
    """Labelled fields, checked while typing, a message below them, a verb and Cancel; enter in a field commits."""

    PREVIEW = 0  # lines that stay free for the message, so that the dialog keeps its size while the user types

    DEFAULT_CSS = """
    Dialog .field { height: auto; width: 100%; }
    Dialog .field Label { width: 13; }
    Dialog .field.-focused Label { text-style: bold; }
    Dialog .field Input, Dialog .field Input:focus {
        height: 1; padding: 0; background: $foreground 12%; background-tint: transparent;
        border: none; border-left: vkey $foreground 40%; border-right: vkey $foreground 40%;
    }
    Dialog .field Input { width: 28; }
    Dialog .field Input:focus { background: $foreground 22%; border-left: vkey $primary; border-right: vkey $primary; }
    Dialog .field Input > .input--selection { background: $surface; text-style: reverse; }
    Dialog .field Input > .input--placeholder { color: auto 70%; text-style: italic; }
    Dialog .field Input:ansi > .input--placeholder { color: ansi_default; text-style: dim italic; }
    Dialog.-ascii .field Input, Dialog.-ascii .field Input:focus {
        border-left: ascii $primary; border-right: ascii $primary;
    }
    Dialog .field Tick { width: 28; padding-left: 1; }
    Dialog .field .note { width: 1fr; padding-left: 1; height: auto; }
    Dialog .field.-text Input { width: 1fr; }
    Dialog .field.-text .note { width: auto; max-width: 35; }
    Dialog #fields { height: auto; }
    Dialog #message { height: auto; margin-top: 1; }
    Dialog #message.-empty { display: none; }
    Dialog #words { width: 100%; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "commit", "Confirm", id="dialog.commit", show=False)]

    def __init__(self, title: str, fields: Sequence[Field], *, verb: str) -> None:
        super().__init__(title)
        self.fields = {field.key: field for field in fields}
        self.verb = verb
        self.busy = False
        self.refused = False  # what the valid fields ask for is not possible; the message has the reason
        self._calm: set[str] = set()  # fields that were empty from the start and have not been left or filled in
        self._focused = ""  # key of the field that had the focus last
        self._notes: dict[str, Text] = {}  # as drawn: an update lays out the whole dialog again
        self._message = Text()

    def inside(self) -> ComposeResult:
        with VerticalScroll(id="fields", can_focus=False):
            for field in self.fields.values():
                with Horizontal(classes="field -text" if field.text else "field"):
                    yield Label(field.label, markup=False)
                    yield _entry(field)
                    yield Static("", classes="note", id=f"note-{field.key}", markup=False)
        with VerticalScroll(id="message", can_focus=False, classes="" if self.PREVIEW else "-empty"):
            yield Static("", id="words", markup=False)

    def buttons(self) -> Iterator[Button]:
        yield from super().buttons()
        yield button(self.verb, "commit", "primary")

    def on_mount(self) -> None:
        """Check the defaults; the error of an empty field is shown once the user has left it."""
        values = self.values
        self._calm |= {key for key in self.wrong() if not values[key]}
        self.check()

    def on_resize(self, event: Resize) -> None:
        """Share the height among fields and message, so that title and buttons stay visible."""
        room = event.size.height - _AROUND
        fields = max(1, min(_FIELDS_MOST, room - min(_MESSAGE_LEAST, room // 2)))
        self.query_one("#fields").styles.max_height = fields
        most = max(1, min(_MESSAGE_MOST, room - min(fields, len(self.fields))))
        message = self.query_one("#message")
        message.styles.max_height, message.styles.min_height = most, min(most, self.PREVIEW)

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        """Mark the label of the field that has the focus; the one that had it before is checked."""
        for row in self.query(".field"):
            row.set_class(event.widget in row.children, "-focused")
        now = (event.widget.id or "").removeprefix("field-")
        if now != self._focused and self._focused in self._calm:
            self._calm.remove(self._focused)
            self._checked()
        self._focused = now

    @property
    def values(self) -> dict[str, str]:
        """The text of each field, without blanks around it."""
        found = {}
        for key, field in self.fields.items():
            if field.toggle:
                found[key] = YES if self.query_one(f"#field-{key}", Tick).value else ""
            else:
                found[key] = self.query_one(f"#field-{key}", Input).value.strip()
        return found

    def put(self, key: str, text: str) -> None:
        """Set a field's text without calling ``changed``."""
        entry = self.query_one(f"#field-{key}", Input)
        with entry.prevent(Input.Changed):
            entry.value = text
        self._checked()

    def wrong(self) -> dict[str, str]:
        return {key: words for key, text in self.values.items() if (words := self.fields[key].check(text))}

    def changed(self) -> None:
        """Hook: the fields have changed, or the dialog has opened."""

    @abstractmethod
    def commit(self, values: dict[str, str]) -> None:
        """Hook: act on valid fields; call ``dismiss`` when done."""

    def show_message(self, words: str | Text, role: str = "") -> None:
        """Show a message below the fields, in the style of ``role``; "" removes it."""
        text = Text(words, self.board.look.style(role)) if isinstance(words, str) else words
        if text == self._message:
            return
        self._message = text
        self.query_one("#words", Static).update(text)
        self.query_one("#message").set_class(not text.plain and not self.PREVIEW, "-empty")

    def set_busy(self, busy: bool) -> None:
        """Say whether work is in progress: fields and verb are disabled, Cancel is not."""
        self.busy = busy
        self.query_one("#fields").disabled = busy
        self._checked()

    @on(Input.Submitted)
    def action_commit(self) -> None:
        """Commit when every field is valid, else go to the first invalid one."""
        if self.busy:
            return
        wrong = self.wrong()
        if wrong:
            self._calm.clear()
            self._checked()
            self.set_focus(self.query_one(f"#field-{next(iter(wrong))}", Widget))
        else:
            self.commit(self.values)

    def _checked(self) -> None:
        wrong = self.wrong()
        for key, field in self.fields.items():
            words = "" if key in self._calm else wrong.get(key, "")
            style = self.board.look.style("bad" if words else "dim")
            text = Text(words or field.hint, style)
            if text.plain != (before := self._notes.get(key, Text())).plain or text.style != before.style:
                self._notes[key] = text
                self.query_one(f"#note-{key}", Static).update(text)
        self.query_one("#commit", Button).disabled = bool(wrong) or self.busy or self.refused

    def work(self, work: Callable[[], U], done: Callable[[U], None]) -> None:
        """Run ``work`` beside the UI with the fields disabled; then call ``done``, or show the error."""

        def failed(error: GpuboardError) -> None:
            if self.is_open:
                self.set_busy(False)
                self.show_message(str(error), "bad")

        self.set_busy(True)
        self.board.ask(work, done, failed)

    @on(Tick.Changed)
    def check(self) -> None:
        self._checked()
        self.changed()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        if event.value.strip():
            self._calm.discard((event.input.id or "").removeprefix("field-"))
        self.check()


def _entry(field: Field) -> Widget:
    if field.toggle:
        return Tick(field.value == YES, f"field-{field.key}")
    example = f"e.g. {field.example}" if field.example else ""
    return Input(field.value, example, id=f"field-{field.key}", select_on_focus=not field.text)


class Confirm(Box[bool]):
    """A confirmation: its button or ``y`` confirms; enter and escape cancel."""

    DEFAULT_CSS = """
    Confirm #box { width: 64; }
    Confirm #detail { height: auto; max-height: 12; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "yes", "Yes", id="dialog.yes"),
        Binding("n", "cancel", "No", id="dialog.no"),
    ]
    VARIANT: ClassVar[Variant] = "error"  # of the button that confirms

    def __init__(self, question: str, detail: str | Text, *, verb: str) -> None:
        super().__init__(question)
        self._detail = detail
        self._verb = verb

    def inside(self) -> ComposeResult:
        with VerticalScroll(id="detail", can_focus=False):
            yield Static(self._detail, markup=False)

    def buttons(self) -> Iterator[Button]:
        yield from super().buttons()
        yield button(f"{self._verb} (y)", "yes", self.VARIANT)

    def on_mount(self) -> None:
        """Give Cancel the focus: enter must not confirm."""
        self.query_one("#cancel").focus()

    def action_yes(self) -> None:
        self.dismiss(True)

    def action_cancel(self) -> None:
        self.dismiss(False)


class _Options(OptionList):
    """A list that ignores page keys before it has a size; textual's fails then."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "cursor_up", "Up", id="dialog.list-up", show=False),
        Binding("j", "cursor_down", "Down", id="dialog.list-down", show=False),
    ]

    def action_page_up(self) -> None:
        if self.scrollable_content_region:
            super().action_page_up()  # type: ignore[no-untyped-call]

    def action_page_down(self) -> None:
        if self.scrollable_content_region:
            super().action_page_down()  # type: ignore[no-untyped-call]


class Choose(Box[str]):
    """A choice from ``options``, pairs of (key, text); the result is the key, None if cancelled."""

    DEFAULT_CSS = """
    Choose #box { width: 76; }
    Choose OptionList {
        height: auto; max-height: 14; border: none; padding: 0; text-wrap: nowrap; text-overflow: ellipsis;
    }
    Choose OptionList:focus { border: none; }
    """

    def __init__(self, title: str, options: Sequence[tuple[str, str | Text]]) -> None:
        super().__init__(title)
        self._options = options

    def inside(self) -> ComposeResult:
        rows = [Option(Content(words) if isinstance(words, str) else words, id=key) for key, words in self._options]
        yield _Options(*rows, id="options", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option.id)
