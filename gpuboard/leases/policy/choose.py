"""Request + snapshot → the chosen GPUs in rank order, or a refusal with a reason for every GPU. Pure.

Fewest nodes; among nodes the best links, then NUMA, then the node with the fewest free GPUs left over (whole nodes stay
free for others), then the first name. All GPUs that were requested or none, and only GPUs known to be free. Sick GPUs
are chosen only by name, or with ``allow_sick`` if there are too few healthy ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from gpuboard.errors import UsageError
from gpuboard.leases.policy.candidates import Candidate, by_node, check, evaluate, names_gpu, nodes_needed, sick_reason
from gpuboard.leases.policy.topology import NVLINK, GpuGroup, best_group, matrix, ring_order
from gpuboard.model.request import Choice, ChosenGpu, Pick, Refusal, Request, slot
from gpuboard.model.snapshot import GpuView, Snapshot

_NUMA = 1024  # a pair scores links * _NUMA, + 1 on one NUMA node: links decide, as a node's 44 GPUs have 946 pairs
_LEVELS = {10: "SYS", 20: "NODE", 30: "PHB", 40: "PXB", 50: "PIX", 60: "PSB"}  # as nvidia-smi topo names them


def choose(request: Request, snapshot: Snapshot, own: Collection[str] = ()) -> Choice | Refusal:
    """Return the GPUs to reserve, or a refusal.

    ``own``: ids of the caller's leases, whose GPUs count as free if ``request.within`` names them.
    Raises UsageError for contradictory options and for an unknown node.
    """
    check(request)
    request = _with_numbered_nodes(request, snapshot)
    candidates = evaluate(request, snapshot, own)
    if request.picks:
        return _choose_picks(request, snapshot, candidates)
    unmatched = _unmatched(request.exclude, snapshot, candidates)
    free = by_node([c for c in candidates if c.reason is None])
    chosen = _spread(request, free)
    if chosen is None:
        from gpuboard.leases.policy.refusal import refuse  # late: only for a refusal

        return refuse(request, snapshot, candidates)
    return _choice(request, free, chosen, unmatched)


def _unmatched(exclude: Collection[Pick], snapshot: Snapshot, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Return a warning about excluded nodes and indexes that do not exist in scope, which may be mistyped."""
    unread = {node.name for node in snapshot.nodes if not node.gpus}
    places = [
        pick.node if pick.index is None else f"{pick.node}:{slot(pick.index, pick.mig)}"
        for pick in exclude
        if pick.node is not None and pick.uuid is None and pick.node not in unread
        and not any(names_gpu(pick, c.node, c.index, c.uuid, pick.mig) for c in candidates)
    ]  # fmt: skip
    return (f"--exclude matches no GPU in scope: {', '.join(places)}",) if places else ()


def _with_numbered_nodes(request: Request, snapshot: Snapshot) -> Request:
    """Return the request with ``2:1`` read as GPU 1 of node ``2`` if there is such a node (else: a MIG device)."""
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


