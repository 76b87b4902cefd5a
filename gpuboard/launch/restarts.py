"""Restarts of a run that has failed (``--max-restarts``): when, on which GPUs, and the loop over the attempts.

Each attempt has a head of its own, another secret and another store.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from gpuboard.launch.plan import Device, LaunchPlan, next_attempt
from gpuboard.launch.preflight.gpus import gpu_check, unread
from gpuboard.launch.timing import HeadTiming
from gpuboard.leases.rank_map import LOOPBACK, rank_map
from gpuboard.model.lease import LeaseGpu, gpus_text
from gpuboard.model.rankmap import Rank, RankMap
from gpuboard.model.request import ChosenGpu
from gpuboard.model.snapshot import GpuView, NodeView, Snapshot
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from gpuboard.launch.head import Head

MakeHead = Callable[[LaunchPlan, "Head | None", str], "Head"]  # of the plan, the attempt before, what has changed


class Attempts:
    """A run and its restarts. ``lease``: its whole lease, where restarts may use other GPUs of it, or fewer."""

    def __init__(self, plan: LaunchPlan, make: MakeHead, lease: RankMap | None) -> None:
        self._plan = plan
        self._make = make
        self._lease = lease
        self._ranks = plan.rank_map.world_size
        self.head = make(plan, None, "")  # of the newest attempt
        self.logs_complete = True  # all output of the ranks of all attempts is in the run's folder

    def run(self) -> int:
        """Run until an attempt succeeds, none is left or the user stops the run; return the exit code of the last one.

        To be called in the main thread.
        """
        code = self._run()
        while self.head.continues:
            try:
                self.head = self._next()
            except BaseException:
                self.head.abandon()
                raise
            code = self._run()
        return code

    def _run(self) -> int:
        try:
            return self.head.run()
        finally:
            self.logs_complete = self.logs_complete and self.head.logs_complete

    def _next(self) -> Head:
        rank_map, change, reading = self._plan.rank_map, "", self.head.lease_reading
        if self._lease is not None and reading is not None:
            options = self._plan.options
            least = self._ranks if options.min_ranks is None else options.min_ranks
            rank_map, change = reassigned(rank_map, self._lease, reading, options.device, most=self._ranks, least=least)
        self._plan = next_attempt(self._plan, rank_map, secrets.token_hex(16))
        return self._make(self._plan, self.head, change)

    def stop(self, reason: str) -> None:
        """Stop the run as `gpuboard stop` does; from any thread and at any time."""
        self.head.stop(reason)


def restarts(plan: LaunchPlan, code: int, *, opened: bool, asked: bool) -> bool:
    """Return whether the attempt of ``plan`` that ended with exit code ``code`` is followed by another one.

    ``opened``: its ranks were started; without that the first attempt is final: preflight refused it. ``asked``: the
    user has asked for the run's end.
    """
    left = plan.attempt <= plan.options.max_restarts
    return left and code != 0 and not asked and (opened or plan.attempt > 1)


def pause_s(attempt: int, timing: HeadTiming) -> float:
    """Return the pause after ``attempt``: twice as long each time, up to a limit."""
    return float(min(timing.restart_pause_max_s, timing.restart_pause_s * 2 ** min(attempt - 1, 30)))


def attempt_text(plan: LaunchPlan) -> str:
    """Return ``attempt 2 of 4``."""
    return f"attempt {plan.attempt} of {plan.options.max_restarts + 1}"


def same_failure_text(plan: LaunchPlan, failure: str) -> str:
    """Return the message for a failure that ended the attempt before too."""
    return f"attempt {plan.attempt} failed like attempt {plan.attempt - 1} ({failure}): restarts may not help"


def reassigned(
    current: RankMap, lease: RankMap, snapshot: Snapshot, device: Device, *, most: int, least: int
) -> tuple[RankMap, str]:
    """Return the rank map of the next attempt, and what changed: "" if nothing did.

    ``lease``: the whole lease, of which ``current`` uses a part; ``snapshot``: its nodes. Left out are GPUs that
    preflight would refuse, those of unreachable nodes, and sick ones, as far as the lease has others. The map has
    ``most`` ranks if the lease has as many usable GPUs, else fewer; with less than ``least`` it stays as it is, and
    preflight reports why.
    """
    views = {view.name: view for view in snapshot.nodes}
    used = {(rank.node, rank.uuid) for rank in current.ranks}
    nodes = {rank.node for rank in current.ranks}
    faults = {(rank.node, rank.uuid): _fault(rank, views.get(rank.node), lease, device) for rank in lease.ranks}
    usable = [rank for rank in lease.ranks if not faults[rank.node, rank.uuid][0]]
    usable.sort(key=lambda r: (bool(faults[r.node, r.uuid][1]), (r.node, r.uuid) not in used, r.node not in nodes))
    chosen = {(rank.node, rank.uuid) for rank in usable[:most]}
    if chosen == used or len(chosen) < least:
        return current, ""
    counts = Counter(node for node, _ in chosen)
    ranks = [rank for rank in lease.ranks if (rank.node, rank.uuid) in chosen]
    ranks.sort(key=lambda rank: -counts[rank.node])  # the node with the most GPUs is the first
    gpus = [ChosenGpu(rank.node, rank.index, rank.uuid, rank.memory_fraction) for rank in ranks]
    known = [*lease.nodes, *(current.nodes if len(current.nodes) > 1 else ())]  # a single node may have the loopback's
    found = rank_map(current.lease, gpus, {node.name: node.address for node in known}, current.job)
    found = msgspec.structs.replace(found, master_port=current.master_port)
    first = current.nodes[0]
    if found.nodes[0].name == first.name and current.master_addr not in {first.address, LOOPBACK}:  # of the user
        found = msgspec.structs.replace(found, master_addr=current.master_addr)
    why = dict.fromkeys("".join(faults[key]) for key in sorted(used - chosen))
    where = gpus_text([LeaseGpu(rank.node, rank.index, rank.uuid) for rank in found.ranks])
    count = (
        f"{len(chosen)} rank{'' if len(chosen) == 1 else 's'} in place of {len(used)}, "
        if len(chosen) != len(used)
        else ""
    )
    return found, f"{count}on {where}" + (f"; left out: {'; '.join(why)}" if why else "")


def _uuids(gpu: GpuView) -> set[str]:
    return {gpu.uuid, *(device.uuid for device in gpu.mig)}


def _fault(rank: Rank, view: NodeView | None, lease: RankMap, device: Device) -> tuple[str, str]:
    """Return why a GPU cannot be used, and why it had better not be used; "" without a fault."""
    if why := unread(view):
        return f"{rank.node}: {why}", ""
    if device == "cpu" or view is None:
        return "", ""
    check = gpu_check(rank, view, lease.lease, lease.job)
    sick = next((gpu.sick for gpu in view.gpus if rank.uuid in _uuids(gpu) and "sick" in gpu.flags), [])
    words = f"{rank.node}: {check.evidence}" + (f" ({clean(check.cause, 80)})" if check.cause else "")
    if check.status == "fail":
        return words, ""
    return "", f"{rank.node}: GPU {rank.index} is sick ({clean('; '.join(sick))})" if sick else ""
