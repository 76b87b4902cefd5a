"""Leases over several nodes, all or nothing; and the leases that the nodes' claims form (pure).

All messages to nodes go through the argument ``call_all``, which has the signature of ``Fleet.call_all``: it calls
several agents at once and returns the value of each, a ``kind``, or its CallFailed or LinkLost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from gpuboard.errors import GpuboardError
from gpuboard.keeper import holder as processes
from gpuboard.leases.ledger import UnknownLease, matching, not_yours
from gpuboard.leases.terms import LONGEST_S, new_id
from gpuboard.model.lease import Lease, LeaseGpu, LeaseHolder
from gpuboard.model.reading import Claim, ClaimHolder
from gpuboard.model.replies import Ends, ReleasedClaims
from gpuboard.model.text import clean
from gpuboard.model.units import iso
from gpuboard.transport.base import CallFailed, LinkLost

if TYPE_CHECKING:
    from gpuboard.model.snapshot import NodeView, Snapshot

T = TypeVar("T")
LeaseFlag = Literal["disputed", "unread", "partial"]  # see :func:`leases_of`


class CallAll(Protocol):
    """See the module's docstring."""

    def __call__(
        self, calls: Mapping[str, tuple[str, dict[str, Any]]], timeout_s: float, kind: type[T]
    ) -> Mapping[str, T | CallFailed | LinkLost]: ...


# A call takes less than 1 s over ssh, and a claim 2 s more while another process holds the folder's lock. A node that
# does not answer in time is skipped: other nodes may suffice.
CALL_S = 4.0
ATTEMPTS = 4
_NOT_THERE = frozenset({"not-found", "not-yours"})  # no claims of the caller to release
# A claim younger than this, of a lease over several nodes, may still be withdrawn: its command is claiming other nodes.
_WITHDRAWAL_S = 2.0


class Wanted(msgspec.Struct, frozen=True):
    """What to reserve: the UUIDs on each node, how long, and the holder."""

    gpus: Mapping[str, Sequence[str]]  # node -> UUIDs
    for_s: float
    host: str  # where the owner reserves from
    holder: ClaimHolder | None = None  # None: detached
    purpose: str = ""
    share: int | None = None  # bytes of one GPU; None: whole GPUs


class Taken(msgspec.Struct, frozen=True):
    """A lease that was claimed."""

    lease: str
    gpus: dict[str, list[str]]  # node -> UUIDs
    remaining_s: float  # until it ends


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of an operation on several nodes: the results by node, and the errors by node where it failed."""

    done: dict[str, Any]
    failed: dict[str, CallFailed | LinkLost]

    @property
    def reasons(self) -> dict[str, str]:
        """Why it failed, by node, without the node's name."""
        return {node: clean(str(error).removeprefix(f"{node}: ")) for node, error in self.failed.items()}


class NotClaimed(GpuboardError):
    """A lease could not be claimed on ``node`` and was released elsewhere.

    ``left``: nodes that did not answer the release. They execute it when they respond again; without a keeper their
    claims expire within 90 s.
    """

    def __init__(self, node: str, words: str, left: Collection[str] = ()) -> None:
        may_stay = f"; claims on {', '.join(left)} could not be withdrawn and will expire within 90 s" if left else ""
        super().__init__(f"{node}: {words}{may_stay}")
        self.node = node
        self.left = tuple(left)


class Conflict(NotClaimed):
    """Another lease has a requested GPU; ``claims`` are its claims."""

    exit_code = 4

    def __init__(self, node: str, words: str, claims: Sequence[Claim], left: Collection[str] = ()) -> None:
        super().__init__(node, words, left)
        self.claims = tuple(claims)


class NodeFailed(NotClaimed):
    """A node cannot hold claims or did not answer; ``kind`` is the agent's (``folder``, ``disk``) or ``link``."""

    def __init__(self, node: str, kind: str, words: str, left: Collection[str] = ()) -> None:
        super().__init__(node, words, left)
        self.kind = kind


