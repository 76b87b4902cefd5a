"""One node's feed: its link, its newest reading and when that arrived; a lost link is retried with back-off."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.routes import Route, Routes
from gpuboard.cluster.snapshot.views import NodeFacts, inert_static
from gpuboard.cluster.timing import TIMING, FleetTiming
from gpuboard.errors import ConfigError
from gpuboard.model.gpu import GpuStatic
from gpuboard.model.late import base_of
from gpuboard.model.reading import Hello, LateDelta, Pushed, Reading, ReadingDelta, Static, applied, shared
from gpuboard.model.state import Thresholds, counted, narrow_links, rests_on_memory
from gpuboard.shellprobe.connector import NodeConnector
from gpuboard.transport import limits
from gpuboard.transport.base import TransportError
from gpuboard.transport.link import AgentLink

if TYPE_CHECKING:
    from gpuboard.shellprobe.link import ShellLink

_REFUSED = frozenset({"auth", "host-key", "limits"})
_LAST_BUSY = 8192  # GPUs whose last use is recorded: bounds a node that invents GPUs


def backoff_s(failures: int, kind: str, timing: FleetTiming = TIMING) -> float:
    """Return the pause after the ``failures``-th failure in a row (from 1), jittered so that clients spread out."""
    import random  # late: 1 ms, and `allocate` on healthy nodes never pauses

    refused = kind in _REFUSED
    first = timing.backoff_refused_s if refused else timing.backoff_first_s
    most = timing.backoff_refused_most_s if refused else timing.backoff_most_s
    return min(most, first * 2.0 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0)


def next_tick_ms(now: float, interval_s: float) -> int:
    """Return milliseconds from ``now`` (epoch seconds) to the next multiple of the interval, the same for all nodes."""
    return max(1, round((interval_s - now % interval_s) * 1000))


class NodeFeed:
    """The feed of one node. Read ``facts`` from any thread.

    A delta is applied when ``facts`` are read next: where nodes send more readings than are shown, most never are.

    ``answer_s``: timeout of the agent's first reading, at least ``timing.first_answer_s``.
    ``changed`` is called after every change and must not block.
    """

    def __init__(
        self,
        node: Node,
        connector: NodeConnector,
        *,
        claims_dir: str,
        thresholds: Thresholds,
        interval_s: float | None,
        answer_s: float,
        changed: Callable[[], None],
        timing: FleetTiming = TIMING,
    ) -> None:
        self.node = node
        self._facts = NodeFacts(name=node.name)
        # The last two deltas that are not applied yet, each with its link's number and when it arrived: a reading and
        # the one before decide what is free.
        self._late: deque[tuple[int, LateDelta | ReadingDelta, float]] = deque(maxlen=2)
        self._wrong: tuple[int, TransportError] | None = None  # why a delta of that link could not be applied
        self.link: AgentLink | ShellLink | None = None
        self.failure: TransportError | None = None  # the error of ``facts``, where that has one
        self.failed_at = 0.0  # when the last link was lost, or could not be opened
        self.retry_at: float | None = None  # when to connect again
        self._connector = connector
        self._thresholds = thresholds
        self._interval_s = interval_s
        self._timing = timing
        self._answer_s = max(timing.first_answer_s, answer_s)
        self._changed = changed
        self._lock = threading.RLock()  # not held while ``changed`` is called
        self._routes = Routes(node.job, local=node.host is None, timing=timing)
        self._route = Route()  # the one taken last
        self._known_as = ""  # its name in the scheduler, for routes through jobs
        self._number = 0  # of the current link: messages of earlier ones are dropped
        self._whole = (0, 0)  # link and number of the reading to which a delta can refer
        self._replace_known = False  # the next list may be confined to a job: GPUs that it lacks are not lost
        self._rebooted = False  # since the list before: other GPUs may be in its slots
        self._identity: dict[str, str] = {}  # UUIDs of known GPUs that the agent cannot identify, by what it sends
        self._no_python: TransportError | None = None
        self._closed = False
        self._opened_at = 0.0
        self._hello_at = 0.0  # when the current link's agent sent its hello
        self._waiting = False  # for the first reading of this link
        self._failures = 0
        self._last_busy: dict[str, float] = {}
        self._widths: list[tuple[str, int | None]] = []  # UUID and PCIe lanes of each GPU, as last read
        self._widest: dict[str, int] = {}  # UUID -> most PCIe lanes since its node was booted
        self._narrow: dict[str, str] = {}
        self._busy: list[str] = []  # UUIDs of the GPUs in use in the newest reading
        self._rests_on_memory = False  # whether that list depends on a number
        self._held: frozenset[tuple[str, str]] = frozenset()  # UUIDs and their leases, as last read
        self._config = {
            "node": node.name,
            "interval_s": interval_s,
            "claims_dir": node.claims_dir or claims_dir,
            "simulate": node.simulate,
            "now": True,
            "job": node.job,
            "deltas": True,
        }

    @property
    def facts(self) -> NodeFacts:
        """What is known of the node now; replaced as a whole."""
        if self._late:
            with self._lock:
                self._apply()
        return self._facts

    @property
    def answered(self) -> bool:
        """Whether there is a reading or an error, or no connection to wait for."""
        facts = self._facts  # without the lock: callers hold one of their own
        return facts.reading is not None or facts.error is not None or facts.closed

    def open(self) -> None:
        """Start connecting and return; does nothing where no route is permitted. Raises ConfigError."""
        with self._lock:
            self._open(time.monotonic())

    def permit(self, *, ssh: bool, jobs: Sequence[str], visits: Sequence[str] = (), known_as: str = "") -> None:
        """Set the permitted routes to the node: ssh, and steps of these jobs of this user.

        ``visits``: this user's jobs there that are no route. ``known_as``: the node's name in the scheduler.

        A link over a route that is still permitted stays; any other is closed at once, and the next route is opened.
        """
        with self._lock:
            self._known_as = known_as
            new_job = self._routes.permit(ssh=ssh, jobs=jobs, visits=visits)
            alive = self.link is not None and self.link.over is None
            if self._routes.closed:
                self._drop_link()
                self._facts = msgspec.structs.replace(self.facts, closed=True, error=None)
            elif not (alive and self._routes.permits(self._route)) and (
                alive or new_job or self.link is None or self.facts.closed
            ):
                self._drop_link()
                self._facts = msgspec.structs.replace(self.facts, closed=False, error=None)
                self._reopen(time.monotonic())

    def close(self) -> None:
        """End the link and open no other."""
        with self._lock:
            self._closed = True
            self._drop_link()

    def tick(self) -> None:
        """Send the agent the time of its next reading by the wall clock."""
        link = self.link
        if self._interval_s is not None and link is not None and link.hello is not None:
            link.tick(next_tick_ms(time.time(), self._interval_s))

    def check(self, now: float) -> None:
        """Check deadlines: close a link without a first answer or gone stale, and retry one that is due.

        Without a route the last reading is dropped once its claims may have expired.
        """
        link = self.link
        with self._lock:
            wrong, self._wrong = self._wrong, None
        if link is not None and wrong is not None and wrong[0] == self._number:
            link.drop(wrong[1])
        elif link is not None and link.over is None:
            silence_s = max(self._timing.silence_s, 10 * (self._interval_s or 0.0))
            began = max(self._hello_at, link.connected_at or now)
            if self._waiting and now - began > self._answer_s:
                link.drop(link.late(self._answer_s))
            elif self._interval_s is not None and link.hello is not None and now - link.last_line > silence_s:
                link.drop(TransportError("lost", f"no message from the agent for {silence_s:.0f} s"))
            elif not isinstance(link, AgentLink):
                link.look(now)
        with self._lock:
            if self.retry_at is not None and now >= self.retry_at:
                self._reopen(now)
            elif self._interval_s is not None and self._routes.agent_is_due(self._route, now) and not self._waiting:
                self._drop_link()
                self._reopen(now)
            facts = self._facts  # ``self.facts`` would apply every feed's deltas; a closed one has none left
            outdated = facts.closed and facts.reading is not None and now - facts.arrived > self._timing.closed_s
            if outdated:
                self._facts = msgspec.structs.replace(facts, reading=None, previous=None)
        if outdated:
            self._changed()

    def _reopen(self, now: float) -> None:
        """Open a link as ``_open`` does; a ConfigError is the node's error: it would end the caller's thread."""
        try:
            self._open(now)
        except ConfigError as error:
            self._drop_link()
            self.failure = TransportError("exited", str(error))
            self._facts = msgspec.structs.replace(self.facts, error=str(error))

    def _open(self, now: float) -> None:
        """Open a link over the route that is next. The lock is held, here and in ``_drop_link``. Raises ConfigError."""
        self.retry_at = None
        route = self._routes.next(now)
        if route is None or self._closed:
            return
        self._route = route
        self._number += 1
        self._opened_at = now
        self._waiting = True
        listener, ended = partial(self._message, self._number), partial(self._ended, self._number)
        host = self.node.host
        if host is not None and route.job is not None:
            host = self._known_as or host
        if route.shell:
            assert host is not None  # on this machine python3 runs this process
            why = str(self._no_python)
            self.link = self._connector.open_shell(
                self.node.name, host, why, self._interval_s, listener=listener, ended=ended, job=route.job
            )
            return
        self.link = self._connector.open(
            self.node.name,
            host,
            role="node",
            config=self._config,
            listener=listener,
            ended=ended,
            job=route.job,
        )
        if self.link.hello is not None:
            self.tick()  # an agent that was started ahead may have answered before ``self.link`` was set

    def _drop_link(self) -> None:
        """End the link and ignore its later messages."""
        self._number += 1
        self.retry_at = None
        self._waiting = False
        if self.link is not None:
            self.link.close()
            self.link = None

    def _message(self, number: int, message: Pushed) -> None:
        if isinstance(message, (LateDelta, ReadingDelta)):  # nearly all
            self._delta(number, message)
            return
        if isinstance(message, Reading):
            self._reading(number, message)
            return
        listed = 0
        with self._lock:
            if number != self._number:
                return  # from an earlier link
            if isinstance(message, Static):
                before = {} if self._replace_known else self.facts.known
                message, self._identity = _identified(message, before)
                known = {gpu.uuid: gpu for gpu in map(inert_static, message.gpus)}
                if self._rebooted:
                    before = _without_replaced(before, known)
                known = {uuid: gpu for uuid, gpu in before.items() if uuid not in known and _is_read(gpu)} | known
                self._replace_known = self._rebooted = False
                self._facts = msgspec.structs.replace(self.facts, static=message, known=known)
                listed = len(known)
            elif isinstance(message, Hello):
                if self.facts.hello is not None and self.facts.hello.boot_id != message.boot_id:
                    self._widths, self._widest = [], {}  # cards may have moved to other slots
                    self._rebooted = True
                self._facts = msgspec.structs.replace(self.facts, hello=message)
                self._replace_known = message.job is not None
                self._hello_at = time.monotonic()
                self.tick()
        if listed > limits.GPUS:
            raise limits.Exceeded(f"listed {listed} different GPUs so far; at most {limits.GPUS} are accepted")

    def _reading(self, number: int, reading: Reading) -> None:
        with self._lock:
            if number != self._number:
                return
            self._apply()
            if self._identity:
                gpus = [
                    msgspec.structs.replace(gpu, uuid=self._identity.get(gpu.uuid, gpu.uuid)) for gpu in reading.gpus
                ]
                reading = msgspec.structs.replace(reading, gpus=gpus)
            self._whole = (number, reading.seq)
            self._waiting = False
            self._take(shared(reading, self._facts.reading), time.monotonic())
        self._changed()

    def _delta(self, number: int, delta: LateDelta | ReadingDelta) -> None:
        with self._lock:
            if number != self._number:
                return
            self._late.append((number, delta, time.monotonic()))
            # Without a reading of this link it is wrong; and numbers can decide whether GPUs were in use.
            if self._whole[0] != number or self._interval_s is None or self._rests_on_memory:
                self._apply()
                if self._wrong is not None and self._wrong[0] == number:
                    raise self._wrong[1]
        self._changed()

    def _apply(self) -> None:
        """Apply the newest deltas. The lock is held, here and in ``_take``."""
        late = list(self._late)
        self._late.clear()
        try:
            readings = [(self._applied(number, delta), arrived) for number, delta, arrived in late]
        except TransportError as error:
            self._wrong = late[0][0], error  # ``check`` ends the link: callers here may hold other locks
            return
        if readings:
            self._take(*readings[-1], readings[0] if len(readings) > 1 else None)

    def _applied(self, number: int, message: LateDelta | ReadingDelta) -> Reading:
        """Return the reading that a delta describes. Raises TransportError for one that fits no earlier reading."""
        reading = self._facts.reading
        delta = message.decode() if isinstance(message, LateDelta) else message
        if reading is None or self._whole != (number, delta.of) or len(reading.gpus) != len(delta.gpus):
            raise limits.Exceeded(f"sent changes to reading {delta.of}, which is not its last one")
        return applied(delta, reading)

    def _take(self, reading: Reading, arrived: float, before: tuple[Reading, float] | None = None) -> None:
        """Make ``reading`` the newest. ``before``: the one before and when it arrived, if it was never the newest."""
        old = self._facts
        steady = old.reading is not None and base_of(reading.gpus) is base_of(old.reading.gpus)
        if not steady or self._rests_on_memory:
            thresholds = self._thresholds
            self._busy = [gpu.uuid for gpu in reading.gpus if gpu.processes is None or counted(gpu, thresholds)]
            self._rests_on_memory = any(rests_on_memory(gpu, thresholds) for gpu in reading.gpus)
            for gpu in reading.gpus:
                self._last_busy.setdefault(gpu.uuid, arrived)
            widths = [(gpu.uuid, gpu.pcie_width) for gpu in reading.gpus if gpu.uuid in old.known]
            if widths != self._widths:
                self._widths = widths
                self._widest |= {uuid: max(self._widest.get(uuid, 0), width or 0) for uuid, width in widths}
                self._narrow = narrow_links(old.known.values(), reading.gpus, self._widest)
        self._last_busy |= dict.fromkeys(self._busy, arrived)
        if len(self._last_busy) > _LAST_BUSY:
            self._last_busy = {gpu.uuid: self._last_busy.get(gpu.uuid, arrived) for gpu in reading.gpus}
        if reading.claims_error is None and (reading.claims or self._held):
            held = frozenset((claim.uuid, claim.lease) for claim in reading.claims if claim.state == "live")
            self._last_busy |= dict.fromkeys((uuid for uuid, _ in held - self._held), arrived)
            self._held = held
        previous, previously = before or (old.reading, old.arrived)
        followed = arrived - previously <= self._thresholds.stale_min_s + reading.interval_s
        self._facts = NodeFacts(
            name=old.name,
            hello=old.hello,
            static=old.static,
            known=old.known,
            reading=reading,
            previous=previous if followed else None,
            arrived=arrived,
            last_busy=self._last_busy,
            narrow=self._narrow,
        )

    def _ended(self, number: int, error: TransportError) -> None:
        now = time.monotonic()
        with self._lock:
            if number != self._number:
                return
            self.failed_at = now
            self._waiting = False
            wait_s = self._routes.failed(self._route, error.kind, now)
            if error.kind == "no-python":
                error = self._without_python(error)
            self.failure = error
            if wait_s == 0.0:
                self._reopen(now)
                return
            self._failures = 1 if now - self._opened_at > self._timing.steady_s else self._failures + 1
            if error.kind == "limits":  # distrust everything that it has sent
                self._facts = NodeFacts(name=self.node.name)
                self._late.clear()
                self._last_busy, self._held = {}, frozenset()
            if self._routes.closed:  # the only route ended with its job
                self._facts = msgspec.structs.replace(self.facts, closed=True, error=None)
            else:
                self._facts = msgspec.structs.replace(self.facts, error=str(error))
            if self._interval_s is not None and not self._routes.closed:
                self.retry_at = now + (
                    backoff_s(self._failures, error.kind, self._timing) if wait_s is None else wait_s
                )
        self._changed()

    def _without_python(self, error: TransportError) -> TransportError:
        """Return the error of a node without python3; if the shell route fails too, with both reasons."""
        if self._route.shell and self._no_python is not None:
            return TransportError(error.kind, f"{self._no_python.words}, {error.words}", self._no_python.remedy)
        self._no_python = error
        return error


def _without_replaced(before: dict[str, GpuStatic], listed: dict[str, GpuStatic]) -> dict[str, GpuStatic]:
    """Return the GPUs of ``before``, by UUID, without those whose slot another GPU of ``listed`` has now."""
    slots = {gpu.pci_bus_id for gpu in listed.values() if gpu.pci_bus_id}
    return {uuid: gpu for uuid, gpu in before.items() if uuid in listed or gpu.pci_bus_id not in slots}


def _is_read(gpu: GpuStatic) -> bool:
    """Return whether a GPU has a UUID; the agent makes one for a GPU that was never readable."""
    return not gpu.uuid.startswith("unread-")


def _identified(static: Static, known: dict[str, GpuStatic]) -> tuple[Static, dict[str, str]]:
    """Return a list in which a GPU without a UUID is the one that had its index last, if that is missing.

    Else it would be shown twice, as lost and as unread. The second value has these UUIDs by what the agent sends.
    """
    listed = {gpu.uuid for gpu in static.gpus}
    missing = {gpu.index: gpu for uuid, gpu in known.items() if uuid not in listed and _is_read(gpu)}
    same = {gpu.uuid: missing[gpu.index] for gpu in static.gpus if not _is_read(gpu) and gpu.index in missing}
    if not same:
        return static, {}
    gpus = [same.get(gpu.uuid, gpu) for gpu in static.gpus]
    return msgspec.structs.replace(static, gpus=gpus), {sent: gpu.uuid for sent, gpu in same.items()}
