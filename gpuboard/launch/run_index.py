"""All runs of a user, for somebody who looks again and again: only what has changed is read once more."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpuboard.launch.preflight.check import Check, grouped
from gpuboard.launch.run_folder import FINAL, RunView, alive, judged, read_state, runs_dir
from gpuboard.model.rankmap import RankMap
from gpuboard.model.text import clean

_WORDS = 64 * 1024  # bytes of head.log that are looked at: its end
_Stamp = tuple[int, int, int]  # mtime in ns, inode, size: a state is replaced by a new file, whole


class RunEntry(msgspec.Struct, frozen=True):
    """One run as it is now."""

    view: RunView
    written: float  # epoch seconds of its newest state: of its end, once it has ended
    elsewhere: bool  # led from another host, so nobody here can tell whether its head lives

    @property
    def live(self) -> bool:
        """Whether it goes on, as far as can be known."""
        return self.unreadable or self.view.state not in FINAL

    @property
    def unreadable(self) -> bool:
        """Whether its state is there and cannot be read, so that nothing is known of it: not that it failed either."""
        return any(verdict.kind == "unreadable" for verdict in self.view.verdicts)


class RunDetail(msgspec.Struct, frozen=True):
    """What else lies in a run's folder. ``grace_s`` None: its plan cannot be read."""

    checks: list[Check]  # of preflight, that did not come out well
    words: list[str]  # the newest words of the head, without its name
    grace_s: float | None
    uuids: dict[int, str]  # rank → its GPU; empty when the rank map cannot be read


class Runbook:
    """Every run of this user."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.folder = runs_dir(env)
        self._kept: dict[str, tuple[_Stamp, RunView]] = {}
        self._ended: dict[str, RunEntry] = {}
        self._detail: tuple[str, RunDetail] | None = None  # of the one looked at last, if it has ended
        self._lock = threading.Lock()

    def read(self) -> list[RunEntry]:
        """Return all runs: those that go on first, then the newest first.

        One listing of the folder; of runs that have ended nothing more. Empty when there is no folder.
        """
        try:
            names = os.listdir(self.folder)
        except OSError:
            names = []
        with self._lock:
            entries = [entry for name in names if (entry := self._ended.get(name) or self._look(name))]
            for gone in self._ended.keys() - set(names):
                del self._ended[gone]
            for gone in self._kept.keys() - set(names):
                del self._kept[gone]
        return sorted(entries, key=lambda e: (e.live and not e.unreadable, e.view.started, e.view.id), reverse=True)

    def one(self, run: str) -> RunEntry | None:
        """Return one run; None while its head has written nothing."""
        with self._lock:
            return self._ended.get(run) or self._look(run)

    def detail(self, run: str) -> RunDetail:
        """Return what else a run's folder says; of one that has ended it is read once."""
        if self._detail is not None and self._detail[0] == run:
            return self._detail[1]
        detail = read_detail(self.folder / run)
        with self._lock:
            self._detail = (run, detail) if run in self._ended else None
        return detail

    def _look(self, name: str) -> RunEntry | None:
        folder = self.folder / name
        try:
            status = os.stat(folder / "state.json")
        except OSError:
            return None  # no run, or its head has only just made the folder
        stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
        kept = self._kept.get(name)
        if kept is None or kept[0] != stamp:
            view = read_state(folder)
            if view is None:
                return None
            kept = self._kept[name] = (stamp, view)
        view = judged(kept[1])
        if view is not kept[1]:
            with contextlib.suppress(OSError):
                status = os.stat(folder / "state.json")  # it may have ended since
        entry = RunEntry(view, status.st_mtime, view.state not in FINAL and alive(view.head) is None)
        if entry.unreadable:
            del self._kept[name]  # it may be readable the next time: a network file system has its moments
        elif view.state in FINAL and time.time() - status.st_mtime > 2.0:  # its head writes no more
            self._ended[name] = entry
            del self._kept[name]
        return entry


class _Options(msgspec.Struct, frozen=True):
    grace_s: float


class _Plan(msgspec.Struct, frozen=True):
    options: _Options


class _Checks(msgspec.Struct, frozen=True):
    checks: list[Check]


def read_detail(folder: Path) -> RunDetail:
    """Return what else the folder of a run says; what cannot be read is left out."""
    try:
        checks = msgspec.json.decode((folder / "preflight.json").read_bytes(), type=_Checks).checks
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        checks = []
    try:
        ranks = msgspec.json.decode((folder / "rank_map.json").read_bytes(), type=RankMap).ranks
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        ranks = []
    try:
        grace_s = msgspec.json.decode((folder / "plan.json").read_bytes(), type=_Plan).options.grace_s
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        grace_s = None
    words = [clean(line.partition(" ")[2].removeprefix("gpuboard: ")) for line in _tail(folder / "head.log")]
    wrong = [check for check in checks if check.status in {"fail", "warn"}]
    return RunDetail(grouped(wrong), words[-20:], grace_s, {rank.rank: rank.uuid for rank in ranks})


def log_trouble(folder: Path) -> str:
    """Return in words why the logs in a run's folder may lack what the ranks wrote; "" when nothing is known."""
    for line in _tail(folder / "head.log"):
        words = clean(line.partition(" ")[2].removeprefix("gpuboard: "))
        if words.startswith("logs are incomplete"):
            return words
    try:
        free = os.statvfs(folder).f_bavail
    except OSError:
        return ""
    return "" if free else f"the disk of {folder} is full: what the ranks write is lost"


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _WORDS))
            lines = file.read(_WORDS).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return lines[1:] if size > _WORDS else lines
