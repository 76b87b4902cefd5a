"""Heartbeats from the host of a detached run's head for a lease that was reserved before the launch."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.keeper import client as keeper
from gpuboard.keeper.client import KeptNode, LeaseRecord
from gpuboard.keeper.holder import identify
from gpuboard.model.rankmap import RankMap
from gpuboard.model.units import parse_duration


def shared_record(rank_map: RankMap, nodes: Sequence[Node], settings: Settings) -> LeaseRecord | None:
    """Return the record of the lease of ``rank_map`` for another keeper; None without one, and for a Slurm job.

    ``nodes``: as that keeper's host reaches them. The record's times count from now.
    """
    if rank_map.lease is None or rank_map.job is not None:
        return None
    uuids = defaultdict[str, list[str]](list)
    for rank in rank_map.ranks:
        uuids[rank.node].append(rank.uuid)
    kept = [
        KeptNode(node.name, uuids[node.name], node.host, node.claims_dir or settings.claims_dir, node.simulate)
        for node in nodes
        if node.name in uuids
    ]
    until_s = parse_duration(settings.max_lease)  # the nodes end it at its own time
    record = keeper.record(rank_map.lease, kept, msgspec.to_builtins(settings), None, until_s, shared=True)
    return record._replace(created=0.0, until=until_s)


def share(record: LeaseRecord, env: Mapping[str, str], name: str, report: Callable[[str], None]) -> None:
    """Let the keeper of this host, the node ``name``, send heartbeats, too, for a lease while this process runs.

    ``report`` receives a message about it. Does nothing where this keeper has the lease itself.
    """
    lease = record.lease
    if (known := keeper.record_of(lease, env)) is not None and not known.shared:
        return
    mine = keeper.record(lease, record.nodes, record.settings, identify(os.getpid()), record.until, shared=True)
    try:
        keeper.hand_over(mine, env).confirm()
    except keeper.KeeperError as error:
        report(
            f"{name} cannot send heartbeats for lease {lease}: {error}\n  the lease depends on the host that "
            "reserved it: if that is down for 90 s, the lease expires while the run goes on"
        )
    else:
        report(f"lease {lease} gets its heartbeats from {name}, too, until the run or the lease ends")
