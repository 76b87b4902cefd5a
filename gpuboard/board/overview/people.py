"""How many GPUs each person holds, uses, and leaves idle (pure, with a memo per node)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from gpuboard.board.scene import Scene
from gpuboard.model.gpu import NodeState
from gpuboard.model.snapshot import GpuView, NodeView, judged

ORDERS = ("idle", "held", "used")


class Person(msgspec.Struct, frozen=True, gc=False):
    """One user's part of the cluster, in GPUs; a MIG device counts as one."""

    name: str
    held: int = 0  # by leases and jobs
    used: int = 0  # with a process, held or not
    idle: int = 0  # held, without a process for long (config: idle_after)
    rogue: int = 0  # with a process, while another user holds it


class _Tally(msgspec.Struct, gc=False):
    gpus: Sequence[GpuView]
    state: NodeState
    leased: list[tuple[str, str]]  # UUIDs and owners
    held: Counter[str]
    used: Counter[str]
    idle: Counter[str]
    rogue: Counter[str]


class People:
    """Counts per user; only nodes that were judged again are counted again."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def of(self, scene: Scene, order: str = "held") -> list[Person]:
        """Return everybody who holds or uses a GPU, by ``order`` (one of ORDERS), the most first."""
        held, used, idle, rogue = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
        tallies: dict[str, _Tally] = {}
        owners: dict[str, list[tuple[str, str]]] = {}
        for lease in scene.leases.leases:
            for gpu in lease.gpus:
                owners.setdefault(gpu.node, []).append((gpu.uuid, lease.owner))
        for node in scene.snapshot.nodes:
            tally = self._tallies.get(node.name)
            leased = owners.get(node.name, [])
            if tally is None or tally.gpus is not judged(node) or tally.state != node.state or tally.leased != leased:
                tally = _count(node, leased, scene)
            tallies[node.name] = tally
            held.update(tally.held)
            used.update(tally.used)
            idle.update(tally.idle)
            rogue.update(tally.rogue)
        self._tallies = tallies
        people = [Person(name, held[name], used[name], idle[name], rogue[name]) for name in {**held, **used}]
        return sorted(people, key=lambda one: (-getattr(one, order), -one.held, -one.used, one.name))


def _count(node: NodeView, leased: list[tuple[str, str]], scene: Scene) -> _Tally:
    gpus = judged(node)
    tally = _Tally(gpus, node.state, leased, Counter(), Counter(), Counter(), Counter())
    for gpu in gpus:
        holders: set[str] = set()
        for unit in gpu.mig or (gpu,):
            owners = {lease.owner for lease in scene.leases_on(unit.uuid)} | {job.user for job in unit.jobs}
            tally.held.update(owners)
            holders |= owners
        if node.state != "up":  # processes are of an old reading; its claims are no leases any more, either
            continue
        if "idle" in gpu.flags:
            tally.idle.update(holders)
        processes = gpu.processes or ()
        tally.used.update({process.user for process in processes if process.user is not None})
        tally.rogue.update({process.user for process in processes if process.rogue and process.user is not None})
    return tally


def totals(people: Sequence[Person]) -> Person:
    """Return the sums over all."""
    return Person("", sum(one.held for one in people), sum(one.used for one in people), sum(one.idle for one in people))
