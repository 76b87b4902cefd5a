"""ShellLink: a node without python3, read through nvidia-smi by the lines of gpuboard/shellprobe/script.py. No I/O.

It stands where an :class:`~gpuboard.transport.link.AgentLink` of role ``node`` would and says the same messages. It can
do nothing else: hold no claims, send no signals, and it knows no leases of processes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from gpuboard.agent import proc
from gpuboard.agent.nvml import terms
from gpuboard.agent.smi import parse as smi
from gpuboard.agent.smi import process as smi_child
from gpuboard.agent.smi import xml as smi_xml
from gpuboard.model.reading import Hello, Message, Reading, Reply, Static
from gpuboard.model.text import clean
from gpuboard.shellprobe import facts, script
from gpuboard.shellprobe.frames import Frames, MalformedFrame, ShellAnswer
from gpuboard.shellprobe.gpus import Gpus
from gpuboard.transport import limits
from gpuboard.transport.base import CallFailed, Channel, LinkLost, TransportError
from gpuboard.transport.link import Listener, Pending, late

FIRST_S = 8.0  # the first reading waits so long for nvidia-smi
OLD_S = 20.0  # a later one goes out with what is there
RETRY_S = (5.0, 60.0)  # first and longest wait after nvidia-smi has failed
NO_SMI = "nor is there nvidia-smi"
_HANGS = f"nvidia-smi: it has not ended for {smi_child.RUN_S:.0f} s"
_decoder = msgspec.json.Decoder(Message)


class ShellLink:
    """One node, from the script to the end of its connection.

    ``why``: what is wrong with python3 there, in the words that whoever asks for more than readings gets.
    ``interval_s`` None: it is read once, and when asked; else as often, but as seldom as nvidia-smi's cost demands.
    """

    def __init__(
        self, node: str, why: str, interval_s: float | None, listener: Listener, ended: Callable[[TransportError], None]
    ) -> None:
        self.node = node
        self.hello: Hello | None = None
        self.connected_at: float | None = None  # when the shell was asked for; monotonic, as all times here
        self.last_line = 0.0  # when the last answer arrived
        self._why = why
        self._interval_s = interval_s
        self._listener = listener
        self._ended = ended
        nonce = os.urandom(8).hex().encode()
        self._opening = script.SCRIPT + nonce + b"\n"
        self._frames = Frames(nonce)
        self._budget = limits.Budget()
        self._channel: Channel | None = None
        self._lock = threading.Lock()  # what follows is used by the transport's thread and by those who ask
        self._over: TransportError | None = None
        self._running = ""  # the request for which nvidia-smi runs
        self._killed = False
        self._asked_at = 0.0
        self._passes = 0  # that have begun
        self._began = 0.0
        self._due: float | None = None  # when the next pass is
        self._reads: list[tuple[Pending, int]] = []  # each is answered by a pass after that one
        self._describing = False  # processes and host have been asked for
        self._told_at = 0.0  # when the last reading went out
        # and this by the transport's thread alone
        self._gpus = Gpus()
        self._error: str | None = "nvidia-smi has not answered yet"
        self._fields = list(smi.FIELDS)
        self._xml = b""
        self._bad = ""
        self._period_s = terms.pause_s(0.0)
        self._retry_s = RETRY_S[0]
        self._seq = 0
        self._static: Static | None = None
        self._cpu: tuple[int, int] | None = None

    silent_since: None = None  # nvidia-smi takes its time

    @property
    def over(self) -> TransportError | None:
        """Why the link has ended; None while it lives."""
        return self._over

    def attach(self, channel: Channel) -> None:
        """Start talking over ``channel``."""
        self._channel = channel
        channel.write(self._opening)
        if self._over is not None:
            channel.close()

    def submit(self, op: str, args: dict[str, Any]) -> Pending:
        """Take a call and return at once; only ``read`` can be answered here."""
        pending = Pending(self.node, op)
        with self._lock:
            over = self._over
            reads = over is None and op == "read"
            if reads:
                self._reads.append((pending, self._passes))
                if self.hello is not None and not self._running and not self._describing:
                    self._begin(time.monotonic())
        if over is not None:
            pending.settle(LinkLost(self.node, over.words))
        elif not reads:
            pending.settle(CallFailed("no-python", self._why))
        return pending

    def tick(self, in_ms: int) -> None:
        """Nothing: readings come when nvidia-smi has been asked, which its cost decides."""

    def look(self, now: float) -> None:
        """Do what time asks for: begin a pass, end an nvidia-smi that hangs, say again what is known."""
        with self._lock:
            if self.hello is None or self._over is not None:
                return
            if self._running:
                if now - self._asked_at > smi_child.RUN_S and not self._killed:
                    self._killed = True
                    self._write("k")
            elif self._due is not None and now >= self._due and not self._describing:
                self._begin(now)
            patience_s = OLD_S if self._told_at else FIRST_S
            if now - (self._told_at or self.connected_at or now) > patience_s and not self._describing:
                self._describe()

    def late(self, seconds: float) -> TransportError:
        """Return what it means that no reading has come for ``seconds``."""
        return late(self.hello, seconds, "")

    def close(self) -> None:
        """End the connection at once; calls on their way fail with LinkLost."""
        self._finish(TransportError("lost", "closed"), told=False)

    def drop(self, error: TransportError) -> None:
        """End the connection for a reason of ours, and tell it as any other end."""
        self._finish(error, told=True)

    def connected(self) -> None:
        """Take note that the transport has reached the node."""
        self.connected_at = time.monotonic()

    def received(self, data: bytes) -> None:
        """Take bytes from the transport."""
        try:
            self._budget.spend(len(data) + limits.PIECE, time.monotonic())
            for answer in self._frames.take(data):
                if self._over is None:
                    self.last_line = time.monotonic()
                    self._answered(answer)
        except limits.Exceeded as error:
            self._finish(error, told=True)
        except (MalformedFrame, msgspec.MsgspecError, ValueError, OverflowError) as error:
            remedy = "run `ssh NODE true` and see what it prints" if self.hello is None else ""
            self._finish(TransportError("lost", f"malformed answer: {clean(str(error), 200)}", remedy), told=True)

    def ended(self, error: TransportError) -> None:
        """Take note that the transport's channel is over."""
        self._finish(error, told=True)

    def _answered(self, answer: ShellAnswer) -> None:
        if answer.request == "none":
            self._finish(TransportError("no-python", NO_SMI), told=True)
        elif answer.request == "hello" and self.hello is None:
            self._greeted(_text(answer.said.get("start", b"")))
        elif answer.request == "p" and self.hello is not None:
            self._described(self.hello.hostname, {name: _text(lines) for name, lines in answer.said.items()})
        elif answer.request == self._running:
            self._ran(answer)

    def _greeted(self, text: str) -> None:
        said = facts.words(text)
        number = {name: int(said[name]) for name in ("uid", "pid") if said.get(name, "").isdecimal()}
        self.hello = hello = _checked(
            Hello,
            hostname=said.get("hostname", ""),
            boot_id=said.get("boot", ""),
            uid=number.get("uid", -1),
            user=said.get("user") or str(number.get("uid", "")),
            pid=number.get("pid", 0),
            python="",
            job=proc.parse_cgroup(text)[0],
        )
        self._listener(hello)
        with self._lock:
            self._begin(time.monotonic())

    def _ran(self, answer: ShellAnswer) -> None:
        """Go on after nvidia-smi has ended: with the listing that it made, or with another way to ask for one."""
        with self._lock:
            self._running, killed, self._killed = "", self._killed, False
        if killed:
            self._failed(_HANGS)
            return
        listing: smi.Listing | None = None
        try:
            if answer.request == "c":
                listing = self._queried(answer)
            else:
                messages = answer.said.get("messages", b"")
                self._xml = answer.said.get("xml", self._xml)
                listing = smi_xml.read_xml(self._xml, messages)
                if len(listing.gpus) < listing.count and answer.request == "q":
                    listing = None
        except smi.Bad as bad:
            self._bad = self._bad or str(bad)
            if answer.request == "c":
                self._failed(f"nvidia-smi: {self._bad}")
                return
            if answer.request == "e":
                self._bad = str(bad)
        if listing is not None:
            self._listed(listing)
        elif answer.request == "q":
            self._ask("e")
        else:
            self._ask("c", ",".join(self._fields))

    def _queried(self, answer: ShellAnswer) -> smi.Listing | None:
        """Return what the queries say; None when a field is unknown to this driver and must be left out. Raises Bad."""
        rows = answer.said.get("rows", b"")
        unknown = smi.not_a_field(_text(rows))
        if unknown in self._fields:
            self._fields.remove(unknown)
            return None
        return smi.read_csv(rows, answer.said.get("apps", b""), tuple(self._fields))

    def _listed(self, listing: smi.Listing) -> None:
        now = time.monotonic()
        self._gpus.take(listing, self._began)
        self._error = None
        self._retry_s = RETRY_S[0]
        self._period_s = terms.pause_s(now - self._began)
        with self._lock:
            if self._interval_s is not None:
                self._due = self._began + max(self._interval_s, self._period_s)
            self._describe()

    def _failed(self, words: str) -> None:
        self._error = words
        reads = self._taken(self._passes + 1)
        with self._lock:
            self._due = time.monotonic() + self._retry_s if self._interval_s is not None else None
            self._describe()
        self._retry_s = min(2 * self._retry_s, RETRY_S[1])
        for pending in reads:
            pending.settle(CallFailed("nvml", self._error))

    def _described(self, hostname: str, said: dict[str, str]) -> None:
        """Send the reading for which processes and host were the last things missing."""
        with self._lock:
            self._describing = False
            self._told_at = time.monotonic()
        host, self._cpu = facts.host(said, self._cpu)
        statics = self._gpus.statics(hostname)
        readings = self._gpus.readings(hostname, facts.processes(said))
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
        reading = _checked(
            Reading,
            seq=self._seq,
            interval_s=max(self._interval_s, self._period_s) if self._interval_s else 0.0,
            gpus=terms.lent(readings, shared, "memory_used", host.get("memory_used")),
            nvml_error=self._error or (_HANGS if self._killed else None),
            claims_error=self._why,
            **host,
        )
        limits.check_message(reading, 0)
        self._listener(reading)
        if self._error is None and not self._running:
            for pending in self._taken(self._passes):
                pending.settle(Reply(0, msgspec.Raw(b'{"seq":%d}' % self._seq)))
        with self._lock:
            if self._reads and not self._running:
                self._begin(time.monotonic())

    def _taken(self, passes: int) -> list[Pending]:
        """Return the reads that were asked for before pass number ``passes`` began, and forget them."""
        with self._lock:
            done = [pending for pending, after in self._reads if after < passes]
            self._reads = [(pending, after) for pending, after in self._reads if after >= passes]
        return done

    def _begin(self, now: float) -> None:
        self._passes += 1
        self._began = now
        self._due = None
        self._bad = ""
        self._run("q", "")

    def _ask(self, request: str, rest: str = "") -> None:
        with self._lock:
            self._run(request, rest)

    def _run(self, request: str, rest: str) -> None:
        self._running, self._asked_at = request, time.monotonic()
        self._write(f"{request} {rest}")

    def _describe(self) -> None:
        self._describing = True
        self._write("p " + " ".join(map(str, self._gpus.pids)))

    def _write(self, line: str) -> None:
        if self._channel is not None and self._over is None:
            self._channel.write(line.encode() + b"\n")

    def _finish(self, error: TransportError, *, told: bool) -> None:
        with self._lock:
            if self._over is not None:
                return
            self._over = error
            reads, self._reads = self._reads, []
        if self._channel is not None:
            self._channel.close()
        for pending, _ in reads:
            pending.settle(LinkLost(self.node, error.words))
        if told:
            self._ended(error)


def _checked(kind: type[Any], **values: Any) -> Any:
    """Return a message as it would have come from an agent: encoded, and checked when decoded. Raises MsgspecError."""
    return _decoder.decode(msgspec.json.encode({"t": kind.__struct_config__.tag, **values}))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
