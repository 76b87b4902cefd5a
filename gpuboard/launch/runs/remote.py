"""Runs whose heads are on nodes: read and controlled through an agent of role ``runs`` (docs/launch-protocol.md)."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.routes import Route, Routes
from gpuboard.cluster.snapshot.views import NodeFacts
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError, NoNodeReached, UsageError
from gpuboard.launch.runs import folder as run_folder
from gpuboard.launch.runs.access import LocalRun, NodeLost
from gpuboard.launch.runs.control import ControlRequest
from gpuboard.launch.runs.folder import FINAL, RunView
from gpuboard.launch.runs.index import RunEntry
from gpuboard.model import replies
from gpuboard.model.text import lines
from gpuboard.model.units import parse_duration
from gpuboard.transport.base import CallFailed, LinkLost, TransportError
from gpuboard.transport.connector import Connector
from gpuboard.transport.link import AgentLink, Pending

if TYPE_CHECKING:
    from gpuboard.cluster.snapshot.scheduler_monitor import Permitted, RoutesOf
    from gpuboard.scheduler.base import Scheduler

_CALL_S = 10.0  # without any message from a connected node: it hangs
_FINAL_LOSSES = frozenset({"auth", "host-key", "no-job", "no-python"})  # another attempt would not succeed
_SCHEDULER_S = 20.0  # longer than a query of it takes until its timeout
_CHECK_S = 0.25  # between two checks of that
_RUNS_MOST = 100_000  # of one node
_STATE_LIMIT = 16 * 2**20  # bytes of one state.json (agent/runs/files.py)
_PIECE_LIMIT = 2**20  # bytes of one piece of a file
_REPLY_LIMIT = 64 * 2**20  # bytes of a head's reply: stacks of all ranks

T = TypeVar("T")


class NodeRuns:
    """This user's runs on one node, over one connection: opened by the first call, and by the next one after a loss.

    Where ssh is refused, it goes through a step of a job of this user there, if ``permit`` names one. Its calls block
    for the timeouts of connecting and 10 s at most. They may be made from several threads.
    """

    def __init__(self, node: Node, connector: Connector, settings: Settings, *, silence_s: float | None = None) -> None:
        """``silence_s``: the agent there ends after this time without a call."""
        self.node = node
        self._connector = connector
        self._config = {"node": node.name, **({} if silence_s is None else {"silence_s": silence_s})}
        self._first_s = max(_CALL_S, parse_duration(settings.connect_timeout))
        self._lock = threading.Lock()
        self._link: AgentLink | None = None
        self._routes = Routes(node.job, local=node.host is None)
        self._route = Route()  # of the link
        self._known_as = node.host  # for steps of jobs
        self._closed = False

    def permit(self, may: Permitted) -> None:
        """Set the permitted routes to the node. A connection over any other is closed."""
        with self._lock:
            here = self.node.host is None
            self._routes.permit(ssh=may.ssh or here, jobs=() if here else may.jobs, visits=may.visits)
            self._known_as = may.known_as or self.node.host
            if self._link is not None and not self._routes.permits(self._route):
                self._link.close()

    def close(self) -> None:
        """End the connection; calls in progress fail at once."""
        with self._lock:
            self._closed = True
        self.disconnect()

    def disconnect(self) -> None:
        """End the connection until the next call."""
        with self._lock:
            if self._link is not None:
                self._link.close()

    def runs(self) -> list[RunView]:
        """Return all runs, the oldest first. Raises NodeLost and GpuboardError."""
        return sorted((entry.view for entry in self.entries()), key=lambda view: (view.started, view.id))

    def entries(self) -> list[RunEntry]:
        """Return all runs as the node can check them. Raises as :meth:`runs`."""
        found: dict[str, RunEntry] = {}
        after, more = "", True
        while more and len(found) < _RUNS_MOST:
            page = self.call("list", {"after": after}, replies.RunStates)
            found |= {entry.run: self._entry(page.folder, entry) for entry in page.runs}
            more = page.more and bool(page.runs) and page.runs[-1].run > after
            after = page.runs[-1].run if page.runs else after
        return list(found.values())

    def find(self, name: str) -> RemoteRun:
        """Return the run of ``name``: an id, the start of one, or ``last``. Raises UsageError and as :meth:`runs`."""
        view = run_folder.matching_run(self.runs(), name, f"the state folder on {self.node.name}")
        return RemoteRun(self, view.id)

    def one(self, run: str) -> RunEntry:
        """Return the run with this id. Raises UsageError where there is none, and as :meth:`runs`."""
        answer = self.call("state", {"run": run}, replies.OneRun)
        if answer.run is None:
            raise UsageError(f"no run {run!r} on {self.node.name}")
        return self._entry(answer.folder, answer.run)

    def call(self, op: str, args: Mapping[str, Any], kind: type[T], reply_s: float = _CALL_S) -> T:
        """Call the node's agent; return its answer. ``reply_s``: the longest time without any message from the node.

        Raises NodeLost, UsageError for an unknown run, GpuboardError where the node refuses the call.
        """
        while True:
            link, route = self._open()
            pending = link.submit(op, dict(args))
            try:
                self._wait(link, pending, reply_s)
                return pending.result(0.0, kind)
            except CallFailed as error:
                failure = UsageError if error.kind == "no-run" else GpuboardError
                raise failure(f"{self.node.name}: {error.message}") from error
            except LinkLost as error:
                over = link.over or TransportError("timeout", error.words)
                link.close()  # nothing waits for a late answer
                unreached = link.hello is None and over.kind != "no-python"
                if unreached and self._routes.failed(route, over.kind, time.monotonic()) == 0.0:
                    continue  # another route
                kind_of_loss = NoNodeReached if over.kind in _FINAL_LOSSES else NodeLost
                raise kind_of_loss(f"{self.node.name}: {over}") from error

    def _open(self) -> tuple[AgentLink, Route]:
        with self._lock:
            if self._closed:
                raise NoNodeReached(f"{self.node.name}: closed")
            if self._link is None or self._link.over is not None:
                route = self._routes.next(time.monotonic())
                if route is None:
                    raise NoNodeReached(
                        f"{self.node.name}: not permitted: you have no job running there; start a job there, or set "
                        'ssh = "all"'
                    )
                host = self._known_as if route.job is not None else self.node.host
                self._route = route
                self._link = self._connector.open(
                    self.node.name,
                    host,
                    role="runs",
                    config=self._config,
                    listener=_ignore,
                    ended=_ignore,
                    job=route.job,
                )
            return self._link, self._route

    def _wait(self, link: AgentLink, pending: Pending, reply_s: float) -> None:
        """Wait for a reply. Connecting has a timeout of its own, which ends the link."""
        while not pending.wait(_CHECK_S):
            now = time.monotonic()
            if link.hello is not None and now - max(pending.sent, link.last_line) > reply_s:
                raise LinkLost(self.node.name, pending.no_answer(now - pending.sent))
            if link.hello is None and link.connected_at is not None and now - link.connected_at > self._first_s:
                raise LinkLost(self.node.name, str(link.late(self._first_s)))

    def _entry(self, folder: str, entry: replies.RunState) -> RunEntry:
        path = Path(folder) / entry.run
        try:
            if entry.state is None:
                raise replies.Malformed(entry.error)
            view = replies.decode(_unpacked(entry.state, _STATE_LIMIT), RunView, lines)
        except replies.Malformed as error:
            view = run_folder.unreadable(path, f"cannot read its state on {self.node.name}: {error}")
        if view.state not in FINAL and entry.alive is False:
            view = run_folder.without_head(view)
        view = msgspec.structs.replace(view, id=entry.run, folder=str(path), node=self.node.name)
        return RunEntry(view, entry.written, view.state not in FINAL and entry.alive is None)


class RemoteRun:
    """A run on a node; see :class:`gpuboard.launch.runs.access.RunAccess`. ``id``: its whole id."""

    poll_s = 0.5

    def __init__(self, node: NodeRuns, run: str) -> None:
        self.node = node
        self.id = run

    def view(self) -> RunView:
        """Return its current state."""
        return self.node.one(self.id).view

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        """See :meth:`RunAccess.sizes`."""
        return self.node.call("sizes", {"run": self.id, "files": list(names)}, replies.FileSizes).sizes

    def read(self, offsets: Mapping[str, int]) -> dict[str, bytes]:
        """See :meth:`RunAccess.read`."""
        found = self.node.call("read", {"run": self.id, "offsets": dict(offsets)}, replies.FilePieces)
        with self._well_formed():
            return {name: _unpacked(data, _PIECE_LIMIT) for name, data in found.pieces.items() if name in offsets}

    def ask(self, request: ControlRequest, timeout_s: float = 5.0) -> object:
        """See :meth:`RunAccess.ask`. A NodeLost leaves open whether the head got the request."""
        args = {"run": self.id, "request": msgspec.to_builtins(request), "timeout_s": timeout_s}
        try:
            found = self.node.call("control", args, replies.ControlReply, timeout_s + _CALL_S)
        except (NoNodeReached, UsageError):
            raise
        except GpuboardError as error:
            words = f"run {self.id}: `gpuboard launch` did not respond: {error}; `gpuboard runs` shows its state"
            raise GpuboardError(words) from error
        with self._well_formed():
            return replies.decode(_unpacked(found.reply, _REPLY_LIMIT), Any, lines)

    @contextlib.contextmanager
    def _well_formed(self) -> Iterator[None]:
        try:
            yield
        except replies.Malformed as error:
            raise GpuboardError(f"{self.node.node.name}: malformed answer: {error}") from error


class SharedRun:
    """A run whose folder a shared home has here too: through its head's node, and from the folder once it has ended.

    The node may not be reachable any more then: a Slurm job ends with its launch.
    """

    poll_s = RemoteRun.poll_s

    def __init__(self, remote: RemoteRun, local: LocalRun) -> None:
        self._remote = remote
        self._local = local

    def view(self) -> RunView:
        """Return its current state."""
        return self._either(self._remote.view, self._local.view)

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        """See :meth:`RunAccess.sizes`."""
        return self._either(lambda: self._remote.sizes(names), lambda: self._local.sizes(names))

    def read(self, offsets: Mapping[str, int]) -> dict[str, bytes]:
        """See :meth:`RunAccess.read`."""
        return self._either(lambda: self._remote.read(offsets), lambda: self._local.read(offsets))

    def ask(self, request: ControlRequest, timeout_s: float = 5.0) -> object:
        """See :meth:`RunAccess.ask`."""
        return self._remote.ask(request, timeout_s)

    def _either(self, remote: Callable[[], T], local: Callable[[], T]) -> T:
        try:
            return remote()
        except NoNodeReached:
            if self._local.view().state not in FINAL:
                raise
            return local()


@contextlib.contextmanager
def connected(nodes: Sequence[Node], settings: Settings, scheduler: Scheduler | None) -> Iterator[list[NodeRuns]]:
    """Yield the runs of each node; close every connection, and ``scheduler``, at the end.

    ``scheduler`` decides which routes are permitted, as for readings: with the setting ``ssh = "own"`` this waits for
    its answer. None: ssh to every node.
    """
    connector = Connector(settings)
    places = [NodeRuns(node, connector, settings) for node in nodes]
    monitor = None
    try:
        if scheduler is not None:
            from gpuboard.cluster.snapshot.scheduler_monitor import SchedulerMonitor  # only where there is one

            answered = threading.Event()

            def permit(routes_of: RoutesOf) -> None:
                for place in places:
                    place.permit(routes_of(place.node, NodeFacts(name=place.node.name)))
                answered.set()

            monitor = SchedulerMonitor(scheduler, settings, permit)
            monitor.start(once=True)
            answered.wait(_SCHEDULER_S)
        yield places
    finally:
        for place in places:
            place.close()
        if monitor is not None:
            monitor.close()
        connector.close()


def ask_all(
    nodes: Sequence[Node],
    settings: Settings,
    scheduler: Scheduler | None,
    look: Callable[[NodeRuns], T],
    limit_s: float = math.inf,
) -> tuple[dict[str, T], dict[str, GpuboardError]]:
    """Call ``look`` for every node, all at once; return the results and the errors by node, in the order of ``nodes``.

    A node that hangs delays the result by its own timeouts, at most by ``limit_s``. ``scheduler``: see
    :func:`connected`.
    """
    until = time.monotonic() + limit_s
    inbox: queue.SimpleQueue[tuple[str, T | GpuboardError]] = queue.SimpleQueue()

    def work(place: NodeRuns) -> None:
        answer: T | GpuboardError
        try:
            answer = look(place)
        except GpuboardError as error:
            answer = error
        except Exception as error:  # a bug: the caller waits for an answer of every node
            answer = GpuboardError(f"{place.node.name}: {type(error).__name__}: {error}")
        inbox.put((place.node.name, answer))

    with connected(nodes, settings, scheduler) as places:
        for place in places:
            threading.Thread(target=work, args=(place,), name=f"runs-{place.node.name}", daemon=True).start()
        answers: dict[str, T | GpuboardError] = {}
        with contextlib.suppress(queue.Empty):
            while len(answers) < len(places):
                left_s = max(0.0, until - time.monotonic())
                answers |= [inbox.get(timeout=None if math.isinf(left_s) else left_s)]
    done: dict[str, T] = {}
    failed: dict[str, GpuboardError] = {}
    for node in nodes:
        answer = answers.get(node.name, NodeLost(f"{node.name}: no answer within {limit_s:.0f} s"))
        if isinstance(answer, GpuboardError):
            failed[node.name] = answer
        else:
            done[node.name] = answer
    return done, failed


def runs_on(
    nodes: Sequence[Node], settings: Settings, scheduler: Scheduler | None
) -> tuple[list[RunView], dict[str, str]]:
    """Return this user's runs on ``nodes``, the oldest first, and by node why it gave no answer.

    A run that several nodes list (a shared home) appears once.
    """
    done, failed = ask_all(nodes, settings, scheduler, NodeRuns.runs)
    words = {name: str(error).removeprefix(f"{name}: ") for name, error in failed.items()}
    return once([view for views in done.values() for view in views]), words


def once(views: Sequence[RunView]) -> list[RunView]:
    """Return ``views``, the oldest first, with one for each run: one that has ended, else that of its head's node."""

    def certainty(view: RunView) -> tuple[bool, bool]:
        return view.state in FINAL, same_host(view.node or os.uname().nodename, view.head.host)

    found: dict[str, RunView] = {}
    for view in views:
        if view.id not in found or certainty(view) > certainty(found[view.id]):
            found[view.id] = view
    return sorted(found.values(), key=lambda view: (view.started, view.id))


def same_host(name: str, host: str) -> bool:
    """Return whether a node's name is that of a host: equal, or equal up to the domain that one of them lacks."""
    return name == host or (("." in name) != ("." in host) and name.partition(".")[0] == host.partition(".")[0])


def node_of(nodes: Iterable[Node], host: str) -> Node | None:
    """Return the node that is the host of this name; None if there is none."""
    return next((node for node in nodes if same_host(node.name, host) or same_host(node.address, host)), None)


def _unpacked(data: bytes, limit: int) -> bytes:
    """Return the bytes of an answer. Raises Malformed, also for more than ``limit`` bytes."""
    unpacker = zlib.decompressobj()
    with contextlib.suppress(zlib.error):
        found = unpacker.decompress(data, limit + 1)
        if unpacker.eof and len(found) <= limit:
            return found
    raise replies.Malformed("invalid compressed data")


def _ignore(_: object) -> None:
    """Ignore events, and the end of a link, which the next call detects."""