class _Group(msgspec.Struct, frozen=True):
    """A group of GPUs of one node: in rank order, with the score of its links and the number of free GPUs left over."""

    node: str
    members: tuple[Candidate, ...]
    score: int
    left: int
    exact: bool

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key, best first: fewest sick GPUs, links, NUMA, fewest free GPUs left over, name."""
        return sum(gpu.sick for gpu in self.members), -self.score, self.left, self.node


def _spread(request: Request, free: dict[str, list[Candidate]]) -> list[_Group] | None:
    """Return the group of each node, or None if the request does not fit; sick GPUs only if there are no others."""
    healthy = {name: well for name, gpus in free.items() if (well := [gpu for gpu in gpus if not gpu.sick])}
    return _fill(request, healthy) or (
        _fill(request, free) if any(gpu.sick for gpus in free.values() for gpu in gpus) else None
    )


def _fill(request: Request, free: dict[str, list[Candidate]]) -> list[_Group] | None:
    """Return the group of each node, or None if the request does not fit."""
    assert request.n is not None
    needed = nodes_needed(request, [len(gpus) for gpus in free.values()])
    if needed is None:
        return None
    groups = _Groups(request.topology)
    chosen: list[_Group] = []
    left, rest = request.n, dict(free)
    for remaining in range(needed, 0, -1):
        if request.per_node is not None:
            take = request.per_node
            able = [name for name, gpus in rest.items() if len(gpus) >= take]
        elif remaining == 1:
            take = left
            able = [name for name, gpus in rest.items() if len(gpus) >= take]
        else:  # the most free GPUs first: fewest nodes, largest groups
            most = max(len(gpus) for gpus in rest.values())
            take = min(most, left - (remaining - 1))
            able = [name for name, gpus in rest.items() if len(gpus) == most]
        best = min((groups.best(name, rest[name], take) for name in able), key=lambda found: found.order)
        chosen.append(best)
        left -= take
        del rest[best.node]
    return sorted(chosen, key=lambda found: (-len(found.members), found.node))


class _Groups:
    """Finds the best group of a node; computed once for nodes with the same links."""

    def __init__(self, topology: str) -> None:
        self._links = topology == "best"
        self._known: dict[tuple[tuple[tuple[int, ...], ...], int], tuple[GpuGroup, tuple[int, ...]]] = {}
        self._found: dict[tuple[str, int], _Group] = {}

    def best(self, name: str, free: list[Candidate], size: int) -> _Group:
        """Return the best ``size`` of ``free`` in rank order."""
        found = self._found.get((name, size))  # `_fill` calls this for all remaining nodes in each round
        if found is None:
            found = self._found[name, size] = self._best(name, free, size)
        return found

    def _best(self, name: str, free: list[Candidate], size: int) -> _Group:
        left = len(free) - size
        healthy = sum(not gpu.sick for gpu in free)
        if healthy < len(free):  # as few sick ones as possible
            sick = [gpu.uuid for gpu in free if gpu.sick][: max(0, size - healthy)]
            free = [gpu for gpu in free if not gpu.sick or gpu.uuid in sick]
        if not self._links:
            return _Group(name, tuple(free[:size]), 0, left, True)
        scores = pair_scores(free)
        key = (tuple(map(tuple, scores)), size)
        if key not in self._known:
            group = best_group(scores, size)
            inside = [[scores[a][b] for b in group.members] for a in group.members]
            self._known[key] = group, tuple(group.members[i] for i in ring_order(inside))
        group, order = self._known[key]
        return _Group(name, tuple(free[i] for i in order), group.score, left, group.exact)


def pair_scores(gpus: Sequence[Candidate]) -> list[list[int]]:
    """Return the score of each pair of one node's GPUs: PCIe level and NVLinks, then the same NUMA node."""

    def pair(a: int, b: int) -> int:
        one, two = gpus[a].gpu, gpus[b].gpu
        numa = one.numa_node is not None and one.numa_node == two.numa_node
        return link(one, two) * _NUMA + numa

    return matrix(len(gpus), pair)


def link(one: GpuView, two: GpuView) -> int:
    """Return the score of a pair by NVIDIA's rule; a link counts if either GPU reports it."""
    level = max(one.pci.get(two.uuid, 0), two.pci.get(one.uuid, 0))
    return level + NVLINK * max(one.links.get(two.uuid, 0), two.links.get(one.uuid, 0))


def _choice(
    request: Request, free: dict[str, list[Candidate]], chosen: list[_Group], warnings: tuple[str, ...]
) -> Choice:
    parts = []
    for found in chosen:
        indexes = ",".join(gpu.slot for gpu in sorted(found.members, key=lambda gpu: gpu.index))
        one = found.members[0]
        what = "" if one.mig is None else f"MIG {one.gpu.mig[one.mig].profile}, "
        text = f"{found.node}: {indexes} ({what}{len(found.members)} of {len(free[found.node])} free"
        if len(found.members) > 1 and request.topology == "best":
            text += f", {_links(found.members)}" + ("" if found.exact else "; best found within the search limit")
        parts.append(text + ")")
    order = "best links" if request.topology == "best" and request.n != 1 else "lowest indexes"
    nodes = f"{len(chosen)} node{'s' if len(chosen) > 1 else ''}, the fewest possible"
    return _with_notes(chosen, f"{'; '.join(parts)}; {nodes}; {order}, then whole nodes kept free", warnings)


