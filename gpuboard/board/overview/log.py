"""What happened while a board ran: snapshots in, events out, kept in the store."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpuboard import paths
from gpuboard.board.overview.damper import Damper
from gpuboard.board.overview.events import Baseline, look, merged
from gpuboard.board.overview.store import EventStore
from gpuboard.model.lease import LeaseList
from gpuboard.model.snapshot import Snapshot
from gpuboard.recording.events import ClusterEvent

_EMPTY = "No events so far. They are recorded while a board runs."


class EventFinder:
    """Compares each snapshot with the one before."""

    def __init__(self) -> None:
        self._seen = Baseline()
        self._damper = Damper()

    def find(self, snapshot: Snapshot, leases: LeaseList, now: float) -> list[ClusterEvent]:
        """Return what has happened since the snapshot before. ``now``: seconds, of any clock that is not set back."""
        found, self._seen = look(self._seen, snapshot, leases)
        return merged(self._damper.listed(found, now))


class EventLog:
    """The events that a board shows. One thread adds; others may read meanwhile."""

    def __init__(self, env: Mapping[str, str], nodes: Collection[str], *, kept: bool, empty: str = _EMPTY) -> None:
        """``nodes``: their names; ``kept``: for the next start, too; ``empty``: shown while there are no events."""
        self.empty = empty
        self._store = EventStore(paths.state_dir(env) / "events.jsonl", nodes)
        self._kept = kept
        self._finder = EventFinder()

    def start(self) -> None:
        """Read the events of earlier boards, and write new ones, in the background."""
        if self._kept:
            self._store.start()

    def add(self, snapshot: Snapshot, leases: LeaseList, now: float) -> None:
        """Add what has happened since the snapshot before. ``now``: as for ``EventFinder.find``."""
        self._store.add(self._finder.find(snapshot, leases, now))

    def replace(self, events: Sequence[ClusterEvent]) -> None:
        """Show these in place of all before; the next snapshot is compared with none."""
        self._finder = EventFinder()
        self._store.events = events

    @property
    def events(self) -> Sequence[ClusterEvent]:
        """All known events, oldest first; the same object until there is another one."""
        return self._store.events

    @property
    def problem(self) -> str:
        """Why events cannot be kept; "": they are."""
        return self._store.problem
