"""All runs of a user, those on other nodes included: each node is asked seldom, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError, NoNodeReached, UsageError
from gpuboard.launch.runs.access import LocalRun, RunAccess
from gpuboard.launch.runs.folder import note
from gpuboard.launch.runs.index import DETAIL_FILES, TAIL, Runbook, RunDetail, RunEntry, read_detail
from gpuboard.launch.runs.remote import NodeRuns, RemoteRun, node_of
from gpuboard.model.text import clean
from gpuboard.transport.connector import Connector

if TYPE_CHECKING:
    from gpuboard.cluster.snapshot.scheduler_monitor import Permitted

_SILENCE_S = 240.0  # without a call, after which the agent on a node ends
_NOT_READ = RunDetail([], [], None, {})


class RunbookTiming(NamedTuple):
    """How often nodes are asked, in seconds."""

    live_s: float = 5.0  # for the runs in progress of a node
    rest_s: float = 60.0  # for the list of all runs of a node


class _Place:
    """One node and its newest answer."""

    def __init__(self, runs: NodeRuns) -> None:
        self.runs = runs
        self.entries: dict[str, RunEntry] = {}
        self.details: dict[str, RunDetail] = {}  # of the run that was asked for last
        self.read_at: float | None = None  # monotonic
        self.list_due = 0.0  # monotonic
        self.due = 0.0
        self.failures = 0
        self.busy = False
        self.unread = ""  # why the last question has no answer

    @property
    def live(self) -> list[str]:
        """Its runs in progress."""
        return [run for run, entry in self.entries.items() if entry.live]

    def entry(self, run: str, now: float) -> RunEntry | None:
        """Return a run with the age of its state; None where the node has not listed it."""
        entry = self.entries.get(run)
        if entry is None or self.read_at is None:
            return None
        lost = entry.live and bool(self.unread)
        return msgspec.structs.replace(
            entry, read_s=now - self.read_at, unread=self.unread, elsewhere=entry.elsewhere or lost
        )


class ClusterRunbook(Runbook):
    """The runs of this host and of ``nodes``. No method waits for a node.

    The runs in progress elsewhere are looked at every 5 s while this is read; ``look`` finds others. ``permitted``
    returns the routes to a node, None where nothing restricts them.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        settings: Settings,
        nodes: Mapping[str, Node],
        permitted: Callable[[str], Permitted | None],
    ) -> None:
        super().__init__(env)
        self.timing = RunbookTiming()
        self._env = env
        self._settings = settings
        self._nodes = {name: node for name, node in nodes.items() if node.host is not None and node.simulate is None}
        self._permitted = permitted
        self._connector: Connector | None = None
        self._places: dict[str, _Place] = {}
        self._guard = threading.Lock()  # of the places, which threads change
        self._wanted = ""  # the run whose details are read
        self._closed = False

    def look(self, names: Iterable[str], *, now: bool = False) -> None:
        """Ask these nodes for their runs where the last answer is old, in the background; ``now``: all of them."""
        at = time.monotonic()
        with self._guard:
            for name in () if self._closed else names:
                place = self._place(name)
                if place is None:
                    continue
                if now:
                    place.list_due = place.due = 0.0
                if place.due <= at and not place.busy:
                    place.busy = True
                    threading.Thread(target=self._ask, args=(name, place), name=f"runs-{name}", daemon=True).start()

    def read(self) -> list[RunEntry]:
        """Return all runs that are known: those in progress first, the newest first among each."""
        found = self._joined({entry.view.id: entry for entry in super().read()}, None)
        return sorted(
            found.values(), key=lambda e: (e.live and not e.unreadable, e.view.started, e.view.id), reverse=True
        )

    def one(self, run: str) -> RunEntry | None:
        """Return one run; None before its head has written a state."""
        entry = super().one(run)
        return self._joined({} if entry is None else {run: entry}, run).get(run)

    def detail(self, run: str) -> RunDetail:
        """Return the details of a run; of one on another node as soon as that has given them."""
        entry = self.one(run)
        place = self._place_of(entry)
        if entry is None or place is None or not entry.far:
            return super().detail(run)
        self._wanted = run
        if run not in place.details and not place.unread:
            place.due = 0.0
            self.look([place.runs.node.name])
        return place.details.get(run, _NOT_READ)

    def access(self, entry: RunEntry) -> RunAccess | None:
        """Return a run for requests to its head; None where that is on a host that is none of the nodes."""
        if entry.read_s is None and not _in_doubt(entry):
            return LocalRun(entry.view)
        place = self._place_of(entry)
        return None if place is None else RemoteRun(place.runs, entry.view.id)

    def far(self, entry: RunEntry) -> RemoteRun | None:
        """Return how to read the files of a run that this host has not; None where it has them."""
        place = self._place_of(entry) if entry.far else None
        return None if place is None else RemoteRun(place.runs, entry.view.id)

    def close(self) -> None:
        """End every connection."""
        with self._guard:
            self._closed = True
            places, connector = list(self._places.values()), self._connector
        for place in places:
            place.runs.close()
        if connector is not None:
            connector.close()

    def _joined(self, here: dict[str, RunEntry], only: str | None) -> dict[str, RunEntry]:
        """Return the runs of this host, and those of the nodes (or ``only`` one) as their nodes last gave them."""
        found = {run: msgspec.structs.replace(e, far=True) if e.view.node else e for run, e in here.items()}
        noted = {run for run, entry in here.items() if entry.view.node is not None}
        now = time.monotonic()
        with self._guard:
            places = dict(self._places)
        for place in places.values():
            for run in place.entries if only is None else [only]:
                entry, known = place.entry(run, now), found.get(run)
                if entry is not None and (known is None or _certainty(entry) > _certainty(known)):
                    found[run] = msgspec.structs.replace(entry, far=run in noted or run not in here)
        due = {name for name, place in places.items() if place.live}
        for run, entry in here.items():
            if not _in_doubt(entry) or (node := self._node_of(entry)) is None:
                continue
            newest = found[run]
            if entry.live and newest.live:
                due.add(node.name)
            if newest.read_s is None:
                found[run] = self._waiting(newest, places.get(node.name))
            elif entry.view.node is not None and newest.view.state != entry.view.state and not newest.elsewhere:
                note(self._env, newest.view)
        self.look(due)
        return found

    @staticmethod
    def _waiting(entry: RunEntry, place: _Place | None) -> RunEntry:
        """Return a run that its node has not listed, with the reason."""
        if place is None or (place.read_at is None and not place.unread):
            unread = "not read yet"
        else:
            unread = place.unread or "its folder there does not exist any more"
        return msgspec.structs.replace(entry, unread=unread)

    def _node_of(self, entry: RunEntry) -> Node | None:
        if entry.view.node is not None:
            return self._nodes.get(entry.view.node)
        return node_of(self._nodes.values(), entry.view.head.host)

    def _place_of(self, entry: RunEntry | None) -> _Place | None:
        if entry is None or not (_in_doubt(entry) or entry.read_s is not None):
            return None
        node = self._node_of(entry)
        with self._guard:
            return None if node is None else self._place(node.name)

    def _place(self, name: str) -> _Place | None:
        """Return the place of a node in scope that is another machine."""
        if name not in self._places and name in self._nodes:
            self._connector = self._connector or Connector(self._settings)
            runs = NodeRuns(self._nodes[name], self._connector, self._settings, silence_s=_SILENCE_S)
            self._places[name] = _Place(runs)
        return self._places.get(name)

    def _ask(self, name: str, place: _Place) -> None:
        """Ask a node; in a thread of its own."""
        began = time.monotonic()
        entries, unread = place.entries, ""
        listed = began >= place.list_due
        try:
            if (may := self._permitted(name)) is not None:
                place.runs.permit(may)
            entries = self._entries(place, listed=listed)
            wanted, before = self._wanted, place.entries.get(self._wanted)
            if wanted in entries and (
                listed
                or wanted not in place.details
                or before is None
                or before.view.state != entries[wanted].view.state
            ):
                place.details = {wanted: _detail(RemoteRun(place.runs, wanted))}
        except GpuboardError as error:
            unread = clean(str(error).removeprefix(f"{name}: "), 300)
        except Exception as error:  # a bug: shown beside the state that is known
            unread = clean(f"{type(error).__name__}: {error}", 300)
        now, timing = time.monotonic(), self.timing
        with self._guard:
            place.entries, place.unread = entries, unread
            place.failures = place.failures + 1 if unread else 0
            if not unread:
                place.read_at = now
                place.list_due = began + timing.rest_s if listed else place.list_due
            pause_s = timing.live_s if place.live else timing.rest_s
            if unread:
                pause_s = min(timing.rest_s, timing.live_s * 2**place.failures)
            place.due = now + pause_s
            place.busy = False
        if not place.live:
            place.runs.disconnect()

    @staticmethod
    def _entries(place: _Place, *, listed: bool) -> dict[str, RunEntry]:
        if not listed:
            try:
                return place.entries | {run: place.runs.one(run) for run in place.live}
            except UsageError:
                pass  # its folder was removed
        return {entry.view.id: entry for entry in place.runs.entries()}


def _in_doubt(entry: RunEntry) -> bool:
    """Return whether this host has only noted a run, or cannot check its head."""
    return entry.view.node is not None or entry.elsewhere


def _certainty(entry: RunEntry) -> tuple[bool, bool, bool]:
    """Of two states of a run the greater one counts: an end, then a head that was checked, a note of a run last."""
    return not entry.live, not entry.elsewhere, entry.read_s is not None or entry.view.node is None


def _detail(run: RemoteRun) -> RunDetail:
    """Return the details of a run on a node, without those of files that cannot be read. Raises NoNodeReached."""
    try:
        return read_detail(_files(run))
    except NoNodeReached:
        raise
    except GpuboardError:
        return _NOT_READ


def _files(run: RemoteRun) -> dict[str, bytes]:
    sizes: Collection[tuple[str, int]] = run.sizes(DETAIL_FILES).items()
    starts = {name: max(0, size - TAIL) if name == "head.log" else 0 for name, size in sizes}
    files = dict.fromkeys(starts, b"")
    while pieces := run.read({name: start + len(files[name]) for name, start in starts.items()}):
        for name, data in pieces.items():
            files[name] += data
    if starts.get("head.log"):
        files["head.log"] = files["head.log"].partition(b"\n")[2]
    return files
