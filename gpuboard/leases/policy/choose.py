"""Request + snapshot → the GPUs to take, in rank order, or a refusal with a reason for every GPU. Pure.

Fewest nodes; among nodes the best links, then NUMA, then the node with the fewest free GPUs left over (whole nodes stay
free for others), then the first name. Never fewer GPUs than asked, never one that is not known to be free. Healthy GPUs
come first; a sick one is taken where it is named, or where ``allow_sick`` allows it and healthy ones do not suffice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from gpuboard.errors import UsageError
from gpuboard.leases.policy.candidates import Candidate, by_node, check, look, names_gpu, nodes_needed, sick_words
from gpuboard.leases.policy.topology import NVLINK, GpuGroup, best_group, matrix, ring_order
from gpuboard.model.request import Choice, ChosenGpu, Pick, Refusal, Request, slot
from gpuboard.model.snapshot import GpuView, Snapshot

_NUMA = 1024  # a pair's score is links * _NUMA + 1 on one NUMA node: links first; 1024 > pairs of a node's 44 GPUs
_LEVELS = {10: "SYS", 20: "NODE", 30: "PHB", 40: "PXB", 50: "PIX", 60: "PSB"}  # nvidia-smi topo's words


def choose(request: Request, snapshot: Snapshot, own: Collection[str] = ()) -> Choice | Refusal:
    """Return the set to take, or why there is none.

    ``own``: ids of the caller's leases; what they hold counts as free when ``request.within`` names it.
    Raises UsageError for a request that contradicts itself or names a node that is not there.
    """
    check(request)
    request = _with_numbered_nodes(request, snapshot)
    looked = look(request, snapshot, own)
    if request.picks:
        return _picked(request, snapshot, looked)
    free = by_node([c for c in looked if c.why_not is None])
    chosen = _spread(request, free)
    if chosen is None:
        from gpuboard.leases.policy.refusal import refuse  # late: only when the answer is no

        return refuse(request, snapshot, looked)
    return _choice(request, free, chosen)


def _with_numbered_nodes(request: Request, snapshot: Snapshot) -> Request:
    """Return the request with ``2:1`` meaning GPU 1 of node ``2`` where there is a node of that name."""
    names = {node.name for node in snapshot.nodes}

    def resolved(picks: tuple[Pick, ...]) -> tuple[Pick, ...]:
        return tuple(
            Pick(str(pick.index), pick.mig, None)
            if pick.mig is not None and pick.node is None and str(pick.index) in names
            else pick
            for pick in picks
        )

    if all(pick.mig is None for pick in (*request.picks, *request.exclude)):
        return request
    return msgspec.structs.replace(request, picks=resolved(request.picks), exclude=resolved(request.exclude))


class _Set(msgspec.Struct, frozen=True):
    """A group of one node: its members in rank order, how well they are linked, and what is left over."""

    node: str
    members: tuple[Candidate, ...]
    score: int
    left: int
    exact: bool

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Best first: fewest sick, links, NUMA, fewest free left over, name."""
        return sum(gpu.sick for gpu in self.members), -self.score, self.left, self.node


def _spread(request: Request, free: dict[str, list[Candidate]]) -> list[_Set] | None:
    """Return the set of each node, or None when the request does not fit; with sick GPUs only where it must be."""
    healthy = {name: well for name, gpus in free.items() if (well := [gpu for gpu in gpus if not gpu.sick])}
    return _fill(request, healthy) or (
        _fill(request, free) if any(gpu.sick for gpus in free.values() for gpu in gpus) else None
    )


def _fill(request: Request, free: dict[str, list[Candidate]]) -> list[_Set] | None:
    """Return the set of each node, or None when the request does not fit."""
    assert request.n is not None
    needed = nodes_needed(request, [len(gpus) for gpus in free.values()])
    if needed is None:
        return None
    sets = _Sets(request.topology)
    chosen: list[_Set] = []
    left, rest = request.n, dict(free)
    for remaining in range(needed, 0, -1):
        if request.per_node is not None:
            take = request.per_node
            able = [name for name, gpus in rest.items() if len(gpus) >= take]
        elif remaining == 1:
            take = left
            able = [name for name, gpus in rest.items() if len(gpus) >= take]
        else:  # the fullest first: that is what makes the nodes few and the groups on them large
            most = max(len(gpus) for gpus in rest.values())
            take = min(most, left - (remaining - 1))
            able = [name for name, gpus in rest.items() if len(gpus) == most]
        best = min((sets.best(name, rest[name], take) for name in able), key=lambda found: found.order)
        chosen.append(best)
        left -= take
        del rest[best.node]
    return sorted(chosen, key=lambda found: (-len(found.members), found.node))


class _Sets:
    """The best group of each node, whose free GPUs stay the same; nodes with the same links are worked out once."""

    def __init__(self, topology: str) -> None:
        self._links = topology == "best"
        self._known: dict[tuple[tuple[tuple[int, ...], ...], int], tuple[GpuGroup, tuple[int, ...]]] = {}
        self._found: dict[tuple[str, int], _Set] = {}

    def best(self, name: str, free: list[Candidate], size: int) -> _Set:
        """Return the best ``size`` of ``free`` in rank order."""
        found = self._found.get((name, size))  # whoever needs many nodes asks for all that are left each time
        if found is None:
            found = self._found[name, size] = self._best(name, free, size)
        return found

    def _best(self, name: str, free: list[Candidate], size: int) -> _Set:
        left = len(free) - size
        healthy = sum(not gpu.sick for gpu in free)
        if healthy < len(free):  # as few of the sick ones as it takes
            sick = [gpu.uuid for gpu in free if gpu.sick][: max(0, size - healthy)]
            free = [gpu for gpu in free if not gpu.sick or gpu.uuid in sick]
        if not self._links:
            return _Set(name, tuple(free[:size]), 0, left, True)
        scores = pair_scores(free)
        key = (tuple(map(tuple, scores)), size)
        if key not in self._known:
            group = best_group(scores, size)
            inside = [[scores[a][b] for b in group.members] for a in group.members]
            self._known[key] = group, tuple(group.members[i] for i in ring_order(inside))
        group, order = self._known[key]
        return _Set(name, tuple(free[i] for i in order), group.score, left, group.exact)