def _with_notes(chosen: Sequence[_Group], why: str, warnings: tuple[str, ...] = ()) -> Choice:
    gpus = [gpu for found in chosen for gpu in found.members]
    notes = warnings + tuple(f"{gpu.place} is {sick_reason(gpu.gpu)}" for gpu in gpus if gpu.sick)
    return Choice(tuple(gpu.chosen for gpu in gpus), "; ".join((why, *notes)), notes)


def rank_order(snapshot: Snapshot, n: int | None = None) -> tuple[ChosenGpu, ...]:
    """Return ``n`` GPUs (None or too many: all) of a snapshot that has only the caller's, in rank order.

    MIG devices replace a GPU in MIG mode.
    """
    own: list[Candidate] = []
    for node in snapshot.nodes:
        for gpu in sorted(node.gpus, key=lambda gpu: gpu.index):
            parts = [(mig.uuid, number) for number, mig in enumerate(gpu.mig)]
            own += [
                Candidate(node.name, gpu.index, uuid, gpu, gpu.state, None, mig=number)
                for uuid, number in (parts if "mig" in gpu.flags else [(gpu.uuid, None)])
            ]
    wanted = min(n or len(own), len(own))
    chosen = (wanted and _spread(Request(n=wanted), by_node(own))) or []
    return tuple(gpu.chosen for found in chosen for gpu in found.members)


def _links(members: Sequence[Candidate]) -> str:
    worst = min(link(a.gpu, b.gpu) for k, a in enumerate(members) for b in members[k + 1 :])
    if worst >= NVLINK:
        return f"each pair linked by {worst // NVLINK} NVLink{'s' if worst >= 2 * NVLINK else ''}"
    return f"each pair at {_LEVELS[worst]} or better" if worst in _LEVELS else "links unknown"


def _choose_picks(request: Request, snapshot: Snapshot, candidates: list[Candidate]) -> Choice | Refusal:
    named: list[Candidate] = []
    missing: list[Pick] = []
    names = [node.name for node in snapshot.nodes]
    for pick in request.picks:
        if pick.node is not None and pick.node not in names:
            raise UsageError(f"--gpus: no node {pick.node!r} in scope, which has {', '.join(names)}")
        if pick.node is None and pick.uuid is None and len(names) > 1:
            where = slot(pick.index, pick.mig)
            raise UsageError(f"--gpus: no node given for GPU {where}; write e.g. {names[0]}:{where}")
        found = [c for c in candidates if names_gpu(pick, c.node, c.index, c.uuid, c.mig)]
        if len({c.uuid for c in found} & {c.uuid for c in named}):
            raise UsageError(f"--gpus names {found[0].place} twice")
        named += found
        missing += [] if found else [pick]
    if missing or any(c.reason is not None for c in named):
        from gpuboard.leases.policy.refusal import refuse_picks  # late: only for a refusal

        return refuse_picks(request, snapshot, named, missing, choose)
    if len(named) > 1 and any(c.mig is not None for c in named):
        raise UsageError("--gpus: a process can use only one MIG device, and no other GPU with it")
    free = by_node(named)
    groups = _Groups(request.topology)
    chosen = sorted(
        (groups.best(name, gpus, len(gpus)) for name, gpus in free.items()),
        key=lambda found: (-len(found.members), found.node),
    )
    places = ", ".join(gpu.place for found in chosen for gpu in found.members)
    return _with_notes(chosen, f"{places}: as requested, all free")
