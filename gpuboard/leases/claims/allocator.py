"""Read, choose, claim, re-check, hand to the keeper; on a conflict, try the next set. All or nothing."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from gpuboard.cluster.fleet import FIRST_READING_S
from gpuboard.cluster.inventory.nodes import folded, inventory
from gpuboard.errors import GpuboardError, Interrupted, NeverPossible, NoNodeReached, NoSuchLease, NotFree, UsageError
from gpuboard.keeper import client as keeper
from gpuboard.keeper import holder as processes
from gpuboard.keeper.client import KeeperError, KeptNode
from gpuboard.leases.claims import client
from gpuboard.leases.ledger import Progress
from gpuboard.leases.output.formats import Allocation
from gpuboard.leases.policy.candidates import is_current, without_utilization
from gpuboard.leases.policy.choose import choose
from gpuboard.leases.rank_map import LOOPBACK, rank_map, reachable_addresses
from gpuboard.leases.recheck import conflict_since
from gpuboard.leases.terms import Terms, as_allocated, duration, remove_rank_map, uninterrupted, write_rank_map
from gpuboard.model.lease import Lease
from gpuboard.model.reading import ClaimHolder
from gpuboard.model.request import Choice, ChosenGpu, Pick, Refusal, Request
from gpuboard.model.snapshot import NodeView, Snapshot
from gpuboard.model.units import format_duration

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.leases.claims.ledger import ScopeFleet
    from gpuboard.transport.base import CallFailed, LinkLost

T = TypeVar("T")
_GRACE_S = 3.0  # a node that answers later is waited for only if the others do not suffice
_READ_S = 6.0  # the agent's own timeout is 5 s
_SLOW_S = 10.0  # for a node that did not answer a call, if no other node suffices
_NVML_READS = 3  # of a node whose NVML is still starting; one that hangs fails the second of them
_ROUNDS = 40  # sets tried before the request is refused
_POLL_S = 2.0  # between two polls while waiting; grows to _POLL_MAX_S
_POLL_MAX_S = 10.0
_LINGERS_READS, _LINGERS_POLL_S = 10, 0.3  # utilization is reported up to 2 s after a program's end (H200, driver 580)


class ClaimsAllocator:
    """Reserves GPUs as claims on the nodes of ``scope``, and closes it at the end.

    See :class:`~gpuboard.leases.ledger.Allocator`.
    """

    def __init__(
        self, scope: ScopeFleet, settings: Settings, env: Mapping[str, str], *, progress: Progress = lambda _: None
    ) -> None:
        self._scope = scope
        self._nodes = self._scope.nodes
        self._fleet = self._scope.fleet
        self._settings = settings
        self._env = env
        self._progress = progress
        self._failed: dict[str, str] = {}  # by node that could not hold a claim or did not answer: why
        self._slow: set[str] = set()  # those that get more time, once, if no other node suffices
        self._waited_for_slow = False
        self._unpublished: dict[str, list[str]] = {}  # by unpublished lease: nodes that may have claims of it
        self._keeper: keeper.Started | None = None
        self._handed: dict[str, keeper.Handover] = {}  # by lease that the keeper has and its owner does not have yet
        self._adopting = ""  # the lease that the keeper is being handed
        self._abandoned = threading.Event()
        self.notes: list[str] = []  # messages for the user about the lease

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for note in [*self.notes, *self._release_all()]:
                error.add_note(note)
        self.close()

    def close(self) -> None:
        """Close the connections that were opened here."""
        if self._keeper is not None:
            self._keeper.close()
        self._scope.close()

    def abandon(self) -> None:
        """Cancel ``allocate``, which raises Interrupted at its next step. Thread-safe; does not wait.

        The keeper releases an unconfirmed lease, as it does when this process ends. Nodes that were sent a claim are
        sent its release, also those that have not answered yet: their connections keep the order.
        """
        self._abandoned.set()
        for lease in list(self._handed):
            self._leave_to_keeper(lease)
        for lease, nodes in list(self._unpublished.items()):
            if lease != self._adopting:  # the keeper would report that as a loss
                for node in list(nodes):
                    self._fleet.send(node, "release", {"lease": lease})

    def count(self) -> int:
        """Return the number of GPUs in scope, in any state.

        Raises NoNodeReached, and Refused where there are none or a node has no reading.
        """
        self._fleet.wait_all(self._fleet.connect_s + FIRST_READING_S)
        snapshot = self._with_nvml(self._snapshot())
        _refuse_unreached(snapshot)
        if unread := [f"{node.name} ({node.error})" for node in snapshot.nodes if node.age_s is None]:
            raise self._refused(Refusal(4, f"no reading from {', '.join(unread)}"))
        if total := sum(len(node.gpus) for node in snapshot.nodes):
            return total
        raise self._refused(self._bare(snapshot) or Refusal(3, "no GPU on any node in scope"))

    def plan(self, request: Request, for_s: float | None = None) -> Choice:
        """Return what would be reserved now, for any duration; reserves nothing. Raises Refused and NoNodeReached."""
        answer = self._first_answer(request)
        if isinstance(answer, Refusal):
            raise self._refused(answer)
        return answer

    def allocate(self, request: Request, terms: Terms, wait_s: float | None = None) -> Allocation:
        """Reserve what ``request`` asks for; the keeper sends heartbeats for the returned lease.

        ``wait_s``: how long to wait until it is free (inf: no limit), None: not at all.
        Raises UsageError, Refused, NoNodeReached, KeeperError, and GpuboardError when the holder ends during the wait;
        after any exception, also an interrupt, no claim outlives the ``with`` block of the allocator.
        """
        for_s = duration(terms.for_s, self._settings)
        self._keeper = keeper.start_early(self._env)
        started = time.monotonic()
        pause_s = _POLL_S
        notes: list[str] = []
        answer = self._first_answer(request)
        if wait_s is None:
            answer = self._unless_it_lingers(request, answer)
        for _ in range(_ROUNDS):
            while isinstance(answer, Refusal):
                if self._slow and not self._waited_for_slow and answer.code != NeverPossible.exit_code:
                    answer = self._choose_with_slow(request)
                    continue
                left_s = -1.0 if wait_s is None else wait_s - (time.monotonic() - started)
                if answer.code == NeverPossible.exit_code or left_s <= 0:
                    self._progress("")
                    raise self._refused(answer, time.monotonic() - started if wait_s is not None else None)
                reason = answer.message.removesuffix(f"; try {answer.nearest}")
                self._progress(f"waiting {format_duration(time.monotonic() - started)}: {reason}")
                time.sleep(min(left_s, _jittered(pause_s)))
                if terms.holder is not None and processes.alive(terms.holder) is False:
                    raise GpuboardError(
                        f"the holder, pid {terms.holder.pid}, ended while the request waited; nothing is reserved"
                    )
                pause_s = min(pause_s * 1.3, _POLL_MAX_S)
                self._failed = self._refresh(self._nodes)
                answer = self._choose(request, self._snapshot())
            self._progress("")
            taken = self._take(answer, terms, for_s, notes)
            if taken is not None:
                return taken
            self._check_abandoned()
            answer = self._choose(request, self._snapshot())
        raise NotFree(
            Refusal(4, f"other users reserved first {_ROUNDS} times in a row; try again or --wait", nearest="--wait")
        )

    def _unless_it_lingers(self, request: Request, answer: Choice | Refusal) -> Choice | Refusal:
        """Return the policy's answer once the utilization of programs that have just ended is no longer reported.

        Otherwise the second of two launches in a script is refused. Waits only where that decides.
        """
        for _ in range(_LINGERS_READS):
            if not isinstance(answer, Refusal) or answer.code == NeverPossible.exit_code:
                break
            quiet, names = without_utilization(self._snapshot(), self._settings.state.busy_utilization)
            if not names or isinstance(self._choose(request, quiet), Refusal):
                break
            self._progress("waiting: busy without a visible process; perhaps a program has just ended")
            time.sleep(_LINGERS_POLL_S)
            self._check_abandoned()
            self._failed.update(self._refresh(names))
            answer = self._choose(request, self._snapshot())
        return answer

    def _choose_with_slow(self, request: Request) -> Choice | Refusal:
        """Give nodes that did not answer a call more time; return the policy's answer with those that did."""
        self._waited_for_slow = True
        failed = self._refresh(self._slow, _SLOW_S)
        answered = self._slow.difference(failed)
        self._failed = {name: why for name, why in self._failed.items() if name not in answered}
        return self._choose(request, self._snapshot())

    def _refresh(self, names: Collection[str], timeout_s: float = _READ_S) -> dict[str, str]:
        """Get new readings of ``names``, and of nodes that became stale; return by node why one failed."""
        failed = self._fleet.refresh(names, timeout_s)
        if not self._scope.is_running:
            self._fleet.freshen()
        return failed

    def _first_answer(self, request: Request) -> Choice | Refusal:
        """Return the policy's answer as soon as it is final: a hung node delays a request only if it is needed.

        A running fleet (the board's) is not waited for: it retries its nodes, and the user sees its readings.
        """
        _check_excluded(request, self._nodes, self._settings)
        limit_s = self._fleet.connect_s + FIRST_READING_S
        wait = not self._scope.is_running
        if wait:
            self._fleet.wait(min(_GRACE_S, limit_s))
        snapshot = self._snapshot()
        if bare := self._bare(snapshot):
            return bare
        answer = self._choose(request, snapshot)
        if wait and isinstance(answer, Refusal) and not all(map(is_current, snapshot.nodes)):
            self._fleet.wait_all(limit_s - _GRACE_S)
            self._fleet.freshen()
            snapshot = self._with_nvml(self._snapshot())
            answer = self._choose(request, snapshot)
        _refuse_unreached(snapshot)
        return answer

    def _with_nvml(self, snapshot: Snapshot) -> Snapshot:
        """Read nodes again whose NVML failed or is starting, which takes long without persistence mode or a free CPU.

        A failure is reported at once, so that only nodes whose NVML has not answered delay this.
        """
        for _ in range(_NVML_READS):
            late = [node.name for node in snapshot.nodes if node.state == "up" and not is_current(node)]
            if not late:
                break
            self._fleet.refresh(late, _READ_S)
            snapshot = self._snapshot()
        return snapshot

    def _bare(self, snapshot: Snapshot) -> Refusal | None:
        """Return a refusal if no node is configured and this machine has no GPU."""
        if any(node.gpus for node in snapshot.nodes):
            return None
        from gpuboard.cluster.inventory.first_run import (  # late: only for a refusal
            bare_machine,
            how_to_name,
            why_bare,
        )

        node = bare_machine(self._nodes.values(), self._settings, snapshot)
        if node is None:
            return None
        why = f"no GPU on this machine ({node.name}): {why_bare(node)}, and no nodes are configured"
        return Refusal(NeverPossible.exit_code, f"{why}; {how_to_name(self._env)}")

    def _choose(self, request: Request, snapshot: Snapshot) -> Choice | Refusal:
        """Return the policy's answer; inside a Slurm job it prefers this node, where the script runs.

        Raises UsageError.
        """
        here, named = self._scope.here, {pick.node for pick in request.picks}
        if unseen := next((name for name in self._scope.left_out if name in named), None):
            raise UsageError(f"--gpus: node {unseen!r} is not in scope{self._only_here()}")
        if self._scope.job is not None and here is not None and named <= {here, None}:
            alone = [node for node in snapshot.nodes if node.name == here]
            answer = choose(request, msgspec.structs.replace(snapshot, nodes=alone))
            if isinstance(answer, Choice):
                return answer
        return choose(request, snapshot)

    def _refused(self, refusal: Refusal, waited_s: float | None = None) -> NeverPossible | NotFree:
        """Return the error of a refusal; its message adds the time waited and the nodes considered."""
        message = refusal.message
        if waited_s is not None and refusal.code != NeverPossible.exit_code:
            message = f"not free within {format_duration(waited_s)}: {message}"
        if self._scope.job is not None and refusal.code == NeverPossible.exit_code and not refusal.gpus:
            message = f"Slurm job {self._scope.job} has no GPUs; request them when you submit it, e.g. --gpus=2"
        elif self._scope.job is not None:
            message += f"\n  only GPUs of Slurm job {self._scope.job} were considered"
        refusal = msgspec.structs.replace(refusal, message=message + self._only_here())
        return NeverPossible(refusal) if refusal.code == NeverPossible.exit_code else NotFree(refusal)

    def _only_here(self) -> str:
        """Return the line of a message that names the nodes that were left out, or ""."""
        if not self._scope.left_out:
            return ""
        everywhere = folded([*self._nodes, *(name for name in self._scope.left_out if name not in self._nodes)])
        return f"\n  only this machine was considered; add --nodes '{everywhere}' for all nodes"

    def _snapshot(self) -> Snapshot:
        """Return the newest readings, with an error for nodes that could not hold a claim or did not answer."""
        found = self._scope.snapshot()
        if not self._failed:
            return found
        nodes = [
            msgspec.structs.replace(node, claims_error=why, error=node.error if node.state == "up" else why)
            if (why := self._failed.get(node.name)) is not None
            else node
            for node in found.nodes
        ]
        return msgspec.structs.replace(found, nodes=nodes)

    def _take(self, choice: Choice, terms: Terms, for_s: float, notes: list[str]) -> Allocation | None:
        """Claim what was chosen, re-check it, hand it to the keeper; None: try another set."""
        before = self._snapshot()
        uuids = _by_node(choice.gpus)
        wanted = client.Wanted(
            uuids,
            for_s,
            os.uname().nodename,
            ClaimHolder(*terms.holder) if terms.holder and not terms.moves else None,
            terms.purpose,
        )
        used = {claim.lease for claims in self._fleet.claims().values() for claim in claims}
        try:
            taken = client.take(self._call_all, wanted, used)
        except client.Conflict as conflict:
            notes.append(str(conflict))
            self._failed.update(self._refresh(uuids))
            return None
        except client.NodeFailed as failure:
            self._node_failed(failure.node, str(failure), notes, slow=failure.kind == "link")
            return None
        unread = self._fleet.refresh(uuids, _READ_S)
        after = self._snapshot()
        conflict_now = conflict_since(before, after, taken, self._settings.state.occupied_memory)
        if unread or conflict_now:
            notes.append(conflict_now)
            self.notes += self._release(taken.lease)
            self._failed.update(unread)
            self._slow.update(unread)
            self._failed.update(self._refresh([name for name in uuids if name not in unread]))
            return None
        self._check_abandoned()
        try:
            self._adopt(taken, terms)
        except keeper.HeartbeatFailed as failure:
            self._adopting, self._keeper = "", None
            self.notes += self._release(taken.lease)
            self._failed.update(self._refresh(uuids))
            self._node_failed(failure.node, str(failure), notes, slow=True)
            return None
        self._check_abandoned()
        lease = self._seen(taken.lease, after)
        if lease is None or len(lease.gpus) < len(choice.gpus):
            with uninterrupted():
                left = self._withdraw(taken.lease)
            outcome = "; ".join(left) or "the lease was released"
            names = ", ".join(uuids)
            raise GpuboardError(
                f"lease {taken.lease} is missing in the readings after it was claimed on {names}; {outcome}"
            )
        self.notes += choice.notes
        before_that = "".join(f"; before: {note}" for note in notes if note)
        return self._allocation(lease, choice.gpus, choice.why + before_that, after)

    def _node_failed(self, node: str, words: str, notes: list[str], *, slow: bool) -> None:
        """Try other nodes than ``node``; ``slow``: it gets more time, once, if no other node suffices."""
        notes.append(words)
        self._failed[node] = words.removeprefix(f"{node}: ")
        if slow:
            self._slow.add(node)
        self._refresh([])

    def _call_all(
        self, calls: Mapping[str, tuple[str, dict[str, Any]]], timeout_s: float, kind: type[T]
    ) -> Mapping[str, T | CallFailed | LinkLost]:
        """Call agents; before a claim, note the node, as an interrupt can occur at any line."""
        for node, (op, args) in calls.items():
            if op == "take":
                self._check_abandoned()
                self._unpublished.setdefault(args["lease"], []).append(node)
        return self._fleet.call_all(calls, timeout_s, kind)

    def _adopt(self, taken: client.Taken, terms: Terms) -> None:
        settings = msgspec.to_builtins(self._settings)
        kept = [
            KeptNode(name, uuids, node.host, node.claims_dir or self._settings.claims_dir, node.simulate, node.job)
            for name, uuids in taken.gpus.items()
            for node in [self._nodes[name]]
        ]
        record = keeper.record(taken.lease, kept, settings, terms.holder, taken.remaining_s)
        self._adopting = taken.lease
        self._handed[taken.lease] = keeper.hand_over(record, self._env, self._keeper)
        self._adopting, self._keeper = "", None

    def _seen(self, lease: str, snapshot: Snapshot) -> Lease | None:
        """Return the lease as the nodes' claims show it; None without claims."""
        uids = self._fleet.uids()
        claims = {
            node: [claim for claim in found if claim.lease == lease and claim.uid == uids.get(node)]
            for node, found in self._fleet.claims().items()
        }
        slots = client.slots(snapshot.nodes)
        return next(iter(client.leases_of(claims, slots, time.time(), client.holder_alive, uids)), None)

    def existing(self, text: str, n: int | None = None) -> Allocation:
        """Return a lease of the caller as it was allocated, or ``n`` GPUs of it. Raises NoSuchLease, Refused."""
        limit_s = self._fleet.connect_s + FIRST_READING_S
        self._fleet.wait(min(_GRACE_S, limit_s))
        if not self._seen_whole(text):
            self._fleet.wait_all(limit_s - _GRACE_S)
        self._fleet.freshen()  # the first node's reading may have become stale while another one answered
        snapshot = self._fleet.snapshot()
        if all(node.age_s is None for node in snapshot.nodes):
            raise NoNodeReached("no node could be reached; `gpuboard status` shows why")
        mine = client.find(text, self._fleet.claims(), self._fleet.uids(), client.unread_nodes(snapshot))
        if unread := sorted(set(mine.nodes) - set(mine.gpus)):
            raise NotFree(Refusal(4, f"no reading from {', '.join(unread)}, where lease {mine.lease} has GPUs too"))
        within = tuple(uuid for uuids in mine.gpus.values() for uuid in uuids)
        index = {  # claims have UUIDs only
            node: {uuid: at.index for uuid, at in on_node.items()}
            for node, on_node in client.slots(snapshot.nodes).items()
        }
        held = sorted((node, index[node].get(uuid, 0), uuid) for node, uuids in mine.gpus.items() for uuid in uuids)
        picks = tuple(Pick(node, None, uuid) for node, _, uuid in held)
        request = Request(picks=picks, within=within) if n is None else Request(n=n, within=within)
        answer = choose(request, snapshot, {mine.lease})
        if isinstance(answer, Refusal):
            raise self._refused(answer)
        gpus = answer.gpus if n is not None else as_allocated(self._env, mine.lease, answer.gpus)
        lease = self._seen(mine.lease, snapshot)
        if lease is None:
            raise NoSuchLease(f"lease {mine.lease} has just ended")
        return self._allocation(lease, gpus, f"lease {mine.lease}" if n is None else answer.why, snapshot)

    def _seen_whole(self, lease: str) -> bool:
        """Return whether every node of a lease of the caller has been read: others may hang."""
        mine = client.mine(self._fleet.claims(), self._fleet.uids()).get(lease)
        return mine is not None and set(mine.nodes) == set(mine.gpus)

    def _allocation(self, lease: Lease, gpus: Sequence[ChosenGpu], why: str, snapshot: Snapshot) -> Allocation:
        names = list(dict.fromkeys(gpu.node for gpu in gpus))
        found = rank_map(lease.id, gpus, self._addresses(names, snapshot))
        file = write_rank_map(self._env, found, whole=len(gpus) == len(lease.gpus))
        here = self._scope.here if self._scope.here in names else None
        return Allocation(lease, found, why, file, folded(names), here)

    def addresses(self) -> dict[str, str]:
        """Return the address of each node in scope for the other nodes, as far as they were read."""
        snapshot = self._fleet.snapshot()
        return self._addresses([node.name for node in snapshot.nodes], snapshot)

    def _addresses(self, names: Sequence[str], snapshot: Snapshot) -> dict[str, str]:
        views: dict[str, NodeView] = {node.name: node for node in snapshot.nodes}
        asked = {name: self._nodes[name].address for name in names if self._nodes[name].host}
        found = reachable_addresses({name: views[name].addresses for name in names}, asked)
        # simulated nodes are all this machine
        return found | {name: LOOPBACK for name in names if self._nodes[name].simulate is not None}

    def handing_over(self, lease: Lease) -> None:
        """Confirm the lease to the keeper, which until then releases it if this process is killed.

        Called before the owner can read it, so that a kill in between does not end a lease in use.
        """
        handed = self._handed.pop(lease.id, None)
        if handed is not None:
            handed.confirm()

    def published(self, lease: Lease) -> None:
        """The owner has the lease: from now on an exception in the ``with`` block does not release it."""
        self.handing_over(lease)
        self._unpublished.pop(lease.id, None)

    def _check_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise Interrupted("reservation cancelled; nothing is reserved")

    def _leave_to_keeper(self, lease: str) -> bool:
        """Let the keeper release an unconfirmed lease; return whether the keeper has it."""
        handed = self._handed.pop(lease, None)
        if handed is None:
            return False
        self._unpublished.pop(lease, None)
        handed.abandon()
        remove_rank_map(self._env, lease)
        return True

    def _release(self, lease: str) -> list[str]:
        """Release a lease on all nodes that may have claims of it; return a message for each failure."""
        with uninterrupted():
            outcome = client.release(self._fleet.call_all, lease, self._unpublished.pop(lease, []))
        return [
            f"could not release lease {lease} on {node}: {reason}; it will expire there within 90 s"
            for node, reason in outcome.reasons.items()
        ]

    def _withdraw(self, lease: str) -> list[str]:
        """Release an unpublished lease that the keeper may have; return a message for each failure."""
        with contextlib.suppress(KeeperError, OSError):
            keeper.forget(lease, self._env)
        left = self._release(lease)
        remove_rank_map(self._env, lease)
        return left

    def _release_all(self) -> list[str]:
        left: list[str] = []
        with uninterrupted():
            for lease in list(self._unpublished):
                if self._abandoned.is_set() and self._leave_to_keeper(lease):
                    continue  # the connections may be closed already
                left += self._withdraw(lease)
        return left