def take(
    call_all: CallAll,
    wanted: Wanted,
    used: Collection[str] = (),
    sleep: Callable[[float], None] = time.sleep,
) -> Taken:
    """Reserve all of ``wanted`` or nothing. ``used``: known lease ids, which are not used again.

    Nodes are called in sorted order, so that one of two concurrent requests wins. Raises Conflict and NodeFailed; after
    an interrupt everything is released before it is raised again.
    """
    for attempt in range(ATTEMPTS):
        lease = new_id(used)  # new each time, to distinguish it from claims that could not be released
        try:
            return _take_once(call_all, wanted, lease)
        except Conflict as conflict:
            if attempt + 1 == ATTEMPTS or not all(_may_be_withdrawn(claim) for claim in conflict.claims):
                raise
        import random  # late: 1 ms, which only a conflict needs

        sleep(random.uniform(0.02, 0.06) * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def _may_be_withdrawn(claim: Claim) -> bool:
    return claim.age_s < _WITHDRAWAL_S and len(claim.nodes) > 1


def _take_once(call_all: CallAll, wanted: Wanted, lease: str) -> Taken:
    asked: list[str] = []
    remaining_s = wanted.for_s
    args: dict[str, Any] = {
        "lease": lease,
        "for_s": wanted.for_s,
        "share": wanted.share,
        "holder": wanted.holder and msgspec.to_builtins(wanted.holder),
        "purpose": wanted.purpose,
        "host": wanted.host,
        "nodes": sorted(wanted.gpus),
        "gpus": sum(len(uuids) for uuids in wanted.gpus.values()),
    }
    try:
        for node in sorted(wanted.gpus):
            asked.append(node)
            ends = call_all({node: ("take", {**args, "uuids": list(wanted.gpus[node])})}, CALL_S, Ends)[node]
            if isinstance(ends, (CallFailed, LinkLost)):
                raise ends
            remaining_s = min(remaining_s, ends.until - ends.now)
    except CallFailed as error:
        # The agent that refused has withdrawn its part itself.
        left = _drop(call_all, lease, asked[:-1])
        if error.kind == "conflict":
            raise Conflict(asked[-1], error.message, error.detail.claims if error.detail else (), left) from None
        raise NodeFailed(asked[-1], error.kind, error.message, left) from None
    except LinkLost as error:
        left = _drop(call_all, lease, asked)  # the claim may have succeeded before the connection was lost
        raise NodeFailed(asked[-1], "link", error.words, left) from None
    except BaseException:
        _drop(call_all, lease, asked)
        raise
    return Taken(lease, {node: list(uuids) for node, uuids in sorted(wanted.gpus.items())}, remaining_s)


def _drop(call_all: CallAll, lease: str, nodes: Iterable[str]) -> list[str]:
    """Release a part; return the nodes that did not answer two calls: a feed reconnects in between.

    A hung node has the release queued after the claim and executes both when it continues.
    """
    failed = list(nodes)
    for _ in range(2):
        failed = list(release(call_all, lease, failed).failed)
    return failed


def release(call_all: CallAll, lease: str, nodes: Iterable[str], *, owned: bool = True) -> Outcome:
    """Release a lease on each of ``nodes``; ``done`` maps a node to the UUIDs that were released.

    A lease that has just ended there is no failure: its list is empty. The same holds for a lease of the caller
    (``owned``) if only another user has claims with this id there: they belong to another lease.
    """
    done, failed = _each(call_all, "release", {"lease": lease}, nodes, ReleasedClaims)
    released = {node: answer.released for node, answer in done.items()}
    for node, error in list(failed.items()):
        if isinstance(error, CallFailed) and error.kind in (_NOT_THERE if owned else {"not-found"}):
            del failed[node]
            released[node] = []
    return Outcome(released, failed)


def renew(call_all: CallAll, lease: str, nodes: Iterable[str], for_s: float) -> Outcome:
    """Let a lease of the caller end ``for_s`` from now; ``done``: the end by node, in that node's epoch seconds."""
    done, failed = _each(call_all, "renew", {"lease": lease, "for_s": for_s}, nodes, Ends)
    return Outcome({node: ends.until for node, ends in done.items()}, failed)


def _each(
    call_all: CallAll, op: str, args: dict[str, Any], nodes: Iterable[str], kind: type[T]
) -> tuple[dict[str, T], dict[str, CallFailed | LinkLost]]:
    answers = call_all({node: (op, dict(args)) for node in sorted(nodes)}, CALL_S, kind)
    failed = {node: each for node, each in answers.items() if isinstance(each, (CallFailed, LinkLost))}
    done = {node: each for node, each in answers.items() if not isinstance(each, (CallFailed, LinkLost))}
    return done, failed


class Mine(msgspec.Struct, frozen=True):
    """A lease of the caller: its claims by node, and every node it names."""

    lease: str
    gpus: dict[str, list[str]]  # node -> UUIDs, where its claims were seen
    nodes: list[str]  # those, and the ones it names without a reading


def mine(claims: Mapping[str, Sequence[Claim]], uids: Mapping[str, int]) -> dict[str, Mine]:
    """Return the caller's leases by id. ``claims`` by node; ``uids``: the caller's uid on each node (its hello)."""
    found: dict[str, dict[str, list[str]]] = {}
    named: dict[str, set[str]] = {}
    whole: dict[str, int] = {}
    for node in sorted(claims):
        for claim in claims[node]:
            if claim.state == "live" and uids.get(node) == claim.uid:
                found.setdefault(claim.lease, {}).setdefault(node, []).append(claim.uuid)
                named.setdefault(claim.lease, set()).update([node, *(n for n in claim.nodes if n not in claims)])
                whole[claim.lease] = claim.gpus
    for lease, gpus in found.items():
        if sum(map(len, gpus.values())) >= whole[lease]:  # other names are other users' names for these nodes
            named[lease] = set(gpus)
    return {lease: Mine(lease, gpus, sorted(named[lease])) for lease, gpus in found.items()}


def find(text: str, claims: Mapping[str, Sequence[Claim]], uids: Mapping[str, int], unread: Sequence[str] = ()) -> Mine:
    """Return the caller's lease with this id or unique prefix.

    Raises NoSuchLease with the reason, UnknownLease also where it may be on one of the nodes ``unread``.
    """
    ours = mine(claims, uids)
    if (lease := matching(text, ours)) is not None:
        return ours[lease]
    owners = {c.owner for found in claims.values() for c in found if c.lease == text and c.state == "live"}
    if owners:
        raise not_yours(text, owners)
    raise UnknownLease(text, ours, unread)


def unread_nodes(snapshot: Snapshot) -> list[str]:
    """Return the nodes whose claims are unknown now."""
    return [node.name for node in snapshot.nodes if node.state != "up" or node.claims_error is not None]


class GpuSlot(msgspec.Struct, frozen=True, gc=False):
    """NVML's index of a GPU, and the number of a MIG device on it."""

    index: int
    mig: int | None = None


def slots(nodes: Iterable[NodeView]) -> dict[str, dict[str, GpuSlot]]:
    """Return the slot of each GPU and MIG device by its node and UUID."""
    from gpuboard.model.snapshot import judged  # late: a keeper has no snapshot

    return {
        node.name: {gpu.uuid: GpuSlot(gpu.index) for gpu in judged(node)}
        | {device.uuid: GpuSlot(gpu.index, number) for gpu in judged(node) for number, device in enumerate(gpu.mig)}
        for node in nodes
    }


def holder_alive(holder: ClaimHolder) -> bool | None:
    """Return whether a claim's holder is alive; None when it runs on another host, or in a container of this one."""
    if holder.host != os.uname().nodename:
        return None  # a container has the host's boot id, but pids of its own
    return processes.alive(processes.Holder(holder.host, holder.boot_id, holder.pid, holder.start))


def leases_of(
    claims: Mapping[str, Sequence[Claim]],
    slots: Mapping[str, Mapping[str, GpuSlot]],
    now: float,
    alive: Callable[[ClaimHolder], bool | None] = lambda _: None,
    uids: Mapping[str, int] | None = None,
) -> list[Lease]:
    """Return the leases that the live claims form, by node then id. Pure.

    ``claims``: by node, only of nodes that were read; ``slots``: by node and UUID; ``now``: epoch seconds here,
    to which the claims' remaining times refer; ``alive``: whether a holder is alive, None if unknown here; ``uids``:
    the caller's uid on each node; root may end leases of others.

    A lease is identified by id and owner: one id with two owners is two leases, one of them a forgery. On each node the
    kernel gives the owner; across nodes the displayed name (with `[users]` aliases) identifies it, because a user's
    uids may differ between servers. The caller's claims are identified by uid on each node (as in :func:`mine`) and
    form one lease, whatever the user's name is there.

    Flags: ``disputed``; ``unread``: a node it names was not read; ``partial``: all were read, but GPUs are missing.
    """
    groups: dict[tuple[str, str | None], list[tuple[str, Claim]]] = {}
    for node in sorted(claims):
        for claim in claims[node]:
            if claim.state == "live":
                owner = None if uids is not None and claim.uid == uids.get(node) else claim.owner
                groups.setdefault((claim.lease, owner), []).append((node, claim))
    return [_lease(found, claims.keys(), slots, now, alive=alive, uids=uids or {}) for found in groups.values()]


def _within(seconds: float) -> float:
    """Return a lease's time within the limits that agents enforce, whatever the node reports."""
    return min(max(seconds, 0.0), LONGEST_S)


def _gpu(node: str, claim: Claim, at: GpuSlot | None) -> LeaseGpu:
    index, mig = (None, None) if at is None else (at.index, at.mig)
    return LeaseGpu(node, index, claim.uuid, claim.share, mig)


def _lease(
    found: list[tuple[str, Claim]],
    read: Collection[str],
    slots: Mapping[str, Mapping[str, GpuSlot]],
    now: float,
    *,
    alive: Callable[[ClaimHolder], bool | None],
    uids: Mapping[str, int],
) -> Lease:
    node, first = found[0]
    mine = uids.get(node) == first.uid
    ends_first = min((claim for _, claim in found), key=lambda claim: claim.remaining_s)
    remaining_s = _within(ends_first.remaining_s)
    until = now + remaining_s  # by this host's clock: times of two hosts are never subtracted
    named = {name for _, claim in found for name in claim.nodes}
    flags: list[LeaseFlag] = ["disputed"] if any(claim.disputed_with for _, claim in found) else []
    if len(found) < max(claim.gpus for _, claim in found):
        flags.append("unread" if named - set(read) else "partial")
    else:
        named = set()  # other names are other users' names for the nodes it was found on
    return Lease(
        id=first.lease,
        owner=first.owner,
        uid=first.uid,
        host=first.host,
        gpus=sorted(
            (_gpu(node, claim, slots.get(node, {}).get(claim.uuid)) for node, claim in found),
            key=lambda gpu: (gpu.node, gpu.index is None, gpu.index, gpu.mig or 0, gpu.uuid),
        ),
        since=iso(until - _within(ends_first.until - ends_first.since)),
        until=iso(until),
        holder=LeaseHolder(first.holder.pid, alive(first.holder)) if first.holder else None,
        purpose=first.purpose,
        flags=[*flags],
        remaining_s=remaining_s,
        nodes=sorted(named | {node for node, _ in found}),
        mine=mine,
        may_end=mine or all(uids.get(node) == 0 for node, _ in found),
    )
