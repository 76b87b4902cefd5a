"""Dragging the mouse over rows: where it began, where it is, when it is over; past an edge the rows scroll on."""

from __future__ import annotations

from textual import events
from textual.geometry import Offset
from textual.scroll_view import ScrollView
from textual.timer import Timer

_LEFT = 1  # the mouse's button
_PACE_S = 0.08  # between two steps past an edge; the further beyond it, the longer they are


def row_at(y: int, first: int, page: int, rows: int) -> tuple[int, bool]:
    """Return the index of the row at ``y``, where ``first`` and so many as ``page`` are in sight, and if it is not.

    Past an edge it is one that has yet to come into sight, further on the further off ``y`` is.
    """
    return max(0, min(first + y, rows - 1)), (y < 0 < first) or (y >= page and first + page < rows)


class Dragging(ScrollView):
    """A view in which a range is selected by pressing the left button on its one end and releasing it on the other."""

    ALLOW_SELECT = False  # textual's own selection, of text, would begin where ours does

    _grip: str | None = None  # the key of what the button was pressed on
    _marks_before: frozenset[str] = frozenset()
    _dragged = False  # the pointer has left what it was pressed on: the click that textual makes of it is none
    _pointer = Offset()
    _pace: Timer | None = None  # while the pointer is past an edge

    @property
    def marks(self) -> frozenset[str]:
        """Hook: the keys of what is selected."""
        raise NotImplementedError

    def key_at(self, at: Offset) -> str | None:
        """Hook: return the key of what stands at ``at`` (in our content) if it can be selected, else None."""
        raise NotImplementedError

    def drag(self, grip: str, at: Offset, before: frozenset[str]) -> bool:
        """Hook: select ``before`` and all from ``grip`` to ``at``, which may lie outside; move the cursor there.

        Return whether ``at`` is past an edge, where more may come into sight.
        """
        raise NotImplementedError

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Take note of where a drag may begin."""
        self._end()
        self._dragged = False
        at = event.get_content_offset(self)
        if event.button == _LEFT and at is not None:
            self._grip, self._marks_before = self.key_at(at), self.marks

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Follow the pointer."""
        if self._grip is None:
            return
        if event.button != _LEFT:  # released where we were not told of it
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
        """The selection stays as it is."""
        self._end()

    def on_mouse_release(self) -> None:
        """Another screen came, say. Where a drag has the mouse this is word of an earlier one, late."""
        if self._dragged and self.app.mouse_captured is not self:
            self._end()

    def is_drag(self, event: events.Click) -> bool:
        """Return whether a click is but the end of a drag; then it is done with."""
        if not self._dragged:
            return False
        self._dragged = False
        event.stop()
        return True

    def _follow(self) -> None:
        assert self._grip is not None  # whoever calls has looked, or ends the timer with it
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
