"""Notifies, on any screen, of how runs that were launched or stopped in this board end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from textual.timer import Timer

from gpuboard.board.background import Background
from gpuboard.board.dialogs.launch_process import StartedRun
from gpuboard.board.text.detail.run import ended_words
from gpuboard.launch.runs.folder import FINAL
from gpuboard.launch.runs.index import RunEntry
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from textual.notifications import SeverityLevel

    from gpuboard.board.app import BoardApp

_POLL_S = 0.5
_TOAST_S = 20.0


class _Seen(NamedTuple):
    """The state of one launch of this board."""

    started: StartedRun
    entry: RunEntry | None  # None: no run, or none yet
    over: bool
    failure: str  # why there is no run, or messages after its end


class Follower:
    """Polls the runs of this board while any of them is live."""

    def __init__(self, board: BoardApp) -> None:
        self._board = board
        self._timer: Timer | None = None
        self._background: Background[tuple[list[_Seen], dict[str, RunEntry | None]]] = Background(board)
        self._notified: dict[str, str] = {}  # run → its state in the last notification
        self._others: set[str] = set()  # runs started elsewhere and stopped here

    def follow(self, run: str | None = None) -> None:
        """Poll the launches of this board; ``run``: also this run, which was stopped here."""
        if run is not None:
            self._others.add(run)
        if self._timer is None:
            self._timer = self._board.set_interval(_POLL_S, self._look)

    def _look(self) -> None:
        core, others = self._board.core, list(self._others)

        def work() -> tuple[list[_Seen], dict[str, RunEntry | None]]:
            seen = []
            for started, entry in core.starter.look(core.runbook):
                over = started not in core.starter.started
                failure = "" if not over else "\n".join(started.messages) if entry is not None else started.failure()
                seen.append(_Seen(started, entry, over, failure))
            return seen, {run: core.runbook.one(run) for run in others}

        self._background.ask(work, lambda found: self._seen(*found))

    def _seen(self, mine: list[_Seen], others: dict[str, RunEntry | None]) -> None:
        for started, entry, over, failure in mine:
            if entry is not None and not entry.unreadable:
                self._notify(entry)
            if over and not started.awaited:
                if failure and not (started.cancelled and entry is None):
                    there = entry is not None
                    title = f"Run {started.run}" if there else f"{clean(started.form.command, 40)} was not launched"
                    self._toast(failure, title, "warning" if there else "error")
                started.clear()
        for run, entry in others.items():
            if entry is not None and not entry.unreadable and all(seen.started.run != run for seen in mine):
                self._notify(entry)
            if entry is None or not entry.live:
                self._others.discard(run)
        if not self._others and not self._board.core.starter.started and self._timer is not None:
            self._timer.stop()
            self._timer = None

    def _notify(self, entry: RunEntry) -> None:
        """Notify of a run's final state or stall, once for each."""
        view = entry.view
        before, self._notified[view.id] = self._notified.get(view.id), view.state
        if view.state != before and view.state in {*FINAL, "stalled"}:
            severity: SeverityLevel = "information" if view.state == "done" else "warning"
            title = f"Run {view.id} {'is ' if view.state == 'done' else ''}{view.state}"
            self._toast(ended_words(entry), title, "error" if view.state == "failed" else severity)

    def _toast(self, words: str, title: str, severity: SeverityLevel) -> None:
        self._board.notify(words, title=title, severity=severity, timeout=_TOAST_S, markup=False)