def pair_scores(gpus: Sequence[Candidate]) -> list[list[int]]:
    """Return how well each two of one node's GPUs are joined: PCIe level and NVLinks, then the same NUMA node."""

    def pair(a: int, b: int) -> int:
        one, two = gpus[a].gpu, gpus[b].gpu
        numa = one.numa_node is not None and one.numa_node == two.numa_node
        return link(one, two) * _NUMA + numa

    return matrix(len(gpus), pair)


def link(one: GpuView, two: GpuView) -> int:
    """Return the score of a pair by NVIDIA's rule; either GPU's word for the link counts."""
    level = max(one.pci.get(two.uuid, 0), two.pci.get(one.uuid, 0))
    return level + NVLINK * max(one.links.get(two.uuid, 0), two.links.get(one.uuid, 0))


def _choice(request: Request, free: dict[str, list[Candidate]], chosen: list[_Set]) -> Choice:
    parts = []
    for found in chosen:
        indexes = ",".join(gpu.slot for gpu in sorted(found.members, key=lambda gpu: gpu.index))
        one = found.members[0]
        what = "" if one.mig is None else f"MIG {one.gpu.mig[one.mig].profile}, "
        words = f"{found.node}: {indexes} ({what}{len(found.members)} of {len(free[found.node])} free"
        if len(found.members) > 1 and request.topology == "best":
            words += f", {_joined(found.members)}" + ("" if found.exact else "; best found, the search was cut short")
        parts.append(words + ")")
    order = "best links" if request.topology == "best" and request.n != 1 else "lowest indexes"
    rule = f"{len(chosen)} node{'s' if len(chosen) > 1 else ''}, the fewest; {order}, then whole nodes left to others"
    return _made(chosen, f"{'; '.join(parts)}; {rule}")


def _made(chosen: Sequence[_Set], why: str) -> Choice:
    """Return the choice of these sets; which of them are sick is said."""
    gpus = [gpu for found in chosen for gpu in found.members]
    notes = tuple(f"{gpu.place} is {sick_words(gpu.gpu)}" for gpu in gpus if gpu.sick)
    return Choice(tuple(gpu.chosen for gpu in gpus), "; ".join((why, *notes)), notes)


def arranged(snapshot: Snapshot, n: int | None = None) -> tuple[ChosenGpu, ...]:
    """Return ``n`` GPUs (None: all) of a snapshot that shows nothing but the asker's own, in rank order.

    MIG devices stand for the GPU they are of. Fewer than asked: what there is.
    """
    own: list[Candidate] = []
    for node in snapshot.nodes:
        for gpu in sorted(node.gpus, key=lambda gpu: gpu.index):
            parts = [(mig.uuid, number) for number, mig in enumerate(gpu.mig)]
            own += [
                Candidate(node.name, gpu.index, uuid, gpu, gpu.state, None, None, mig=number)
                for uuid, number in (parts if "mig" in gpu.flags else [(gpu.uuid, None)])
            ]
    wanted = min(n or len(own), len(own))
    chosen = (wanted and _spread(Request(n=wanted), by_node(own))) or []
    return tuple(gpu.chosen for found in chosen for gpu in found.members)


def _joined(members: Sequence[Candidate]) -> str:
    worst = min(link(a.gpu, b.gpu) for k, a in enumerate(members) for b in members[k + 1 :])
    if worst >= NVLINK:
        return f"each two joined by {worst // NVLINK} NVLink{'s' if worst >= 2 * NVLINK else ''}"
    return f"each two at {_LEVELS[worst]} or better" if worst in _LEVELS else "links unknown"


def _picked(request: Request, snapshot: Snapshot, looked: list[Candidate]) -> Choice | Refusal:
    named: list[Candidate] = []
    missing: list[Pick] = []
    names = [node.name for node in snapshot.nodes]
    for pick in request.picks:
        if pick.node is not None and pick.node not in names:
            raise UsageError(f"--gpus: {pick.node!r} is not among the nodes: {', '.join(names)}")
        if pick.node is None and pick.uuid is None and len(names) > 1:
            where = slot(pick.index, pick.mig)
            raise UsageError(f"--gpus: {where} of which node? write {names[0]}:{where}")
        found = [c for c in looked if names_gpu(pick, c.node, c.index, c.uuid, c.mig)]
        if len({c.uuid for c in found} & {c.uuid for c in named}):
            raise UsageError(f"--gpus names {found[0].place} twice")
        named += found
        missing += [] if found else [pick]
    if missing or any(c.why_not is not None for c in named):
        from gpuboard.leases.policy.refusal import refuse_picks  # late: only when the answer is no

        return refuse_picks(request, snapshot, named, missing, choose)
    if len(named) > 1 and any(c.mig is not None for c in named):
        raise UsageError("--gpus: a MIG device goes alone, one process sees one MIG device")
    free = by_node(named)
    sets = _Sets(request.topology)
    chosen = sorted(
        (sets.best(name, gpus, len(gpus)) for name, gpus in free.items()),
        key=lambda found: (-len(found.members), found.node),
    )
    places = ", ".join(gpu.place for found in chosen for gpu in found.members)
    return _made(chosen, f"{places}: as named, all free")
