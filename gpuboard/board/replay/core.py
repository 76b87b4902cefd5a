"""The core of a board that plays a recording: its scenes are the recording's, nothing can be changed. No textual."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

from gpuboard import paths
from gpuboard.board.core import Core, banners
from gpuboard.board.dialogs.launch_process import Starter
from gpuboard.board.operations import Operations
from gpuboard.board.overview.log import EventLog
from gpuboard.board.replay.past import past_before
from gpuboard.board.scene import Scene
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.model.units import format_duration
from gpuboard.recording.file import Recording
from gpuboard.recording.frames import Frame
from gpuboard.recording.player import Player, local_time

if TYPE_CHECKING:
    from gpuboard.config import Settings

_PACE_S = 1.0  # the time in the label advances at least this often
_FASTEST_S = 0.1  # between two scenes
_GAP_S = 120.0  # a longer pause between two frames is reported
_PAST_GPUS_MOST = 1024  # 30 ms of CPU a frame; elsewhere the graphs begin with the jump
WHY_REFUSED = "this is a replay: nothing can be reserved, launched, signalled or watched"
_NONE = "No events up to this moment."
_NONE_YET = "No events so far. This recording has no events; they are found while it plays."


class ReplayCore(Core):
    """A core whose scenes and events come from a recording. Reserving, launching and signals are refused."""

    def __init__(self, recording: Recording, settings: Settings, env: Mapping[str, str]) -> None:
        """``env``: preferences and history of the replay are kept in ``<state>/replay``, apart from the board's."""
        first = recording.at(recording.begin)
        self.first = Scene(first.snapshot, first.leases, uids=first.uids, label="REPLAY")
        nodes = [Node(name=node.name, host=None) for node in first.snapshot.nodes]
        apart = {**env, "XDG_STATE_HOME": str(paths.state_dir(env) / "replay")}
        super().__init__(nodes, settings, apart)
        self.operations = _ReadOnly(nodes, settings, apart, self.fleet)
        self.starter = _NoStarter(nodes, apart)
        self.events = EventLog(apart, self.nodes, kept=False, empty=_NONE_YET if first.events is None else _NONE)
        self.recording = recording
        self.player = Player(recording)
        self._lock = threading.Lock()  # player: the UI's thread and the one that makes scenes
        self._jumps = 0  # of the player, before the newest scene
        self._wake = threading.Event()
        self._past: Iterator[None] = iter(())  # reads what was before the last jump, while no scene is due

    def control(self, change: Callable[[Player], object]) -> None:
        """Change the position, the speed or the pause; a new scene follows at once."""
        with self._lock:
            change(self.player)
        self._wake.set()

    def connect(self) -> None:
        """Connect to nothing."""

    def record(self, notify: Callable[[str], object]) -> None:
        """Keep nothing on disk."""

    def start(self, changed: Callable[[Scene], object]) -> None:
        """Call ``changed`` with every new scene, in a background thread."""
        threading.Thread(target=self._play, args=(changed,), name="replay", daemon=True).start()

    def scene(self) -> Scene:
        """Return the scene at the position. Raises GpuboardError for a damaged recording."""
        with self._lock:
            frame, at = self.player.frame(), self.player.position
            later = self.player.next_at
            words = label(self.player)
            jumped, self._jumps = self.player.jumps != self._jumps, self.player.jumps
        self._take_events(frame, jumped)
        if jumped:
            small = sum(len(node.gpus) for node in frame.snapshot.nodes) <= _PAST_GPUS_MOST
            self._past = past_before(self.recording, at, self.history) if small else iter(())
        gap = later is not None and later - frame.at > _GAP_S and at - frame.at > _GAP_S / 2
        lines = (f"nothing was recorded for {format_duration(later - frame.at)}",) if gap and later is not None else ()
        found = (*lines, *banners(frame.snapshot, running_s=math.inf))
        return Scene(frame.snapshot, frame.leases, uids=frame.uids, banners=found, label=words)

    def _take_events(self, frame: Frame, jumped: bool) -> None:
        """Show the events until a frame; find those of a recording without them, from the last jump on."""
        if frame.events is not None:
            self.events.replace(frame.events)
            return
        if jumped:  # what happened in between has no known time
            self.events.replace(())
        self.events.add(frame.snapshot, frame.leases, frame.at)

    def close(self) -> None:
        super().close()
        self._wake.set()

    def _play(self, changed: Callable[[Scene], object]) -> None:
        newest: Scene | None = None
        while not self._closed.is_set():
            self._wake.clear()
            began = time.monotonic()
            try:
                newest = self.scene()
                self.history.add(newest.snapshot, self.player.position)
            except GpuboardError as error:  # what was shown stays; a jump may lead to a part that is not damaged
                last = newest or self.first
                changed(Scene(last.snapshot, last.leases, uids=last.uids, banners=(str(error),), label=last.label))
                self._wake.wait()
                continue
            changed(newest)
            with self._lock:
                due_s = self.player.next_s
            pace_s = _PACE_S / min(_PACE_S / _FASTEST_S, self.player.speed)
            wait_s = pace_s if due_s is None else min(pace_s, due_s)
            until = time.monotonic() + max(wait_s, _FASTEST_S, time.monotonic() - began)
            self._read_past(until)
            self._wake.wait(max(0.0, until - time.monotonic()))

    def _read_past(self, until: float) -> None:
        """Read on until the next scene is due, half of the time: the keys come first."""
        began = time.monotonic()
        for _ in self._past:
            took_s = time.monotonic() - began
            if self._wake.wait(min(took_s, until - time.monotonic())) or time.monotonic() >= until:
                return
            began = time.monotonic()


def label(player: Player) -> str:
    """Return the words at the top of each screen: ``REPLAY 2026-01-31 14:03:21  10x  paused``."""
    state = "paused" if player.paused else "at its end" if player.position >= player.recording.end else ""
    return "  ".join(filter(None, (f"REPLAY {local_time(player.position)}", f"{player.speed:g}x", state)))


def _refuse(*_: object, **__: object) -> NoReturn:
    raise UsageError(WHY_REFUSED)


class _ReadOnly(Operations):
    """Operations of a replay: all of them are refused."""

    plan = reserve = release = renew = signal = _refuse


class _NoStarter(Starter):
    """Starts nothing."""

    start = _refuse


# Actions have the names of the operations that they use; a recording has no run that could be stopped, and a watch
# would announce what was free then.
REFUSED = frozenset({
    "launch", "stop", "watch", "watches", *(name for name in vars(_ReadOnly) if not name.startswith("_"))
})  # fmt: skip
