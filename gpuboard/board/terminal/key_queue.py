"""A queue of keys: each takes effect before the next one is handled.

textual sends a key to the widget that has the focus when the key arrives, but effects (a binding, the focus of a new
screen) follow some messages later. Keys that arrive together, as over a slow connection, would all go to the first
widget: ``/user:quinn`` would quit the board. Here each key waits until the one before it is done.
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

# Interval and maximum number of checks whether the widget that handles a key has closed or hangs. The limit is a count,
# not a time, so that keys keep their order on a slow machine and after a suspend.
_CHECK_S, _MOST_CHECKS = 0.5, 20


class InOrder:
    """The keys and pastes of an app that have not been handled."""

    def __init__(self, board: App[int]) -> None:
        self._board = board
        self._waiting: deque[Event] = deque()
        self._now: Event | None = None  # the event in progress
        self._at: MessagePump = board  # where the event, or the marker behind it, is now
        self._timer: Timer | None = None  # runs while events wait
        self._checks = 0

    async def pass_on(self, event: Event, handle: Callable[[Event], Awaitable[None]]) -> None:
        """Handle an event of the app; queue a key while another is in progress."""
        if not isinstance(event, (Key, Paste)) or event.is_forwarded:
            await handle(event)
            return
        if self._now is not None and event is not self._now:
            self._waiting.append(event)
            self._start_timer(self._now)
            return
        self._now, self._at = event, self._board
        target = self._board.focused or self._board.screen
        await handle(event)
        # The path of an unhandled key up to the app, twice: the second time for the messages that it caused
        path = [*target.ancestors_with_self, *target.ancestors_with_self]
        self._follow(event, deque(path))

    def _follow(self, event: Event, path: deque[MessagePump]) -> None:
        """Send a marker along the event's path, behind it in each message queue."""
        while path:
            self._at = path.popleft()
            if self._at.call_later(self._follow, event, path):
                return
        self._at = self._board.screen
        if not self._at.call_later(self._next, event):  # a new screen handles this once it is open
            self._next(event)

    def _next(self, event: Event) -> None:
        if event is not self._now:
            return
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        self._now, self._at = self._take() if self._waiting else None, self._board
        if self._now is not None:
            self._board.post_message(self._now)
            if self._waiting:
                self._start_timer(self._now)

    def _take(self) -> Event:
        """Return the next event; characters for a text field are joined into one paste."""
        event = self._waiting.popleft()
        if not isinstance(self._board.focused, Input) or not _is_text(event):
            return event
        text = [event.character or ""]
        while self._waiting and _is_text(more := self._waiting[0]):
            text.append(more.character or "")
            self._waiting.popleft()
        return Paste("".join(text)) if len(text) > 1 else event

    def _start_timer(self, event: Event) -> None:
        if self._timer is None:
            self._checks = 0
            self._timer = self._board.set_interval(_CHECK_S, lambda: self._check(event))

    def _check(self, event: Event) -> None:
        """Start the next event if the widget that handles this one has closed or hangs."""
        self._checks += 1
        if is_closing(self._at) or self._checks >= _MOST_CHECKS:
            self._next(event)


def _is_text(event: Event) -> TypeGuard[Key]:
    return isinstance(event, Key) and event.is_printable
