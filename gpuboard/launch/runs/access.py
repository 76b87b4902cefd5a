"""One run, wherever its head is: what `logs`, `stop`, `explain` and `attach` need of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from gpuboard.errors import GpuboardError, NoNodeReached, UsageError
from gpuboard.launch.runs import control
from gpuboard.launch.runs import folder as run_folder
from gpuboard.launch.runs.control import ControlRequest
from gpuboard.launch.runs.folder import RunView

_CHUNK = 1 << 20  # bytes of one file that are read at once
_BACKOFF_S, _BACKOFF_MOST_S = 0.5, 15.0  # pauses between attempts to reach a node again

T = TypeVar("T")


class NodeLost(NoNodeReached):
    """A node cannot be reached, or its connection was lost during a call; another attempt may succeed."""


class RunAccess(Protocol):
    """A run: in a folder of this host (:class:`LocalRun`) or on a node (``remote.RemoteRun``).

    All methods raise GpuboardError, and NodeLost where repeating the call may succeed.
    """

    poll_s: float  # a sensible pause between two looks

    def view(self) -> RunView:
        """Return its current state."""

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        """Return the bytes of files in its folder; files that do not exist yet are left out."""

    def read(self, offsets: Mapping[str, int]) -> dict[str, bytes]:
        """Return the next bytes of files in its folder, from these offsets on (file → bytes to skip).

        At most about a MiB at once: repeat it. Files that have no more bytes, or do not exist yet, are left out.
        """

    def ask(self, request: ControlRequest, timeout_s: float = 5.0) -> object:
        """Send a request to its head and return the reply, plain values."""


class LocalRun:
    """A run in a folder of this host."""

    poll_s = 0.2

    def __init__(self, view: RunView) -> None:
        self._id = view.id
        self._folder = Path(view.folder)

    def view(self) -> RunView:
        """Return its current state. Raises UsageError when its folder was deleted."""
        view = run_folder.read_run(self._folder)
        if view is None:
            raise UsageError(f"run {self._id}: {self._folder} was deleted")
        return view

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        """See :meth:`RunAccess.sizes`."""
        return {name: (self._folder / name).stat().st_size for name in names if (self._folder / name).exists()}

    def read(self, offsets: Mapping[str, int]) -> dict[str, bytes]:
        """See :meth:`RunAccess.read`."""
        found = {}
        for name, offset in offsets.items():
            try:
                with (self._folder / name).open("rb") as file:
                    file.seek(offset)
                    if data := file.read(_CHUNK // max(1, len(offsets))):
                        found[name] = data
            except FileNotFoundError:
                continue  # it is created at the first output
        return found

    def ask(self, request: ControlRequest, timeout_s: float = 5.0) -> object:
        """See :meth:`RunAccess.ask`."""
        head = self.view().head
        if run_folder.alive(head) is None:
            raise GpuboardError(
                f"run {self._id} was launched on {head.host}, which is not one of the nodes; "
                f"use `gpuboard {request.op} {self._id}` there, or with --node {head.host}"
            )
        return control.ask(self._folder, request, timeout_s)


def ask_to_stop(run: RunAccess, grace_s: float | None, reason: str = "") -> RunView:
    """Ask the head of a run to stop it; return the run's state, which is final if it has ended already.

    ``grace_s`` None: the time from SIGTERM to SIGKILL that launch was given. Raises GpuboardError.
    """
    view = run.view()
    if view.state in run_folder.FINAL:
        return view
    try:
        run.ask(ControlRequest("stop", grace_s, reason))
    except GpuboardError:
        now = run.view()
        if now.state not in run_folder.FINAL:
            raise
        return now
    return view


def persistently(call: Callable[[], T], notify: Callable[[str], None], until: float = math.inf) -> T:
    """Return the result of ``call``, repeated with back-off while its node is not reachable; ``notify``: of that.

    Raises its NodeLost at ``until`` (monotonic).
    """
    pause_s = 0.0
    while True:
        try:
            result = call()
        except NodeLost as error:
            if time.monotonic() >= until:
                raise
            if not pause_s:
                notify(f"{error}; reconnecting")
            pause_s = min(2 * pause_s, _BACKOFF_MOST_S) or _BACKOFF_S
            time.sleep(pause_s)
        else:
            if pause_s:
                notify("connected again")
            return result
