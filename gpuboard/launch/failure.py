"""The root cause of a run's failure, judged from supervisors' events; when to stop; the run's exit code (pure).

Times are passed in (monotonic seconds). The head acts on ``messages``, ``stop_reason`` and ``finished``.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection
from typing import Literal

import msgspec

from gpuboard.launch import events
from gpuboard.launch.events import LaunchEvent
from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.run_folder import RankView
from gpuboard.launch.stalls.waits import RankStatus
from gpuboard.launch.timing import DEFAULT_TIMING, HeadTiming
from gpuboard.model.text import clean
from gpuboard.model.units import ranges

# Errors that a rank reports because another rank has gone: from gloo, NCCL, the store's client, sockets.
_SECONDARY = re.compile(
    r"connection reset by peer|connection closed by peer|broken pipe|connection was likely closed|failed to recv|"
    r"socket closed|recvbytes|sendbytes|ncclremoteerror|remote process exited|connection refused|"
    r"timed out waiting for clients|store.*(shut ?down|closed)|heartbeat.*monitor",
    re.IGNORECASE,
)
_NOTICE_LINES = 20  # of a longer notice: the end of a traceback names the error


FailureKind = Literal["raised", "exit", "signal", "before-init", "node-lost", "node-stopped", "store-died", "stopped"]


class Cause(msgspec.Struct, frozen=True):
    """Why a run failed or was stopped."""

    kind: FailureKind
    rank: int | None
    node: str | None
    text: str
    evidence: str = ""
    secondary: bool = False  # looks like the effect of another rank's failure
    at: float = 0.0


class FailureWatch:
    """The state of all ranks of one run, and the root cause of its failure."""

    def __init__(self, plan: LaunchPlan, timing: HeadTiming = DEFAULT_TIMING) -> None:
        ranks = {r.rank: (node.node, r) for node in plan.nodes for r in node.ranks}
        self.ranks = {rank: RankView(rank, node, r.local_rank, r.index) for rank, (node, r) in sorted(ranks.items())}
        self.exits: dict[int, events.Exited] = {}
        self.joined: set[int] = set()
        self.ended_nodes: set[str] = set()
        self.cause: Cause | None = None
        self.stop_reason: str | None = None  # set once; the head then stops every node
        self.messages: list[str] = []  # lines for the user; the head prints and removes them
        self._timing = timing
        self._nodes = [node.node for node in plan.nodes]
        self._raised: dict[int, events.Raised] = {}
        self._candidates: list[Cause] = []
        self._forwarded: set[int] = set()  # signals that the head has sent to the ranks
        self._last_error: dict[int, str] = {}

    # input

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
            self._on_raised(event, now)
        elif isinstance(event, events.Exited):
            self._on_exited(event, now)
        elif isinstance(event, events.Store):
            self._on_store(event, node, now)
        elif isinstance(event, events.NodeEnded):
            self.ended_nodes.add(node)
            if event.left:
                stuck = "processes in uninterruptible sleep (driver or file system) cannot be killed yet"
                self.messages.append(f"{node}: {stuck}: {event.left}")
        elif isinstance(event, events.Stopping):
            if self.stop_reason is None:
                text = f"{node}: {clean(event.reason)}; its ranks are being stopped"
                self._candidates.append(Cause("node-stopped", None, node, text, at=now))
        elif isinstance(event, events.RunNotice):
            lines = [line for line in event.text.splitlines() if line.strip()]
            self.messages += [f"{node}: {clean(line)}" for line in lines[-_NOTICE_LINES:]]

    def accepts(self, node: str, event: LaunchEvent) -> bool:
        """Return whether ``event`` concerns ``node`` as a whole or one of its own ranks."""
        rank = getattr(event, "rank", None)
        return rank is None or (rank in self.ranks and self.ranks[rank].node == node)

    def gate_opened(self) -> None:
        """Mark the ranks that wait at the gate as running."""
        for rank, view in self.ranks.items():
            if view.state == "gate":
                self._set(rank, state="running")

    def note_output(self, rank: int, line: str, error: str) -> None:
        """Record the newest line of a rank's output, and of its stderr."""
        self._set(rank, last_line=clean(line, 200))
        self._last_error[rank] = error

    def note_forwarded(self, number: int) -> None:
        """Record that the head forwarded a signal to the ranks: it explains a rank that this signal ends."""
        self._forwarded.add(number)

    def node_lost(self, node: str, reason: str, now: float) -> None:
        """Record that nothing more is known of ``node``."""
        if node in self.ended_nodes:
            return
        self.ended_nodes.add(node)
        for rank, view in self.ranks.items():
            if view.node == node and rank not in self.exits:
                self._set(rank, state="lost")
        self._candidates.append(Cause("node-lost", None, node, f"{node}: {reason}", at=now))

    def stop(self, reason: str, now: float) -> None:
        """Stop the run at the user's request."""
        if self.cause is None:
            self.cause = Cause("stopped", None, None, reason, at=now)
        self._stop(reason)

    # conclusions

    def tick(self, now: float) -> None:
        """Evaluate the events up to ``now``: set ``cause`` and ``stop_reason``, add to ``messages``."""
        self._check_early_exit(now)
        if self.cause is None and self._candidates:
            self.cause = self._root_cause(now)
            if self.cause is not None:
                self.messages.append(self.cause.text)
                if self.cause.evidence:
                    self.messages += [f"  {line}" for line in self.cause.evidence.splitlines()]
        if self.cause is not None and self.stop_reason is None:
            self._stop(f"rank {self.cause.rank} failed" if self.cause.rank is not None else self.cause.text)

    @property
    def exiting(self) -> list[int]:
        """The rank that failed first with an exception and is still exiting: it may finish its exit handlers."""
        if self.cause is None or self.cause.kind != "raised" or self.cause.rank is None:
            return []
        return [self.cause.rank] if self.cause.rank not in self.exits else []

    @property
    def running(self) -> list[int]:
        """The ranks whose processes have not ended, without those of lost nodes."""
        return [r for r, view in self.ranks.items() if r not in self.exits and view.state != "lost"]

    @property
    def finished(self) -> bool:
        """Whether every rank has ended or is on a lost node."""
        return not self.running

    @property
    def emptied(self) -> bool:
        """Whether every node has reported that no process of the run is left, or is lost."""
        return self.ended_nodes.issuperset(self._nodes)

    def mark(self, rank: int, line: str) -> str:
        """Return the prefix for an output line of ``rank``: "" unless it reports a secondary failure."""
        first = self.cause or next((c for c in self._candidates if not c.secondary), None)
        if first is None or first.rank == rank or first.kind == "stopped" or not is_secondary(line):
            return ""
        return f"(caused by rank {first.rank}) " if first.rank is not None else "(secondary failure) "

    def exit_code(self) -> int:
        """Return the run's exit code: 0 when all ranks succeeded, else that of the root cause's rank (128+n)."""
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
            return 1  # an uncaught exception, whose exit handlers were cut short by our own signal
        if ended.signal is not None:
            return 128 + ended.signal
        return ended.code or 1

    def summary(self) -> list[str]:
        """Return the closing lines for the user: the root cause and the ranks that failed because of it."""
        if self.cause is None or self.cause.kind == "stopped":
            return []
        others = [r for r, e in self.exits.items() if r != self.cause.rank and (e.code or e.signal)]
        return [f"root cause: {self.cause.text}"] + ([f"secondary failures: {rank_words(others)}"] if others else [])

    def statuses(self, quiet_s: Callable[[int, float], float | None], now: float) -> list[RankStatus]:
        """Return what is known of every rank, for an inspection."""
        return [
            RankStatus(
                rank,
                view.node,
                view.index,
                importing=view.state in {"waiting", "importing"},
                joined=rank in self.joined,
                ended=rank in self.exits or view.state == "lost",
                exit_code=self.exits[rank].code if rank in self.exits else None,
                quiet_s=quiet_s(rank, now),
                last_error=self._last_error.get(rank, ""),
            )
            for rank, view in self.ranks.items()
        ]

    # details

    def _set(self, rank: int, **changes: object) -> None:
        self.ranks[rank] = msgspec.structs.replace(self.ranks[rank], **changes)

    def _where(self, rank: int) -> str:
        view = self.ranks[rank]
        return f"rank {rank} ({view.node}:{view.index})"

    def _stop(self, reason: str) -> None:
        if self.stop_reason is None:
            self.stop_reason = reason

    def _root_cause(self, now: float) -> Cause | None:
        """Return the first failure that is not secondary; None while one may still arrive."""
        primary = [c for c in self._candidates if not c.secondary]
        first = (primary or self._candidates)[0]
        waited = now - first.at >= self._timing.cause_wait_s
        if first.kind == "signal" and first.rank is not None and self.exits[first.rank].signal == signal.SIGTERM:
            # Slurm and a shutdown send SIGTERM to the ranks and to their supervisor, in any order.
            ends = [c for c in primary if c.kind in {"node-stopped", "node-lost"}]
            return ends[0] if ends else first if self.emptied or waited else None
        return first if primary or self.finished or waited else None

    def _on_raised(self, event: events.Raised, now: float) -> None:
        self._raised[event.rank] = event
        self._set(event.rank, state="failed")
        if self.stop_reason is not None:
            return
        message = clean(event.message, 400)
        place = f" at {clean(event.file)}:{event.line}" if event.file else ""
        place += f" in {clean(event.function)}" if event.function and event.function != "<module>" else ""
        phase = {"import": " before init_process_group", "init": " in init_process_group"}.get(event.phase, "")
        what = clean(event.type) + (f": {message}" if message else "")
        text = f"{self._where(event.rank)} failed{phase}: {what}{place}"
        secondary = is_secondary(f"{event.type}: {event.message}")
        self._candidates.append(
            Cause("raised", event.rank, self.ranks[event.rank].node, text, secondary=secondary, at=now)
        )

    def _on_exited(self, event: events.Exited, now: float) -> None:
        self.exits[event.rank] = event
        if event.joined:
            self.joined.add(event.rank)
        succeeded = event.code == 0 and event.rank not in self._raised
        killed = event.signal is not None and self.stop_reason is not None and event.rank not in self._raised
        self._set(event.rank, state="done" if succeeded else "killed" if killed else "failed")
        if succeeded or event.rank in self._raised or self.stop_reason is not None:
            return
        error = self._last_error.get(event.rank, "")
        evidence = event.oom or (f"last line on stderr: {clean(error)}" if error else "")
        if event.signal is not None:
            forwarded = " (forwarded by `gpuboard launch`)" if event.signal in self._forwarded else ""
            how = f"was killed by {signal_name(event.signal)}{forwarded}" + (": out of memory" if event.oom else "")
        else:
            how = f"ended with exit code {event.code}"
        kind: FailureKind = "signal" if event.signal is not None else "exit"
        node = self.ranks[event.rank].node
        secondary = is_secondary(error) and event.oom is None and event.signal in (None, signal.SIGABRT)
        self._candidates.append(
            Cause(kind, event.rank, node, f"{self._where(event.rank)} {how}", evidence, secondary=secondary, at=now)
        )

    def _on_store(self, event: events.Store, node: str, now: float) -> None:
        if event.state == "died" and self.stop_reason is None and not self.finished:
            how = "" if event.code is None else f": exit code {event.code}"
            if event.code is not None and event.code < 0:
                how = f": killed by {signal_name(-event.code)}"
            self._candidates.append(
                Cause("store-died", None, node, f"{node}: the rendezvous store of the ranks died{how}", at=now)
            )

    def _check_early_exit(self, now: float) -> None:
        """Report a rank that exited with 0 before init while another has joined and would wait until its timeout."""
        if self.cause is not None or not self.joined:
            return
        gone = [r for r, e in self.exits.items() if e.code == 0 and r not in self.joined and r not in self._raised]
        if not gone or any(c.rank in gone for c in self._candidates):
            return
        waiting = sorted(self.joined - self.exits.keys())
        if waiting:
            text = (
                f"{self._where(gone[0])} ended with exit code 0 before init_process_group; "
                f"{rank_words(waiting)} would wait for it until the timeout"
            )
            self._candidates.append(Cause("before-init", gone[0], self.ranks[gone[0]].node, text, at=now))


def is_secondary(line: str) -> bool:
    """Return whether ``line`` is an error that follows from the end of another rank."""
    return bool(_SECONDARY.search(line))


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; ``signal 99`` for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def rank_words(ranks: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2,5``."""
    return f"rank{'s' if len(ranks) != 1 else ''} {ranges(ranks)}"
