"""What the board works on: the fleet and its newest scene, made in a thread of its own. No textual."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpuboard.board.dialogs.launch_process import Starter
from gpuboard.board.history import History
from gpuboard.board.operations import Operations
from gpuboard.board.scene import Scene
from gpuboard.board.terminal.crash import report
from gpuboard.cluster.fleet import Fleet
from gpuboard.launch.run_index import Runbook
from gpuboard.model.lease import LeaseList
from gpuboard.model.snapshot import NodeView, Snapshot, scheduler_words
from gpuboard.model.text import clean
from gpuboard.model.units import iso
from gpuboard.scheduler.find import finder

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.config import Settings
    from gpuboard.scheduler.base import Scheduler
    from gpuboard.shellprobe.connector import NodeConnector

_PACE_S = 1.0  # ages grow on the screen also when nothing arrives
_REST = 9  # after a scene nine times as long as it took: nodes that answer out of step cost a tenth of a core at most
_REST_MOST_S = 1.0
_FIRST_S = 10.0  # after the start, nodes without a connection count as connecting for this long


class Core:
    """The cluster behind one board. What may take long is called in a thread (``BoardApp.ask``), not in the UI's."""

    def __init__(
        self,
        nodes: Sequence[Node],
        settings: Settings,
        env: Mapping[str, str],
        connector: NodeConnector | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        """``connector``: how nodes are reached, where it is not by the settings (a recorded feed).

        ``scheduler``: what else holds the nodes' GPUs; it is closed with the core.
        """
        self.nodes = {node.name: node for node in nodes}
        self.settings = settings
        self.env = env
        self.interval_s = settings.interval_s(len(nodes))
        self.fleet = Fleet(
            nodes,
            settings,
            interval_s=self.interval_s,
            one_shot=False,
            connector=connector,
            scheduler=scheduler,
        )
        self.history = History()
        make = finder(settings, env) if scheduler is not None else None
        self.operations = Operations(nodes, settings, env, self.fleet, make)
        self.runbook = Runbook(env)
        self.starter = Starter(nodes, env)
        self._connected = False
        self._closed = threading.Event()
        self._began = time.monotonic()

    def connect(self) -> None:
        """Connect to every node; returns at once. ``start`` does it, if nobody did it earlier."""
        if not self._connected:
            self._connected = True
            self.fleet.start()

    def start(self, changed: Callable[[Scene], object]) -> None:
        """Connect, and from now on call ``changed`` with every new scene, from a thread of the core's own."""
        self.connect()
        threading.Thread(target=self._watch, args=(changed,), name="scenes", daemon=True).start()

    def scene(self) -> Scene:
        """Return the cluster as it is now."""
        snapshot = self.fleet.snapshot()
        said = banners(snapshot, running_s=time.monotonic() - self._began)
        return Scene(snapshot, self.operations.leases(snapshot), uids=self.fleet.uids(), banners=said)

    def close(self) -> None:
        """End every connection; takes less than half a second whatever hangs."""
        self._closed.set()
        self.starter.close()
        self.operations.close()
        self.fleet.close()

    def _watch(self, changed: Callable[[Scene], object]) -> None:
        while not self._closed.is_set():
            began = time.thread_time()
            try:
                scene = self.scene()
                self.history.add(scene.snapshot, time.monotonic())
            except Exception as error:  # a bug: said, and no old picture is shown for the truth; the next may do
                at = iso(time.time())
                nothing = LeaseList(schema=1, at=at, leases=[], unread=self.fleet.names)
                scene = Scene(Snapshot(1, at, "", []), nothing, uids={}, banners=(clean(report(error, self.env)),))
            changed(scene)
            self._closed.wait(min(_REST_MOST_S, _REST * (time.thread_time() - began)))
            self.fleet.wait_change(_PACE_S)


def banners(snapshot: Snapshot, *, running_s: float) -> tuple[str, ...]:
    """Return what to say, the worst first; ``running_s``: how long we have been looking."""
    nodes = snapshot.nodes
    found: list[str] = []
    if not nodes:
        return ("no node to look at: name some with --nodes, or as `nodes` in the config",)
    silence = scheduler_words(snapshot.scheduler)
    if silence and all(node.source == "slurm" for node in nodes):
        return (silence,)
    if all(node.state == "unreachable" for node in nodes):
        failed = [node.error for node in nodes if not node.connecting]
        if not failed and running_s < _FIRST_S:
            return ()
        yet = " yet" if len(failed) < len(nodes) else ""
        found.append(f"no node answers{yet}{_reason(nodes, failed)}")
    elif all(node.state != "up" for node in nodes):
        found.append(f"no node answers any more{_reason(nodes, [node.error for node in nodes])}")
    elif not any(node.gpus for node in nodes) and all(node.state == "up" for node in nodes):
        where = "here" if len(nodes) == 1 else "on these nodes"
        found.append(f"no GPU {where}: name other nodes with --nodes, or as `nodes` in the config")
    if silence:
        found.append(silence)
    without = [node for node in nodes if node.claims_error is not None and node.state == "up"]
    if without:
        reason = _reason(without, [node.claims_error for node in without])
        what = "this node" if len(nodes) == 1 else f"{len(without)} of {len(nodes)} nodes"
        found.append(f"{what} cannot hold reservations{reason}; nothing there is called free")
    return tuple(found)


def _reason(nodes: Sequence[NodeView], reasons: Sequence[str | None]) -> str:
    """Return the reason that most nodes give, and how many have others."""
    counts = Counter(reason for reason in reasons if reason)
    if not counts:
        return ""
    first, number = counts.most_common(1)[0]
    of = f" ({number} of {len(nodes)})" if number < len(nodes) else ""
    return f": {first}{of}"
