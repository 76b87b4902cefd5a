"""What is held now, and giving it back: the leases of a fleet's nodes, which of them a person means, their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from gpuboard.errors import GpuboardError, NoSuchLease
from gpuboard.keeper import client as keeper
from gpuboard.keeper import holder as processes
from gpuboard.leases.claims import client as ledger
from gpuboard.model.lease import Lease, LeaseGpu, LeaseList
from gpuboard.model.text import clean
from gpuboard.model.units import iso

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.model.reading import Holder
    from gpuboard.model.snapshot import NodeView, Snapshot


class ReleasedLease(msgspec.Struct, frozen=True):
    """A lease that was ended: the GPUs that were released; by node, elsewhere, why not and when it expires there."""

    lease: str
    gpus: list[LeaseGpu]
    failed: dict[str, str]


def leases(fleet: Fleet, snapshot: Snapshot) -> LeaseList:
    """Return the leases in the nodes' newest readings and in the scheduler, and the nodes that could not be read."""
    now = time.time()
    unread = [node.name for node in snapshot.nodes if node.state != "up" or node.claims_error is not None]
    down = set(unread)
    current = {node: claims for node, claims in fleet.claims().items() if node not in down}
    index = indexes(node for node in snapshot.nodes if current.get(node.name))
    found = ledger.leases_of(current, index, now, _alive, fleet.uids())
    if (schedule := fleet.schedule) is not None:
        from gpuboard.leases.slurm import queries as slurm_held  # only where there is a Slurm

        found += slurm_held.leases(schedule, snapshot, now, fleet.known_as)
    return LeaseList(schema=1, at=iso(now), leases=found, unread=unread)


def indexes(nodes: Iterable[NodeView]) -> dict[str, dict[str, int]]:
    """Return NVML's index of each GPU by its node and UUID; of a MIG device, that of its GPU."""
    return {
        node.name: {gpu.uuid: gpu.index for gpu in node.gpus}
        | {device.uuid: gpu.index for gpu in node.gpus for device in gpu.mig}
        for node in nodes
    }


def gpus_words(gpus: Sequence[LeaseGpu]) -> str:
    """Return GPUs as ``gpu01:0,2@gpu02:1``; one that is no longer in the readings by its UUID, an unknown one as ?."""
    return "@".join(
        f"{clean(node, 64)}:{','.join(clean(g.uuid, 48) or '?' if g.index is None else str(g.index) for g in on_node)}"
        for node, on_node in groupby(gpus, key=lambda gpu: gpu.node)
    )


def chosen(ids: Sequence[str], fleet: Fleet, unread: Sequence[str]) -> list[ledger.Mine]:
    """Return the leases that ``ids`` name, all of ours without ids. Raises before anything is changed: NoSuchLease,
    or GpuboardError where one may lie on a node that was not read: then nobody knows that it has ended."""
    claims, uids = fleet.claims(), fleet.uids()
    if not ids:
        return list(ledger.mine(claims, uids).values())
    found = {}
    for text in ids:
        try:
            mine = ledger.find(text, claims, uids)
        except NoSuchLease as error:
            theirs = {
                node: [c.uuid for c in on if c.lease == text and c.state == "live"] for node, on in claims.items()
            }
            ended = {node: uuids for node, uuids in theirs.items() if uuids and uids.get(node) == 0}
            if ended:  # root may end anybody's
                mine = ledger.Mine(text, ended, sorted(ended), owned=False)
            elif unread and not any(theirs.values()):
                raise GpuboardError(f"{error}; not read, so it may lie there: {', '.join(unread)}") from None
            else:
                raise
        found[mine.lease] = mine
    return list(found.values())


def release(
    mine: ledger.Mine, known: Sequence[Lease], fleet: Fleet, env: Mapping[str, str], warn: Callable[[str], None]
) -> ReleasedLease:
    """End one lease on all its nodes. ``known``: the leases as they were read, for GPUs' indexes and their end."""
    kept_here = keeper.has(mine.lease, env)
    try:
        keeper.forget(mine.lease, env)  # first, so that it does not take the release for a loss
    except (keeper.KeeperError, OSError) as error:
        kept_here = False  # it may go on
        warn(f"warning: {error}; {mine.lease} is released all the same, the keeper may report it as lost")
    outcome = ledger.release(fleet.call, mine.lease, mine.nodes, owned=mine.owned)
    index = {(gpu.node, gpu.uuid): gpu.index for lease in known for gpu in lease.gpus}
    gpus = [LeaseGpu(node, index.get((node, uuid)), uuid) for node, uuids in outcome.done.items() for uuid in uuids]
    ours = [lease for lease in known if any(gpu.uuid in mine.gpus.get(gpu.node, ()) for gpu in lease.gpus)]
    until = max((lease.until for lease in ours if lease.id == mine.lease), default="the end of its time")
    when = "within 90 s" if kept_here else f"when its holder ends, at the latest at {until}"
    failed = {node: f"not released on {node}: {clean(str(error))}" for node, error in outcome.failed.items()}
    return ReleasedLease(
        mine.lease, gpus, {node: f"{words}; it expires there by itself {when}" for node, words in failed.items()}
    )


def renew(mine: ledger.Mine, for_s: float, fleet: Fleet, env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Let one lease end ``for_s`` from now; return the nodes where it does, and by node why not, elsewhere."""
    outcome = ledger.renew(fleet.call, mine.lease, mine.nodes, for_s)
    if outcome.done:
        keeper.renew(mine.lease, for_s, env)
    return sorted(outcome.done), {node: clean(str(error)) for node, error in outcome.failed.items()}


def _alive(holder: Holder) -> bool | None:
    return processes.alive(processes.Holder(holder.host, holder.boot_id, holder.pid, holder.start))
