"""Read, choose, claim, look again, hand to the keeper; the next set when somebody was quicker. All or nothing."""

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
from gpuboard.leases.policy.choose import choose
from gpuboard.leases.rank_map import LOOPBACK, rank_map, reachable_addresses
from gpuboard.leases.recheck import moved_in
from gpuboard.leases.terms import Terms, as_allocated, duration, forget_file, keep_rank_map, uninterrupted
from gpuboard.model.lease import Lease
from gpuboard.model.reading import Holder
from gpuboard.model.request import Choice, ChosenGpu, Pick, Refusal, Request
from gpuboard.model.snapshot import NodeView, Snapshot
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.leases.claims.scope_fleet import ScopeFleet

T = TypeVar("T")
_GRACE_S = 3.0  # a node that takes longer than this to answer is waited for only when the others do not suffice
_READ_S = 6.0  # the agent gives up after 5
_LATE_S = 10.0  # for a node that has left a call unanswered, where no other can serve
_ROUNDS = 40  # sets tried before it is said that there is too much going on
_POLL_S = 2.0  # between two looks while waiting; grows to _POLL_MAX_S
_POLL_MAX_S = 10.0


class ClaimsAllocator:
    """Reserves GPUs as claims on the nodes of ``scope``, which is closed with it.

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
        self._failed: dict[str, str] = {}  # nodes that could not hold a claim or left a call unanswered, and why
        self._late: set[str] = set()  # those that get more time, once, if no other can serve
        self._waited_for_late = False
        self._asked: dict[str, list[str]] = {}  # lease -> nodes a claim may lie on, as long as nobody keeps it
        self._keeper: keeper.Started | None = None
        self._handed: dict[str, keeper.Handover] = {}  # by lease: the keeper has it, its owner does not know of it yet
        self._adopting = ""  # the lease that the keeper is being handed
        self._abandoned = threading.Event()
        self.notes: list[str] = []  # what the person should know of a lease that was taken

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for words in [*self.notes, *self._drop_all()]:
                error.add_note(words)
        self.close()

    def close(self) -> None:
        """End all connections that are ours."""
        if self._keeper is not None:
            self._keeper.close()
        self._scope.close()

    def abandon(self) -> None:
        """Give up, from any thread and without waiting; ``allocate`` raises Interrupted at its next step.

        Nothing more is taken. What the keeper has already and nobody was told of, it releases, as it does when our
        process ends; nodes that were asked for a claim are asked to drop it, also one that has not answered yet: on
        its connection this comes after the other.
        """
        self._abandoned.set()
        for lease in list(self._handed):
            self._leave_to_keeper(lease)
        for lease, nodes in list(self._asked.items()):
            if lease != self._adopting:  # else the keeper would take it for a loss, and say so
                for node in list(nodes):
                    self._fleet.tell(node, "release", {"lease": lease})

    def count(self) -> int:
        """Return how many GPUs there are in scope, whatever their state. Raises NoNodeReached, and Refused where there
        are none or a node could not be read."""
        self._fleet.wait_all(self._fleet.connect_s + FIRST_READING_S)
        snapshot = self._snapshot()
        _refuse_unreached(snapshot)
        if unread := [f"{node.name} ({node.error})" for node in snapshot.nodes if node.age_s is None]:
            raise self._refused(Refusal(4, f"not read: {', '.join(unread)}"))
        if total := sum(len(node.gpus) for node in snapshot.nodes):
            return total
        raise self._refused(self._bare(snapshot) or Refusal(3, "there are no GPUs"))

    def plan(self, request: Request, for_s: float | None = None) -> Choice:
        """Return what would be taken now (for however long); takes nothing. Raises Refused and NoNodeReached."""
        answer = self._first_answer(request)
        if isinstance(answer, Refusal):
            raise self._refused(answer)
        return answer

    def allocate(self, request: Request, terms: Terms, wait_s: float | None = None) -> Allocation:
        """Reserve what ``request`` asks for and return it, kept alive by the keeper.

        ``wait_s``: how long to wait for it to become free (inf: for ever), None: not at all.
        Raises UsageError, Refused, NoNodeReached, KeeperError, and GpuboardError when the holder ends while it waits;
        whatever is raised, also an interrupt, no claim outlives the ``with`` block of the allocator.
        """
        for_s = duration(terms.for_s, self._settings)
        self._keeper = keeper.start_early(self._env)
        started = time.monotonic()
        pause_s = _POLL_S
        notes: list[str] = []
        answer = self._first_answer(request)
        for _ in range(_ROUNDS):
            while isinstance(answer, Refusal):
                if self._late and not self._waited_for_late and answer.code != NeverPossible.exit_code:
                    answer = self._with_late(request)
                    continue
                left_s = -1.0 if wait_s is None else wait_s - (time.monotonic() - started)
                if answer.code == NeverPossible.exit_code or left_s <= 0:
                    self._progress("")
                    raise self._refused(answer, time.monotonic() - started if wait_s is not None else None)
                words = answer.message.removesuffix(f"; try {answer.nearest}")
                self._progress(f"waiting {format_duration(time.monotonic() - started)}: {words}")
                time.sleep(min(left_s, _jittered(pause_s)))
                if terms.holder is not None and processes.alive(terms.holder) is False:
                    raise GpuboardError(
                        f"process {terms.holder.pid}, for which this waited, has ended: nothing is reserved"
                    )
                pause_s = min(pause_s * 1.3, _POLL_MAX_S)
                self._failed = self._refresh(self._nodes)
                answer = self._choose(request, self._snapshot())
            self._progress("")
            taken = self._take(answer, terms, for_s, notes)
            if taken is not None:
                return taken
            self._go_on()
            answer = self._choose(request, self._snapshot())
        raise NotFree(
            Refusal(4, f"others were quicker {_ROUNDS} times in a row; try again, or --wait", nearest="--wait")
        )

    def _with_late(self, request: Request) -> Choice | Refusal:
        """Give nodes that have left a call unanswered more time; return the policy's answer with those that came."""
        self._waited_for_late = True
        silent = self._refresh(self._late, _LATE_S)
        came = self._late.difference(silent)
        self._failed = {name: why for name, why in self._failed.items() if name not in came}
        return self._choose(request, self._snapshot())

    def _refresh(self, names: Collection[str], timeout_s: float = _READ_S) -> dict[str, str]:
        """Get new readings of ``names``, and of others that grew old meanwhile; return by node why there is none."""
        silent = self._fleet.refresh(names, timeout_s)
        if not self._scope.is_running:
            self._fleet.freshen()
        return silent

    def _first_answer(self, request: Request) -> Choice | Refusal:
        """Return the policy's answer as soon as it is sure: a hung node delays a request only when it is needed.

        A fleet that runs is not waited for: it keeps trying its nodes, and what it shows is what the person goes by.
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
        if wait and isinstance(answer, Refusal) and any(node.state != "up" for node in snapshot.nodes):
            self._fleet.wait_all(limit_s - _GRACE_S)
            self._fleet.freshen()
            snapshot = self._snapshot()
            answer = self._choose(request, snapshot)
        _refuse_unreached(snapshot)
        return answer

    def _bare(self, snapshot: Snapshot) -> Refusal | None:
        """Return the refusal of any request where no node is configured and this machine has no GPU."""
        if any(node.gpus for node in snapshot.nodes):
            return None
        from gpuboard.cluster.inventory.first_run import (  # late: only when the answer is no
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
        """Return the policy's answer; inside a Slurm job this node is preferred: the script that asked runs here."""
        if self._scope.job is not None and self._scope.here is not None:
            here = [node for node in snapshot.nodes if node.name == self._scope.here]
            answer = choose(request, msgspec.structs.replace(snapshot, nodes=here))
            if isinstance(answer, Choice):
                return answer
        return choose(request, snapshot)

    def _refused(self, refusal: Refusal, waited_s: float | None = None) -> NeverPossible | NotFree:
        """Return the error of a refusal; its words say for how long and where was looked."""
        message = refusal.message
        if waited_s is not None and refusal.code != NeverPossible.exit_code:
            message = f"not free within {format_duration(waited_s)}: {message}"
        if self._scope.job is not None and refusal.code == NeverPossible.exit_code and not refusal.gpus:
            message = f"Slurm job {self._scope.job} has no GPUs; ask Slurm for some when you submit it: --gpus=2"
        elif self._scope.job is not None:
            message += f"\n  only what Slurm job {self._scope.job} has was looked at"
        if self._scope.left_out:
            everywhere = folded([*self._nodes, *(name for name in self._scope.left_out if name not in self._nodes)])
            message += f"\n  only this machine was looked at; add --nodes '{everywhere}' for all"
        refusal = msgspec.structs.replace(refusal, message=message)
        return NeverPossible(refusal) if refusal.code == NeverPossible.exit_code else NotFree(refusal)

    def _snapshot(self) -> Snapshot:
        """Return the nodes in scope as they are now; those that failed to hold a claim, or to answer, say why."""
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
        """Claim what was chosen, look again, hand it to the keeper; None when another set must be tried."""
        before = self._snapshot()
        uuids = _by_node(choice.gpus)
        wanted = client.Wanted(
            uuids,
            for_s,
            os.uname().nodename,
            Holder(*terms.holder) if terms.holder else None,
            terms.purpose,
        )
        used = {claim.lease for claims in self._fleet.claims().values() for claim in claims}
        try:
            taken = client.take(self._call, wanted, used)
        except client.Conflict as conflict:
            notes.append(str(conflict))
            self._failed.update(self._refresh(uuids))
            return None
        except client.NodeFailed as failure:
            notes.append(str(failure))
            self._failed[failure.node] = str(failure).removeprefix(f"{failure.node}: ")
            if failure.kind == "link":
                self._late.add(failure.node)
            self._refresh([])
            return None
        silent = self._fleet.refresh(uuids, _READ_S)
        after = self._snapshot()
        moved = moved_in(before, after, taken, self._settings.state.occupied_memory)
        if silent or moved:
            notes.append(moved)
            self.notes += self._drop(taken.lease)
            self._failed.update(silent)
            self._late.update(silent)
            self._failed.update(self._refresh([name for name in uuids if name not in silent]))
            return None
        self._go_on()
        self._adopt(taken, terms)
        self._go_on()
        lease = self._seen(taken.lease, after)
        if lease is None or len(lease.gpus) < len(choice.gpus):
            with uninterrupted():
                left = self._give_up(taken.lease)
            words = "; ".join(left) or "it was released again, on all of them"
            names = ", ".join(uuids)
            raise GpuboardError(f"lease {taken.lease}, taken on {names}, is not in the readings that followed: {words}")
        self.notes += choice.notes
        notes_words = "".join(f"; before: {note}" for note in notes if note)
        return self._allocation(lease, choice.gpus, choice.why + notes_words, after)

    def _call(self, node: str, op: str, args: dict[str, Any], timeout_s: float, kind: type[T]) -> T:
        """Call an agent, and note beforehand where a claim may come to lie: an interrupt can strike at any line."""
        if op == "take":
            self._go_on()
            self._asked.setdefault(args["lease"], []).append(node)
        return self._fleet.call(node, op, args, timeout_s, kind)

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
        """Return the lease as the nodes' claims have it; None when none of them is there."""
        uids = self._fleet.uids()
        claims = {
            node: [claim for claim in found if claim.lease == lease and claim.uid == uids.get(node)]
            for node, found in self._fleet.claims().items()
        }
        index = client.indexes(snapshot.nodes)
        return next(iter(client.leases_of(claims, index, time.time(), client.holder_alive, uids)), None)

    def existing(self, text: str, n: int | None = None) -> Allocation:
        """Return a lease of ours as it was allocated, or ``n`` GPUs of it. Raises NoSuchLease and the like."""
        limit_s = self._fleet.connect_s + FIRST_READING_S
        self._fleet.wait(min(_GRACE_S, limit_s))
        if not self._seen_whole(text):
            self._fleet.wait_all(limit_s - _GRACE_S)
            self._fleet.freshen()
        snapshot = self._fleet.snapshot()
        if all(node.age_s is None for node in snapshot.nodes):
            raise NoNodeReached("no node could be reached; `gpuboard status` shows why")
        mine = client.find(text, self._fleet.claims(), self._fleet.uids())
        if unread := sorted(set(mine.nodes) - set(mine.gpus)):
            raise NotFree(Refusal(4, f"lease {mine.lease} also covers {', '.join(unread)}, which could not be read"))
        within = tuple(uuid for uuids in mine.gpus.values() for uuid in uuids)
        index = client.indexes(snapshot.nodes)  # claims come by their UUIDs
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
        return self._allocation(lease, gpus, answer.why, snapshot)

    def _seen_whole(self, lease: str) -> bool:
        """Tell whether every node of a lease of ours has been read: a hung one elsewhere does not matter to it."""
        mine = client.mine(self._fleet.claims(), self._fleet.uids()).get(lease)
        return mine is not None and set(mine.nodes) == set(mine.gpus)

    def _allocation(self, lease: Lease, gpus: Sequence[ChosenGpu], why: str, snapshot: Snapshot) -> Allocation:
        names = list(dict.fromkeys(gpu.node for gpu in gpus))
        found = rank_map(lease.id, gpus, self._addresses(names, snapshot))
        file = keep_rank_map(self._env, found, whole=len(gpus) == len(lease.gpus))
        here = self._scope.here if self._scope.here in names else None
        return Allocation(lease, found, why, file, folded(names), here)

    def addresses(self) -> dict[str, str]:
        """Return at which address the other nodes reach each node in scope, as far as they were read."""
        snapshot = self._fleet.snapshot()
        return self._addresses([node.name for node in snapshot.nodes], snapshot)

    def _addresses(self, names: Sequence[str], snapshot: Snapshot) -> dict[str, str]:
        views: dict[str, NodeView] = {node.name: node for node in snapshot.nodes}
        asked = {name: self._nodes[name].address for name in names if self._nodes[name].host}
        found = reachable_addresses({name: views[name].addresses for name in names}, asked)
        # simulated nodes are all this machine
        return found | {name: LOOPBACK for name in names if self._nodes[name].simulate is not None}

    def handing_over(self, lease: Lease) -> None:
        """Take note that its owner is about to be told of the lease. Until then the keeper ends it if we are killed.

        Before and not after he is told: a kill in between must not end a lease that he counts on.
        """
        handed = self._handed.pop(lease.id, None)
        if handed is not None:
            handed.confirm()

    def published(self, lease: Lease) -> None:
        """Take note that its owner knows of the lease: until then it is dropped when we leave by an exception."""
        self.handing_over(lease)
        self._asked.pop(lease.id, None)

    def _go_on(self) -> None:
        if self._abandoned.is_set():
            raise Interrupted("given up; nothing is reserved")

    def _leave_to_keeper(self, lease: str) -> bool:
        """Let the keeper release a lease that it has and nobody was told of; return whether there is one."""
        handed = self._handed.pop(lease, None)
        if handed is None:
            return False
        self._asked.pop(lease, None)
        handed.abandon()
        forget_file(self._env, lease)
        return True

    def _drop(self, lease: str) -> list[str]:
        """Release what may lie on nodes; return what is left, in words."""
        with uninterrupted():
            outcome = client.release(self._fleet.call, lease, self._asked.pop(lease, []))
        return [
            f"lease {lease} was not released on {node}: {clean(str(error))}; it expires there by itself within 90 s"
            for node, error in outcome.failed.items()
        ]

    def _give_up(self, lease: str) -> list[str]:
        """Release a lease that the keeper may have, and nobody was told of; return what is left, in words."""
        with contextlib.suppress(KeeperError, OSError):
            keeper.forget(lease, self._env)
        left = self._drop(lease)
        forget_file(self._env, lease)
        return left

    def _drop_all(self) -> list[str]:
        left: list[str] = []
        with uninterrupted():
            for lease in list(self._asked):
                if self._abandoned.is_set() and self._leave_to_keeper(lease):
                    continue  # our own connections may be closed by now
                left += self._give_up(lease)
        return left