def _check_excluded(request: Request, scope: Collection[str], settings: Settings) -> None:
    """Raise UsageError where `--exclude` names a node that is not configured: it would exclude nothing."""
    names = {pick.node for pick in request.exclude if pick.node is not None} - set(scope)
    if not names or not settings.nodes or any(source.startswith("slurm:") for source in settings.nodes):
        return  # no inventory, or only Slurm's
    configured = [node.name for node in inventory(settings)]
    if unknown := sorted(names.difference(configured)):
        raise UsageError(f"--exclude: no node {unknown[0]!r} among the configured nodes: {folded(configured)}")


def _refuse_unreached(snapshot: Snapshot) -> None:
    """Raise NoNodeReached with the reasons if no node was read."""
    if any(node.age_s is not None for node in snapshot.nodes):
        return
    by_error: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        by_error.setdefault(node.error or "no answer", []).append(node.name)
    words = [f"{folded(names)}: {error}" for error, names in by_error.items()]
    more = f"; and {len(words) - 4} more reasons" if len(words) > 4 else ""
    raise NoNodeReached(f"no node could be reached: {'; '.join(words[:4])}{more}")


def _jittered(pause_s: float) -> float:
    """Return about ``pause_s``: many processes may wait for one GPU."""
    import random  # 2 ms: needed only to wait

    return pause_s * random.uniform(0.7, 1.3)


def _by_node(gpus: Sequence[ChosenGpu]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        found.setdefault(gpu.node, []).append(gpu.uuid)
    return found
