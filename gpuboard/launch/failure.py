"""The root cause of a run's failure, judged from supervisors' events; when to stop; the run's exit code (pure).

Times are passed in (monotonic seconds). The head acts on ``messages``, ``stop_reason`` and ``finished``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

import msgspec

from gpuboard.launch import events
from gpuboard.launch.causes.cause import Cause, FailureKind, symptom_of
from gpuboard.launch.causes.effects import Failures, among_effects, earlier_than
from gpuboard.launch.causes.exits import code_text, cuda_memory_text, signal_name, signal_text, without_advice
from gpuboard.launch.causes.raised import hint, judged
from gpuboard.launch.causes.stderr import CHILD_FAILED
from gpuboard.launch.events import LaunchEvent
from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.runs.folder import RankView, VerdictView
from gpuboard.launch.stalls.differences import difference, evidence_of, last_calls, merged
from gpuboard.launch.stalls.evidence import RankEvidence
from gpuboard.launch.stalls.waits import RankStatus, rank_words
from gpuboard.launch.stalls.words import exit_place
from gpuboard.launch.timing import DEFAULT_TIMING, HeadTiming
from gpuboard.model.text import clean

_COMPARE_S = 3.0  # longest wait for the collectives of other ranks after a failure that they may explain
_OF_A_NODE = frozenset({"node-lost", "node-stopped", "store-died"})
_NOTICE_LINES = 20  # of a longer notice: the end of a traceback names the error


class FailureWatch:
    """The state of all ranks of one run, and the root cause of its failure."""

    def __init__(self, plan: LaunchPlan, timing: HeadTiming = DEFAULT_TIMING) -> None:
        ranks = {r.rank: (node.node, r) for node in plan.nodes for r in node.ranks}
        self.ranks = {rank: RankView(rank, node, r.local_rank, r.index) for rank, (node, r) in sorted(ranks.items())}
        self.exits: dict[int, events.Exited] = {}
        self.joined: set[int] = set()
        self._apart: set[int] = set()  # ranks whose process group has another number of ranks than the run
        self._disconnected: set[int] = set()  # ranks that run on without a channel: they may have joined
        self._left: dict[int, tuple[float, int]] = {}  # ranks that ended without an exception → when, exit code
        self._exit_places: dict[int, tuple[int, str]] = {}  # rank → the code of its sys.exit(), and where
        self.ended_nodes: set[str] = set()
        self.cause: Cause | None = None
        self.stop_reason: str | None = None  # set once; the head then stops every node
        self.elsewhere: dict[int, str] = {}  # rank that takes part in no collective → what it does, after "which"
        self.places_wanted: bool | None = None  # the places of the ranks may explain a failure; False: they were read
        self.comparing = False  # the collectives and places of the ranks are being read
        self.messages: list[str] = []  # lines for the user; the head prints and removes them
        self.gpu_processes: dict[str, dict[int, str]] = {}  # node → pid → user and command, if the GPUs were read
        self._timing = timing
        self._stdin_rank = plan.options.stdin_rank
        self._reports_exceptions = plan.target.kind != "program"
        self._nodes = [node.node for node in plan.nodes]
        self._raised: dict[int, events.Raised] = {}
        self._candidates: list[Cause] = []
        self._forwarded: set[int] = set()  # signals that the head has sent to the ranks
        self._collectives: dict[int, RankEvidence] = {}  # what was last seen of them
        self._last_error: dict[int, str] = {}
        self._root_error: dict[int, str] = {}  # that explains the newest one
        self._last_words: dict[int, str] = {}  # the last line of stdout
        self._store_code: int | None = None  # exit code of the store, or the signal that ended it, negative

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
            if not event.all_ranks:
                self._apart.add(event.rank)
        elif isinstance(event, events.Disconnected):
            self._disconnected.add(event.rank)
        elif isinstance(event, events.Leaving):
            self._left[event.rank] = now, event.code
            self._exit_places[event.rank] = event.code, clean(event.place, 400)
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
                kind: FailureKind = "node-lost" if event.killed else "node-stopped"
                self._candidates.append(Cause(kind, None, node, text, at=now))
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

    def note_output(self, rank: int, line: str, error: str = "") -> None:
        """Record the newest line of a rank's output, and the newest error on its stderr."""
        self._set(rank, last_line=clean(line, 200))
        self._last_error[rank] = error

    def note_end_of_output(self, rank: int, root_error: str, last_words: str) -> None:
        """Record the error on a rank's stderr that explains the newest one, and the last line of its stdout; or ""."""
        self._root_error[rank] = root_error
        self._last_words[rank] = clean(last_words, 200)

    def note_evidence(self, line: str) -> None:
        """Add evidence that was found after the failure."""
        if self.cause is not None:
            lines = [*self.cause.evidence.splitlines(), line]
            self.cause = msgspec.structs.replace(self.cause, evidence="\n".join(lines))

    def note_collectives(self, found: Iterable[RankEvidence]) -> None:
        """Record the newest collectives of ranks, which may explain a failure."""
        for one in found:
            if one.collectives is not None:
                self._collectives[one.rank] = merged(self._collectives.get(one.rank), one)

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

    def stalled(self, verdict: VerdictView, now: float) -> None:
        """Let a stalled run fail (--on-stall kill), unless it has failed already."""
        if self.cause is not None:
            return
        self.cause = Cause("stalled", verdict.rank, verdict.node, verdict.text, verdict.evidence, at=now)
        self._stop("the run is stalled (--on-stall kill)")

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
            if self.cause.rank is not None and self.cause.kind not in {"timeout", "left-group"}:
                self._stop(f"rank {self.cause.rank} failed")
            else:
                self._stop(self.cause.text if self.cause.kind in _OF_A_NODE else "the run failed")

    @property
    def exiting(self) -> list[int]:
        """The rank that failed first and is still exiting: it may finish its exit handlers."""
        if self.cause is None or self.cause.kind not in {"raised", "exit"} or self.cause.rank is None:
            return []
        return [self.cause.rank] if self.cause.rank not in self.exits else []

    @property
    def unexplained(self) -> bool:
        """Whether ranks have failed in a way that their collectives may explain."""
        return any(c.symptom in {"mismatch", "timeout"} for c in self._candidates)

    @property
    def running(self) -> list[int]:
        """The ranks whose processes have not ended, without those of lost nodes."""
        return [r for r, view in self.ranks.items() if r not in self.exits and view.state != "lost"]

    @property
    def finished(self) -> bool:
        """Whether every rank has ended or is on a lost node."""
        return not self.running

    @property
    def all_well(self) -> bool:
        """Whether nothing has failed, nor ended in a way that may turn out to be a failure."""
        return self.cause is None and not self._candidates

    @property
    def emptied(self) -> bool:
        """Whether every node has reported that no process of the run is left, or is lost."""
        return self.ended_nodes.issuperset(self._nodes)

    def mark(self, rank: int, line: str) -> str:
        """Return the prefix for an output line of ``rank``: "" unless it reports a secondary failure."""
        first = self.cause or next((c for c in self._candidates if c.symptom == "own"), None)
        if first is None or first.rank == rank or first.kind == "stopped" or symptom_of(line) != "lost":
            return ""
        return f"(caused by rank {first.rank}) " if first.rank is not None else "(secondary failure) "

    def exit_code(self) -> int:
        """Return the run's exit code: 0 when all ranks succeeded, else that of the root cause's rank (128+n)."""
        if self.cause is None:
            return 0
        if self.cause.kind == "exit" and self.cause.rank in self._left:
            return self._left[self.cause.rank][1] or 1
        if self.cause.rank not in self.exits or self.cause.kind in {"stalled", "timeout", "left-group", "mismatch"}:
            return 1
        ended = self.exits[self.cause.rank]
        if (
            self.cause.kind == "raised"
            and self.stop_reason is not None
            and ended.signal in (signal.SIGTERM, signal.SIGKILL)
        ):
            # Our own signal cut its exit handlers short: the code of its sys.exit(), or that of an uncaught exception.
            return self._left.get(self.cause.rank, (0.0, 1))[1] or 1
        if ended.signal is not None:
            return 128 + ended.signal
        return ended.code or 1

    def summary(self) -> list[str]:
        """Return the closing lines for the user: the root cause and the ranks that failed because of it."""
        if self.cause is None or self.cause.kind == "stopped":
            return []
        shared = self.cause.kind in {"mismatch", "timeout"}  # of several ranks, and any of the others may be at fault
        own = {c.rank for c in self._candidates if shared and c.symptom == self.cause.symptom} | {self.cause.rank}
        others = [r for r, view in self.ranks.items() if r not in own and view.state == "failed" and r in self.exits]
        same = [] if shared else [rank for rank in others if self._same_failure(rank)]
        others = sorted(set(others).difference(same))
        label = "other ranks that failed" if shared else "secondary failures"
        return [
            f"root cause: {self.cause.text}",
            *([f"the same failure: {rank_words(same)}"] if same else []),
            *([f"{label}: {rank_words(others)}"] if others else []),
        ]

    def _same_failure(self, rank: int) -> bool:
        """Whether a rank failed as the first one did, by itself: the same exception or exit at the same place."""
        first = None if self.cause is None else self.cause.rank
        if first is None:
            return False
        if first in self._raised and rank in self._raised:
            ones = [self._raised[r] for r in (first, rank)]
            if ones[1].origin not in {None, rank}:
                return False
            return len({(one.type, one.file, one.line) for one in ones}) == 1 and ones[1].file is not None
        code = self.exits[first].code if first in self.exits else None
        place = self._exit_place(first, code)
        return bool(code and place) and code == self.exits[rank].code and place == self._exit_place(rank, code)

    @property
    def running_nodes(self) -> list[str]:
        """The nodes with ranks that run."""
        return sorted({self.ranks[rank].node for rank in self.running} - self.ended_nodes)

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
                exit_place=self._exit_place(rank, self.exits[rank].code) if rank in self.exits else "",
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
        """Return the first failure that explains the others; None while one may still arrive."""
        own = [c for c in self._candidates if c.symptom == "own"]
        first = (own or self._candidates)[0]
        waited = now - first.at >= self._timing.cause_wait_s
        if self._terminated(first):
            # Slurm and a shutdown send SIGTERM to the ranks, the store and their supervisor, in any order.
            ends = [c for c in own if c.kind in {"node-stopped", "node-lost"}]
            return ends[0] if ends else first if self.emptied or waited else None
        if own:
            return earlier_than(first, self._candidates)
        if self.places_wanted is None and now - first.at >= self._timing.cause_wait_s / 2 and not self._left:
            self.places_wanted = True
        if self.comparing and not self.emptied and now - first.at < _COMPARE_S:
            return None
        return among_effects(self._failures(now)) if self.finished or waited else None

    def _failures(self, now: float) -> Failures:
        statuses = self.statuses(lambda rank, now: None, now)
        return Failures(
            self.ranks,
            self._candidates,
            self._left,
            self.exits,
            self.joined | self._disconnected,
            self.running,
            difference(statuses, self._collectives),
            last_calls(statuses, self._collectives),
            self.elsewhere,
            self._last_error,
            self._where,
            self._code_text,
            {rank: self._exit_place(rank, 0) for rank in self._exit_places},
        )

    def _terminated(self, cause: Cause) -> bool:
        if cause.kind == "store-died":
            return self._store_code == -signal.SIGTERM
        return cause.kind == "signal" and cause.rank is not None and self.exits[cause.rank].signal == signal.SIGTERM

    def _on_raised(self, event: events.Raised, now: float) -> None:
        self._raised[event.rank] = event
        self._set(event.rank, state="failed")
        if (found := evidence_of(event)) is not None:
            self.note_collectives([found])
        if self.stop_reason is not None:
            return
        event, symptom = judged(event)
        self._raised[event.rank] = event
        failed = event.origin if event.origin in self.ranks else event.rank
        rank = self.ranks[failed]
        held = cuda_memory_text(event.message, rank.local_rank, self.gpu_processes.get(rank.node, {}))
        message = held or clean(" ".join(without_advice(event.message).split()), 400)  # on one line
        place = f" at {clean(event.file)}:{event.line}" if event.file else ""
        place += f" in {clean(event.function)}" if event.function and event.function != "<module>" else ""
        phases = {
            "torch": " to import torch",
            "import": " before init_process_group",
            "init": " in init_process_group",
        }
        phase = phases.get(event.phase, "")
        what = clean(event.type) + (f": {message}" if message else "")
        note = f", {clean(event.note, 400)}" if event.note else ""
        text = f"{self._where(failed)} failed{phase}: {what}{place}{note}"
        tip = hint(event, has_stdin=event.rank == self._stdin_rank)
        origin = f"{clean(event.type)}{place}" if event.file else ""
        self._candidates.append(
            Cause("raised", failed, rank.node, text, tip, event.chain, symptom=symptom, at=now, place=origin)
        )

    def _on_exited(self, event: events.Exited, now: float) -> None:
        self.exits[event.rank] = event
        if event.joined:
            self.joined.add(event.rank)
        self._explain_child(event.rank)
        alone = not self._candidates and not self._left.keys() - {event.rank}
        ended_well = self._left.get(event.rank, (now, None))[1] == 0
        at = now
        if event.code is not None and event.rank not in self._raised:
            at, _ = self._left.get(event.rank, (now, 0))
            self._left[event.rank] = at, event.code
        succeeded = event.code == 0 and event.rank not in self._raised
        killed = event.signal is not None and self.stop_reason is not None and event.rank not in self._raised
        self._set(event.rank, state="done" if succeeded else "killed" if killed else "failed")
        if succeeded or event.rank in self._raised:
            return
        error = self._last_error.get(event.rank, "")
        evidence = event.oom or (clean(event.evidence, 400) if event.evidence else error)
        if event.signal is not None:
            oom = bool(event.oom) if event.oom or event.oom_readable else None
            how = signal_text(event.signal, forwarded=event.signal in self._forwarded, oom=oom)
        else:
            how = self._code_text(event.rank, event.code or 0)
        if ended_well and event.signal not in self._forwarded:
            how += ", after its script had ended with 0: by an exit handler (atexit), a thread or native code"
        kind: FailureKind = "signal" if event.signal is not None else "exit"
        node = self.ranks[event.rank].node
        # Libraries abort after such an error. A code is the script's own decision, whatever it printed before.
        by_text = event.signal == signal.SIGABRT or (event.code is not None and not alone)
        symptom = symptom_of(error) if by_text and event.oom is None else "own"
        if symptom == "own" and evidence == error:
            evidence = self._root_error.get(event.rank) or error
        if not evidence and event.code is not None and (last := self._last_words.get(event.rank)):
            evidence = f"last line of its output: {last}"
        if self.stop_reason is None:
            self._candidates.append(
                Cause(kind, event.rank, node, f"{self._where(event.rank)} {how}", evidence, symptom=symptom, at=at)
            )
        elif evidence and self._is_cause(event.rank, "exit") and not (self.cause and self.cause.evidence):
            self._print_evidence(evidence)  # it was blamed when its script had left

    def _is_cause(self, rank: int, kind: FailureKind) -> bool:
        return self.cause is not None and (self.cause.rank, self.cause.kind) == (rank, kind)

    def _print_evidence(self, line: str) -> None:
        self.note_evidence(line)
        self.messages.append(f"  {line}")

    def _explain_child(self, rank: int) -> None:
        """Add the error of a rank's child process to the exception about that process."""
        error, raised = self._root_error.get(rank), self._raised.get(rank)
        if not error or raised is None:
            return
        if error.startswith("last line") and "DataLoader" in raised.message:  # of the rank: workers write tracebacks
            return
        if not any(kind in f"{raised.type}: {raised.message} {raised.note}" for kind in CHILD_FAILED):
            return
        if self._is_cause(rank, "raised"):
            self._print_evidence(error)
        self._candidates = [
            msgspec.structs.replace(one, evidence=error) if (one.rank, one.kind) == (rank, "raised") else one
            for one in self._candidates
        ]

    def _exit_place(self, rank: int, code: int | None) -> str:
        """Return where a rank called sys.exit() with ``code``; "" if it did not: another code comes from elsewhere."""
        told, place = self._exit_places.get(rank, (None, ""))
        return place if told == code else ""

    def _code_text(self, rank: int, code: int) -> str:
        place = self._exit_place(rank, code)
        reports = self._reports_exceptions and rank not in self._disconnected
        return code_text(code, f"sys.exit() at {place}" if place else "", reports_exceptions=reports)

    def _on_store(self, event: events.Store, node: str, now: float) -> None:
        self._store_code = event.code
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
        maybe_joined = self.joined | self._disconnected
        gone = [r for r, e in self.exits.items() if e.code == 0 and r not in maybe_joined and r not in self._raised]
        if not gone or any(c.rank in gone for c in self._candidates):
            return
        waiting = sorted(self.joined - self._apart - self.exits.keys())
        if waiting:
            text = (
                f"{self._where(gone[0])} ended with exit code 0 before init_process_group; "
                f"{rank_words(waiting)} would wait for it until the timeout"
                f"{exit_place([self._exit_place(gone[0], 0)])}"
            )
            self._candidates.append(Cause("before-init", gone[0], self.ranks[gone[0]].node, text, at=now))
