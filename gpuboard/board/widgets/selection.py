"""Selecting rows by dragging the mouse; past an edge the rows scroll."""

from __future__ import annotations

from abc import abstractmethod

from textual import events
from textual.geometry import Offset
from textual.scroll_view import ScrollView
from textual.timer import Timer

_LEFT = 1  # mouse button
_PACE_S = 0.08  # between two scroll steps past an edge; steps grow with the distance


def row_at(y: int, first: int, page: int, rows: int) -> tuple[int, bool]:
    """Return the index of the row at ``y`` and whether it is past an edge, with ``page`` rows from ``first`` visible.

    Past an edge it is a row to scroll to; its distance grows with that of ``y``.
    """
    return max(0, min(first + y, rows - 1)), (y < 0 < first) or (y >= page and first + page < rows)


class Dragging(ScrollView):
    """A view in which dragging with the left button selects a range."""

    ALLOW_SELECT = False  # textual's text selection would start with the same gesture

    _grip: str | None = None  # the key under the pointer when the button was pressed
    _marks_before: frozenset[str] = frozenset()
    _dragged = False  # the pointer has left the grip: ignore the click event that follows
    _pointer = Offset()
    _pace: Timer | None = None  # while the pointer is past an edge

    @property
    @abstractmethod
    def marks(self) -> frozenset[str]:
        """Hook: the selected keys."""

    @abstractmethod
    def key_at(self, at: Offset) -> str | None:
        """Hook: return the key at ``at`` (content coordinates) if it can be selected, else None."""

    @abstractmethod
    def drag(self, grip: str, at: Offset, before: frozenset[str]) -> bool:
        """Hook: select ``before`` and the range from ``grip`` to ``at``, which may be outside; move the cursor there.

        Return whether ``at`` is past an edge with more rows beyond it.
        """

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._end()
        self._dragged = False
        at = event.get_content_offset(self)
        if event.button == _LEFT and at is not None:
            self._grip, self._marks_before = self.key_at(at), self.marks

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._grip is None:
            return
        if event.button != _LEFT:  # released outside: no event came
            self._end()
            return
        self._pointer = event.get_content_offset_capture(self)
        if not self._dragged:
            if self.key_at(self._pointer) == self._grip:
                return
            self._dragged = True
            self.capture_mouse()
        self._follow()

    def on_mouse_up(self) -> None:
        self._end()

    def on_mouse_release(self) -> None:
        """End the drag, e.g. when another screen opens; ignore a late event of an earlier drag."""
        if self._dragged and self.app.mouse_captured is not self:
            self._end()

    def is_drag(self, event: events.Click) -> bool:
        """Return whether a click only ends a drag; if so, stop the event."""
        if not self._dragged:
            return False
        self._dragged = False
        event.stop()
        return True

    def _follow(self) -> None:
        assert self._grip is not None  # callers check it; the timer ends with the drag
        beyond = self.drag(self._grip, self._pointer, self._marks_before)
        if beyond and self._pace is None:
            self._pace = self.set_interval(_PACE_S, self._follow)
        elif not beyond:
            self._stay()

    def _stay(self) -> None:
        if self._pace is not None:
            self._pace.stop()
            self._pace = None

    def _end(self) -> None:
        self._grip = None
        self._stay()
        self.release_mouse()
