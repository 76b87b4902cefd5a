"""Leases over several nodes: all of it or nothing; and the claims that lie on the nodes as leases (pure).

Everything that travels goes through a ``call`` that is handed in: ``call(node, op, args, timeout_s, kind)`` returns the
agent's value, a ``kind``, and raises CallFailed or LinkLost (``Fleet.call`` has that shape).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from gpuboard.errors import GpuboardError
from gpuboard.keeper import holder as processes
from gpuboard.leases.ledger import matching, no_such_lease, not_yours
from gpuboard.model.lease import Lease, LeaseGpu, LeaseHolder
from gpuboard.model.reading import Claim, Holder
from gpuboard.model.replies import Ends, Released
from gpuboard.model.units import iso
from gpuboard.transport.base import CallFailed, LinkLost

if TYPE_CHECKING:
    from gpuboard.model.snapshot import NodeView

T = TypeVar("T")


class Call(Protocol):
    """See the module's docstring."""

    def __call__(self, node: str, op: str, args: dict[str, Any], timeout_s: float, kind: type[T]) -> T: ...


# Read aloud and typed by people: none of 0 o 1 l i u.
_LETTERS = "abcdefghjkmnpqrstvwxyz"
_SIGNS = _LETTERS + "23456789"
_ID_LENGTH = 6  # 5e8 ids

# A call takes less than 1 s over ssh, and a take 2 s more while a neighbour keeps the folder's lock. A node that has
# not answered by then is set aside: others can serve.
CALL_S = 4.0
ATTEMPTS = 4
_NOT_THERE = frozenset({"not-found", "not-yours"})  # why there was nothing of ours to release
LONGEST_S = 366 * 86400.0  # what agents take for a claim (agent/claims/rules.py)
# A claim younger than this, of a lease over several nodes, may be withdrawn yet: its taker is still on his way.
_ON_ITS_WAY_S = 2.0


class Wanted(msgspec.Struct, frozen=True):
    """What to reserve: the UUIDs on each node, for how long, for whom."""

    gpus: Mapping[str, Sequence[str]]  # node -> UUIDs
    for_s: float
    host: str  # where the owner typed
    holder: Holder | None = None  # None: detached
    purpose: str = ""
    share: int | None = None  # bytes of one GPU; None: whole GPUs


class Taken(msgspec.Struct, frozen=True):
    """A lease that was taken."""

    lease: str
    gpus: dict[str, list[str]]  # node -> UUIDs
    remaining_s: float  # until it ends


class Outcome(msgspec.Struct, frozen=True):
    """What an operation over several nodes did: the nodes where it succeeded, and why not, by node, elsewhere."""

    done: dict[str, Any]
    failed: dict[str, CallFailed | LinkLost]


class NotTaken(GpuboardError):
    """A lease could not be taken on ``node``; nothing of it is left.

    ``left``: nodes that gave no answer when their part was dropped. They drop it when they answer again; without a
    keeper claims there expire within 90 s.
    """

    def __init__(self, node: str, words: str, left: Collection[str] = ()) -> None:
        may_stay = f"; a claim on {', '.join(left)} that was not withdrawn expires within 90 s" if left else ""
        super().__init__(f"{node}: {words}{may_stay}")
        self.node = node
        self.left = tuple(left)


class Conflict(NotTaken):
    """Somebody else holds a GPU that was asked for; ``claims`` says who."""

    exit_code = 4

    def __init__(self, node: str, words: str, claims: Sequence[Claim], left: Collection[str] = ()) -> None:
        super().__init__(node, words, left)
        self.claims = tuple(claims)


class NodeFailed(NotTaken):
    """A node cannot hold claims or gave no answer; ``kind`` is the agent's (``folder``, ``disk``) or ``link``."""

    def __init__(self, node: str, kind: str, words: str, left: Collection[str] = ()) -> None:
        super().__init__(node, words, left)
        self.kind = kind


def new_id(used: Collection[str] = ()) -> str:
    """Return a lease id, random, of six signs that are not mistaken for each other, the first a letter."""
    while True:
        dice = os.urandom(_ID_LENGTH * 2)
        numbers = [int.from_bytes(dice[i : i + 2], "big") for i in range(0, len(dice), 2)]
        lease = _LETTERS[numbers[0] % len(_LETTERS)] + "".join(_SIGNS[n % len(_SIGNS)] for n in numbers[1:])
        if lease not in used:
            return lease


