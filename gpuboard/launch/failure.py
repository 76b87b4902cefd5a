"""What the head concludes from events: which rank failed first and why, when to stop, the run's exit code (pure).

Times are passed in (monotonic seconds). The head acts on ``said`` (lines for the person), ``stop_reason`` and
``finished``.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection
from typing import Literal

import msgspec

from gpuboard.launch import events
from gpuboard.launch.events import LaunchEvent
from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.run_folder import RankView
from gpuboard.launch.timing import DEFAULT_TIMING, HeadTiming
from gpuboard.model.text import clean

# What a rank says when another one has gone: gloo, NCCL, the store's client, the socket layer under them.
_ECHO = re.compile(
    r"connection reset by peer|connection closed by peer|broken pipe|connection was likely closed|failed to recv|"
    r"socket closed|recvbytes|sendbytes|ncclremoteerror|remote process exited|connection refused|"
    r"timed out waiting for clients|store.*(shut ?down|closed)|heartbeat.*monitor",
    re.IGNORECASE,
)
_NOTICE_LINES = 20  # the end of a traceback says most


FailureKind = Literal["raised", "exit", "signal", "before-init", "node-lost", "node-stopped", "store-died", "stopped"]


class Cause(msgspec.Struct, frozen=True):
    """Why a run failed or was stopped."""

    kind: FailureKind
    rank: int | None
    node: str | None
    text: str
    evidence: str = ""
    echo: bool = False
    at: float = 0.0


class FailureWatch:
    """The state of all ranks of one run, and the judgement of its first failure."""

    def __init__(self, plan: LaunchPlan, timing: HeadTiming = DEFAULT_TIMING) -> None:
        ranks = {r.rank: (node.node, r) for node in plan.nodes for r in node.ranks}
        self.ranks = {rank: RankView(rank, node, r.local_rank, r.index) for rank, (node, r) in sorted(ranks.items())}
        self.exits: dict[int, events.Exited] = {}
        self.joined: set[int] = set()
        self.ended_nodes: set[str] = set()
        self.cause: Cause | None = None
        self.stop_reason: str | None = None  # set once: the head stops every node for it
        self.said: list[str] = []  # lines for the person, taken by the head
        self._timing = timing
        self._nodes = [node.node for node in plan.nodes]
        self._raised: dict[int, events.Raised] = {}
        self._candidates: list[Cause] = []
        self._forwarded: set[int] = set()
        self._last_error: dict[int, str] = {}

    # what happens

    def event(self, node: str, event: LaunchEvent, now: float) -> None:
        """Process one event of ``node``; an event about a rank of another node is ignored."""
        if not self.accepts(node, event):
            return
        if isinstance(event, events.Spawned):
            self._set(event.rank, pid=event.pid, state="importing")
        elif isinstance(event, events.Gate):
            self._set(event.rank, state="gate")
        elif isinstance(event, events.Joined):
            self.joined.add(event.rank)
        elif isinstance(event, events.Raised):
            self._take_raised(event, now)
        elif isinstance(event, events.Exited):
            self._take_exited(event, now)
        elif isinstance(event, events.Store):
            self._take_store(event, node, now)
        elif isinstance(event, events.NodeEnded):
            self.ended_nodes.add(node)
            if event.left:  # in an uninterruptible call of a driver or a file system
                self.said.append(
                    f"{node}: {event.left} processes of the run cannot be killed; they end when the kernel lets"
                )
        elif isinstance(event, events.Stopping):
            if self.stop_reason is None:
                text = f"{node}: {clean(event.reason)}; this node is stopped"
                self._candidates.append(Cause("node-stopped", None, node, text, at=now))
        elif isinstance(event, events.RunNotice):
            lines = [line for line in event.text.splitlines() if line.strip()]
            self.said += [f"{node}: {clean(line)}" for line in lines[-_NOTICE_LINES:]]

    def accepts(self, node: str, event: LaunchEvent) -> bool:
        """Return whether ``event`` concerns ``node`` as a whole or one of its own ranks."""
        rank = getattr(event, "rank", None)
        return rank is None or (rank in self.ranks and self.ranks[rank].node == node)

    def opened(self) -> None:
        """Note that the gate is open."""
        for rank, view in self.ranks.items():
            if view.state == "gate":
                self._set(rank, state="running")

    def last_words(self, rank: int, line: str, error: str) -> None:
        """Note the newest line of a rank's output, and of its stderr."""
        self._set(rank, last_line=clean(line, 200))
        self._last_error[rank] = error

    def forwarded(self, number: int) -> None:
        """Note that a signal was passed on to the ranks: one that ends a rank then is no riddle."""
        self._forwarded.add(number)

    def node_lost(self, node: str, words: str, now: float) -> None:
        """Take in that the connection to ``node`` is gone."""
        if node in self.ended_nodes:
            return
        self.ended_nodes.add(node)
        for rank, view in self.ranks.items():
            if view.node == node and rank not in self.exits:
                self._set(rank, state="lost")
        self._candidates.append(Cause("node-lost", None, node, f"{node}: the connection is gone: {words}", at=now))

    def stop(self, reason: str, now: float) -> None:
        """Take in that the person wants the run to end."""
        if self.cause is None:
            self.cause = Cause("stopped", None, None, reason, at=now)
        self._stop(reason)

    # what follows

    def tick(self, now: float) -> None:
        """Judge what has happened up to ``now``; sets ``cause``, ``stop_reason`` and adds to ``said``."""
        self._absent(now)
        if self.cause is None and self._candidates:
            self.cause = self._first(now)
            if self.cause is not None:
                self.said.append(self.cause.text)
                if self.cause.evidence:
                    self.said += [f"  {line}" for line in self.cause.evidence.splitlines()]
        if self.cause is not None and self.stop_reason is None:
            self._stop(f"rank {self.cause.rank} failed" if self.cause.rank is not None else self.cause.text)

    @property
    def ending(self) -> list[int]:
        """The rank that is on its way out with an exception of its own, while it may take its time for that."""
        if self.cause is None or self.cause.kind != "raised" or self.cause.rank is None:
            return []
        return [self.cause.rank] if self.cause.rank not in self.exits else []

    @property
    def running(self) -> list[int]:
        """The ranks whose processes have not ended, as far as their nodes can be heard."""
        return [r for r, view in self.ranks.items() if r not in self.exits and view.state != "lost"]

    @property
    def finished(self) -> bool:
        """Whether every rank has ended or is out of sight."""
        return not self.running

    @property
    def emptied(self) -> bool:
        """Whether every node has said that nothing is left, or is out of sight."""
        return self.ended_nodes.issuperset(self._nodes)

    def mark(self, rank: int, line: str) -> str:
        """Return words to put before a line of ``rank``: an echo of another rank's end is marked as such."""
        first = self.cause or next((c for c in self._candidates if not c.echo), None)
        if first is None or first.rank == rank or first.kind == "stopped" or not is_echo(line):
            return ""
        return f"(echo of rank {first.rank}) " if first.rank is not None else "(echo) "

    def exit_code(self) -> int:
        """Return the code of the run: 0 when all ranks ended well, else the first failing rank's own (128+n)."""
        if self.cause is None:
            return 0
        if self.cause.rank is None or self.cause.rank not in self.exits:
            return 1
        ended = self.exits[self.cause.rank]
        if (
            self.cause.kind == "raised"
            and self.stop_reason is not None
            and ended.signal in (signal.SIGTERM, signal.SIGKILL)
        ):
            return 1  # it was on its way out with an exception when it was stopped
        if ended.signal is not None:
            return 128 + ended.signal
        return ended.code or 1

    def summary(self) -> list[str]:
        """Return the last lines for the person: who failed, who followed."""
        if self.cause is None:
            return []
        others = [r for r, e in self.exits.items() if r != self.cause.rank and (e.code or e.signal)]
        lines = [f"first: {self.cause.text}"] if self.cause.kind != "stopped" else []
        if others and self.cause.kind != "stopped":
            lines.append(f"then: {rank_words(others)} ended because of that")
        return lines

    # inside

    def _set(self, rank: int, **changes: object) -> None:
        self.ranks[rank] = msgspec.structs.replace(self.ranks[rank], **changes)

    def _where(self, rank: int) -> str:
        view = self.ranks[rank]
        return f"rank {rank} ({view.node}:{view.index})"

    def _stop(self, reason: str) -> None:
        if self.stop_reason is None:
            self.stop_reason = reason

    def _first(self, now: float) -> Cause | None:
        """Return what came first; None while that is still waited for."""
        real = [c for c in self._candidates if not c.echo]
        first = (real or self._candidates)[0]
        waited = now - first.at >= self._timing.cause_wait_s
        if first.kind == "signal" and first.rank is not None and self.exits[first.rank].signal == signal.SIGTERM:
            # Who ends a node (Slurm, a shutdown) sends it to the ranks and to their supervisor, in any order.
            ends = [c for c in real if c.kind in {"node-stopped", "node-lost"}]
            return ends[0] if ends else first if self.emptied or waited else None
        return first if real or self.finished or waited else None

    def _take_raised(self, event: events.Raised, now: float) -> None:
        self._raised[event.rank] = event
        self._set(event.rank, state="failed")
        if self.stop_reason is not None:
            return
        message = clean(event.message, 400)
        place = f" at {clean(event.file)}:{event.line}" if event.file else ""
        place += f" in {clean(event.function)}" if event.function and event.function != "<module>" else ""
        while_words = {"import": " before init_process_group", "init": " in init_process_group"}.get(event.phase, "")
        what = clean(event.type) + (f": {message}" if message else "")
        text = f"{self._where(event.rank)} failed{while_words}: {what}{place}"
        echo = is_echo(f"{event.type}: {event.message}")
        self._candidates.append(Cause("raised", event.rank, self.ranks[event.rank].node, text, echo=echo, at=now))

    def _take_exited(self, event: events.Exited, now: float) -> None:
        self.exits[event.rank] = event
        if event.joined:
            self.joined.add(event.rank)
        well = event.code == 0 and event.rank not in self._raised
        killed = event.signal is not None and self.stop_reason is not None and event.rank not in self._raised
        self._set(event.rank, state="done" if well else "killed" if killed else "failed")
        if well or event.rank in self._raised or self.stop_reason is not None:
            return
        error = self._last_error.get(event.rank, "")
        evidence = event.oom or (f"its last line on stderr: {clean(error)}" if error else "")
        if event.signal is not None:
            forwarded = " (passed on from the head)" if event.signal in self._forwarded else ""
            how = f"was killed by {signal_name(event.signal)}{forwarded}" + (": out of memory" if event.oom else "")
        else:
            how = f"ended with exit code {event.code}"
        kind: FailureKind = "signal" if event.signal is not None else "exit"
        node = self.ranks[event.rank].node
        echo = is_echo(error) and event.oom is None and event.signal in (None, signal.SIGABRT)
        self._candidates.append(
            Cause(kind, event.rank, node, f"{self._where(event.rank)} {how}", evidence, echo=echo, at=now)
        )

    def _take_store(self, event: events.Store, node: str, now: float) -> None:
        if event.state == "died" and self.stop_reason is None and not self.finished:
            code = f" (exit code {event.code})" if event.code is not None else ""
            self._candidates.append(
                Cause("store-died", None, node, f"{node}: the ranks' meeting point, the store, died{code}", at=now)
            )

    def _absent(self, now: float) -> None:
        """Exit 0 before init, while another rank has joined: it would wait for the absent one until its timeout."""
        if self.cause is not None or not self.joined:
            return
        gone = [r for r, e in self.exits.items() if e.code == 0 and r not in self.joined and r not in self._raised]
        if not gone or any(c.rank in gone for c in self._candidates):
            return
        waiting = sorted(self.joined - self.exits.keys())
        if waiting:
            text = (
                f"{self._where(gone[0])} ended with exit code 0 before init_process_group; "
                f"{rank_words(waiting)} would wait for it in vain"
            )
            self._candidates.append(Cause("before-init", gone[0], self.ranks[gone[0]].node, text, at=now))


def is_echo(line: str) -> bool:
    """Return whether ``line`` is what a rank says when another one has gone."""
    return bool(_ECHO.search(line))


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; ``signal 99`` for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def rank_words(ranks: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2,5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) != 1 else ''} {words}"