def _check_excluded(request: Request, scope: Collection[str], settings: Settings) -> None:
    """Raise UsageError where `--exclude` names a node that is not configured: a slip would leave out nothing."""
    names = {pick.node for pick in request.exclude if pick.node is not None} - set(scope)
    if not names or not settings.nodes or any(source.startswith("slurm:") for source in settings.nodes):
        return  # no inventory, or one that Slurm alone knows
    configured = [node.name for node in inventory(settings)]
    if unknown := sorted(names.difference(configured)):
        raise UsageError(f"--exclude: no node {unknown[0]!r} in the configured inventory; it has: {folded(configured)}")


def _refuse_unreached(snapshot: Snapshot) -> None:
    """Raise NoNodeReached, with the reasons, where no node at all was read."""
    if any(node.age_s is not None for node in snapshot.nodes):
        return
    by_error: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        by_error.setdefault(node.error or "no answer", []).append(node.name)
    words = [f"{folded(names)}: {error}" for error, names in by_error.items()]
    more = f"; and {len(words) - 4} more reasons" if len(words) > 4 else ""
    raise NoNodeReached(f"no node could be reached: {'; '.join(words[:4])}{more}")


def _jittered(pause_s: float) -> float:
    """Return about ``pause_s``: many may wait for one GPU."""
    import random  # 2 ms: only who waits needs it

    return pause_s * random.uniform(0.7, 1.3)


def _by_node(gpus: Sequence[ChosenGpu]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        found.setdefault(gpu.node, []).append(gpu.uuid)
    return found
