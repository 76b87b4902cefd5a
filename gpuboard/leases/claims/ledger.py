"""Claims on the nodes as a ledger: each GPU's claims lie on its node. See :mod:`gpuboard.leases.ledger`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node, local_node, node_by_uuids, own_uuids
from gpuboard.errors import NoNodeReached, NoSuchLease, UsageError
from gpuboard.leases.ledger import (
    NO_OPTIONS,
    AmbiguousLease,
    Found,
    JobOptions,
    Progress,
    Released,
    Renewed,
    Scope,
    UnknownLease,
    not_yours,
)
from gpuboard.model.snapshot import Snapshot
from gpuboard.model.units import day_time, seconds_of

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.leases.claims.allocator import ClaimsAllocator
    from gpuboard.leases.claims.client import Mine
    from gpuboard.leases.output.formats import Allocation
    from gpuboard.model.lease import Lease, LeaseList
    from gpuboard.model.request import Choice, Refusal, Request

_REFRESH_S = 2.0  # for a running fleet to show a change
Settle = Callable[[Fleet], "Snapshot"]  # waits until every node of a fleet has a reading or an error


class ClaimsLedger:
    """Leases as claims on the nodes of ``scope``, which is called when the nodes are first needed.

    ``running``: an open fleet of these nodes (the board's), used instead of new connections. ``settle`` replaces the
    wait for readings (a command shows its progress); ``warn`` receives warnings.
    """

    kind = "nodes"
    name = "claims on the nodes"
    names_gpus = True

    def __init__(
        self,
        scope: Callable[[], Scope],
        settings: Settings,
        env: Mapping[str, str],
        *,
        running: Fleet | None,
        settle: Settle | None,
        warn: Progress,
    ) -> None:
        self._scope = scope
        self._settings = settings
        self._env = env
        self._running = running
        self._settle = settle or _settle
        self._warn = warn
        self._fleet = running

    def close(self) -> None:
        """Close the connections that were opened here."""
        if self._fleet is not None and self._fleet is not self._running:
            self._fleet.close()
        self._fleet = self._running

    def covers(self, nodes: Sequence[Node], *, ask: bool = True) -> Collection[str]:
        """Return all of them: any node can have claims."""
        return [node.name for node in nodes]

    def allocator(self, scope: Scope, *, options: JobOptions, progress: Progress) -> ClaimsAllocator:
        """Return the allocator for the nodes of ``scope``. Raises UsageError for options of a scheduler's job."""
        if options != NO_OPTIONS:
            raise UsageError(
                "--partition, --account, --qos, --reservation and --slurm apply to Slurm nodes only, and the requested "
                "nodes are reserved without Slurm; `gpuboard config` shows the setting `scheduler`"
            )
        fleet = ScopeFleet(scope, self._settings, running=self._running)  # reads the nodes during the import below
        try:
            from gpuboard.leases.claims.allocator import ClaimsAllocator

            return ClaimsAllocator(fleet, self._settings, self._env, progress=progress)
        except BaseException:
            fleet.close()
            raise

    def plan(self, request: Request, snapshot: Snapshot) -> Choice | Refusal:
        """Return the policy's answer for ``snapshot``. Raises UsageError."""
        from gpuboard.leases.policy.choose import choose

        return choose(request, snapshot)

    def leases(self, fleet: Fleet, snapshot: Snapshot, *, fresh: bool = False) -> LeaseList:
        """Return all users' leases in the nodes' newest readings, and the nodes without one."""
        from gpuboard.leases.claims import client
        from gpuboard.model.lease import LeaseList
        from gpuboard.model.units import iso

        now = time.time()
        unread = client.unread_nodes(snapshot)
        skipped = set(unread)
        current = {node: claims for node, claims in fleet.claims().items() if node not in skipped}
        slots = client.slots(node for node in snapshot.nodes if current.get(node.name))
        found = client.leases_of(current, slots, now, client.holder_alive, fleet.uids())
        return LeaseList(schema=1, at=iso(now), leases=found, unread=unread)

    def find(self, ids: Sequence[str]) -> Found:
        """Return the caller's leases; the error of a missing id names the nodes without a reading."""
        from gpuboard.leases.claims import client

        nodes = self._scope().nodes
        if not nodes:
            return Found([], {text: UnknownLease(text) for text in ids})
        fleet, snapshot = self._read(nodes)
        unread = client.unread_nodes(snapshot)
        claims, uids = fleet.claims(), fleet.uids()
        shown = client.leases_of(claims, client.slots(snapshot.nodes), time.time(), client.holder_alive, uids)
        if not ids:
            return Found([_as_lease(each, shown) for each in client.mine(claims, uids).values()], unread=unread)
        found: dict[str, Lease] = {}
        missing: dict[str, UnknownLease] = {}
        for text in ids:
            try:
                each = client.find(text, claims, uids, unread)
            except AmbiguousLease:
                raise
            except UnknownLease as error:
                missing[text] = error
                continue
            except NoSuchLease:  # of others
                theirs = {
                    node: [c.uuid for c in on if c.lease == text and c.state == "live"] for node, on in claims.items()
                }
                for_root = {node: uuids for node, uuids in theirs.items() if uuids and uids.get(node) == 0}
                if not for_root:  # root may end any lease
                    raise
                each = client.Mine(text, for_root, sorted(for_root))
            found[each.lease] = _as_lease(each, shown)
        return Found(list(found.values()), missing, unread)

    def release(self, lease: Lease) -> Released:
        """End a lease on all its nodes."""
        from gpuboard.keeper import client as keeper
        from gpuboard.leases.claims import client
        from gpuboard.leases.terms import remove_rank_map
        from gpuboard.model.lease import LeaseGpu

        kept_here = keeper.has(lease.id, self._env)
        try:
            keeper.forget(lease.id, self._env)  # first, so that it does not report the release as a loss
        except (keeper.KeeperError, OSError) as error:
            kept_here = False  # the keeper may continue the heartbeats
            self._warn(f"warning: {error}; {lease.id} is released anyway, and the keeper may report it as lost")
        fleet = self._connected(lease)
        owned = self._is_own(lease, fleet.uids())
        outcome = client.release(fleet.call_all, lease.id, lease.nodes, owned=owned)
        remove_rank_map(self._env, lease.id)
        known = {(gpu.node, gpu.uuid): (gpu.index, gpu.mig) for gpu in lease.gpus}
        gpus = []
        for node, uuids in outcome.done.items():
            for uuid in uuids:
                index, mig = known.get((node, uuid), (None, None))
                gpus.append(LeaseGpu(node, index, uuid, mig=mig))
        gpus.sort(key=lambda gpu: (gpu.node, gpu.index or 0, gpu.mig or 0))
        end = day_time(seconds_of(lease.until))
        when = "within 90 s" if kept_here else f"when its holder ends, at the latest {end}"
        self._refresh(lease.nodes)
        return Released(
            lease.id,
            gpus,
            {
                node: f"not released on {node}: {reason}; it will expire there {when}"
                for node, reason in outcome.reasons.items()
            },
        )

    def renew(self, lease: Lease, for_s: float) -> Renewed:
        """Renew a lease of the caller on all its nodes. Raises NoSuchLease for another user's, which root can find."""
        from gpuboard.keeper import client as keeper
        from gpuboard.leases.claims import client

        fleet = self._connected(lease)
        if not self._is_own(lease, fleet.uids()):
            raise not_yours(lease.id, [lease.owner])
        outcome = client.renew(fleet.call_all, lease.id, lease.nodes, for_s)
        if outcome.done:
            keeper.renew(lease.id, for_s, self._env)
        self._refresh(lease.nodes)
        return Renewed(sorted(outcome.done), outcome.reasons, for_s)

    def existing(self, text: str, n: int | None = None) -> Allocation:
        """Return a lease of the caller as its claims show it."""
        scope = msgspec.structs.replace(self._scope(), explicit=True)
        with self.allocator(scope, options=NO_OPTIONS, progress=lambda _: None) as allocator:
            return allocator.existing(text, n)

    def _read(self, nodes: Sequence[Node]) -> tuple[Fleet, Snapshot]:
        """Return a fleet of ``nodes`` and its readings. Raises NoNodeReached."""
        if self._running is not None:
            return self._running, self._running.snapshot()
        self.close()
        self._fleet = self._open(nodes)
        snapshot = self._settle(self._fleet)
        if all(node.age_s is None for node in snapshot.nodes):
            names = [node.name for node in nodes]
            raise NoNodeReached("no node could be reached; `gpuboard status` shows why", names)
        return self._fleet, snapshot

    def _connected(self, lease: Lease) -> Fleet:
        """Return the fleet that :meth:`find` read, else one with new connections to the lease's nodes.

        The connections that reserved it may have been lost during a run of days.
        """
        if self._fleet is None:
            self._fleet = self._open([node for node in self._scope().nodes if node.name in lease.nodes])
        return self._fleet

    def _open(self, nodes: Sequence[Node]) -> Fleet:
        fleet = Fleet(nodes, self._settings, interval_s=None)
        fleet.start()
        return fleet

    def _is_own(self, lease: Lease, uids: Mapping[str, int]) -> bool:
        """Return whether a lease is the caller's, by uid on its first node if that was read."""
        return not lease.gpus or lease.uid == uids.get(lease.gpus[0].node, lease.uid)

    def _refresh(self, nodes: Sequence[str]) -> None:
        if self._running is not None:
            self._running.refresh(nodes, _REFRESH_S)


class ScopeFleet:
    """Feeds of the nodes of ``scope``, started at once; only this machine's if it is a node and scope is not explicit.

    ``running``: an open fleet of exactly these nodes, used instead of new connections.
    """

    def __init__(self, scope: Scope, settings: Settings, *, running: Fleet | None = None) -> None:
        here = local_node(scope.nodes)
        alone = here is not None and not scope.explicit
        self.nodes = {node.name: node for node in scope.nodes if not alone or node is here}
        self.left_out = [node.name for node in scope.nodes if node.name not in self.nodes]
        self.here = here.name if here else None  # the node that is this machine, if known
        self.job = scope.job
        self._by_uuid = own_uuids() if here is None and not scope.explicit else []
        self.is_running = running is not None
        self.fleet = running or Fleet(list(self.nodes.values()), settings, interval_s=None)
        if running is None:
            self.fleet.start()

    def snapshot(self) -> Snapshot:
        """Return the newest readings of the nodes in scope. This machine is recognized by its GPUs' UUIDs too."""
        found = self.fleet.snapshot()
        if self._by_uuid and (here := node_by_uuids(found, self._by_uuid)):
            self.here = here
            self.left_out = [name for name in self.nodes if name != here]
            return msgspec.structs.replace(found, nodes=[node for node in found.nodes if node.name == here])
        return found

    def close(self) -> None:
        """Close the connections that were opened here."""
        if not self.is_running:
            self.fleet.close()


def _as_lease(mine: Mine, shown: Sequence[Lease]) -> Lease:
    """Return the lease of the claims in ``mine`` as the readings show it, with the nodes to call."""
    parts = [
        lease
        for lease in shown
        if lease.id == mine.lease and any(gpu.uuid in mine.gpus.get(gpu.node, ()) for gpu in lease.gpus)
    ]
    gpus = [gpu for lease in parts for gpu in lease.gpus if gpu.uuid in mine.gpus.get(gpu.node, ())]
    return msgspec.structs.replace(parts[0], gpus=gpus, nodes=mine.nodes, until=max(lease.until for lease in parts))


def _settle(fleet: Fleet) -> Snapshot:
    fleet.wait_all(fleet.connect_s + 5)
    fleet.freshen()
    return fleet.snapshot()
