"""Fleet: the feeds of all nodes in scope; wait for them, take a snapshot, call agents. Plain synchronous use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from gpuboard.cluster.feed import NodeFeed
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.snapshot.builder import SnapshotBuilder
from gpuboard.cluster.snapshot.views import NodeFacts, View, standing
from gpuboard.cluster.timing import TIMING, FleetTiming
from gpuboard.model.reading import Claim
from gpuboard.model.replies import Read
from gpuboard.model.snapshot import Snapshot
from gpuboard.model.text import clean
from gpuboard.model.units import parse_duration
from gpuboard.shellprobe.connector import NodeConnector
from gpuboard.transport.base import CallFailed, LinkLost, TransportError
from gpuboard.transport.link import Pending

if TYPE_CHECKING:
    from gpuboard.cluster.snapshot.scheduler_monitor import Permitted, RoutesOf, SchedulerMonitor
    from gpuboard.config import Settings
    from gpuboard.model.schedule import Schedule
    from gpuboard.scheduler.base import Scheduler

T = TypeVar("T")
FIRST_READING_S = 12.0  # after ``connect_s``: start of the agent, and of NVML without persistence mode


class Fleet:
    """The feeds of ``nodes``. ``interval_s`` None: each node is read when it connects, then on request.

    With ``one_shot`` a single reading makes a GPU free; otherwise that takes two in a row.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        settings: Settings,
        *,
        interval_s: float | None,
        one_shot: bool = True,
        connector: NodeConnector | None = None,
        scheduler: Scheduler | None = None,
        timing: FleetTiming = TIMING,
        make_way: Callable[[], None] = lambda: None,
    ) -> None:
        """``scheduler``: closed together with the fleet.

        ``make_way``: called for each reading and each node of a snapshot; may sleep for some milliseconds.
        """
        self._settings = settings
        self._interval_s = interval_s
        self._timing = timing
        self._one_shot = one_shot
        self._thresholds = settings.state.thresholds()
        self._connector = connector or NodeConnector(settings)
        self._monitor: SchedulerMonitor | None = None
        if scheduler is not None:
            from gpuboard.cluster.snapshot.scheduler_monitor import SchedulerMonitor  # only where there is one

            self._monitor = SchedulerMonitor(scheduler, settings, self._permit)
        self._permitted: dict[str, Permitted] = {}  # by node, by the scheduler's newest answer
        self._make_way = make_way
        self._builder = SnapshotBuilder(make_way)
        self._condition = threading.Condition()
        self._dirty = False
        self._waiting = 0  # threads in wait()
        self._closed = threading.Event()
        self._opening = threading.Lock()
        self._feeds = {
            node.name: NodeFeed(
                node,
                self._connector,
                claims_dir=settings.claims_dir,
                thresholds=self._thresholds,
                interval_s=interval_s,
                answer_s=parse_duration(settings.connect_timeout),
                changed=self._feed_changed,
                timing=timing,
            )
            for node in nodes
        }

    @property
    def connect_s(self) -> float:
        """The longest time that connecting to every node once may take: ``max_connections`` are set up at a time."""
        rounds = -(-len(self._feeds) // self._settings.max_connections)
        return parse_duration(self._settings.connect_timeout) * max(1, rounds)

    @property
    def schedule(self) -> Schedule | None:
        """The scheduler's newest answer; None: there is no scheduler, or it has not answered yet."""
        return self._monitor.schedule if self._monitor is not None else None

    def known_as(self, name: str) -> str | None:
        """Return the scheduler's name for a node in scope; None without a scheduler, or for a node unknown to it."""
        feed = self._feeds.get(name)
        return self._monitor.known_as(feed.facts) if self._monitor is not None and feed is not None else None

    def permitted(self, name: str) -> Permitted | None:
        """Return the routes by which a node in scope may be reached; None: no scheduler restricts them."""
        if self._monitor is None:
            return None
        from gpuboard.cluster.snapshot.scheduler_monitor import Permitted  # it has been imported with the monitor

        return self._permitted.get(name, Permitted(ssh=False))

    @property
    def facts(self) -> list[NodeFacts]:
        """What the feeds know of their nodes now, in the order given."""
        found = []
        for feed in self._feeds.values():
            self._make_way()
            found.append(feed.facts)
        return found

    @property
    def failures(self) -> dict[str, TransportError]:
        """Why nodes have no connection, with the remedy, by name."""
        return {name: feed.failure for name, feed in self._feeds.items() if feed.facts.error and feed.failure}

    @property
    def names(self) -> list[str]:
        """The nodes, in the order given."""
        return list(self._feeds)

    def start(self) -> None:
        """Start connecting to every permitted node and return."""
        if self._monitor is not None:
            self._monitor.start(once=self._interval_s is None)
        else:
            for feed in self._feeds.values():
                feed.open()
        if self._interval_s is not None:
            threading.Thread(target=self._pace, name="fleet", daemon=True).start()

    def wait(self, timeout_s: float, names: Collection[str] | None = None) -> None:
        """Wait until each node (of ``names``) has a reading or an error, at most ``timeout_s``. A node that hangs
        delays this no longer than its own deadline."""
        feeds = [feed for name, feed in self._feeds.items() if names is None or name in names]
        until = time.monotonic() + timeout_s
        with self._condition:
            self._waiting += 1
            try:
                while (left := until - time.monotonic()) > 0 and not self._answered(feeds):
                    self._condition.wait(min(left, self._timing.poll_s))
                    if self._interval_s is None:
                        self._check(feeds)
            finally:
                self._waiting -= 1

    def wait_all(
        self, limit_s: float, progress: Callable[[float, list[str]], None] = lambda waited_s, missing: None
    ) -> None:
        """Wait until each node has a reading or an error, at most ``limit_s`` after the last of them answered.

        ``progress`` is called each second with the time waited so far and the nodes that are missing.
        """
        began = latest = time.monotonic()
        left = len(self._feeds)
        while (rest_s := latest + limit_s - time.monotonic()) > 0:
            self.wait(min(rest_s, self._timing.pace_s))
            missing = [name for name, feed in self._feeds.items() if not feed.answered]
            if self._answered(self._feeds.values()):
                return
            if len(missing) < left:
                left, latest = len(missing), time.monotonic()
            progress(time.monotonic() - began, missing)

    def _answered(self, feeds: Collection[NodeFeed]) -> bool:
        return (self._monitor is None or self._monitor.answered) and all(feed.answered for feed in feeds)

    def wait_change(self, timeout_s: float) -> bool:
        """Wait for a change since the last call; return whether there is one. Readings that arrive together are one."""
        with self._condition:
            if not self._dirty:
                self._condition.wait_for(lambda: self._dirty or self._closed.is_set(), timeout_s)
            if not self._dirty:
                return False
        until = time.monotonic() + self._timing.settle_most_s
        while self._dirty and time.monotonic() < until:
            self._dirty = False
            time.sleep(self._timing.settle_s)
        self._dirty = False
        return True

    def snapshot(self) -> Snapshot:
        """Return every node's newest reading, each with its age, judged now."""
        now, at = time.monotonic(), time.time()
        nodes = self.facts
        view = View(
            now=now,
            at=at,
            cluster=self._cluster,
            thresholds=self._thresholds,
            users=self._settings.users,
            interval_s=self._interval_s,
            one_shot=self._one_shot,
            scheduled=self._monitor.of(nodes, now, at) if self._monitor else {},
            scheduler=self._monitor.view(now) if self._monitor else None,
        )
        return self._builder.snapshot(nodes, view)

    def claims(self) -> dict[str, list[Claim]]:
        """Return the claims in each node's newest reading; a node without a reading is left out."""
        users = self._settings.users
        read = [facts for feed in self._feeds.values() if (facts := feed.facts).reading is not None]
        found = {facts.name: self._builder.claims(facts, users) for facts in read}
        if self._monitor is not None:
            held = [facts for facts in read if found[facts.name]]
            scheduled = self._monitor.of(held, time.monotonic(), time.time())
            found |= {facts.name: standing(found[facts.name], facts, scheduled.get(facts.name)) for facts in held}
        return found

    def uids(self) -> dict[str, int]:
        """Return this user's uid on each node that has answered: uids can differ between nodes."""
        return {name: feed.facts.hello.uid for name, feed in self._feeds.items() if feed.facts.hello is not None}

    def call(self, node: str, op: str, args: dict[str, Any], timeout_s: float, kind: type[T]) -> T:
        """Call one agent and return its answer, a ``kind``. Raises CallFailed and LinkLost."""
        answer = self.call_all({node: (op, args)}, timeout_s, kind)[node]
        if isinstance(answer, (CallFailed, LinkLost)):
            raise answer
        return answer

    def call_all(
        self, calls: Mapping[str, tuple[str, dict[str, Any]]], timeout_s: float, kind: type[T]
    ) -> dict[str, T | CallFailed | LinkLost]:
        """Call several agents at once; return each node's answer, or its CallFailed or LinkLost as the value.

        The timeout starts with a node's oldest unanswered call: a node that hangs delays later calls no further.
        """
        started = time.monotonic()
        pending = {node: self._submit(node, op, args) for node, (op, args) in calls.items()}
        answers: dict[str, T | CallFailed | LinkLost] = {}
        for node, sent in pending.items():
            try:
                answers[node] = self._settled(node, sent, started, timeout_s).result(0.0, kind)
            except (CallFailed, LinkLost) as error:
                answers[node] = error
        return answers

    def _settled(self, node: str, sent: Pending | LinkLost, started: float, timeout_s: float) -> Pending:
        """Return a call once it is answered. Raises LinkLost when it is not."""
        if isinstance(sent, LinkLost):
            raise sent
        while not sent.settled:
            now = time.monotonic()
            link = self._feeds[node].link
            since = min(started, (link.silent_since if link is not None else None) or started)
            left_s = since + timeout_s - now
            if left_s <= 0 and now >= started + self._timing.call_least_s:
                raise LinkLost(node, sent.no_answer(now - since))
            sent.wait(min(max(left_s, self._timing.call_least_s), self._timing.poll_s))
        return sent

    def send(self, node: str, op: str, args: dict[str, Any]) -> None:
        """Send a call to one agent without waiting for the answer; does nothing when it is not connected."""
        feed = self._feeds[node]
        if feed.link is not None:
            feed.link.submit(op, args)

    def refresh(self, names: Collection[str], timeout_s: float) -> dict[str, str]:
        """Get a reading that starts after this call from each node; return the failures by node."""
        answers = self.call_all({name: ("read", {}) for name in names}, timeout_s, Read)
        return {name: str(answer) for name, answer in answers.items() if isinstance(answer, (CallFailed, LinkLost))}

    def freshen(self) -> None:
        """Read again the nodes whose newest reading has aged while this process waited for others."""
        now = time.monotonic()
        feeds = self._feeds.items()
        aged = [
            name
            for name, feed in feeds
            if feed.facts.reading is not None and now - feed.facts.arrived > self._timing.aged_s
        ]
        if aged:
            self.refresh(aged, self._timing.reread_s)

    def close(self) -> None:
        """End every connection at once."""
        self._closed.set()
        with self._condition:
            self._condition.notify_all()
        if self._monitor is not None:
            self._monitor.close()
        for feed in self._feeds.values():
            feed.close()
        self._connector.close()

    @cached_property
    def _cluster(self) -> str:
        if self._settings.cluster:
            return clean(self._settings.cluster, 96)
        if len(self._feeds) <= 1:
            return "".join(self._feeds)
        from gpuboard.nodesets import fold  # 30 ms: only to fold several names

        return fold(self._feeds)

    def _submit(self, node: str, op: str, args: dict[str, Any]) -> Pending | LinkLost:
        feed = self._feeds.get(node)
        if feed is None:
            return LinkLost(node, f"not one of the nodes in scope ({', '.join(self._feeds)})")
        with self._opening:
            link = feed.link
            if link is None or link.over is not None:
                recently = time.monotonic() - feed.failed_at < self._timing.call_retry_s
                if self._interval_s is not None or recently or self._closed.is_set():
                    return LinkLost(node, feed.facts.error or "not connected")
                feed.open()
                link = feed.link
        if link is None:
            return LinkLost(node, "no route: ssh is not permitted, and you have no job running there")
        return link.submit(op, args)

    def _permit(self, routes_of: RoutesOf) -> None:
        """Open and close connections as the scheduler's newest answer permits."""
        for feed in self._feeds.values():
            may = routes_of(feed.node, feed.facts)
            self._permitted[feed.node.name] = may
            ssh = may.ssh or feed.node.host is None
            feed.permit(ssh=ssh, jobs=may.jobs, visits=may.visits, known_as=may.known_as)
        self._feed_changed()

    def _feed_changed(self) -> None:
        self._make_way()
        if not self._dirty or self._waiting:  # one wake-up for all changes before the next wait_change
            with self._condition:
                self._dirty = True
                self._condition.notify_all()

    def _check(self, feeds: Collection[NodeFeed]) -> None:
        now = time.monotonic()
        for feed in feeds:
            feed.check(now)

    def _pace(self) -> None:
        """Check deadlines, retry connections and send ticks until the fleet is closed.

        A gap of ``suspended_s`` between two checks means this process was suspended: frames that are still queued are
        read before links are judged.
        """
        checked_at = time.monotonic()
        tick_at = checked_at + self._timing.tick_s
        while not self._closed.wait(self._timing.pace_s):
            before, checked_at = checked_at, time.monotonic()
            if checked_at - before < self._timing.suspended_s:
                self._check(self._feeds.values())
            if time.monotonic() >= tick_at:
                tick_at += self._timing.tick_s
                for feed in self._feeds.values():
                    feed.tick()
