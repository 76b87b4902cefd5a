"""ShellLink: a node without python3, read through nvidia-smi by the lines of gpuboard/shellprobe/script.py. No I/O.

It stands in for an :class:`~gpuboard.transport.link.AgentLink` of role ``node`` and sends the same messages. It
holds no claims, sends no signals, and knows no leases of processes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from gpuboard.agent import proc
from gpuboard.agent.nvml import terms
from gpuboard.agent.smi import parse as smi
from gpuboard.agent.smi import process as smi_child
from gpuboard.agent.smi import xml as smi_xml
from gpuboard.model.decoding import json_decoder
from gpuboard.model.reading import Hello, Message, Reading, Reply, Static
from gpuboard.model.text import clean
from gpuboard.shellprobe import readings, script
from gpuboard.shellprobe.script import Frames, MalformedFrame, ShellFrame
from gpuboard.transport import limits
from gpuboard.transport.base import CallFailed, TransportError
from gpuboard.transport.link import Link, Listener, Pending

NO_SMI = "nor is there nvidia-smi"
_decoder = json_decoder(Message)


class ShellTiming(msgspec.Struct, frozen=True):
    """All in seconds."""

    first_s: float = 8.0  # the first reading is sent without values when nvidia-smi takes longer; feeds wait 10 s
    old_s: float = 20.0  # the last values are sent again, with their age, when a pass takes longer
    run_s: float = smi_child.RUN_S  # nvidia-smi is killed when it takes longer
    retry_s: float = 5.0  # wait after nvidia-smi has failed; doubles with every failure
    retry_most_s: float = 60.0


TIMING = ShellTiming()


class ShellLink(Link):
    """One node, from the script to the end of its connection.

    ``why``: what is wrong with python3 there; the error of every call but ``read``.
    ``interval_s`` None: the node is read once, and when asked; else at this interval, or a longer one where nvidia-smi
    is slow.
    """

    silent_since: None = None  # nvidia-smi is slow: a call may wait

    def __init__(
        self,
        node: str,
        why: str,
        interval_s: float | None,
        listener: Listener,
        ended: Callable[[TransportError], None],
        *,
        timing: ShellTiming = TIMING,
    ) -> None:
        nonce = os.urandom(8).hex().encode()
        super().__init__(node, script.SCRIPT + nonce + b"\n", listener, ended)
        self._why = why
        self._interval_s = interval_s
        self._timing = timing
        self._hangs = f"nvidia-smi: it has been running for {timing.run_s:.0f} s"
        self._frames = Frames(nonce)
        self._budget = limits.Budget()
        # Under the lock: used by the transport's thread, by callers and by the feed's.
        self._running: str | None = None  # the request that nvidia-smi runs for
        self._killed = False
        self._asked_at = 0.0
        self._passes = 0  # that have begun
        self._began = 0.0
        self._due: float | None = None  # when the next pass is
        self._reads: list[tuple[Pending, int]] = []  # with the number of passes when they came: a later one answers
        # Under this one: messages go out one after the other. Taken before the lock, never after it.
        self._sending = threading.RLock()
        self._sent_at = 0.0  # when the last reading went out
        self._gpus = readings.Gpus()
        self._host: dict[str, Any] = {}
        self._cpu: tuple[int, int] | None = None
        self._processes: dict[int, dict[str, Any]] = {}
        self._error: str | None = "nvidia-smi has not answered yet"
        self._fields = list(smi.FIELDS)
        self._bad = ""  # why the XML of this pass could not be read
        self._rows = b""
        self._period_s = terms.pause_s(0.0)
        self._retry_s = timing.retry_s
        self._seq = 0
        self._static: Static | None = None

    def tick(self, in_ms: int) -> None:
        """Nothing: nvidia-smi's cost decides when the next reading is due."""

    def look(self, now: float) -> None:
        """Do what is due: begin a pass, kill an nvidia-smi that hangs, send the last values again."""
        with self._lock:
            if self.hello is None or self._over is not None:
                return
            if self._running is not None:
                if now - self._asked_at > self._timing.run_s and not self._killed:
                    self._killed = True
                    self._request(script.KILL)  # under the lock: the next pass must not be killed in its place
            elif self._due is not None and now >= self._due:
                self._request(self._begin())
        limit_s = self._timing.old_s if self._sent_at else self._timing.first_s
        if now - (self._sent_at or self.connected_at or now) > limit_s:
            self._guard(self._send)

    def received(self, data: bytes) -> None:
        """Handle bytes from the transport."""

        def take() -> None:
            self._budget.spend(len(data) + limits.PIECE, time.monotonic())
            for frame in self._frames.take(data):
                if self._over is None:
                    self.last_line = time.monotonic()
                    self._answered(frame)

        self._guard(take)

    def _accept(self, pending: Pending, op: str, args: dict[str, Any]) -> bytes:
        if op != "read":
            pending.settle(CallFailed("no-python", self._why))
            return b""
        self._reads.append((pending, self._passes))
        return _line(self._begin()) if self.hello is not None and self._running is None else b""

    def _abandon(self) -> Iterable[Pending]:
        reads, self._reads = self._reads, []
        return [pending for pending, _ in reads]

    def _guard(self, act: Callable[[], None]) -> None:
        """Do what handles data of the node; data that is malformed or too much ends the link."""
        try:
            with self._sending:
                act()
        except limits.Exceeded as error:
            self.drop(error)
        except (MalformedFrame, msgspec.MsgspecError, ValueError, OverflowError) as error:
            remedy = "run `ssh NODE true` and see what it prints" if self.hello is None else ""
            self.drop(TransportError("lost", f"malformed answer: {clean(str(error), 200)}", remedy))

    def _answered(self, frame: ShellFrame) -> None:
        sections = {name: text.decode("utf-8", "replace") for name, text in frame.sections.items() if name != "listing"}
        self._host, self._cpu = readings.host(sections, self._cpu)
        if "none" in sections:
            self.drop(TransportError("no-python", NO_SMI))
        elif self.hello is None and "hello" in sections:
            self._greeted(sections["hello"])
        elif self._running is not None:
            self._processes = readings.processes(sections)
            self._ran(frame.sections.get("listing", b""), frame.sections.get("messages", b""))

    def _greeted(self, text: str) -> None:
        fields = readings.words(text)
        number = {name: int(fields[name]) for name in ("uid", "pid") if fields.get(name, "").isdecimal()}
        hello = _checked(
            Hello,
            hostname=fields.get("hostname", ""),
            boot_id=fields.get("boot", ""),
            uid=number.get("uid", -1),
            user=fields.get("user") or str(number.get("uid", "")),
            pid=number.get("pid", 0),
            python="",
            job=proc.parse_cgroup(text)[0],
        )
        with self._lock:
            self.hello = hello
            request = self._begin()
        self._listener(hello)
        self._request(request)

    def _ran(self, listing: bytes, messages: bytes) -> None:
        """Go on after a run of nvidia-smi: the pass is complete, or the next form of listing is asked for."""
        with self._lock:
            ran, killed = self._running, self._killed
        if killed:
            self._pass_ended(self._hangs)
            return
        try:
            if ran == script.LISTING:
                try:
                    self._gpus.take(smi_xml.read_xml(listing, messages), self._began)
                except smi.Bad as bad:
                    self._bad = str(bad)
                    self._ask(script.query(self._fields))
                    return
            elif ran != script.APPS:
                unknown = smi.not_a_field((listing + messages).decode("utf-8", "replace"))
                if unknown in self._fields:
                    self._fields.remove(unknown)
                    self._ask(script.query(self._fields))
                else:
                    self._rows = messages + b"\n" + listing
                    self._ask(script.APPS)
                return
            else:
                self._gpus.take(smi.read_csv(self._rows, listing, tuple(self._fields)), self._began)
        except smi.Bad as bad:
            self._pass_ended(f"nvidia-smi: {self._bad or bad}")
        else:
            self._pass_ended(None)

    def _pass_ended(self, error: str | None) -> None:
        """Send what the pass has found, answer the reads that came before it, and plan the next one."""
        now = time.monotonic()
        self._error = error
        if error is None:
            self._retry_s = self._timing.retry_s
            self._period_s = terms.pause_s(now - self._began)
            due = self._began + max(self._interval_s or 0.0, self._period_s)
        else:
            due = now + self._retry_s
            self._retry_s = min(2 * self._retry_s, self._timing.retry_most_s)
        self._send()
        with self._lock:
            self._running, self._killed, self._bad = None, False, ""
            self._due = due if self._interval_s is not None else None
            done = [pending for pending, after in self._reads if error is not None or after < self._passes]
            self._reads = [read for read in self._reads if read[0] not in done]
            request = self._begin() if self._reads else None
        for pending in done:
            settled = Reply(0, msgspec.Raw(b'{"seq":%d}' % self._seq)) if error is None else CallFailed("nvml", error)
            pending.settle(settled)
        self._request(request)

    def _send(self) -> None:
        assert self.hello is not None
        hostname, host = self.hello.hostname, self._host
        statics = self._gpus.statics(hostname)
        shared = terms.sharing(statics)
        static = _checked(
            Static,
            gpus=terms.lent(statics, shared, "memory_total", host.get("memory_total")),
            driver=self._gpus.driver,
            cuda=self._gpus.cuda,
            source="nvidia-smi",
        )
        if static != self._static:
            self._static = static
            limits.check_message(static, 0)
            self._listener(static)
        self._seq += 1
        gpus = self._gpus.readings(hostname, self._processes)
        reading = _checked(
            Reading,
            seq=self._seq,
            interval_s=max(self._interval_s, self._period_s) if self._interval_s else 0.0,
            gpus=terms.lent(gpus, shared, "memory_used", host.get("memory_used")),
            nvml_error=self._error or (self._hangs if self._killed else None),
            claims_error=self._why,
            **host,
        )
        limits.check_message(reading, 0)
        self._sent_at = time.monotonic()
        self._listener(reading)

    def _begin(self) -> str:
        """Begin a pass; return its request. The lock is held."""
        self._passes += 1
        self._began = self._asked_at = time.monotonic()
        self._due = None
        self._running = script.LISTING
        return self._running

    def _ask(self, request: str) -> None:
        with self._lock:
            self._running, self._asked_at = request, time.monotonic()
        self._request(request)

    def _request(self, request: str | None) -> None:
        if request is not None:
            self._write(_line(request))


def _line(request: str) -> bytes:
    return request.encode() + b"\n"


def _checked(kind: type[Any], **values: Any) -> Any:
    """Return a message as an agent would have sent it: encoded, and checked when decoded. Raises MsgspecError."""
    return _decoder.decode(msgspec.json.encode({"t": kind.__struct_config__.tag, **values}))
