"""One node's feed: its link, its newest reading and when that arrived; connects again, with back-off, when lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.routes import Ladder, Route
from gpuboard.cluster.snapshot.views import NodeFacts, inert_static
from gpuboard.cluster.timing import TIMING, FleetTiming
from gpuboard.model.reading import Event, Hello, Reading, Static, shared
from gpuboard.model.state import Thresholds, counted, narrow_links, rests_on_memory
from gpuboard.shellprobe.connector import NodeConnector
from gpuboard.transport import limits
from gpuboard.transport.base import TransportError
from gpuboard.transport.link import AgentLink

if TYPE_CHECKING:
    from gpuboard.shellprobe.link import ShellLink

_REFUSED = frozenset({"auth", "host-key", "limits"})
_LAST_BUSY = 8192  # GPUs of which it is remembered when they were last in use; real ones are far fewer


def backoff_s(failures: int, kind: str, timing: FleetTiming = TIMING) -> float:
    """Return the pause after the ``failures``-th failure in a row (from 1), jittered so that clients spread out."""
    refused = kind in _REFUSED
    first = timing.backoff_refused_s if refused else timing.backoff_first_s
    most = timing.backoff_refused_most_s if refused else timing.backoff_most_s
    return min(most, first * 2.0 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0)


def next_tick_ms(now: float, interval_s: float) -> int:
    """Return milliseconds from ``now`` (epoch seconds) to the next multiple of the interval, the same for all nodes."""
    return max(1, round((interval_s - now % interval_s) * 1000))


class NodeFeed:
    """The feed of one node. ``facts`` is replaced whole, in the transport's thread; read it from any thread.

    ``answer_s``: how long its agent may take to the first reading, at least 10 s.
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
        self.facts = NodeFacts(name=node.name)
        self.link: AgentLink | ShellLink | None = None
        self.failed_at = 0.0  # when the last link was lost or not made
        self.retry_at: float | None = None  # when to connect again
        self._connector = connector
        self._thresholds = thresholds
        self._interval_s = interval_s
        self._timing = timing
        self._answer_s = max(timing.first_answer_s, answer_s)
        self._changed = changed
        self._lock = threading.RLock()  # not held while ``changed`` is called
        self._ladder = Ladder(node.job, local=node.host is None, timing=timing)
        self._way = Route()  # the one taken last
        self._known_as = ""  # its name for the scheduler, where the ways are the scheduler's
        self._number = 0  # of the link whose messages count
        self._anew = False  # what lists GPUs next may see those of its job alone: the others known are not lost
        self._no_python: TransportError | None = None
        self._over = False
        self._opened_at = 0.0
        self._hello_at = 0.0  # when the newest link's agent began
        self._waiting = False  # for the first reading of this link
        self._failures = 0
        self._last_busy: dict[str, float] = {}
        self._widths: list[tuple[str, int | None]] = []  # UUID and lanes of each GPU's PCIe link, as last read
        self._widest: dict[str, int] = {}  # UUID -> lanes of its PCIe link at most since its node was booted
        self._narrow: dict[str, str] = {}
        self._busy: list[str] = []  # the UUIDs of those in use in the newest reading
        self._rests_on_memory = False  # which these are may change with nothing but a number
        self._held: frozenset[tuple[str, str]] = frozenset()  # UUIDs with the leases on them, as last read
        self._config = {
            "node": node.name,
            "interval_s": interval_s,
            "claims_dir": node.claims_dir or claims_dir,
            "simulate": node.simulate,
            "now": True,
            "job": node.job,
        }

    @property
    def answered(self) -> bool:
        """Whether there is a reading or an error, or nothing to wait for."""
        return self.facts.reading is not None or self.facts.error is not None or self.facts.closed

    def open(self) -> None:
        """Connect, at once and without waiting; nothing happens where no way is permitted."""
        with self._lock:
            self._open()

    def permit(self, *, ssh: bool, jobs: Sequence[str], visits: Sequence[str] = (), known_as: str = "") -> None:
        """Take note in which ways the node may be reached from now on: by ssh, through these jobs of ours, or not.

        ``visits``: jobs of ours there that are no way themselves. ``known_as``: the node's name for those jobs.

        A connection that may stay does; any other one ends at once, and the next way is taken where there is one.
        """
        with self._lock:
            self._known_as = known_as
            new_job = self._ladder.permit(ssh=ssh, jobs=jobs, visits=visits)
            alive = self.link is not None and self.link.over is None
            if self._ladder.closed:
                self._leave()
                self.facts = msgspec.structs.replace(self.facts, closed=True, error=None)
            elif not (alive and self._ladder.permits(self._way)) and (
                alive or new_job or self.link is None or self.facts.closed
            ):
                self._leave()
                self.facts = msgspec.structs.replace(self.facts, closed=False, error=None)
                self._open()

    def close(self) -> None:
        """End the link, for good."""
        with self._lock:
            self._over = True
            self._leave()

    def tick(self) -> None:
        """Tell the agent when the next reading is due by the wall clock."""
        link = self.link
        if self._interval_s is not None and link is not None and link.hello is not None:
            link.tick(next_tick_ms(time.time(), self._interval_s))

    def look(self, now: float) -> None:
        """Do what time asks for: give up on a link without an answer or gone silent, connect again."""
        link = self.link
        if link is not None and link.over is None:
            silent_s = max(self._timing.silence_s, 10 * (self._interval_s or 0.0))
            began = max(self._hello_at, link.connected_at or now)
            if self._waiting and now - began > self._answer_s:
                link.drop(link.late(self._answer_s))
            elif self._interval_s is not None and link.hello is not None and now - link.last_line > silent_s:
                link.drop(TransportError("lost", f"the agent said nothing for {silent_s:.0f} s"))
            elif not isinstance(link, AgentLink):
                link.look(now)
        with self._lock:
            if self.retry_at is not None and now >= self.retry_at:
                self._open()
            elif self._interval_s is not None and self._ladder.agent_is_due(self._way, now) and not self._waiting:
                self._leave()
                self._open()

    def _open(self) -> None:
        """Take the way that is to be taken now. The lock is held, here and in ``_leave``."""
        self.retry_at = None
        way = self._ladder.way(time.monotonic())
        if way is None or self._over:
            return
        self._way = way
        self._number += 1
        self._opened_at = time.monotonic()
        self._waiting = True
        listener, ended = partial(self._message, self._number), partial(self._ended, self._number)
        host = self.node.host
        if host is not None and way.job is not None:
            host = self._known_as or host
        if way.shell:
            assert host is not None  # on this machine python3 is the one that runs us
            why = str(self._no_python)
            self.link = self._connector.open_shell(
                self.node.name, host, why, self._interval_s, listener=listener, ended=ended, job=way.job
            )
            return
        self.link = self._connector.open(
            self.node.name,
            host,
            role="node",
            config=self._config,
            listener=listener,
            ended=ended,
            job=way.job,
        )
        if self.link.hello is not None:
            self.tick()  # an agent started ahead can answer before we know its link

    def _leave(self) -> None:
        """End the link and hear no more of it."""
        self._number += 1
        self.retry_at = None
        self._waiting = False
        if self.link is not None:
            self.link.close()
            self.link = None

    def _message(self, number: int, message: Hello | Static | Reading | Event) -> None:
        if type(message) is Reading:  # nearly all; isinstance costs more
            self._reading(number, message)
            return
        listed = 0
        with self._lock:
            if number != self._number:
                return  # of a link that we have left
            if isinstance(message, Static):
                known = {gpu.uuid: gpu for gpu in map(inert_static, message.gpus)}
                if not self._anew:
                    known = self.facts.known | known
                self._anew = False
                self.facts = msgspec.structs.replace(self.facts, static=message, known=known)
                listed = len(known)
            elif isinstance(message, Hello):
                if self.facts.hello is not None and self.facts.hello.boot_id != message.boot_id:
                    self._widths, self._widest = [], {}  # cards may have changed their slots
                self.facts = msgspec.structs.replace(self.facts, hello=message)
                self._anew = message.job is not None
                self._hello_at = time.monotonic()
                self.tick()
        if listed > limits.GPUS:
            raise limits.Exceeded(f"has listed {listed} different GPUs by now; at most {limits.GPUS} are accepted")

    def _reading(self, number: int, reading: Reading) -> None:
        now = time.monotonic()
        with self._lock:
            if number != self._number:
                return
            self._waiting = False
            old = self.facts
            reading, steady = shared(reading, old.reading)
            if not steady or self._rests_on_memory:
                thresholds = self._thresholds
                self._busy = [gpu.uuid for gpu in reading.gpus if gpu.processes is None or counted(gpu, thresholds)]
                self._rests_on_memory = any(rests_on_memory(gpu, thresholds) for gpu in reading.gpus)
                for gpu in reading.gpus:
                    self._last_busy.setdefault(gpu.uuid, now)
                widths = [(gpu.uuid, gpu.pcie_width) for gpu in reading.gpus if gpu.uuid in old.known]
                if widths != self._widths:
                    self._widths = widths
                    self._widest |= {uuid: max(self._widest.get(uuid, 0), width or 0) for uuid, width in widths}
                    self._narrow = narrow_links(old.known.values(), reading.gpus, self._widest)
            self._last_busy |= dict.fromkeys(self._busy, now)
            if len(self._last_busy) > _LAST_BUSY:
                self._last_busy = {gpu.uuid: self._last_busy.get(gpu.uuid, now) for gpu in reading.gpus}
            if reading.claims_error is None:
                held = frozenset((claim.uuid, claim.lease) for claim in reading.claims if claim.state == "live")
                self._last_busy |= dict.fromkeys((uuid for uuid, _ in held - self._held), now)
                self._held = held
            followed = now - old.arrived <= self._thresholds.stale_min_s + reading.interval_s
            self.facts = NodeFacts(
                name=old.name,
                hello=old.hello,
                static=old.static,
                known=old.known,
                reading=reading,
                previous=old.reading if followed else None,
                steady=steady,
                arrived=now,
                last_busy=self._last_busy,
                narrow=self._narrow,
            )
        self._changed()

    def _ended(self, number: int, error: TransportError) -> None:
        now = time.monotonic()
        with self._lock:
            if number != self._number:
                return
            self.failed_at = now
            self._waiting = False
            wait_s = self._ladder.failed(self._way, error.kind, now)
            if error.kind == "no-python":
                error = self._without_python(error)
            if wait_s == 0.0:
                self._open()
                return
            self._failures = 1 if now - self._opened_at > self._timing.steady_s else self._failures + 1
            if error.kind == "limits":  # nothing that it has sent is believed
                self.facts = NodeFacts(name=self.node.name)
                self._last_busy, self._held = {}, frozenset()
            if self._ladder.closed:  # the only way has gone with its job
                self.facts = msgspec.structs.replace(self.facts, closed=True, error=None)
            else:
                self.facts = msgspec.structs.replace(self.facts, error=str(error))
            if self._interval_s is not None and not self._ladder.closed:
                self.retry_at = now + (
                    backoff_s(self._failures, error.kind, self._timing) if wait_s is None else wait_s
                )
        self._changed()

    def _without_python(self, error: TransportError) -> TransportError:
        """Return what is wrong where there is no python3; a shell adds what it has not found either."""
        if self._way.shell and self._no_python is not None:
            return TransportError(error.kind, f"{self._no_python.words}, {error.words}", self._no_python.remedy)
        self._no_python = error
        return error
