"""The board without its UI: the fleet and its newest scene, made in a background thread. No textual."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from gpuboard.board.history import History
from gpuboard.board.history.recorder import Recorder
from gpuboard.board.operations import Operations
from gpuboard.board.overview.log import EventLog
from gpuboard.board.scene import Scene
from gpuboard.board.terminal.crash import report
from gpuboard.board.terminal.key_first import KeyFirst
from gpuboard.cluster.fleet import Fleet
from gpuboard.model.lease import LeaseList
from gpuboard.model.snapshot import NodeView, Snapshot, scheduler_words
from gpuboard.model.text import clean
from gpuboard.model.units import iso
from gpuboard.scheduler.find import finder

if TYPE_CHECKING:
    from gpuboard.board.dialogs.launch_process import Starter
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.config import Settings
    from gpuboard.launch.runs.elsewhere import ClusterRunbook
    from gpuboard.scheduler.base import Scheduler
    from gpuboard.shellprobe.connector import NodeConnector

_PACE_S = 1.0  # the longest wait for a change after that pause: ages on the screen grow
_REST = 19  # pause after a scene, as a multiple of its CPU time: up to 0.15 s a scene, a twentieth of a core at most
_REST_MOST_S = 3.0
_FEW = 8  # nodes: so many are all asked for runs
_FIND_RUNS_S = 10.0  # between two searches for the nodes that the user uses
_LOOK_S = 5.0  # how often a node is asked again for the throughput of a GPU on show; it ends after 15 s
_FIRST_S = 10.0  # after the start, nodes without a connection count as connecting for this long


class Core:
    """The cluster behind one board. Call what can block through ``BoardApp.ask``, never in the UI's thread."""

    def __init__(
        self,
        nodes: Sequence[Node],
        settings: Settings,
        env: Mapping[str, str],
        connector: NodeConnector | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        """``connector``: reaches nodes in place of the one from the settings (a recorded feed).

        ``scheduler``: closed with the core.
        """
        self.nodes = {node.name: node for node in nodes}
        self.settings = settings
        self.env = env
        self.interval_s = settings.interval_s(len(nodes))
        self.key_first = KeyFirst()
        self.fleet = Fleet(
            nodes,
            settings,
            interval_s=self.interval_s,
            one_shot=False,
            connector=connector,
            scheduler=scheduler,
            make_way=self.key_first.make_way,
        )
        self.history = History()
        self._recorder: Recorder | None = None
        self.events = EventLog(env, self.nodes, kept=not any(node.simulate for node in nodes))
        make = finder(settings, env) if scheduler is not None else None
        self.operations = Operations(nodes, settings, env, self.fleet, make)
        self._found_runs = -_FIND_RUNS_S  # monotonic: when own nodes were looked for
        self._on_show: tuple[str, str] | None = None  # node and UUID, since the last scene
        self._connected = False
        self._closed = threading.Event()
        self._began = time.monotonic()

    @cached_property
    def runbook(self) -> ClusterRunbook:
        """The user's runs, on this machine and on the nodes."""
        from gpuboard.launch.runs.elsewhere import ClusterRunbook  # late: the first frame shows no run

        return ClusterRunbook(self.env, self.settings, self.nodes, self.fleet.permitted)

    @cached_property
    def starter(self) -> Starter:
        """The launches from this board."""
        from gpuboard.board.dialogs.launch_process import Starter  # late, as above

        return Starter(list(self.nodes.values()), self.env)

    def connect(self) -> None:
        """Connect to every node; returns at once. ``start`` calls it, too; a second call does nothing."""
        if not self._connected:
            self._connected = True
            self.events.start()
            self.fleet.start()

    def start(self, changed: Callable[[Scene], object]) -> None:
        """Connect, then call ``changed`` with every new scene, in a background thread."""
        self.connect()
        _ = self.runbook, self.starter  # before several threads use them: a cached property has no lock
        threading.Thread(target=self._watch, args=(changed,), name="scenes", daemon=True).start()

    def record(self, notify: Callable[[str], object]) -> None:
        """Load the history from disk and keep it there, in a background thread; ``notify`` gets messages there."""
        if not any(node.simulate for node in self.nodes.values()):
            self._recorder = Recorder(self.history, self.env, notify)
            self._recorder.start()

    def scene(self) -> Scene:
        snapshot = self.fleet.snapshot()
        lines = banners(snapshot, running_s=time.monotonic() - self._began)
        return Scene(snapshot, self.operations.leases(snapshot), uids=self.fleet.uids(), banners=lines)

    def find_runs(self, scene: Scene | None, *, everywhere: bool = False) -> None:
        """Ask for the user's runs in the background: on nodes with own leases or processes, or ``everywhere``.

        Of a few nodes, each is asked.
        """
        now = time.monotonic()
        if everywhere or len(self.nodes) <= _FEW:
            self.runbook.look(self.nodes, now=everywhere)
        elif scene is not None and now - self._found_runs >= _FIND_RUNS_S:
            self._found_runs = now
            self.runbook.look(scene.own_nodes())

    def look(self, node: str, uuid: str) -> None:
        """Have the throughput of a GPU measured, which costs the node too much for all; call again with every scene."""
        self._on_show = (node, uuid)

    def close(self) -> None:
        """End every connection within half a second, hung ones included."""
        self._closed.set()
        if self._recorder is not None:
            self._recorder.close()
        if "starter" in self.__dict__:  # else there is nothing to close
            self.starter.close()
        self.operations.close()
        self.fleet.close()
        if "runbook" in self.__dict__:
            self.runbook.close()

    def _watch(self, changed: Callable[[Scene], object]) -> None:
        looked, look_at = self._on_show, 0.0
        shown: deque[Scene] = deque(maxlen=1)  # the scene before is freed here: the UI's thread answers keys
        while not self._closed.is_set():
            began = time.thread_time()
            try:
                scene = self.scene()
                self.history.add(scene.snapshot, time.time())
                self.events.add(scene.snapshot, scene.leases, time.monotonic())
            except (
                Exception
            ) as error:  # a bug: shown in place of an old scene that looks current; the next scene may work
                at = iso(time.time())
                nothing = LeaseList(schema=1, at=at, leases=[], unread=self.fleet.names)
                scene = Scene(Snapshot(1, at, "", []), nothing, uids={}, banners=(clean(report(error, self.env)),))
            changed(scene)
            on_show, self._on_show = self._on_show, None
            if on_show is not None and (on_show != looked or time.monotonic() >= look_at):
                looked, look_at = on_show, time.monotonic() + _LOOK_S
                self.fleet.send(on_show[0], "look", {"uuid": on_show[1]})
            self._closed.wait(min(_REST_MOST_S, _REST * (time.thread_time() - began)))
            self.fleet.wait_change(_PACE_S)
            shown.append(scene)  # the UI shows it by now; the next one uses the memory of the one before


def banners(snapshot: Snapshot, *, running_s: float) -> tuple[str, ...]:
    """Return what is wrong with the cluster as a whole, the worst first; ``running_s``: since the start."""
    nodes = snapshot.nodes
    found: list[str] = []
    if not nodes:
        return ("no nodes: list some with --nodes, or as `nodes` in the config",)
    scheduler = scheduler_words(snapshot.scheduler)
    if scheduler and all(node.source == "slurm" for node in nodes):
        return (scheduler,)
    if all(node.state == "unreachable" for node in nodes):
        failed = [node.error for node in nodes if not node.connecting]
        if not failed and running_s < _FIRST_S:
            return ()
        yet = " yet" if len(failed) < len(nodes) else ""
        found.append(f"no node is reachable{yet}{_reason(nodes, failed)}")
    elif all(node.state != "up" for node in nodes):
        found.append(f"every node is stale or unreachable{_reason(nodes, [node.error for node in nodes])}")
    elif not any(node.gpus for node in nodes) and all(node.state == "up" for node in nodes):
        where = "here" if len(nodes) == 1 else "on these nodes"
        found.append(f"no GPU {where}: list other nodes with --nodes, or as `nodes` in the config")
    if scheduler:
        found.append(scheduler)
    without = [node for node in nodes if node.claims_error is not None and node.state == "up"]
    if without:
        reason = _reason(without, [node.claims_error for node in without])
        where = "this node" if len(nodes) == 1 else f"{len(without)} of {len(nodes)} nodes"
        found.append(f"no reservations on {where}{reason}; no GPU there counts as free")
    return tuple(found)


def _reason(nodes: Sequence[NodeView], reasons: Sequence[str | None]) -> str:
    """Return the most frequent reason, with its count where nodes differ."""
    counts = Counter(reason for reason in reasons if reason)
    if not counts:
        return ""
    first, number = counts.most_common(1)[0]
    of = f" ({number} of {len(nodes)})" if number < len(nodes) else ""
    return f": {first}{of}"
