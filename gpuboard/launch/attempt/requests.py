"""Requests of the user to a run: signals of this process, and operations of the control socket."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from gpuboard.launch.attempt.record import AttemptRecord
from gpuboard.launch.runs.control import FORWARDED, ControlRequest, ControlServer
from gpuboard.launch.runs.folder import RunView
from gpuboard.launch.stalls.follower import ExplainRequest
from gpuboard.launch.stalls.verdict import Explanation

_EXPLAIN_S = 12.0  # for the inspections of all nodes

Inbox = queue.SimpleQueue[Any]


class SignalReceived(msgspec.Struct, frozen=True):
    """This process received a signal."""

    number: int


class Requests:
    """One for all attempts of a run: each attempt in turn gets them in its inbox."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._inbox: Inbox | None = None  # of the newest attempt
        self._moving = threading.RLock()  # held while requests go to an inbox, also by a signal handler meanwhile
        self._explained: Callable[[Explanation], Explanation] = lambda explanation: explanation
        self._view: Callable[[], RunView | None] = lambda: None
        self._server: ControlServer | None = None
        self._handlers: dict[int, Any] = {}  # of signals, to be restored

    def receive(
        self,
        inbox: Inbox,
        record: AttemptRecord,
        *,
        view: Callable[[], RunView | None],
        explained: Callable[[Explanation], Explanation],
    ) -> None:
        """Put the requests into ``inbox`` from now on, also those that the attempt before has not handled.

        ``view``: the attempt's state; ``explained`` adds to an explanation what the attempt knows. In the main thread.
        """
        with self._moving:
            before, self._inbox, self._view, self._explained = self._inbox, inbox, view, explained
        if before is None:
            self._catch_signals()
            try:
                self._server = ControlServer(record.folder.path, self._control)
            except OSError as error:  # a file system without sockets
                why = f"{record.folder.path}: cannot create the control socket: {error.strerror}"
                record.print(f"{why}; `gpuboard stop` will not work for this run, ctrl-C does")
            return
        with contextlib.suppress(queue.Empty):
            while True:
                inbox.put(before.get_nowait())

    def close(self) -> None:
        """Remove the control socket, restore the handlers of signals."""
        if self._server is not None:
            self._server.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _catch_signals(self) -> None:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)
        ours = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup; `&` in sh
        self._handlers = {number: signal.signal(number, self._caught) for number in ours}

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        self._put(SignalReceived(number))

    def _put(self, item: object) -> None:
        with self._moving:
            assert self._inbox is not None
            self._inbox.put(item)

    def _control(self, request: ControlRequest) -> object:
        """Return the reply to a client of the control socket; called in the socket's thread."""
        if request.op == "stop":
            self._put(request)
            return {"run": self._run}
        if request.op == "signal" and request.signal in FORWARDED:
            self._put(SignalReceived(request.signal))
            return {"run": self._run}
        if request.op == "explain":
            asked = ExplainRequest(queue.SimpleQueue())
            self._put(asked)
            try:
                return self._explained(asked.reply.get(timeout=_EXPLAIN_S))
            except queue.Empty:
                return {"error": f"the nodes did not respond within {_EXPLAIN_S:.0f} s"}
        return self._view() if request.op == "state" else {"error": f"unknown op {request.op!r}"}


def suspend(record: AttemptRecord, ends_after_s: float | None) -> None:
    """Suspend this process as ctrl-Z does, after telling what that means for the run.

    ``ends_after_s``: after this long without the head its ranks are stopped; None: they run on, or have ended.
    """
    if ends_after_s is not None:
        record.print(
            f"suspended: the ranks will be stopped unless `fg` or `bg` continues gpuboard within {ends_after_s:.0f} s; "
            "launch with --lost-head never to let them run on"
        )
        record.screen.settle(1.0)
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)  # to this thread: it acts before this returns
    signal.signal(signal.SIGTSTP, handler)
