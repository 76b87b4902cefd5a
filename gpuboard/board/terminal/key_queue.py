"""What is typed takes effect key by key, however quickly it comes.

textual hands a key to whatever has the focus when it arrives, and its effects (a binding, the focus of a screen that
opens) follow messages later. Keys that arrive together, as they do over a slow connection, would all go to the first
of those places: ``/user:quinn`` would leave the board. Here each waits until the one before it has been dealt with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeGuard

from textual.events import Event, Key, Paste
from textual.widgets import Input

from gpuboard.board.terminal.textual_compat import is_closing

if TYPE_CHECKING:
    from textual.app import App
    from textual.message_pump import MessagePump
    from textual.timer import Timer

# How often it is looked whether what follows a key went with its widget, and how often at most: then something hangs.
# In looks, not seconds: on a machine that is slow, or stands still as a laptop that sleeps, no key passes another.
_LOOK_S, _MOST_LOOKS = 0.5, 20


class InOrder:
    """The keys and pastes of an app that have not been dealt with."""

    def __init__(self, board: App[int]) -> None:
        self._board = board
        self._waiting: deque[Event] = deque()
        self._now: Event | None = None  # what is being dealt with
        self._at: MessagePump = board  # who has to do with it now, or has what follows it
        self._watch: Timer | None = None  # there while something waits
        self._looks = 0

    async def pass_on(self, event: Event, handle: Callable[[Event], Awaitable[None]]) -> None:
        """Handle an event that has come to the app; what was typed maybe later."""
        if not isinstance(event, (Key, Paste)) or event.is_forwarded:
            await handle(event)
            return
        if self._now is not None and event is not self._now:
            self._waiting.append(event)
            self._be_patient(self._now)
            return
        self._now, self._at = event, self._board
        target = self._board.focused or self._board.screen
        await handle(event)
        # The way that an unhandled key takes up to the app; and once more, for the messages that it has caused
        way = [*target.ancestors_with_self, *target.ancestors_with_self]
        self._follow(event, deque(way))

    def _follow(self, event: Event, way: deque[MessagePump]) -> None:
        """Go the way of the event, behind it."""
        while way:
            self._at = way.popleft()
            if self._at.call_later(self._follow, event, way):
                return
        self._at = self._board.screen
        if not self._at.call_later(self._next, event):  # one that opens: not before it is there
            self._next(event)

    def _next(self, event: Event) -> None:
        """Turn to what came after an event."""
        if event is not self._now:
            return
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._now, self._at = self._take() if self._waiting else None, self._board
        if self._now is not None:
            self._board.post_message(self._now)
            if self._waiting:
                self._be_patient(self._now)

    def _take(self) -> Event:
        """Return what is next; all the characters that wait for a line of text are one thing to deal with."""
        event = self._waiting.popleft()
        if not isinstance(self._board.focused, Input) or not _is_text(event):
            return event
        text = [event.character or ""]
        while self._waiting and _is_text(more := self._waiting[0]):
            text.append(more.character or "")
            self._waiting.popleft()
        return Paste("".join(text)) if len(text) > 1 else event

    def _be_patient(self, event: Event) -> None:
        if self._watch is None:
            self._looks = 0
            self._watch = self._board.set_interval(_LOOK_S, lambda: self._look(event))

    def _look(self, event: Event) -> None:
        """Go on where nobody is left who could."""
        self._looks += 1
        if is_closing(self._at) or self._looks >= _MOST_LOOKS:
            self._next(event)


def _is_text(event: Event) -> TypeGuard[Key]:
    return isinstance(event, Key) and event.is_printable