def take(
    call: Call,
    wanted: Wanted,
    used: Collection[str] = (),
    sleep: Callable[[float], None] = time.sleep,
) -> Taken:
    """Reserve all of ``wanted`` or nothing. ``used``: ids of leases that are known, so that ours is a new one.

    Nodes are asked in sorted order, so that of two takers one gets ahead. Raises Conflict and NodeFailed; an
    interrupt also drops everything before it goes on.
    """
    for attempt in range(ATTEMPTS):
        lease = new_id(used)  # new each time: what could not be dropped must not be mistaken for ours
        try:
            return _take_once(call, wanted, lease)
        except Conflict as conflict:
            if attempt + 1 == ATTEMPTS or not all(_on_its_way(claim) for claim in conflict.claims):
                raise
        sleep(random.uniform(0.02, 0.06) * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def _on_its_way(claim: Claim) -> bool:
    return claim.age_s < _ON_ITS_WAY_S and len(claim.nodes) > 1


def _take_once(call: Call, wanted: Wanted, lease: str) -> Taken:
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
            ends = call(node, "take", {**args, "uuids": list(wanted.gpus[node])}, CALL_S, Ends)
            remaining_s = min(remaining_s, ends.until - ends.now)
    except CallFailed as error:
        # The agent that said no has withdrawn its part itself.
        left = _drop(call, lease, asked[:-1])
        if error.kind == "conflict":
            raise Conflict(asked[-1], error.message, error.detail.claims if error.detail else (), left) from None
        raise NodeFailed(asked[-1], error.kind, error.message, left) from None
    except LinkLost as error:
        left = _drop(call, lease, asked)  # it may have been taken there before the connection went
        raise NodeFailed(asked[-1], "link", error.words, left) from None
    except BaseException:
        _drop(call, lease, asked)
        raise
    return Taken(lease, {node: list(uuids) for node, uuids in sorted(wanted.gpus.items())}, remaining_s)


def _drop(call: Call, lease: str, nodes: Iterable[str]) -> list[str]:
    """Release a part; return the nodes that gave no answer, each asked twice: a feed connects again meanwhile.

    One that hangs has the release behind the take in its queue, and answers both when it goes on.
    """
    failed = list(nodes)
    for _ in range(2):
        failed = list(release(call, lease, failed).failed)
    return failed


def release(call: Call, lease: str, nodes: Iterable[str], *, owned: bool = True) -> Outcome:
    """End a lease on each of ``nodes``; ``done`` maps a node to the UUIDs that were released.

    None where it has ended by itself a moment ago: that is no failure. Nor is it, of a lease of one's own (``owned``),
    when only another user has claims with this id there: they are another lease.
    """
    done, failed = _each(call, "release", {"lease": lease}, nodes, Released)
    released = {node: answer.released for node, answer in done.items()}
    for node, error in list(failed.items()):
        if isinstance(error, CallFailed) and error.kind in (_NOT_THERE if owned else {"not-found"}):
            del failed[node]
            released[node] = []
    return Outcome(released, failed)


def renew(call: Call, lease: str, nodes: Iterable[str], for_s: float) -> Outcome:
    """Let our lease end ``for_s`` from now on each of ``nodes``; ``done`` maps a node to its own epoch time of it."""
    done, failed = _each(call, "renew", {"lease": lease, "for_s": for_s}, nodes, Ends)
    return Outcome({node: ends.until for node, ends in done.items()}, failed)


def _each(
    call: Call, op: str, args: dict[str, Any], nodes: Iterable[str], kind: type[T]
) -> tuple[dict[str, T], dict[str, CallFailed | LinkLost]]:
    done: dict[str, T] = {}
    failed: dict[str, CallFailed | LinkLost] = {}
    for node in sorted(nodes):
        try:
            done[node] = call(node, op, dict(args), CALL_S, kind)
        except (CallFailed, LinkLost) as error:
            failed[node] = error
    return done, failed


class Mine(msgspec.Struct, frozen=True):
    """A lease of ours: its claims by node, and every node it names."""

    lease: str
    gpus: dict[str, list[str]]  # node -> UUIDs, where its claims were seen
    nodes: list[str]  # those, and the ones it names that gave no reading


def mine(claims: Mapping[str, Sequence[Claim]], uids: Mapping[str, int]) -> dict[str, Mine]:
    """Return our leases by id. ``claims`` by node; ``uids``: who we are on each node (its hello says so)."""
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
        if sum(map(len, gpus.values())) >= whole[lease]:  # other names in it are other people's names for these nodes
            named[lease] = set(gpus)
    return {lease: Mine(lease, gpus, sorted(named[lease])) for lease, gpus in found.items()}


def find(text: str, claims: Mapping[str, Sequence[Claim]], uids: Mapping[str, int]) -> Mine:
    """Return our lease of this id, or the only one whose id starts so. Raises NoSuchLease with the reason."""
    ours = mine(claims, uids)
    if (lease := matching(text, ours)) is not None:
        return ours[lease]
    owners = {c.owner for found in claims.values() for c in found if c.lease == text and c.state == "live"}
    raise not_yours(text, owners) if owners else no_such_lease(text, ours)


def indexes(nodes: Iterable[NodeView]) -> dict[str, dict[str, int]]:
    """Return NVML's index of each GPU by its node and UUID; of a MIG device, that of its GPU."""
    return {
        node.name: {gpu.uuid: gpu.index for gpu in node.gpus}
        | {device.uuid: gpu.index for gpu in node.gpus for device in gpu.mig}
        for node in nodes
    }


def holder_alive(holder: Holder) -> bool | None:
    """Return whether a claim's holder is alive; None when it runs on another host."""
    return processes.alive(processes.Holder(holder.host, holder.boot_id, holder.pid, holder.start))


def leases_of(
    claims: Mapping[str, Sequence[Claim]],
    index: Mapping[str, Mapping[str, int]],
    now: float,
    alive: Callable[[Holder], bool | None] = lambda _: None,
    uids: Mapping[str, int] | None = None,
) -> list[Lease]:
    """Return the leases that the live claims make, by node then id. Pure.

    ``claims``: by node, only nodes that were read; ``index``: NVML's by node and UUID; ``now``: our epoch seconds, at
    which the claims' remaining times hold; ``alive``: whether a holder lives, None when it cannot be told from here;
    ``uids``: who we are on each node.

    A lease is its id and its owner: one id with two owners is two leases, the second somebody's forgery. The owner is
    the kernel's word on each node; over several nodes it is the name to show (`[users]` aliases applied), because one
    person's uids may differ between servers. Claims of ours are one lease whatever we are called on each node: they are
    ours by uid, node by node (as in :func:`mine`).

    Flags: ``disputed``; ``unread``: a node it names was not read; ``partial``: all were, yet GPUs of it are missing.
    """
    groups: dict[tuple[str, str | None], list[tuple[str, Claim]]] = {}
    for node in sorted(claims):
        for claim in claims[node]:
            if claim.state == "live":
                owner = None if uids is not None and claim.uid == uids.get(node) else claim.owner
                groups.setdefault((claim.lease, owner), []).append((node, claim))
    return [_lease(found, claims.keys(), index, now, alive) for found in groups.values()]


def _within(seconds: float) -> float:
    """Return a lease's time as agents let it be: what a node says is not believed beyond that."""
    return min(max(seconds, 0.0), LONGEST_S)


def _lease(
    found: list[tuple[str, Claim]],
    read: Collection[str],
    index: Mapping[str, Mapping[str, int]],
    now: float,
    alive: Callable[[Holder], bool | None],
) -> Lease:
    first = found[0][1]
    ends_first = min((claim for _, claim in found), key=lambda claim: claim.remaining_s)
    remaining_s = _within(ends_first.remaining_s)
    until = now + remaining_s  # by our clock: two hosts' clocks are never subtracted
    named = {name for _, claim in found for name in claim.nodes}
    flags = ["disputed"] if any(claim.disputed_with for _, claim in found) else []
    if len(found) < max(claim.gpus for _, claim in found):
        flags.append("unread" if named - set(read) else "partial")
    else:
        named = set()  # other names are other people's names for the nodes it was found on
    return Lease(
        id=first.lease,
        owner=first.owner,
        uid=first.uid,
        host=first.host,
        gpus=sorted(
            (LeaseGpu(node, index.get(node, {}).get(claim.uuid), claim.uuid, claim.share) for node, claim in found),
            key=lambda gpu: (gpu.node, gpu.index is None, gpu.index, gpu.uuid),
        ),
        since=iso(until - _within(ends_first.until - ends_first.since)),
        until=iso(until),
        holder=LeaseHolder(first.holder.pid, alive(first.holder)) if first.holder else None,
        purpose=first.purpose,
        flags=flags,
        remaining_s=remaining_s,
        nodes=sorted(named | {node for node, _ in found}),
    )
