"""All runs of a user, for repeated reading: only changed files are read again."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from gpuboard.launch.preflight.check import Check, grouped
from gpuboard.launch.runs.folder import FINAL, RunView, alive, judged, read_state, runs_dir
from gpuboard.model.decoding import from_json
from gpuboard.model.rankmap import RankMap
from gpuboard.model.text import clean

TAIL = 64 * 1024  # bytes read from the end of head.log
DETAIL_FILES = ("preflight.json", "rank_map.json", "plan.json", "head.log")
_T = TypeVar("_T")
_Stamp = tuple[int, int, int]  # mtime in ns, inode, size: each write replaces the file


class RunEntry(msgspec.Struct, frozen=True):
    """The current state of one run."""

    view: RunView
    written: float  # epoch seconds of the last write: for a finished run, its end
    elsewhere: bool  # its head is on another host, where it cannot be checked now
    read_s: float | None = None  # seconds since its node gave this state; None: this host gives it
    unread: str = ""  # why its node gives no newer one
    far: bool = False  # its files are on that node only

    @property
    def live(self) -> bool:
        """Whether the run may still be in progress."""
        return self.unreadable or self.view.state not in FINAL

    @property
    def unreadable(self) -> bool:
        """Whether its state file cannot be read: nothing is known of the run, nor that it failed."""
        return any(verdict.kind == "unreadable" for verdict in self.view.verdicts)


class RunDetail(msgspec.Struct, frozen=True):
    """The other files of a run's folder. ``grace_s`` None: its plan cannot be read."""

    checks: list[Check]  # preflight checks with status fail or warn
    words: list[str]  # the head's newest messages, without the prefix "gpuboard: "
    grace_s: float | None
    uuids: dict[int, str]  # rank → its GPU; empty when the rank map cannot be read


class Runbook:
    """Every run of this user."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.folder = runs_dir(env)
        self._active: dict[str, tuple[_Stamp, RunView]] = {}
        self._ended: dict[str, RunEntry] = {}
        self._detail: tuple[str, RunDetail] | None = None  # of the ended run that was read last
        self._lock = threading.Lock()

    def read(self) -> list[RunEntry]:
        """Return all runs: those in progress first, the newest first among each; none if there is no folder.

        Lists the folder once and reads no file of a run that has ended.
        """
        try:
            names = os.listdir(self.folder)
        except OSError:
            names = []
        with self._lock:
            entries = [entry for name in names if (entry := self._ended.get(name) or self._read_entry(name))]
            for gone in self._ended.keys() - set(names):
                del self._ended[gone]
            for gone in self._active.keys() - set(names):
                del self._active[gone]
        return sorted(entries, key=lambda e: (e.live and not e.unreadable, e.view.started, e.view.id), reverse=True)

    def one(self, run: str) -> RunEntry | None:
        """Return one run; None before its head has written a state."""
        with self._lock:
            return self._ended.get(run) or self._read_entry(run)

    def detail(self, run: str) -> RunDetail:
        """Return the details of a run; those of an ended run are read once."""
        if self._detail is not None and self._detail[0] == run:
            return self._detail[1]
        detail = read_detail(_files(self.folder / run))
        with self._lock:
            self._detail = (run, detail) if run in self._ended else None
        return detail

    def _read_entry(self, name: str) -> RunEntry | None:
        folder = self.folder / name
        try:
            status = os.stat(folder / "state.json")
        except OSError:
            return None  # not a run, or a new folder
        stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
        kept = self._active.get(name)
        if kept is None or kept[0] != stamp:
            view = read_state(folder)
            if view is None:
                return None
            kept = self._active[name] = (stamp, view)
        view = judged(kept[1])
        if view is not kept[1]:
            with contextlib.suppress(OSError):
                status = os.stat(folder / "state.json")  # the run may have ended since
        entry = RunEntry(view, status.st_mtime, view.state not in FINAL and alive(view.head) is None)
        if entry.unreadable:
            del self._active[name]  # read it again next time: errors of a network file system may be temporary
        elif view.state in FINAL and time.time() - status.st_mtime > 2.0:  # later writes are ruled out
            self._ended[name] = entry
            del self._active[name]
        return entry


class _Options(msgspec.Struct, frozen=True):
    grace_s: float


class _Plan(msgspec.Struct, frozen=True):
    options: _Options


class _Checks(msgspec.Struct, frozen=True):
    checks: list[Check]


def _files(folder: Path) -> dict[str, bytes]:
    """Return the files of a run's folder that its details are in; unreadable ones are left out."""
    found = {}
    for name in DETAIL_FILES:
        with contextlib.suppress(OSError):
            found[name] = _end(folder / name) if name == "head.log" else (folder / name).read_bytes()
    return found


def read_detail(files: Mapping[str, bytes]) -> RunDetail:
    """Return the details that ``files`` contain (of DETAIL_FILES; of head.log its last whole lines)."""
    preflight = _decoded(files, "preflight.json", _Checks)
    rank_map = _decoded(files, "rank_map.json", RankMap)
    plan = _decoded(files, "plan.json", _Plan)
    wrong = [check for check in preflight.checks if check.status in {"fail", "warn"}] if preflight else []
    uuids = {rank.rank: rank.uuid for rank in rank_map.ranks} if rank_map else {}
    words = _messages(files.get("head.log", b""))
    return RunDetail(grouped(wrong), words[-20:], plan.options.grace_s if plan else None, uuids)


def _decoded(files: Mapping[str, bytes], name: str, kind: type[_T]) -> _T | None:
    try:
        return from_json(files[name], kind)
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def log_trouble(folder: Path) -> str:
    """Return why the logs in a run's folder may lack output of the ranks; "" if there is no sign of that."""
    with contextlib.suppress(OSError):
        for message in _messages(_end(folder / "head.log")):
            if message.startswith("logs are incomplete"):
                return message
    try:
        free = os.statvfs(folder).f_bavail
    except OSError:
        return ""
    return "" if free else f"the disk of {folder} is full: output of the ranks is lost; free some space"


def _end(path: Path) -> bytes:
    """Return the last whole lines of a file. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        data = file.read(TAIL)
    return data.partition(b"\n")[2] if size > TAIL else data


def _messages(log: bytes) -> list[str]:
    """Return the head's messages in a part of head.log, without time and prefix."""
    lines = log.decode("utf-8", "replace").splitlines()
    return [clean(line.partition(" ")[2].removeprefix("gpuboard: ")) for line in lines]
